"""How many random lakes per second the batched value iteration solves, beside a loop over maps with the same function.

    python benchmarks/value_iteration.py --lakes 10000 --size 8    # 12 seconds on two CPU cores: 4,400 lakes/s, ratio 6

Axes: M maps, S states, A actions.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(__name__, "NumPy. Then random lakes are solved, 12 seconds with the default options on two CPU cores")

import numpy as np

from llm_policy.command_line import parse_arguments
from llm_policy.environments.frozen_lake import lake_mdp, random_grids
from llm_policy.environments.mdp import optimal_q
from llm_policy.errors import run_script

LOOP_LAKES = 300
BATCHED_REPEATS = 3


@dataclass
class Arguments:
    lakes: int = field(default=10_000, metadata={"help": "Random slippery lakes in one call."})
    size: int = field(default=8, metadata={"help": "Cells per side."})


def main(argv: Sequence[str] | None = None) -> None:
    (options,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    print(f"drawing {options.lakes} lakes and solving them {BATCHED_REPEATS} times in one call ...", flush=True)
    grids = random_grids(options.lakes, options.size)
    lakes = lake_mdp(grids)
    seconds = []
    for _ in range(BATCHED_REPEATS):
        begin = time.perf_counter()
        q_MSA = optimal_q(lakes)
        seconds.append(time.perf_counter() - begin)
    batched_rate = len(grids) / min(seconds)
    spread = ", ".join(f"{value:.3g}" for value in seconds)
    print(
        f"batched:      {batched_rate:8.0f} lakes/s  ({len(grids)} {options.size}x{options.size} lakes in {spread} s)"
    )

    singles = [lake_mdp(grid) for grid in grids[:LOOP_LAKES]]
    begin = time.perf_counter()
    looped = [optimal_q(lake) for lake in singles]
    loop_seconds = time.perf_counter() - begin
    loop_rate = len(singles) / loop_seconds
    print(f"per-map loop: {loop_rate:8.0f} lakes/s  ({len(singles)} of these lakes in {loop_seconds:.3g} s)")
    difference = abs(np.stack(looped) - q_MSA[: len(looped)]).max()
    print(f"ratio:        {batched_rate / loop_rate:8.1f}  (largest difference of a Q-value {difference:.0e})")


if __name__ == "__main__":
    run_script(main)
