"""Policy tables against the known scores of the canonical lake and of the cliff."""

import numpy as np
import pytest

from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, FrozenLake, lake_mdp, shortest_path_policy
from llm_policy.environments.mdp import AGREEMENT_GAMMA, greedy_policy, optimal_q
from llm_policy.environments.policy_table import (
    action_letters,
    best_actions,
    best_constant_action,
    constant_policy,
    expert_policy,
    score_policy,
    uniform_policy,
)
from llm_policy.environments.toy_text import CliffWalking, Taxi

GRID = CANONICAL_GRIDS["4x4"]
LAKE = FrozenLake(GRID)
LEFT, DOWN, RIGHT, UP = range(4)


def expert(is_slippery: bool, grid=GRID) -> np.ndarray:
    return greedy_policy(optimal_q(lake_mdp(grid, is_slippery), AGREEMENT_GAMMA))


KNOWN_SCORES = [
    # policy, slippery, success without a limit, within 100 steps, states whose most probable action is optimal
    (expert(True), True, 14 / 17, 0.7402, 11),
    (uniform_policy(16, 4), True, 0.0139, 0.0139, 0),
    (constant_policy(16, LEFT, 4), True, 0.0, 0.0, 4),
    (constant_policy(16, DOWN, 4), True, 0.0495, 0.0495, 2),
    (constant_policy(16, RIGHT, 4), True, 0.032, 0.032, 2),
    (expert(False), False, 1.0, 1.0, 11),
    (shortest_path_policy(GRID), False, 1.0, 1.0, 11),
    (constant_policy(16, DOWN, 4), False, 0.0, 0.0, None),
]


@pytest.mark.parametrize(("policy_SA", "is_slippery", "success", "at_horizon", "optimal_states"), KNOWN_SCORES)
def test_known_scores(policy_SA, is_slippery, success, at_horizon, optimal_states):
    score = score_policy(FrozenLake(GRID, is_slippery), policy_SA, horizon_steps=100)
    optimum = 14 / 17 if is_slippery else 1.0
    assert score.success_probability == pytest.approx(success, abs=5e-4)
    assert score.success_at_horizon == pytest.approx(at_horizon, abs=5e-4)
    assert score.optimal_success == pytest.approx(optimum, abs=1e-9)
    assert score.optimal_at_horizon == pytest.approx(0.7442 if is_slippery else 1.0, abs=5e-5)
    assert score.percent_of_optimal == pytest.approx(100 * score.success_probability / optimum)
    assert score.regret == pytest.approx(optimum - score.success_probability)
    assert score.acting_states == 11
    if optimal_states is not None:
        assert score.optimal_states == optimal_states
    assert score.format_validity is None
    assert (score.return_at_horizon, score.optimal_return) == (None, None), "success is the return"


def test_a_longer_limit_comes_closer_to_no_limit():
    within = [score_policy(LAKE, expert(True), steps).success_at_horizon for steps in (10, 100, 1000)]
    assert within[0] < within[1] < within[2] == pytest.approx(14 / 17, abs=1e-6)


def test_a_lake_that_nobody_can_cross():
    score = score_policy(FrozenLake(("SH", "HG")), uniform_policy(4, 4), 10)
    assert (score.success_probability, score.percent_of_optimal, score.regret) == (0.0, 100.0, 0.0)


def test_ties_of_the_most_probable_action_count_when_all_of_them_are_optimal():
    policy_SA = expert(True).copy()
    policy_SA[6] = [0.5, 0.0, 0.5, 0.0]  # between two holes LEFT and RIGHT are equally good
    assert score_policy(LAKE, policy_SA, 100).optimal_states == 11
    policy_SA[0] = [0.5, 0.5, 0.0, 0.0]  # here only LEFT is
    assert score_policy(LAKE, policy_SA, 100).optimal_states == 10


@pytest.mark.parametrize(
    ("is_slippery", "grid", "action"),
    [(True, GRID, DOWN), (False, ("SFG",), RIGHT), (False, ("S", "G"), DOWN), (False, ("GS",), LEFT)],
)
def test_best_constant_action(is_slippery, grid, action):
    assert best_constant_action(FrozenLake(grid, is_slippery), horizon_steps=100) == action


def test_the_step_limit_is_the_environments_own():
    assert score_policy(LAKE, expert(True)) == score_policy(LAKE, expert(True), 100)
    assert score_policy(FrozenLake(CANONICAL_GRIDS["8x8"]), uniform_policy(64, 4)).horizon_steps == 200
    assert best_constant_action(LAKE) == best_constant_action(LAKE, 100)


def test_the_expert_and_what_it_prefers():
    for is_slippery in (True, False):
        lake = FrozenLake(GRID, is_slippery)
        np.testing.assert_array_equal(expert_policy(lake), expert(is_slippery))
        assert (best_actions(lake) >= expert_policy(lake).astype(bool)).all()
    assert best_actions(LAKE)[6].tolist() == [True, False, True, False]


def test_action_letters():
    policy_SA = np.array([[1.0, 0, 0, 0], [0.4, 0.6, 0, 0], [0.5, 0, 0.5, 0], [0.25] * 4, [0, 0, 0, 1]])
    assert action_letters(policy_SA, LAKE.actions) == "LD..U"
    assert action_letters(np.eye(6), Taxi().actions) == "SNEWPD"


# Where a return counts and not a success -------------------------------------------------------------------------

CLIFF = CliffWalking()
CLIFF_SCORES = [
    # policy, success without a limit, return within 100 steps, percent: 0 is a wall all the time, 100 the optimum
    (expert_policy(CLIFF), 1.0, -13.0, 100.0),
    (uniform_policy(48, 4), 1.0, -1083.0, -100 * (1083 - 100) / (100 - 13)),
    (constant_policy(48, CLIFF.actions.index("UP"), 4), 0.0, -100.0, 0.0),
    # Over the cliff in each step
    (constant_policy(48, CLIFF.actions.index("RIGHT"), 4), 0.0, -10_000.0, -100 * (10_000 - 100) / (100 - 13)),
]


@pytest.mark.parametrize(("policy_SA", "success", "earned", "percent"), CLIFF_SCORES)
def test_scores_of_the_cliff(policy_SA, success, earned, percent):
    score = score_policy(CLIFF, policy_SA)
    assert score.success_probability == pytest.approx(success, abs=1e-9)
    assert score.return_at_horizon == pytest.approx(earned, abs=5e-3)
    assert score.optimal_return == -13
    assert score.regret == pytest.approx(-13 - earned, abs=5e-3)
    assert score.percent_of_optimal == pytest.approx(percent, abs=1e-2)
    assert (score.acting_states, score.horizon_steps) == (37, 100)
    assert (score.optimal_success, score.optimal_at_horizon) == pytest.approx((1.0, 1.0))


def test_where_one_action_everywhere_is_the_optimum_the_next_best_is_at_0():
    up, right = (constant_policy(48, CLIFF.actions.index(action), 4) for action in ("UP", "RIGHT"))
    policies_SA = (up, uniform_policy(48, 4), right)
    best, random, worst = (score_policy(CLIFF, policy_SA, horizon_steps=5) for policy_SA in policies_SA)
    assert (best.percent_of_optimal, best.regret) == (100.0, 0.0)
    assert random.percent_of_optimal == pytest.approx(0.0)
    assert worst.percent_of_optimal < -100


def test_success_within_the_limit_where_a_return_counts():
    assert score_policy(CLIFF, expert_policy(CLIFF)).success_at_horizon == 1.0
    assert score_policy(CLIFF, expert_policy(CLIFF), 12).success_at_horizon == 0.0
    assert score_policy(CLIFF, uniform_policy(48, 4)).success_at_horizon == pytest.approx(0.0081, abs=5e-5)
    assert score_policy(CLIFF, expert_policy(CLIFF)).optimal_states == 37
