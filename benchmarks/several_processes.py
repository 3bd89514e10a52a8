"""What several processes cost beside one: the same real run, with the same threads in all, in turn.

    python benchmarks/several_processes.py          # two processes of one thread, one process of two: 8 minutes
    python benchmarks/several_processes.py --processes 4 --batch 32

Both are `train_script.py` on the embedded model as configs/laptop.yaml has it, after its warm start, with the same
batch in all. Figures are seconds per step, the median of a run; starting, warm start and judging are left out.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(__name__, "PyTorch. Then both kinds of run take turns, about 8 minutes with the default options on two cores")

from figures import check_output, save_figures

from llm_policy.command_line import parse_arguments
from llm_policy.errors import InputError, run_script
from llm_policy.run_files import METRICS_FILE, ROOT

FIRST_STEPS = 2  # left out: what is allocated and compiled once


@dataclass
class Arguments:
    """What is measured."""

    processes: int = field(default=2, metadata={"help": "Processes of one thread each; the other run has the threads."})
    batch: int = field(default=24, metadata={"help": "Completions of a step, in all processes together."})
    steps: int = field(default=14, metadata={"help": f"Steps of a run; the first {FIRST_STEPS} are left out."})
    rounds: int = field(default=3, metadata={"help": "Each round runs both."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})

    def __post_init__(self) -> None:
        if self.steps <= FIRST_STEPS + 1:
            raise InputError(f"--steps {self.steps}: expected at least {FIRST_STEPS + 2}")
        if self.batch % (2 * self.processes):
            raise InputError(f"--batch {self.batch}: expected a multiple of {2 * self.processes}, two for each process")


def seconds_per_step(processes: int, threads: int, arguments: Arguments) -> float:
    """The median over the steps of one run of `processes` processes with `threads` threads each."""
    launcher = ["-m", "llm_policy.launch", "--nproc_per_node", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "config": "configs/laptop.yaml", "output_dir": f"{folder}/run", "max_steps": arguments.steps,
            "per_device_train_batch_size": arguments.batch // processes, "warm_start": "always", "warm_start_steps": 5,
            "evaluate_steps": 0, "stop_when": "never", "save_strategy": "no", "samples_per_state": 0,
            "report_to": "none",
        }  # fmt: skip
        command = [sys.executable, *launcher, "train_script.py"]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), done.stderr[-300:])
            raise InputError(f"train_script.py ended with code {done.returncode}: {said}")
        lines = (Path(folder) / "run" / METRICS_FILE).read_text().splitlines()
    # By the clock: TRL's step_time leaves the optimiser out, which every process repeats
    ends = [json.loads(line)["seconds"] for line in lines[FIRST_STEPS - 1 :]]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def main(argv: Sequence[str] | None = None) -> None:
    (arguments,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    check_output(arguments.output)
    several, one = [], []
    for number in range(1, arguments.rounds + 1):
        several.append(seconds_per_step(arguments.processes, 1, arguments))
        one.append(seconds_per_step(1, arguments.processes, arguments))
        print(
            f"round {number}: {several[-1]:.2f} s a step in {arguments.processes} processes, {one[-1]:.2f} s in one, "
            f"ratio {several[-1] / one[-1]:.2f}",
            flush=True,
        )
    ratios = [s / o for s, o in zip(several, one, strict=True)]
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if arguments.output:
        save_figures(
            arguments.output,
            {"processes": arguments.processes, "batch": arguments.batch, "seconds_several": several,
             "seconds_one": one, "ratio": statistics.median(ratios), "ratios": ratios},
        )  # fmt: skip


if __name__ == "__main__":
    run_script(main)
