"""Policy tables against the known scores of the canonical lake; a model's completions as a table."""

import numpy as np
import pytest
from tiny_models import build_tiny_model

from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, acting_states, lake_mdp, shortest_path_policy
from llm_policy.environments.mdp import AGREEMENT_GAMMA, greedy_policy, optimal_q
from llm_policy.environments.policy_table import (
    PolicyReader,
    best_constant_action,
    constant_policy,
    score_policy,
    uniform_policy,
)
from llm_policy.models import load_model, load_tokenizer
from prompts import format_example

GRID = CANONICAL_GRIDS["4x4"]
STATES = acting_states(GRID)
LEFT, DOWN, RIGHT, UP = range(4)


def expert(is_slippery: bool, grid=GRID) -> np.ndarray:
    return greedy_policy(optimal_q(lake_mdp(grid, is_slippery), AGREEMENT_GAMMA))


KNOWN_SCORES = [
    # policy, slippery, success without a limit, within 100 steps, states whose most probable action is optimal
    (expert(True), True, 14 / 17, 0.7402, 11),
    (uniform_policy(16), True, 0.0139, 0.0139, 0),
    (constant_policy(16, LEFT), True, 0.0, 0.0, 4),
    (constant_policy(16, DOWN), True, 0.0495, 0.0495, 2),
    (constant_policy(16, RIGHT), True, 0.032, 0.032, 2),
    (expert(False), False, 1.0, 1.0, 11),
    (shortest_path_policy(GRID), False, 1.0, 1.0, 11),
    (constant_policy(16, DOWN), False, 0.0, 0.0, None),
]


@pytest.mark.parametrize(("policy_SA", "is_slippery", "success", "at_horizon", "optimal_states"), KNOWN_SCORES)
def test_known_scores(policy_SA, is_slippery, success, at_horizon, optimal_states):
    score = score_policy(GRID, is_slippery, policy_SA, horizon_steps=100)
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


def test_a_longer_limit_comes_closer_to_no_limit():
    within = [score_policy(GRID, True, expert(True), steps).success_at_horizon for steps in (10, 100, 1000)]
    assert within[0] < within[1] < within[2] == pytest.approx(14 / 17, abs=1e-6)


def test_a_lake_that_nobody_can_cross():
    score = score_policy(("SH", "HG"), True, uniform_policy(4), 10)
    assert (score.success_probability, score.percent_of_optimal, score.regret) == (0.0, 100.0, 0.0)


def test_ties_of_the_most_probable_action_count_when_all_of_them_are_optimal():
    policy_SA = expert(True).copy()
    policy_SA[6] = [0.5, 0.0, 0.5, 0.0]  # between two holes LEFT and RIGHT are equally good
    assert score_policy(GRID, True, policy_SA, 100).optimal_states == 11
    policy_SA[0] = [0.5, 0.5, 0.0, 0.0]  # here only LEFT is
    assert score_policy(GRID, True, policy_SA, 100).optimal_states == 10


@pytest.mark.parametrize(
    ("is_slippery", "grid", "action"),
    [(True, GRID, DOWN), (False, ("SFG",), RIGHT), (False, ("S", "G"), DOWN), (False, ("GS",), LEFT)],
)
def test_best_constant_action(is_slippery, grid, action):
    assert best_constant_action(lake_mdp(grid, is_slippery), horizon_steps=100) == action


# A model's policy ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = build_tiny_model(tmp_path_factory.mktemp("models") / "llama")
    return load_model(folder, dtype="float32"), load_tokenizer(folder)


class Scripted(PolicyReader):
    """A reader whose model says what stands in `texts`, over and over, whatever it is asked."""

    def completions(self, model, prompts, samples):
        count = len(prompts) * max(samples, 1)
        return (list(model) * count)[:count]


def scripted(tiny, texts: list[str], samples: int, grids=(GRID,)):
    return Scripted(tiny[1], is_slippery=True).policies(texts, grids, samples)


def reply(answer: str) -> str:
    return f"<think>ice</think><answer>{answer}</answer>"


def test_greedy_completions_become_a_one_hot_table(tiny):
    texts = [format_example(GRID, state, i % 4) for i, state in enumerate(STATES)]
    policies = scripted(tiny, texts, samples=0)
    (table_SA,) = policies.tables
    assert table_SA[STATES].argmax(1).tolist() == [i % 4 for i in range(11)]
    assert set(np.unique(table_SA[STATES])) == {0.0, 1.0}
    np.testing.assert_array_equal(np.delete(table_SA, STATES, axis=0), 0.25)
    assert policies.format_validity == 1.0
    assert policies.texts == texts


def test_samples_become_shares(tiny):
    # Per state: LEFT, LEFT, UP, unreadable (a quarter of a uniformly random action)
    policies = scripted(tiny, [reply("LEFT"), reply("LEFT"), reply("UP"), "?"], samples=4)
    (table_SA,) = policies.tables
    np.testing.assert_allclose(table_SA[STATES], [[2.25 / 4, 0.25 / 4, 0.25 / 4, 1.25 / 4]] * 11)
    np.testing.assert_allclose(table_SA.sum(1), 1.0)
    assert policies.format_validity == 0.75


VALIDITIES = [
    # completion, share that counts as valid, row of the table
    (reply("UP"), 1.0, [0, 0, 0, 1]),
    # An answer out of form moves the agent and is still invalid
    ("<answer>UP</answer>", 0.0, [0, 0, 0, 1]),
    # In form without an action
    (reply("UP or LEFT"), 0.0, [0.25] * 4),
    ("", 0.0, [0.25] * 4),
]


@pytest.mark.parametrize(("text", "validity", "row"), VALIDITIES)
def test_format_validity(tiny, text, validity, row):
    policies = scripted(tiny, [text], samples=0)
    assert policies.format_validity == validity
    np.testing.assert_array_equal(policies.tables[0][STATES], [row] * 11)


def test_several_maps_of_different_sizes(tiny):
    grids = (("SFG",), GRID)
    policies = scripted(tiny, [reply(ACTIONS[i % 4]) for i in range(13)], 0, grids)
    assert [table.shape for table in policies.tables] == [(3, 4), (16, 4)]
    assert policies.tables[0].argmax(1)[:2].tolist() == [LEFT, DOWN]
    assert policies.tables[1][STATES].argmax(1).tolist() == [(i + 2) % 4 for i in range(11)]


def test_a_real_model_is_asked_for_every_state(tiny):
    model, tokenizer = tiny
    reader = PolicyReader(tokenizer, is_slippery=True, max_completion_tokens=4, rows_per_batch=5)
    policies = reader.policies(model, [GRID], samples=2)
    assert len(policies.texts) == 22
    np.testing.assert_allclose(policies.tables[0].sum(1), 1.0)
    # Greedy answers do not depend on how they are batched
    cells = [(GRID, state) for state in STATES]
    together = PolicyReader(tokenizer, is_slippery=True, max_completion_tokens=4)
    assert reader.completions(model, cells, 0) == together.completions(model, cells, 0)
