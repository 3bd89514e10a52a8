"""Several processes that train one model together: which one this is, what the others have, and who writes.

torchrun, `accelerate launch` or llm_policy/launch.py start them, and torch.distributed connects them. All do the same
work: completions to sample are shared out and gathered again, so that every process judges and decides alike, and
none waits for a long time. The main process, number 0, alone writes files and speaks. In a run of one process all
functions return at once.
"""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from llm_policy.errors import InputError
from llm_policy.startup import EXIT_INTERRUPTED

T = TypeVar("T")

SEEN_WITHIN_SECONDS = 120  # by which a shared file system shows what another node wrote
# What gloo says of a process that is gone, in plain RuntimeErrors
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Socket closed")


def count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def index() -> int:
    return dist.get_rank() if count() > 1 else 0


def is_main() -> bool:
    return index() == 0


def in_pieces() -> bool:
    """Whether the weights are spread over the processes (FSDP), so that none of them holds the whole model."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def own_share(number: int) -> slice:
    """Which of `number` items are this process's: runs of items, as even as can be, in the order of the processes."""
    return slice(number * index() // count(), number * (index() + 1) // count())


def gathered(own: list[T]) -> list[T]:
    """The items of all processes, in their order."""
    if count() == 1:
        return own
    lists: list[Any] = [None] * count()
    dist.all_gather_object(lists, own)
    return [item for items in lists for item in items]


def from_main(work: Callable[[], T]) -> T:
    """What `work` returns in the main process; the others do not call it."""
    if count() == 1:
        return work()
    result = [work() if is_main() else None]
    dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]


def wait_for_all() -> None:
    if count() > 1:
        dist.barrier()


def uniform_from_main(rows: int, columns: int) -> torch.Tensor:
    """Uniform random numbers of the main process's generator, the same in all: what is sampled does not depend on
    how many processes there are.
    """
    return from_main(lambda: torch.rand(rows, columns))


def take_from_main(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite `tensors` with what they are in the main process."""
    if count() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)


def add_up(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite each of `tensors` with its sum over the processes."""
    if count() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def progress(items: Collection[T], what: str, **options) -> "tqdm[T]":
    """A bar of the main process alone; in a log file nothing of what takes less than a minute."""
    is_hidden, pace = not is_main() or len(items) < 2, bar_pace()
    return tqdm(items, what, leave=False, disable=is_hidden, delay=pace["mininterval"], **pace, **options)


def bar_pace() -> dict[str, float]:
    """How often a bar is drawn, for `tqdm`: a log file keeps every drawing, so once a minute there."""
    seconds = 0.1 if sys.stderr.isatty() else 60
    return {"mininterval": seconds, "maxinterval": max(seconds, 10)}


def check_agreement(facts: Mapping[str, object]) -> None:
    """`InputError` where a process was started with other facts (code, versions, options, data) than the main one."""
    everywhere = gathered([dict(facts)])
    for number, others in enumerate(everywhere):
        for name in sorted({*everywhere[0], *others}):
            here, there = everywhere[0].get(name, "the default"), others.get(name, "the default")
            if here != there:
                by_machine = ". What is faster differs here: name --dtype" if name in ("--dtype", "--bf16") else ""
                raise InputError(
                    f"{name}: {there} in process {number}, {here} in process 0; start all processes of a run with the "
                    f"same code, packages, options and data{by_machine}"
                )


def wait_for_files(folder: Path, names: Iterable[str] | None = None) -> None:
    """Wait until this process sees what the main one wrote in `folder`: with several nodes a network lies between.

    `InputError` after `SEEN_WITHIN_SECONDS`.

    Args:
        names: the files in question; all of the folder's without them.
    """
    if count() == 1:
        return
    sizes = from_main(lambda: {name: (folder / name).stat().st_size for name in names or _files(folder)})
    until = time.monotonic() + SEEN_WITHIN_SECONDS
    while missing := [name for name, size in sizes.items() if _size(folder / name) != size]:
        if time.monotonic() > until:
            raise InputError(
                f"{folder / missing[0]}: the main process wrote it and this one does not see it after "
                f"{SEEN_WITHIN_SECONDS} s; put --output_dir on a disk that all nodes share"
            )
        time.sleep(0.2)
    wait_for_all()  # before anybody writes there again


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


@contextmanager
def one_of_several(remedy: str) -> Iterator[None]:
    """Around a whole run: its processes part at its end, and a line and `EXIT_INTERRUPTED` where one of them has died.

    An interpreter that ends while it is still connected is ended by SIGABRT now and then: gloo's threads outlive it.
    """
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)
        if count() == 1 or not is_lost:
            raise
        print(f"another process of this run has ended, and it alone knows why; {remedy}", flush=True)
        os._exit(EXIT_INTERRUPTED)  # not parted: NCCL would wait for the other one
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
