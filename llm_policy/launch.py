"""Start several processes of one run: torchrun with the signals and the exit codes of a single process.

    python -m llm_policy.launch --nproc_per_node 2 train_script.py --config configs/gemma_2b_it.yaml

    --nproc_per_node N    processes of this machine, one for each GPU
    --nnodes N            machines; on each of them the same command, with the next three
    --rdzv_backend c10d --rdzv_id ID --rdzv_endpoint HOST:PORT    where they meet: a free port of one of them

All options before the script are torchrun's, and `torchrun --help` has the others. What plain torchrun does otherwise:
it ends with code 1 and a page of report whatever happened, gives its processes 30 seconds after SIGTERM, and dies of
SIGUSR1 without them. Here a signal goes to every process; they finish the step and write a checkpoint. The exit code is
that of the process that ended first.
"""

from llm_policy.startup import announce

announce(__name__, "PyTorch")

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # below that, a page for every connection that ends

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import determine_local_world_size, parse_args, run

from llm_policy.errors import EXIT_INPUT_ERROR, EXIT_INTERRUPTED, InputError, ended_by, run_script
from llm_policy.hardware import granted_threads
from llm_policy.interruption import RESUME

MEET_WITHIN_SECONDS = 110
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else EXIT_INPUT_ERROR
    args = parse_args(argv)
    args.signals_to_handle = "none"  # they are passed on here
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(granted_threads() or cores, cores) // processes_here(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # the processes speak for themselves
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's SIGHUP, for one
            signal.signal(number, pass_on)
    have_met = threading.Event()
    threading.Thread(target=watch_meeting, args=(args.rdzv_endpoint, have_met), daemon=True).start()
    try:
        run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(
                f"error: process {rank} {ended_by(-failure.exitcode)}; {RESUME} resumes the run",
                file=sys.stderr,
            )
            return 128 - failure.exitcode
        return failure.exitcode
    except (RendezvousError, DistError) as error:
        if have_met.is_set():
            raise InputError("the launcher of another node has ended, and its own message says why") from error
        raise InputError(no_meeting(args.rdzv_endpoint)) from error
    except (ValueError, AssertionError, RuntimeError) as error:  # torch's own checks of its options
        if isinstance(error, RuntimeError) and have_met.is_set():
            raise
        raise InputError(f"{' '.join(str(error).split())}; torchrun --help lists the options") from error
    return 0


def processes_here(asked: str) -> int:
    """How many processes `--nproc_per_node` means on this machine; `InputError` for none."""
    try:
        count = determine_local_world_size(asked)
    except ValueError as error:
        raise InputError(f"--nproc_per_node {asked}: {' '.join(str(error).split())}") from error
    if count < 1:
        raise InputError(f"--nproc_per_node {asked}: expected at least one process")
    return count


def no_meeting(endpoint: str) -> str:
    return (
        f"--rdzv_endpoint {endpoint}: the processes do not meet there; the port is in use by another program, the host "
        "cannot be reached, or a node did not start; name another endpoint, or start again"
    )


def watch_meeting(endpoint: str, have_met: threading.Event) -> None:
    """Leave where no process is started in time: torch would wait for ten minutes, or for ever."""
    until = time.monotonic() + MEET_WITHIN_SECONDS
    while time.monotonic() < until:
        if psutil.Process().children():
            have_met.set()
            return
        time.sleep(0.1)
    print(f"error: {no_meeting(endpoint)}", file=sys.stderr, flush=True)
    os._exit(EXIT_INPUT_ERROR)


def pass_on(number: int, _frame) -> None:
    """A signal to the processes that were started, each of which has a session of its own; none yet: leave."""
    children = psutil.Process().children()
    if not children:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)  # a run knows no SIGHUP


if __name__ == "__main__":
    run_script(main)
