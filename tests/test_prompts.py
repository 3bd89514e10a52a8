"""Every word that the model is told, for every cell."""

import re

import numpy as np
import pytest

from llm_policy.completions import action_index, parse_completion
from llm_policy.environments.frozen_lake import (
    ACTIONS,
    CANONICAL_GRIDS,
    MOVES,
    acting_states,
    goal_distances,
    lake_mdp,
    random_grids,
)
from llm_policy.errors import InputError
from prompts import OBSERVATIONS, THOUGHTS, format_example, observation_text, policy_messages, thought_text

GRID = CANONICAL_GRIDS["4x4"]  # SFFF FHFH FFFH HFFG


@pytest.mark.parametrize("state", range(16))
def test_position_and_map_of_every_cell(state):
    row, column = divmod(state, 4)
    rows = [list(line) for line in GRID]
    rows[row][column] = "A"
    map_text = "\n".join(map("".join, rows))
    assert observation_text(GRID, state, "grid") == map_text
    assert observation_text(GRID, state, "coordinates") == f"You are at row {row}, column {column}.\n{map_text}"
    assert observation_text(GRID, state, "neighbours").startswith(
        f"You are at row {row}, column {column}.\n{map_text}\n"
    )


NEIGHBOURS = [
    # A corner, an edge, the inside, beside holes, beside the goal
    (0, "LEFT: edge, DOWN: ice, RIGHT: ice, UP: edge."),
    (4, "LEFT: edge, DOWN: ice, RIGHT: hole, UP: ice."),
    (6, "LEFT: hole, DOWN: ice, RIGHT: hole, UP: ice."),
    (14, "LEFT: ice, DOWN: edge, RIGHT: goal, UP: ice."),
]


@pytest.mark.parametrize(("state", "line"), NEIGHBOURS)
def test_neighbours(state, line):
    assert observation_text(GRID, state, "neighbours").splitlines()[-1] == line


def test_cells_have_names():
    text = observation_text(("SFHF", "FFFH"), 5, "cells")
    assert text == "You are at 11.\n00:S 01:F 02:H 03:F\n10:F 11:A 12:F 13:H"
    large = ("S" + "F" * 15, *["F" * 16] * 14, "F" * 15 + "G")
    assert observation_text(large, 16 * 11 + 13, "cells").splitlines()[0] == "You are at bd."
    with pytest.raises(InputError, match="a map of 2 x 17 cells: names are for 16 rows and columns at most"):
        observation_text(("S" * 17, "G" * 17), 0, "cells")


THINKING = [
    ("place", GRID, 6, "I am at row 1, column 2."),
    ("neighbours", GRID, 6, "LEFT 11: hole, DOWN 22: ice, RIGHT 13: hole, UP 02: ice."),
    ("neighbours", GRID, 14, "LEFT 31: ice, DOWN out, RIGHT 33: goal, UP 22: ice."),
    (
        "ways", GRID, 4,
        "LEFT out. DOWN 20: ice (out, 30: hole, 21: ice) 1 on. RIGHT 11: hole. UP 00: ice (out, 01: ice, out) 1 on.",
    ),
    (
        "ways", GRID, 14,
        "LEFT 31: ice (30: hole, out, 21: ice) 1 on. DOWN out. RIGHT 33: goal. "
        "UP 22: ice (21: ice, 23: hole, 12: ice) 2 on.",
    ),
    ("search", GRID, 14, "33>32A32 23H|A32> 31.LEFT 33+RIGHT 22.UP"),
    (
        "search", GRID, 6,
        "33>32g32 23H|g32>31h31 33- 22i22|h31>30H 32- 21j21|"
        "i22>21- 32- 23H 12A12|A12> 11!LEFT 22+DOWN 13!RIGHT 02.UP",
    ),
    ("search", ("SHG", "FHF"), 3, "02>01H 12g12|g12>11H 02-|A10> 11!RIGHT 00.UP"),  # no way
]  # fmt: skip
ON_SLIPPERY_ICE = [
    (
        GRID, 14,
        "33>32A32 23H|LEFT31.>30H1 32A1 21F1 LEFT.1|DOWN32= DOWN=0|RIGHT33+ RIGHT+0|"
        "UP22.>21F0 32A0 23H1 12F1 UP.1|"
        "UP.1LEFT.1DOWN=0>LEFT|LEFT.1DOWN=0RIGHT+0>DOWN|DOWN=0RIGHT+0UP.1>RIGHT|RIGHT+0UP.1LEFT.1>UP",
    ),
    (
        ("SFG",), 0,
        "02>01g01|g01>00A00 02-|LEFT00= LEFT=0|DOWN00= DOWN=0|RIGHT01+>00A0 02G0 RIGHT+0|UP00= UP=0|"
        "UP=0LEFT=0DOWN=0>LEFT|LEFT=0DOWN=0RIGHT+0>DOWN|DOWN=0RIGHT+0UP=0>RIGHT|RIGHT+0UP=0LEFT=0>UP",
    ),
    (
        ("SHG", "FHF"), 3,  # no way
        "02>01H 12g12|g12>11H 02-|LEFT10= LEFT=0|DOWN10= DOWN=0|RIGHT11! RIGHT!0|UP00.>10A0 01H1 UP.1|"
        "UP.1LEFT=0DOWN=0>LEFT|LEFT=0DOWN=0RIGHT!0>DOWN|DOWN=0RIGHT!0UP.1>RIGHT|RIGHT!0UP.1LEFT=0>UP",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("thought", "grid", "state", "text"), THINKING)
def test_thoughts_say_what_is_so(thought, grid, state, text):
    assert thought_text(grid, state, thought).replace("\n", "|") == text
    if thought != "search":
        assert thought_text(grid, state, thought, is_slippery=True) == thought_text(grid, state, thought)


@pytest.mark.parametrize(("grid", "state", "text"), ON_SLIPPERY_ICE)
def test_a_search_on_slippery_ice_says_where_each_action_may_lead(grid, state, text):
    assert thought_text(grid, state, "search", is_slippery=True).replace("\n", "|") == text


@pytest.mark.parametrize("grid", random_grids(5, size=5))
def test_on_slippery_ice_marks_are_those_of_the_cells_that_the_dynamics_lead_to(grid):
    lake, cells, distance_S = lake_mdp(grid, is_slippery=True), "".join(grid), goal_distances(grid)

    def mark(state, end):
        row, column = divmod(end, 5)
        beside = [(row + down, column + right) for down, right in MOVES]
        holes = sum(grid[r][c] == "H" for r, c in beside if 0 <= r < 5 and 0 <= c < 5)
        nearer = "+" if distance_S[end] < distance_S[state] else "."
        if cells[end] == "H":
            return "!0"
        if end == state:
            return "=0"
        return f"{nearer}{0 if cells[end] == 'G' else holes}"

    for state in acting_states(grid):
        last = thought_text(grid, state, "search", is_slippery=True).splitlines()[-len(ACTIONS) :]
        for action, line in enumerate(last):
            said = [
                ACTIONS[(action + side) % len(ACTIONS)] + mark(state, lake.next_states_SAK[state, action, which])
                for which, side in enumerate((-1, 0, 1))
            ]
            assert line == f"{''.join(said)}>{ACTIONS[action]}"


@pytest.mark.parametrize("grid", random_grids(5, size=5))
def test_where_a_search_has_come_by_beside_the_agent_it_is_a_step_nearer_to_a_goal(grid):
    distance_S = goal_distances(grid)
    for state in acting_states(grid):
        own, beside = thought_text(grid, state, "search").splitlines()[-1].split("> ")
        assert own == f"A{state // 5}{state % 5}"
        for row, column, mark, action in re.findall(r"(\S)(\S)(\S)([A-Z]+)", beside):
            down, right = MOVES[ACTIONS.index(action)]
            assert (int(row), int(column)) == (state // 5 + down, state % 5 + right)
            assert (mark == "+") == (distance_S[5 * int(row) + int(column)] < distance_S[state])
            assert (mark == "!") == (grid[int(row)][int(column)] == "H")
    assert np.isfinite(distance_S[0])


def test_a_search_marks_no_way_that_leads_away_from_the_nearest_goal():
    """01 has been come by, from the goal at the right, and is as far from it as 00 is from the one below."""
    assert thought_text(("SFFG", "FFFF", "GFFF"), 0, "search").splitlines()[-1] == "A00> 10+DOWN 01.RIGHT"


@pytest.mark.parametrize("is_slippery", [False, True])
@pytest.mark.parametrize("thought", THOUGHTS)
def test_a_thought_is_the_same_whatever_is_answered(thought, is_slippery):
    """No action is preferred, and the reply is read as it was meant."""
    for state in acting_states(GRID):
        replies = [format_example(GRID, state, action, thought, is_slippery) for action in range(len(ACTIONS))]
        parsed = [parse_completion(reply) for reply in replies]
        assert {p.thought for p in parsed} == {thought_text(GRID, state, thought, is_slippery)}
        assert [action_index(p.answer, ACTIONS) for p in parsed] == [0, 1, 2, 3]
        assert all(p.is_well_formed for p in parsed)


def test_an_unknown_thought():
    with pytest.raises(InputError, match="--thought 'deep': expected one of place, neighbours, ways, search"):
        thought_text(GRID, 0, "deep")


def test_spaced_is_neighbours_with_cells_apart():
    text = observation_text(("SFHF", "FFFH"), 5, "spaced")
    assert text == "You are at row 1, column 1.\nS F H F\nF A F H\nLEFT: ice, DOWN: edge, RIGHT: ice, UP: ice."


WAYS = [
    (GRID, 0, "LEFT: edge, DOWN: ice with 1 way on, RIGHT: ice with 1 way on, UP: edge."),
    (GRID, 4, "LEFT: edge, DOWN: ice with 1 way on, RIGHT: hole, UP: ice with 1 way on."),
    (GRID, 14, "LEFT: ice with 1 way on, DOWN: edge, RIGHT: goal, UP: ice with 2 ways on."),
    # behind DOWN the goal counts as a way, too
    (GRID, 10, "LEFT: ice with 2 ways on, DOWN: ice with 2 ways on, RIGHT: hole, UP: ice with 1 way on."),
    (("SFG", "FHF", "FHF"), 3, "LEFT: edge, DOWN: ice with 0 ways on, RIGHT: hole, UP: ice with 1 way on."),
]


@pytest.mark.parametrize(("grid", "state", "line"), WAYS)
def test_ways_counts_the_open_sides_behind_a_neighbour(grid, state, line):
    text = observation_text(grid, state, "ways")
    assert text.splitlines()[-1] == line
    assert text.splitlines()[:-1] == observation_text(grid, state, "spaced").splitlines()[:-1]


def test_maps_need_not_be_square():
    assert observation_text(("SFH", "FFG"), 4) == "You are at row 1, column 1.\nSFH\nFAG"


def test_unknown_observation():
    with pytest.raises(InputError, match="--observation 'pixels': expected one of grid, coordinates, neighbours"):
        observation_text(GRID, 0, "pixels")


def test_the_prompt_names_dynamics_letters_and_answer_form():
    system, user = policy_messages(GRID, 0, is_slippery=True)
    assert (system["role"], user["role"]) == ("system", "user")
    for words in ("S start", "F ice", "H hole", "G goal", "A you", "LEFT, DOWN, RIGHT or UP", "</think><answer>"):
        assert words in system["content"]
    assert "slippery" in system["content"].lower()
    assert "1/3" in system["content"]
    not_slippery = policy_messages(GRID, 0, is_slippery=False)[0]["content"]
    assert "not slippery" in not_slippery.lower()
    assert "1/3" not in not_slippery
    assert "{" not in system["content"] + not_slippery + user["content"]


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_distinct_states_have_distinct_prompts(observation):
    for grid in CANONICAL_GRIDS.values():
        texts = {str(policy_messages(grid, state, True, observation)) for state in acting_states(grid)}
        assert len(texts) == len(acting_states(grid))


@pytest.mark.parametrize("action", range(4))
def test_the_example_is_well_formed_and_its_thought_names_no_action(action):
    for state in acting_states(GRID):
        example = format_example(GRID, state, action)
        parsed = parse_completion(example)
        assert (parsed.is_well_formed, action_index(parsed.answer, ACTIONS)) == (True, action)
        thought = example.partition("</think>")[0]
        assert not any(name in thought.upper() for name in ACTIONS)
        # The thought is the same whatever the action is: no label can leak through it
        assert thought == format_example(GRID, state, 0).partition("</think>")[0]


def test_the_original_prompt_asks_for_ice_under_its_examples():
    with pytest.raises(InputError, match=r"--observation original: its examples .* use another observation"):
        policy_messages(("SHF", "FFG"), 0, True, "original")
    with pytest.raises(InputError, match=r"not all of which are ice on SF\|FG"):
        policy_messages(("SF", "FG"), 0, True, "original")


def test_a_new_observation_is_one_entry(monkeypatch):
    monkeypatch.setitem(OBSERVATIONS, "cell", (lambda grid, state: f"cell {state}", *OBSERVATIONS["grid"]))
    assert observation_text(("SF", "FG"), 2, "cell") == "cell 2\nSF\nAG"
