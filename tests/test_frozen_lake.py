"""Maps and their text, both ways, and the lake's arrays against Gymnasium's own table."""

import gymnasium as gym
import numpy as np
import pytest

from llm_policy.environments.frozen_lake import (
    ACTIONS,
    CANONICAL_GRIDS,
    FrozenLake,
    acting_states,
    check_grid,
    default_horizon,
    lake_mdp,
    leads_to_goal,
    parse_state_text,
    random_grids,
    read_grid,
    shortest_path_policy,
    state_text,
)
from llm_policy.environments.mdp import mdp_from_env, policy_return
from llm_policy.errors import InputError

SMALL, LARGE = CANONICAL_GRIDS["4x4"], CANONICAL_GRIDS["8x8"]
TWO_STARTS = ("SFF", "FHG", "SFF", "FFF")


@pytest.mark.parametrize("is_slippery", [True, False])
def test_equals_gymnasium(is_slippery):
    for grid in [SMALL, LARGE, TWO_STARTS, ("SG",), *random_grids(5, 4, seed=2), *random_grids(3, 7, seed=2)]:
        env = gym.make("FrozenLake-v1", desc=list(grid), is_slippery=is_slippery)
        expected, lake = mdp_from_env(env), lake_mdp(grid, is_slippery)
        np.testing.assert_array_equal(lake.transitions_SAS, expected.transitions_SAS)
        np.testing.assert_array_equal(lake.rewards_SA, expected.rewards_SA)
        np.testing.assert_array_equal(lake.start_S, expected.start_S)
        # Gymnasium lists a terminal state's own self-loop as done, so unreachable holes count there too
        np.testing.assert_array_equal(lake.terminal_S, expected.terminal_S)


def test_stack_of_lakes():
    grids = random_grids(6, 5, seed=4)
    lakes = lake_mdp(grids)
    for number, grid in enumerate(grids):
        lake = lake_mdp(grid)
        for name in ("next_states_SAK", "probabilities_SAK", "rewards_SA", "start_S", "terminal_S"):
            np.testing.assert_array_equal(getattr(lakes, name)[number], getattr(lake, name))


def test_action_order_is_gymnasiums():
    env = gym.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
    for action, name in enumerate(ACTIONS):
        env.reset(seed=0)
        env.step(action)
        assert env.render().splitlines()[0].strip() == f"({name.capitalize()})"


@pytest.mark.parametrize("grid", [SMALL, LARGE, *random_grids(3, 6, seed=8), ("SFG",)])
def test_text_round_trip(grid):
    for state in acting_states(grid):
        text = state_text(grid, state)
        assert text.count("A") == 1
        assert parse_state_text(text) == (grid, state)
        assert parse_state_text(text.replace("|", "\n") + "\n") == (grid, state)
        assert parse_state_text(text.replace("|", "\r\n")) == (grid, state)


def test_known_texts():
    assert state_text(SMALL, 0) == "AFFF|FHFH|FFFH|HFFG"
    assert state_text(SMALL, 14) == "SFFF|FHFH|FFFH|HFAG"
    assert acting_states(SMALL) == [0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14]
    assert parse_state_text("AFG|FFF") == (("SFG", "FFF"), 0)
    assert parse_state_text("SFG|FAF") == (("SFG", "FFF"), 4)


def test_ansi_rendering_of_every_state():
    for grid in (SMALL, TWO_STARTS):
        env = gym.make("FrozenLake-v1", desc=list(grid), is_slippery=True, render_mode="ansi")
        env.reset(seed=0)
        for state in range(len("".join(grid))):
            for last_action in (None, 0, 1, 2, 3):
                env.unwrapped.s, env.unwrapped.lastaction = state, last_action
                assert parse_state_text(env.render()) == (grid, state)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("AFFF|FHF|FFFH|HFFG", ["row 2", "'FHF'", "expected 4"]),
        ("AFFF|FHXH|FFFH|HFFG", ["row 2", "column 3", "'X'", "S, F, H or G"]),
        ("SFFF|FHFH|FFFH|HFFG", ["no agents", "one cell"]),
        ("AFFF|FHFH|FAFH|HFFG", ["2 agents"]),
        ("\x1b[41mS\x1b[0mFFF\nFHFH\nFFAH\nHFFG", ["2 agents"]),
        ("\x1b[41mS\x1b[0mFF\n\x1b[41mF\x1b[0mFG", ["2 agents"]),
        ("AFFF|FHFH|FFFH|HFFF", ["no goal", "G"]),
        ("SFFF|FHFH|FFFH|HFFA", ["no goal"]),
        ("\x1b[41mF\x1b[0mFG", ["no start"]),
        ("A", ["2 cells"]),
        ("", ["no agents"]),
        ("afff|fhfh|fffh|hffg", ["no agents"]),
        ("AFFF||FHFH", ["row 2", "''"]),
        ("42", ["no agents"]),
    ],
)
def test_bad_state_text(text, words):
    with pytest.raises(InputError) as error:
        parse_state_text(text)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_read_grid(tmp_path):
    assert read_grid("4x4") == SMALL
    assert read_grid("8x8") == LARGE
    path = tmp_path / "map.txt"
    path.write_bytes(b"\xef\xbb\xbfSFF\r\nHFG\r\n\r\n")
    assert read_grid(path) == ("SFF", "HFG")
    for content, word in [(b"SFF\nHF\n", "row 2"), (b"SFF\nFFF\n", "goal"), (b"", "2 cells"), (b"\xff\xfeS", "UTF-8")]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=word) as error:
            read_grid(path)
        assert str(path) in str(error.value)
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(InputError, match=str(missing)):
            read_grid(missing)


def test_check_grid_names_the_place():
    assert check_grid(["SF", "FG"]) == ("SF", "FG")
    with pytest.raises(InputError, match=r"^here: .*no start"):
        check_grid(["FF", "FG"], where="here")
    with pytest.raises(InputError, match=r"SFS\|FFG: has several starts"):
        state_text(("SFS", "FFG"), 1)
    assert check_grid(["SFH", "HFF", "GHF", "FFF"])[0] == "SFH", "a way around three sides"
    with pytest.raises(InputError, match=r"^here: 'SFH\|FHH\|HHG' has no way from S to G"):
        check_grid(["SFH", "FHH", "HHG"], where="here")


def test_random_grids():
    grids = random_grids(200, 4, seed=1)
    assert len(set(grids)) == 200
    assert grids == random_grids(200, 4, seed=1)
    assert grids[:50] == random_grids(50, 4, seed=1)
    assert grids != random_grids(200, 4, seed=2)
    assert not set(random_grids(20, 8, seed=1)) & set(random_grids(20, 8, seed=2))
    for grid in grids:
        assert check_grid(grid) == grid
        # solvable: the shortest path, followed on firm ground, arrives
        assert policy_return(lake_mdp(grid, is_slippery=False), shortest_path_policy(grid)) == 1.0
    # of the four 2x2 lakes with S and G in the corners only the one with two holes cannot be solved
    assert sorted(random_grids(3, 2)) == [("SF", "FG"), ("SF", "HG"), ("SH", "FG")]
    with pytest.raises(InputError, match="only 3 distinct 2x2 maps"):
        random_grids(4, 2)
    with pytest.raises(InputError, match=r"count 1, size 1, seed 0"):
        random_grids(1, 1)


def test_shortest_path_is_shortest():
    lake = lake_mdp(SMALL, is_slippery=False)
    policy_SA = shortest_path_policy(SMALL)
    assert policy_return(lake, policy_SA, horizon_steps=6) == 1.0
    assert policy_return(lake, policy_SA, horizon_steps=5) == 0.0
    assert ACTIONS[policy_SA[0].argmax()] == "DOWN"  # ties: the first in the order of ACTIONS
    # far from the optimum of 0.74 where it is slippery
    assert policy_return(lake_mdp(SMALL), policy_SA, horizon_steps=100) < 0.05


def test_horizons_are_gymnasiums():
    assert default_horizon(SMALL) == gym.spec("FrozenLake-v1").max_episode_steps
    assert default_horizon(LARGE) == gym.spec("FrozenLake8x8-v1").max_episode_steps


def test_stack_needs_one_size():
    with pytest.raises(InputError, match="2 different sizes"):
        lake_mdp([SMALL, LARGE])


@pytest.mark.parametrize(
    ("cell", "without", "expected"),
    [((0, 0), None, True), ((0, 3), None, True), ((0, 3), (0, 2), False), ((0, 2), (0, 3), True), ((3, 3), None, True)],
)
def test_leads_to_goal(cell, without, expected):
    assert leads_to_goal(SMALL, cell, without) is expected


# One lake as a `TableEnvironment` --------------------------------------------------------------------------------


def test_a_lake_is_its_map_and_its_ice():
    assert FrozenLake(SMALL) == FrozenLake(SMALL, is_slippery=True) != FrozenLake(SMALL, is_slippery=False)
    assert len({FrozenLake(SMALL), FrozenLake(SMALL), FrozenLake(LARGE), FrozenLake(SMALL, False)}) == 3
    assert str(FrozenLake(SMALL)) == "SFFF|FHFH|FFFH|HFFG"
    assert (FrozenLake(SMALL).horizon_steps, FrozenLake(LARGE).horizon_steps) == (100, 200)
    assert FrozenLake(SMALL).acting_states == acting_states(SMALL)


@pytest.mark.parametrize("is_slippery", [True, False])
def test_arrays_and_gymnasium_environment_of_a_lake(is_slippery):
    lake = FrozenLake(("SFF", "HFG"), is_slippery)
    np.testing.assert_array_equal(lake.mdp.transitions_SAS, mdp_from_env(lake.make()).transitions_SAS)
    np.testing.assert_array_equal(lake.success_mdp.rewards_SA, lake.mdp.rewards_SA)
    assert lake.pays_success
    assert [lake.make(steps).spec.max_episode_steps for steps in (None, 7)] == [75, 7]


@pytest.mark.parametrize("is_slippery", [True, False])
def test_states_of_a_lake_are_read_back(is_slippery):
    for lake in (FrozenLake(SMALL, is_slippery), FrozenLake(("SFG", "FFF"), is_slippery)):
        for state in lake.acting_states:
            assert FrozenLake.read_state(lake.state_text(state), is_slippery) == (lake, state)


def test_states_in_which_no_action_is_chosen_are_refused():
    for text, where in [("SFF|F\x1b[41mH\x1b[0mG", "in a hole"), ("SFF|FG\x1b[41mG\x1b[0m", "at the goal")]:
        with pytest.raises(InputError, match=f"the agent stands {where}, expected a state in which an action"):
            FrozenLake.read_state(text)
    with pytest.raises(InputError, match="has several starts"):
        FrozenLake.read_state("\x1b[41mS\x1b[0mFS|FFG")


def test_arrows_and_drawing_of_a_lake():
    lake = FrozenLake(("SFFF", "HFFG"), is_slippery=False)
    (drawing,) = lake.drawings()
    assert (drawing.title, drawing.cells) == ("", lake.grid)
    assert drawing.state_of == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 3, (1, 1): 5, (1, 2): 6}
    for (row, column), state in drawing.state_of.items():
        for action, (x, y) in lake.arrows.items():
            next_cell = divmod(int(lake.mdp.next_states_SAK[state, action, 0]), 4)
            assert next_cell in ((row + y, column + x), (row, column)), "the next cell, or the edge"
