"""How far the words of an observation or a thought reach on maps never seen: a small network reads them.

    python benchmarks/observation_probe.py --output runs/observation_probe.json    # 4 minutes on two CPU cores

Maps and test maps are those of configs/random_maps.yaml. The network is given each state's phrases, in no order because
each names its own place, and raises the probability of the expert's best actions. What it reaches without the lines of
the map estimates what a policy can do that does not read the map; the marks of a search, one whose thought read it.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(
    __name__,
    "PyTorch, Transformers and TRL. Then small networks read the words of 2,200 maps, about 4 minutes on two CPU cores",
)

import numpy as np
import pandas as pd
import torch
from figures import check_output, save_figures
from tqdm import tqdm

from llm_policy.command_line import parse_arguments
from llm_policy.environments.frozen_lake import ACTIONS, FrozenLake, Grid, acting_states, lake_mdp, random_grids
from llm_policy.environments.mdp import optimal_actions, optimal_return, policy_return
from llm_policy.errors import run_script
from prompts import observation_text, thought_text
from tasks.tabular import exact_expert, held_out

MAPS, TEST_MAPS, TEST_MAP_SEED = 2200, 200, 1  # as in configs/random_maps.yaml
HIDDEN_UNITS, EPOCHS, BATCH_STATES, LEARNING_RATE, WEIGHT_DECAY = 128, 15, 64, 2e-3, 1e-2


def observed(grid: Grid, state: int, is_slippery: bool, observation: str, reads_map: bool = False) -> list[str]:
    """What is read of one state: the phrases around the map, and each cell with its place if `reads_map`."""
    lines = observation_text(grid, state, observation).splitlines()
    around = [phrase for line in lines if not set(line) <= set("SFHGA ") for phrase in line.rstrip(".").split(", ")]
    cells = [f"cell {place}: {letter}" for place, letter in enumerate("".join(grid))]
    return around + cells if reads_map else around


def searched(grid: Grid, state: int, is_slippery: bool) -> list[str]:
    """What a search ends with: the mark of each cell beside the agent, on slippery ice those of each action in turn."""
    lines = thought_text(grid, state, "search", is_slippery).splitlines()
    if not is_slippery:
        return [word[2:] for word in lines[-1].split("> ")[1].split()]
    said = [line.split(">") for line in lines[-len(ACTIONS) :]]
    return [f"{action} {i}: {mark}" for marks, action in said for i, mark in enumerate(re.findall(r"\W\d", marks))]


READERS = {  # label: (map, state, whether the ice is slippery) -> phrases
    "place": partial(observed, observation="coordinates"),
    "place and neighbours": partial(observed, observation="neighbours"),
    "place, neighbours and ways on": partial(observed, observation="ways"),
    "what a search ends with": searched,
    "place and map": partial(observed, observation="coordinates", reads_map=True),
}


def percent_of_optimal(
    table: pd.DataFrame, grids: list[Grid], is_slippery: bool, reader: Callable[[Grid, int, bool], list[str]], seed: int
) -> float:
    """The trained network's greedy success as a share of the optimum's, in percent, the mean over `grids`."""
    torch.manual_seed(seed)
    read = [reader(grid, state, is_slippery) for grid, state in zip(table["grid"], table["state"], strict=True)]
    index = {phrase: place for place, phrase in enumerate(sorted({p for found in read for p in found}))}

    def features(found: list[list[str]]) -> torch.Tensor:
        features_NF = torch.zeros(len(found), len(index))
        for row, names in zip(features_NF, found, strict=True):
            row[[index[name] for name in names if name in index]] = 1.0
        return features_NF

    features_NF = features(read)
    best_NA = torch.tensor(optimal_actions(np.stack(table["q_values"])))
    network = torch.nn.Sequential(
        torch.nn.Linear(len(index), HIDDEN_UNITS), torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN_UNITS, HIDDEN_UNITS), torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN_UNITS, best_NA.shape[1]),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(features_NF)).split(BATCH_STATES):
            log_policy_BA = network(features_NF[batch]).log_softmax(1)
            loss = -log_policy_BA.masked_fill(~best_NA[batch], -torch.inf).logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    percents = []
    for grid in grids:
        lake, states = lake_mdp(grid, is_slippery), acting_states(grid)
        action_S = np.zeros(len(lake.next_states_SAK), int)
        with torch.no_grad():
            logits = network(features([reader(grid, state, is_slippery) for state in states]))
        action_S[states] = logits.argmax(1)
        percents.append(100 * policy_return(lake, np.eye(best_NA.shape[1])[action_S]) / optimal_return(lake))
    return float(np.mean(percents))


@dataclass
class Arguments:
    output: str = field(metadata={"help": "JSON file to write."})
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds of the network."})


def main(argv: Sequence[str] | None = None) -> None:
    (options,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    check_output(options.output)
    found = {label: {} for label in READERS}
    runs = [(slip, label, seed) for slip in (False, True) for label in READERS for seed in options.seeds]
    tables, grids = {}, random_grids(MAPS)
    for slip in (False, True):
        print(f"solving {MAPS} maps {'with' if slip else 'without'} slip ...", flush=True)
        table = pd.concat([exact_expert(FrozenLake(grid, slip)) for grid in grids], ignore_index=True)
        expert, lakes = held_out(table, TEST_MAPS, TEST_MAP_SEED)
        expert["grid"] = [lake.grid for lake in expert["environment"]]
        tables[slip] = expert, [lake.grid for lake in lakes]
    print(f"training {len(runs)} networks ...", flush=True)
    for slip, label, seed in tqdm(runs, unit="network"):
        percent = percent_of_optimal(*tables[slip], slip, READERS[label], seed)
        found[label].setdefault("slippery" if slip else "not slippery", []).append(percent)
    save_figures(options.output, {"seeds": options.seeds, "percent_of_optimal": found})
    for label, percents in found.items():
        print(label, ", ".join(f"{dynamics}: {np.mean(values):.1f} %" for dynamics, values in percents.items()))


if __name__ == "__main__":
    run_script(main)
