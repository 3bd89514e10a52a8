"""How many programs a second the sandbox of the drawing task runs.

    python benchmarks/sandbox.py                                                    # a few seconds
    python benchmarks/sandbox.py --output results/speed/sandbox/sandbox.json

Random drawings of one to four calls, one worker, and an endless loop at the end, which must be cut off.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(__name__)

from figures import check_output, save_figures

from llm_policy.command_line import parse_arguments
from llm_policy.errors import run_script
from tasks.drawing.sandbox import Sandbox
from tasks.drawing.targets import empty, random_program

LOOP = "def task(img):\n    while True:\n        pass\n"


@dataclass
class Arguments:
    rounds: int = field(default=3, metadata={"help": "The best of so many counts."})
    size: int = field(default=9, metadata={"help": "Side of the picture, in pixels."})
    samples: int = field(default=1000, metadata={"help": "Programs of a round."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


def main(argv: Sequence[str] | None = None) -> None:
    (arguments,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    check_output(arguments.output)
    sandbox, given = Sandbox(workers=1), empty(arguments.size, arguments.size)
    rates = []
    for number in range(arguments.rounds):
        programs = [random_program(f"{number} {i}")[0] for i in range(arguments.samples)]
        started = time.perf_counter()
        outcomes = sandbox.run_all(programs, given)
        rates.append(len(set(programs)) / (time.perf_counter() - started))
        drawn = sum(outcome.grid is not None for outcome in outcomes) / len(outcomes)
    started = time.perf_counter()
    loop = sandbox.run_all([LOOP], given)[0]
    seconds = time.perf_counter() - started
    sandbox.close()
    print(f"{max(rates):,.0f} programs a second with one worker, {drawn:.0%} of them run")
    print(f"an endless loop: {loop.error} after {seconds:.3f} s")
    if arguments.output:
        save_figures(arguments.output, {"programs_per_second": rates, "loop_seconds": seconds, "loop": loop.error})


if __name__ == "__main__":
    run_script(main)
