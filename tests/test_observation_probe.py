"""benchmarks/observation_probe.py: what the small network is shown, and that it learns from it."""

import sys
from pathlib import Path

import pandas as pd

from llm_policy.frozen_lake import acting_states, lake_mdp
from llm_policy.mdp import optimal_q

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from observation_probe import READERS, percent_of_optimal, phrases

GRID = ("SFFF", "FHFH", "FFFH", "HFFG")


def test_around_the_map_nothing_of_the_map_is_read():
    place, neighbours = ["You are at row 0", "column 2"], ["LEFT: ice", "DOWN: ice", "RIGHT: ice", "UP: edge"]
    assert phrases(GRID, 2, "neighbours", False) == place + neighbours
    ways = ["LEFT: ice with 1 way on", "DOWN: ice with 1 way on", "RIGHT: ice with 0 ways on", "UP: edge"]
    assert phrases(GRID, 2, "ways", False) == place + ways
    assert phrases(GRID, 2, "coordinates", True)[1:4] == ["column 2", "cell 0: S", "cell 1: F"]


def test_the_network_learns_a_map_where_it_is_shown_enough():
    states = acting_states(GRID)
    q_SA = optimal_q(lake_mdp(GRID, is_slippery=False), 0.99)
    table = pd.DataFrame({"grid": [GRID] * 40 * len(states), "state": states * 40})
    table["q_values"] = [q_SA[state] for state in table["state"]]
    assert percent_of_optimal(table, [GRID], False, *READERS["place"], seed=1) == 100.0
