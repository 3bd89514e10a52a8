"""benchmarks/observation_probe.py: what the small network is shown, and that it learns from it."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from llm_policy.environments.frozen_lake import acting_states, lake_mdp
from llm_policy.environments.mdp import optimal_q
from llm_policy.report import maps

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import observation_probe
from observation_probe import READERS, main, observed, percent_of_optimal, searched

GRID = ("SFFF", "FHFH", "FFFH", "HFFG")


def test_around_the_map_nothing_of_the_map_is_read():
    place, neighbours = ["You are at row 0", "column 2"], ["LEFT: ice", "DOWN: ice", "RIGHT: ice", "UP: edge"]
    assert observed(GRID, 2, False, "neighbours") == place + neighbours
    ways = ["LEFT: ice with 1 way on", "DOWN: ice with 1 way on", "RIGHT: ice with 0 ways on", "UP: edge"]
    assert observed(GRID, 2, False, "ways") == place + ways
    assert observed(GRID, 2, False, "coordinates", reads_map=True)[1:4] == ["column 2", "cell 0: S", "cell 1: F"]


def test_of_a_search_its_marks_are_read():
    assert searched(GRID, 14, is_slippery=False) == [".LEFT", "+RIGHT", ".UP"]
    assert searched(GRID, 14, is_slippery=True)[:4] == ["LEFT 0: .1", "LEFT 1: .1", "LEFT 2: =0", "DOWN 0: .1"]


MIRRORED = ("HSFG",), ("GFSH",)  # RIGHT in one, LEFT in the other: the place alone does not tell which


def states_with_q(grids, is_slippery, copies=60) -> pd.DataFrame:
    rows = []
    for grid in grids:
        q_SA = optimal_q(lake_mdp(grid, is_slippery), 0.99)
        rows += [{"grid": grid, "state": state, "q_values": q_SA[state]} for state in acting_states(grid)]
    return pd.DataFrame(rows * copies)


@pytest.mark.parametrize("is_slippery", [False, True])
def test_the_network_learns_what_it_is_shown_enough_of(is_slippery):
    one, two = states_with_q([GRID], is_slippery), states_with_q(MIRRORED, is_slippery)
    assert percent_of_optimal(one, [GRID], is_slippery, READERS["place"], seed=1) == pytest.approx(100.0)
    assert percent_of_optimal(two, MIRRORED, is_slippery, READERS["place"], seed=1) < 90
    assert percent_of_optimal(two, MIRRORED, is_slippery, READERS["place and map"], seed=1) == pytest.approx(100.0)


def test_the_file_is_what_the_report_reads(tmp_path, monkeypatch):
    for name, value in (("MAPS", 30), ("TEST_MAPS", 10), ("EPOCHS", 1)):
        monkeypatch.setattr(observation_probe, name, value)
    output = tmp_path / "new" / "probe.json"
    main(["--output", str(output), "--seeds", "7", "8"])
    found = json.loads(output.read_text())
    assert found["seeds"] == [7, 8]
    monkeypatch.setattr(maps, "made", lambda file: [])  # not committed
    lines = maps.probe_section(output).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(READERS)
    for percents in found["percent_of_optimal"].values():
        assert {dynamics: len(values) for dynamics, values in percents.items()} == {"not slippery": 2, "slippery": 2}
        assert all(0 <= value <= 100 + 1e-9 for values in percents.values() for value in values)
