"""Exact values against published numbers, linear solves and searches that share no code with the module."""

import re
from collections import deque
from fractions import Fraction
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from llm_policy.environments import mdp as mdp_module
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, lake_mdp, random_grids
from llm_policy.environments.mdp import (
    MDP,
    greedy_policy,
    mdp_from_env,
    optimal_actions,
    optimal_policy,
    optimal_q,
    optimal_return,
    policy_return,
    policy_values,
)
from llm_policy.errors import InputError

LAKE = lake_mdp(CANONICAL_GRIDS["4x4"])
UNIFORM_SA = np.full((16, 4), 0.25)


def constant_policy(action: int) -> np.ndarray:
    return np.eye(4)[np.full(16, action)]


def blackwell_optimal_values(mdp: MDP) -> np.ndarray:
    """Policy iteration with dense solves at gamma 1 - 1e-9: its policy is optimal at gamma 1 too. One map only."""
    transitions_SAS, gamma = mdp.transitions_SAS, 1 - 1e-9
    states = np.arange(len(mdp.start_S))
    actions_S = np.zeros(len(states), dtype=int)
    while True:
        chain_SS = transitions_SAS[states, actions_S]
        values_S = np.linalg.solve(np.eye(len(states)) - gamma * chain_SS, mdp.rewards_SA[states, actions_S])
        q_SA = mdp.rewards_SA + gamma * transitions_SAS @ values_S
        better_S = q_SA.max(axis=1) > q_SA[states, actions_S] + 1e-12
        if not better_S.any():
            return policy_values(mdp, np.eye(q_SA.shape[1])[actions_S])
        actions_S = np.where(better_S, q_SA.argmax(axis=1), actions_S)


def test_canonical_lake_optimum():
    q_SA = optimal_q(LAKE)
    assert q_SA.max(axis=1)[0] == pytest.approx(14 / 17, abs=1e-10)
    assert optimal_return(LAKE) == pytest.approx(14 / 17, abs=1e-10)
    assert policy_return(LAKE, greedy_policy(q_SA)) == pytest.approx(14 / 17, abs=1e-10)
    assert policy_return(LAKE, greedy_policy(q_SA), horizon_steps=100) == pytest.approx(0.7402, abs=5e-5)
    assert optimal_return(LAKE, horizon_steps=100) == pytest.approx(0.7442, abs=5e-5)


@pytest.mark.parametrize(
    ("policy_SA", "success"),
    [(UNIFORM_SA, 0.0139), (constant_policy(1), 0.0495), (constant_policy(2), 0.0315), (constant_policy(0), 0.0)],
)
def test_canonical_lake_baselines(policy_SA, success):
    assert policy_return(LAKE, policy_SA, horizon_steps=100) == pytest.approx(success, abs=5e-5)


def test_deterministic_lake():
    assert optimal_return(lake_mdp(CANONICAL_GRIDS["4x4"], is_slippery=False)) == 1.0
    assert optimal_return(lake_mdp(CANONICAL_GRIDS["4x4"], is_slippery=False), horizon_steps=6) == 1.0
    assert optimal_return(lake_mdp(CANONICAL_GRIDS["4x4"], is_slippery=False), horizon_steps=5) == 0.0


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_q_within_tolerance_of_a_linear_solve(gamma):
    for grid in [*random_grids(12, 4, seed=3), *random_grids(6, 8, seed=3), CANONICAL_GRIDS["8x8"]]:
        lake = lake_mdp(grid)
        q_SA = optimal_q(lake, gamma)
        if gamma == 1.0:
            values_S = blackwell_optimal_values(lake)
        else:
            policy_SA = greedy_policy(q_SA)
            chain_SS = np.einsum("sa,sat->st", policy_SA, lake.transitions_SAS)
            rewards_S = (policy_SA * lake.rewards_SA).sum(axis=1)
            values_S = np.linalg.solve(np.eye(len(rewards_S)) - gamma * chain_SS, rewards_S)
        expected_SA = lake.rewards_SA + gamma * lake.transitions_SAS @ values_S
        np.testing.assert_allclose(q_SA, expected_SA, atol=1e-10, rtol=0)


def test_corridor_that_takes_ten_million_steps():
    """A residual of 1e-7 means nothing here: action 0 ends with 1e-7 a step and pays 0.5 in all, action 1 pays 0.4."""
    mdp = MDP(
        next_states_SAK=np.array([[[0], [0]]]),
        probabilities_SAK=np.array([[[1 - 1e-7], [0.0]]]),
        rewards_SA=np.array([[0.5e-7, 0.4]]),
        start_S=np.ones(1),
        terminal_S=np.zeros(1, dtype=bool),
    )
    # (1 - 1e-7) is only known to 1e-16, which is 1e-9 of the chance to leave
    assert optimal_q(mdp)[0] == pytest.approx([0.5, 0.4], abs=1e-8)


def test_stack_equals_single_maps_and_drops_none(monkeypatch):
    grids = random_grids(40, 5, seed=1)
    lakes, singles = lake_mdp(grids), [lake_mdp(grid) for grid in grids]
    policy_MSA = optimal_policy(lakes)
    monkeypatch.setattr(mdp_module, "CHUNK_OUTCOMES", 7 * 5 * 5 * 12)  # several chunks, the last one not full
    np.testing.assert_allclose(optimal_q(lakes), [optimal_q(lake) for lake in singles], atol=1e-12)
    for horizon in (None, 30):
        expected_M = [policy_return(lake, policy, 1, horizon) for lake, policy in zip(singles, policy_MSA, strict=True)]
        np.testing.assert_allclose(policy_return(lakes, policy_MSA, 1, horizon), expected_M, atol=1e-12)
        best_M = [optimal_return(lake, horizon) for lake in singles]
        np.testing.assert_allclose(optimal_return(lakes, horizon), best_M, atol=1e-12)
    np.testing.assert_allclose(lakes.transitions_SAS, [lake.transitions_SAS for lake in singles])
    everywhere_SA = policy_MSA[0]
    assert policy_return(lakes, everywhere_SA).shape == (40,)


def test_optimal_policy_arrives_where_greedy_ties():
    lakes = lake_mdp([CANONICAL_GRIDS["8x8"], *random_grids(20, 8, seed=5)])
    np.testing.assert_allclose(policy_return(lakes, optimal_policy(lakes)), optimal_return(lakes), atol=1e-10)
    # why it exists: on the 8x8 lake all safe actions tie at gamma 1, and the first of them never moves on
    assert policy_return(lakes, greedy_policy(optimal_q(lakes)))[0] < 0.5


def test_transitions_equal_the_table():
    env = gym.make("CliffWalkingSlippery-v1")
    mdp = mdp_from_env(env)
    expected_SAS = np.zeros((48, 4, 48))
    rewards_SA = np.zeros((48, 4))
    for state, by_action in env.unwrapped.P.items():
        for action, outcomes in by_action.items():
            for probability, next_state, reward, done in outcomes:
                expected_SAS[state, action, next_state] += 0 if done else probability
                rewards_SA[state, action] += probability * reward
    np.testing.assert_allclose(mdp.transitions_SAS, expected_SAS, atol=1e-15)
    np.testing.assert_allclose(mdp.rewards_SA, rewards_SA, atol=1e-13)
    assert mdp.start_S.argmax() == 36
    assert mdp.terminal_S.nonzero()[0].tolist() == [47]


def test_cliff_walking():
    mdp = mdp_from_env(gym.make("CliffWalking-v1"))
    assert optimal_return(mdp) == -13
    assert optimal_return(mdp, horizon_steps=13) == -13
    assert policy_return(mdp, greedy_policy(optimal_q(mdp))) == -13
    # LEFT from the start bumps into the wall for ever, at -1 a step
    left_SA = np.eye(4)[np.full(48, 3)]
    assert policy_return(mdp, left_SA) == -np.inf
    assert policy_return(mdp, left_SA, horizon_steps=7) == -7
    assert policy_return(mdp, left_SA, gamma=0.5) == pytest.approx(-2)


def test_rounding_is_no_end_of_the_episode():
    """Probabilities that sum to 1 - 2e-16 are still a loop that pays for ever."""
    probabilities_SAK = np.array([[[0.5, 0.5 - 2e-16]]])
    assert probabilities_SAK.sum() < 1
    mdp = MDP(np.zeros((1, 1, 2), int), probabilities_SAK, -np.ones((1, 1)), np.ones(1), np.zeros(1, bool))
    assert policy_return(mdp, np.ones((1, 1))) == -np.inf


def test_slippery_cliff_policy_iteration_needs_more_sweeps_than_one_burst():
    mdp = mdp_from_env(gym.make("CliffWalkingSlippery-v1"))
    values_S = np.zeros(48)
    for _ in range(20_000):
        values_S = (mdp.rewards_SA + mdp.transitions_SAS @ values_S).max(axis=1)
    np.testing.assert_allclose(optimal_q(mdp).max(axis=1), values_S, atol=1e-9)


def test_taxi_optimum_by_breadth_first_search():
    """Every step costs 1 but the last, which earns 20; no optimal route makes a mistake that costs 10."""
    env = gym.make("Taxi-v4")
    predecessors: dict[int, list[int]] = {state: [] for state in range(500)}
    distance = {}
    for state, by_action in env.unwrapped.P.items():
        for ((_, next_state, reward, done),) in by_action.values():
            if done and reward == 20:
                distance[state] = 1
            elif reward == -1:
                predecessors[next_state].append(state)
    queue = deque(distance)
    while queue:
        state = queue.popleft()
        for previous in predecessors[state]:
            if previous not in distance:
                distance[previous] = distance[state] + 1
                queue.append(previous)
    start_S = env.unwrapped.initial_state_distrib
    expected = sum(start_S[state] * (21 - distance[state]) for state in np.nonzero(start_S)[0])
    mdp = mdp_from_env(env)
    assert optimal_return(mdp) == pytest.approx(expected, abs=1e-9)
    assert expected == pytest.approx(7.93)
    np.testing.assert_allclose(optimal_q(mdp).max(axis=1)[list(distance)], [21 - d for d in distance.values()])


def test_greedy_takes_the_first_of_ties():
    q_SA = np.array([[0.5, 0.5 + 1e-7, 0.1, 0.5 + 1e-5], [0.0, 0.0, 0.0, 0.0]])
    assert greedy_policy(q_SA).argmax(axis=1).tolist() == [3, 0]
    q_SA[0, 3] = 0.2
    assert greedy_policy(q_SA).argmax(axis=1).tolist() == [0, 0]
    assert optimal_actions(q_SA).tolist() == [[True, True, False, False], [True] * 4]


ENDLESS_REWARD = MDP(np.zeros((1, 1, 1), int), np.ones((1, 1, 1)), np.ones((1, 1)), np.ones(1), np.zeros(1, bool))


def test_who_earns_nothing_any_more_has_what_was_earned():
    """A coin, then steps without end: nothing is left to wait for."""
    table = {0: [[(1.0, 1, 1.0, False)], [(1.0, 0, 0.0, False)]], 1: [[(1.0, 1, 0.0, False)]] * 2}
    mdp = mdp_from_env(SimpleNamespace(P=table, initial_state_distrib=[1.0, 0.0]))
    assert policy_return(mdp, np.eye(2)[[0, 0]]) == 1.0
    assert policy_return(mdp, np.eye(2)[[1, 0]]) == 0.0
    assert optimal_return(mdp) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([(1.0, 2, 0.0, False)], "state 1, action 1: 2 is no state, expected 0 to 1"),
        ([(1.0, -1, 0.0, False)], "state 1, action 1: -1 is no state, expected 0 to 1"),
        ([(1.0, 0, 0.0)], "its table is no P[state][action] = [(probability, next state, reward, done), ...]"),
        (None, "its table is no P[state][action] = [(probability, next state, reward, done), ...]"),
    ],
)
def test_a_table_that_leads_out_of_itself(outcomes, words):
    table = {0: {a: [(1.0, 1, 1.0, False)] for a in range(2)}, 1: {0: [(1.0, 0, 0.0, False)], 1: outcomes}}
    if outcomes is None:
        del table[1][1]
    with pytest.raises(InputError, match=re.escape(words)) as error:
        mdp_from_env(SimpleNamespace(P=table, initial_state_distrib=[1.0, 0.0]))
    assert "\n" not in str(error.value)


def test_a_loss_far_ahead_is_seen_before_a_loop_that_costs_nothing():
    """GO pays 1 and leads into a corridor that ends with -3; STAY pays 0."""
    length = 100
    corridor = {n: [[(1.0, n + 1, 0.0, False)]] * 2 for n in range(1, length)}
    table = {0: [[(1.0, 1, 1.0, False)], [(1.0, 0, 0.0, False)]]} | corridor
    table[length] = [[(1.0, length, -3.0, True)]] * 2
    mdp = mdp_from_env(SimpleNamespace(P=table, initial_state_distrib=np.eye(length + 1)[0]))
    np.testing.assert_allclose(optimal_q(mdp)[0], [-2.0, 0.0])


def test_each_row_of_a_table_is_a_distribution():
    table = {0: [[(1.2, 0, 0.0, True)], [(0.8, 0, 0.0, True)]]}
    with pytest.raises(InputError, match=r"its table, state 0, action 0, has probabilities that sum to 1\.2"):
        mdp_from_env(SimpleNamespace(P=table, initial_state_distrib=[1.0]))


def test_rewards_without_end_add_up_to_infinity():
    assert policy_return(ENDLESS_REWARD, np.ones((1, 1))) == np.inf


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: optimal_q(LAKE, gamma=1.5), ["gamma", "1.5", "0 to 1"]),
        (lambda: optimal_q(LAKE, gamma=float("nan")), ["gamma", "nan"]),
        (lambda: optimal_q(ENDLESS_REWARD, max_sweeps=200), ["max_sweeps=200", "not converged"]),
        (lambda: policy_return(LAKE, np.ones((3, 4)) / 4), ["(3, 4)", "(16, 4)"]),
        (lambda: policy_return(LAKE, np.ones((16, 4))), ["sum to 1"]),
        (lambda: policy_return(LAKE, np.full((16, 4), np.nan)), ["sum to 1"]),
        (lambda: policy_return(LAKE, np.tile([2.0, -1.0, 0.0, 0.0], (16, 1))), [">= 0"]),
        (lambda: policy_return(LAKE, UNIFORM_SA, horizon_steps=-1), ["horizon_steps", "-1"]),
        (lambda: mdp_from_env(gym.make("CartPole-v1")), ["CartPole-v1", "`P`"]),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# Policies that hardly ever leave a loop


@pytest.mark.parametrize("is_slippery", [True, False])
@pytest.mark.parametrize("chance", [1e-3, 1e-9, 1.5e-16, 1e-17, 1e-30])
def test_a_start_that_is_hardly_ever_left_loses_nothing_without_a_limit(is_slippery, chance):
    mdp = lake_mdp(CANONICAL_GRIDS["4x4"], is_slippery)
    policy_SA = optimal_policy(mdp)
    expected = policy_return(mdp, policy_SA)
    policy_SA[0] = [0, chance, 0, 1 - chance]  # UP, and hardly ever DOWN
    assert policy_return(mdp, policy_SA) == pytest.approx(expected, rel=1e-12)


def in_fractions(mdp: MDP, policy_SA: np.ndarray) -> float:
    """The value of the start, 0 in one map, by Gauss-Jordan elimination without any rounding."""
    states, actions, outcomes = mdp.next_states_SAK.shape
    matrix = [[Fraction(0)] * states for _ in range(states)]
    right = [Fraction(0)] * states
    for s, a in np.ndindex(states, actions):
        chance = Fraction(policy_SA[s, a])
        right[s] += chance * Fraction(mdp.rewards_SA[s, a]).limit_denominator(9)
        matrix[s][s] += chance
        for k in range(outcomes):
            going_on = Fraction(mdp.probabilities_SAK[s, a, k]).limit_denominator(9)
            matrix[s][mdp.next_states_SAK[s, a, k]] -= chance * going_on
    inner = [s for s in range(states) if matrix[s][s]]
    for c in inner:
        for i in inner:
            if i != c and (factor := matrix[i][c] / matrix[c][c]):
                matrix[i] = [own - factor * other for own, other in zip(matrix[i], matrix[c], strict=True)]
                right[i] -= factor * right[c]
    return float(right[0] / matrix[0][0])


@pytest.mark.parametrize("is_slippery", [True, False])
@pytest.mark.parametrize("spread", [1, 10, 30])
def test_values_of_nearly_deterministic_policies_equal_those_in_fractions(is_slippery, spread):
    mdp, generator = lake_mdp(CANONICAL_GRIDS["4x4"], is_slippery), np.random.default_rng(spread)
    for _ in range(3):
        logits_SA = spread * generator.normal(size=(16, 4))
        policy_SA = np.exp(logits_SA - logits_SA.max(axis=1, keepdims=True))
        policy_SA /= policy_SA.sum(axis=1, keepdims=True)
        assert policy_return(mdp, policy_SA) == pytest.approx(in_fractions(mdp, policy_SA), rel=1e-9)
