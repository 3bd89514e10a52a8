"""The original's numbers, completion by completion, and what constant policies earn."""

import numpy as np
import pytest

from llm_policy.completions import well_formed_rewards
from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, acting_states, lake_mdp
from llm_policy.environments.mdp import greedy_policy, optimal_q
from llm_policy.errors import InputError
from rewards import (
    ORIGINAL_SHAPING,
    REWARD_SHAPES,
    REWARDS,
    RewardShaping,
    advantage_reward,
    combined_reward,
    format_reward,
    reward_functions,
)

Q_VALUES = [0.2, 0.4, 0.6, 0.1]  # LEFT, DOWN, RIGHT (best), UP (worst)


def reply(answer: str) -> str:
    return f"<think>ice</think><answer>{answer}</answer>"


CASES = [
    # completion, format, advantage, combined
    # Well-formed: the best action, the worst, and the two between
    (reply("RIGHT"), 1.0, 1.0, 1.0),
    (reply("UP"), 1.0, 0.0, 0.5),
    (reply("LEFT"), 1.0, 0.2, 0.6),
    (reply("DOWN"), 1.0, 0.6, 0.8),
    # Lower case counts the same
    (reply("right"), 1.0, 1.0, 1.0),
    # Well-formed without an action
    (reply("LEFT or UP"), 1.0, 0.0, 0.5),
    (reply(""), 1.0, 0.0, 0.5),
    # An action in a malformed reply
    ("<answer>RIGHT</answer>", 0.0, 1.0, 0.5),
    ("Well: " + reply("DOWN"), 0.0, 0.6, 0.3),
    # Neither
    ("RIGHT", 0.0, 0.0, 0.0),
    ("", 0.0, 0.0, 0.0),
    (reply("RIGHT") * 2, 0.0, 0.0, 0.0),
    # Never evaluated
    (reply("max(q_values)"), 1.0, 0.0, 0.5),
]


@pytest.mark.parametrize(("completion", "form", "advantage", "combined"), CASES)
def test_the_seeds_rewards(completion, form, advantage, combined):
    assert format_reward([completion]) == [form]
    assert advantage_reward([completion], [Q_VALUES]) == pytest.approx([advantage])
    assert combined_reward([completion], [Q_VALUES]) == pytest.approx([combined])


SHAPES = [
    # shaping, Q-values -> reward of LEFT, DOWN, RIGHT, UP
    # The original: the bonus is cut off at 1, so that it does nothing
    (ORIGINAL_SHAPING, Q_VALUES, [0.2, 0.6, 1.0, 0.0]),
    (RewardShaping(optimal_bonus=0.0), Q_VALUES, [0.2, 0.6, 1.0, 0.0]),
    # Without the cap it is there
    (RewardShaping(cap_bonus=False), Q_VALUES, [0.2, 0.6, 1.2, 0.0]),
    (RewardShaping(optimal_bonus=0.5, cap_bonus=False), Q_VALUES, [0.2, 0.6, 1.5, 0.0]),
    # Two best actions: both are optimal
    (RewardShaping(cap_bonus=False), [0.5, 0.5, 0.3, 0.1], [1.2, 1.2, 0.5, 0.0]),
    # ... also where the CSV's rounding parts them
    (RewardShaping(cap_bonus=False), [0.5, 0.5 - 1e-8, 0.3, 0.1], [1.2, 1.2, 0.5, 0.0]),
    (RewardShaping("rank"), [0.5, 0.5 - 1e-8, 0.3, 0.1], [1.0, 1.0, 1 / 3, 0.0]),
    # ... and not where the Q-values do
    (RewardShaping(cap_bonus=False), [0.5, 0.5 - 5e-6, 0.3, 0.1], [1.2, 0.9999875, 0.5, 0.0]),
    # All Q-values equal, or equal but for rounding: every action is optimal
    (ORIGINAL_SHAPING, [0.3] * 4, [1.0] * 4),
    (ORIGINAL_SHAPING, [0.0] * 4, [1.0] * 4),
    (RewardShaping(cap_bonus=False), [0.3] * 4, [1.2] * 4),
    (RewardShaping(cap_bonus=False), [0.3, 0.3, 0.3 + 1e-10, 0.3 - 1e-10], [1.2] * 4),
    # Negative Q-values, as on CliffWalking
    (ORIGINAL_SHAPING, [-13.0, -11.0, -12.0, -15.0], [0.5, 1.0, 0.75, 0.0]),
    (ORIGINAL_SHAPING, [-1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.5, 0.5]),
    # Whole numbers
    (ORIGINAL_SHAPING, [0, 1, 2, 4], [0.0, 0.25, 0.5, 1.0]),
    # Gap: exp(-10 * relative loss)
    (RewardShaping("gap"), [1.0, 0.95, 0.9, 0.0], [1.0, np.exp(-0.5), np.exp(-1.0), np.exp(-10.0)]),
    (RewardShaping("gap"), [-1.0, -1.1, -2.0, -1.0], [1.0, np.exp(-1.0), np.exp(-10.0), 1.0]),
    (RewardShaping("gap"), [0.0] * 4, [1.0] * 4),
    (RewardShaping("gap"), [5e-7, 0.0, 0.0, 0.0], [1.0] * 4),
    (RewardShaping("gap", cap_bonus=False), [1.0, 0.0, 0.0, 0.0], [1.2] + [np.exp(-10.0)] * 3),
    # Rank: share of the others that are not better; ties share the better rank
    (RewardShaping("rank"), Q_VALUES, [1 / 3, 2 / 3, 1.0, 0.0]),
    (RewardShaping("rank"), [0.5, 0.5, 0.1, 0.1], [1.0, 1.0, 1 / 3, 1 / 3]),
    (RewardShaping("rank"), [0.3] * 4, [1.0] * 4),
    (RewardShaping("rank", cap_bonus=False), Q_VALUES, [1 / 3, 2 / 3, 1.2, 0.0]),
]


@pytest.mark.parametrize(("shaping", "q_values", "expected"), SHAPES)
def test_rewards_of_all_actions(shaping, q_values, expected):
    np.testing.assert_allclose(shaping.of_actions([q_values]), [expected], atol=1e-6)
    # ... and completions that name them earn the same
    earned = advantage_reward([reply(a) for a in ACTIONS], [q_values] * 4, shaping)
    np.testing.assert_allclose(earned, expected, atol=1e-6)


@pytest.mark.parametrize("shape", REWARD_SHAPES)
def test_rewards_stay_in_range_and_keep_the_order_of_the_actions(shape):
    q_values_PA = np.random.default_rng(0).normal(size=(500, 4))
    rewards_PA = RewardShaping(shape, cap_bonus=False).of_actions(q_values_PA)
    assert rewards_PA.min() >= 0
    assert rewards_PA.max() <= 1.2 + 1e-12
    assert RewardShaping(shape).of_actions(q_values_PA).max() <= 1.0
    ranked_PA = np.take_along_axis(rewards_PA, q_values_PA.argsort(1), axis=1)
    assert (np.diff(ranked_PA, axis=1) >= 0).all()
    assert (ranked_PA[:, 3] > ranked_PA[:, 2]).all()


def test_what_state_blind_policies_earn():
    """Over the states that the expert visits, as often as it does; combined reward of the original, well-formed."""
    grid = CANONICAL_GRIDS["4x4"]
    lake = lake_mdp(grid)
    q_SA = optimal_q(lake, gamma=0.99)
    visits_S, here_S = np.zeros(16), lake.start_S
    to_next_SS = np.einsum("sat,sa->st", lake.transitions_SAS, greedy_policy(q_SA))
    for _ in range(100):
        visits_S, here_S = visits_S + here_S, here_S @ to_next_SS
    states = acting_states(grid)
    weights_P = visits_S[states] / visits_S[states].sum()
    rewards_AP = np.array([combined_reward([reply(a)] * len(states), q_SA[states].tolist()) for a in ACTIONS])
    earned = dict(zip(ACTIONS, rewards_AP @ weights_P, strict=True))
    assert earned["LEFT"] == pytest.approx(0.804, abs=1e-3)
    assert earned["DOWN"] == pytest.approx(0.653, abs=1e-3)
    assert earned["RIGHT"] == pytest.approx(0.625, abs=1e-3)
    assert np.mean(list(earned.values())) == pytest.approx(0.675, abs=1e-3)
    assert rewards_AP.max(0) @ weights_P == pytest.approx(1.0)


# TRL's contract ------------------------------------------------------------------------------------------------


def test_reward_functions_take_what_trl_passes():
    """Keyword arguments only: prompts, completions of messages, token ids, every column of the data set, and more."""
    functions = reward_functions(RewardShaping(cap_bonus=False))
    assert [f.__name__ for f in functions] == ["combined_reward", "format_reward", "advantage_reward"]
    passed = {
        "prompts": [[{"role": "user", "content": "Where?"}]] * 2,
        "completions": [[{"role": "assistant", "content": text}] for text in (reply("RIGHT"), "<answer>LEFT</answer>")],
        "completion_ids": [[1, 2], [3]],
        "q_values": [Q_VALUES] * 2,
        "state": [0, 1],
        "map": ["SFFF|FHFH|FFFH|HFFG"] * 2,
        "trainer_state": object(),
        "log_extra": None,
        "log_metric": None,
    }
    expected = ([1.1, 0.1], [1.0, 0.0], [1.2, 0.2])
    for function, rewards in zip(functions, expected, strict=True):
        earned = function(**passed)
        assert earned == pytest.approx(rewards)
        assert all(type(value) is float for value in earned)


WELL_FORMED = [  # weights, what LEFT, DOWN, RIGHT and UP earn with a bonus of 1
    ((1, 0, 0), [0.6, 0.8, 1.5, 0.5]),
    ((0, 1, 0), [1.0, 1.0, 1.0, 1.0]),
    ((0, 0.5, 0.5), [0.6, 0.8, 1.5, 0.5]),
    ((2, 0.1, 3), [1.9, 3.5, 9.1, 1.1]),
]


@pytest.mark.parametrize(("weights", "earned"), WELL_FORMED)
def test_well_formed_rewards_are_what_the_functions_earn_together(weights, earned):
    functions = reward_functions(RewardShaping("minmax", 1.0, cap_bonus=False))
    rows = [{"q_values": Q_VALUES}, {"q_values": Q_VALUES[::-1]}]
    found_PA = well_formed_rewards(functions, weights, rows, ACTIONS)
    np.testing.assert_allclose(found_PA, [earned, earned[::-1]])


def test_each_completion_is_judged_by_its_own_row():
    rows = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    assert advantage_reward([reply("LEFT")] * 2, rows) == [1.0, 0.0]


@pytest.mark.parametrize("function", reward_functions(ORIGINAL_SHAPING))
def test_no_completions_no_rewards(function):
    assert function(completions=[], q_values=[]) == []


def test_rows_and_completions_must_match():
    with pytest.raises(ValueError, match="zip"):
        advantage_reward([reply("LEFT")] * 2, [Q_VALUES])


def test_unknown_shape():
    with pytest.raises(InputError, match=r"--reward_shape 'softmax': expected one of minmax, gap, rank"):
        RewardShaping("softmax")


# Other actions than the lake's -----------------------------------------------------------------------------------

ORDERS = [
    ("UP", "LEFT", "DOWN", "RIGHT"),
    ("SOUTH", "NORTH", "EAST", "WEST", "PICKUP", "DROPOFF"),
    ("STAY", "GO"),
]


@pytest.mark.parametrize("actions", ORDERS, ids="-".join)
def test_a_completion_is_scored_by_the_name_of_its_action(actions):
    """Whatever the order of the Q-values, and however many: the lake's order counts for the lake alone."""
    q_values = [float(i) for i in range(len(actions))]
    expected = [i / (len(actions) - 1) for i in range(len(actions))]
    columns = {"completions": [reply(name) for name in actions], "q_values": [q_values] * len(actions)}
    combined, form, advantage = reward_functions(ORIGINAL_SHAPING, actions)
    assert advantage(**columns) == pytest.approx(expected)
    assert combined(**columns) == pytest.approx([(1 + value) / 2 for value in expected])
    assert form(**columns) == [1.0] * len(actions)
    assert advantage_reward(columns["completions"], columns["q_values"], actions=actions) == pytest.approx(expected)


def test_a_name_of_another_environment_is_no_action():
    taxi = reward_functions(ORIGINAL_SHAPING, ORDERS[1])
    assert [function(completions=[reply("LEFT")], q_values=[[1.0] * 6]) for function in taxi] == [[0.5], [1.0], [0.0]]
    assert advantage_reward([reply("SOUTH")], [Q_VALUES]) == [0.0]


def test_a_column_of_the_data_cannot_replace_what_is_bound():
    """A dataset may have a column `actions`; the rewards keep the names that the task gave them."""
    _, _, advantage = reward_functions(ORIGINAL_SHAPING, ("UP", "LEFT", "DOWN", "RIGHT"))
    earned = advantage(completions=[reply("UP")], q_values=[[1.0, 0.0, 0.0, 0.0]], actions=["other"], shaping=["other"])
    assert earned == [1.0]


def test_every_part_has_a_name_that_trl_logs_as_a_reward():
    assert all(reward.__name__.endswith("_reward") for reward in REWARDS)
