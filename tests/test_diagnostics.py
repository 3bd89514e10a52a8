"""State-blindness as a number and in words; a log that survives kills."""

import json
import math
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from llm_policy.grpo.diagnostics import COLLAPSE_STEPS, MetricsFile, PolicyDiagnostics, mutual_information, policy_verdict
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, acting_states, lake_mdp
from llm_policy.environments.mdp import AGREEMENT_GAMMA, greedy_policy, optimal_q
from llm_policy.environments.policy_table import ModelPolicies, constant_policy, score_policy, uniform_policy

GRID = CANONICAL_GRIDS["4x4"]
ARGUMENTS = SimpleNamespace(save_strategy="steps")
FOUR_STATES = ("SFFFG",)
EXPERT = greedy_policy(optimal_q(lake_mdp(GRID), AGREEMENT_GAMMA))


def with_rows(grid, rows_PA) -> np.ndarray:
    table_SA = uniform_policy(len(grid) * len(grid[0]))
    table_SA[acting_states(grid)] = rows_PA
    return table_SA


INFORMATION = [
    # State-blind, whatever the distribution: none
    (constant_policy(16, 1), GRID, 0.0),
    (uniform_policy(16), GRID, 0.0),
    (np.full((16, 4), [0.7, 0.1, 0.1, 0.1]), GRID, 0.0),
    # Four states, four actions: all there is
    (with_rows(FOUR_STATES, np.eye(4)), FOUR_STATES, math.log(4)),
    # Two states each for two actions
    (with_rows(FOUR_STATES, np.eye(4)[[0, 0, 2, 2]]), FOUR_STATES, math.log(2)),
    # The expert, one-hot: the entropy of its actions, 4 x LEFT, 2 x DOWN, 1 x RIGHT, 4 x UP
    (EXPERT, GRID, -sum(n / 11 * math.log(n / 11) for n in (4, 2, 1, 4))),
    # What could not be read says nothing about the states
    (with_rows(GRID, [*np.full((5, 4), 0.25), *np.eye(4)[[0] * 6]]), GRID, 0.0),
    # One state differs a little: a little
    (with_rows(("SFG",), [[0.5, 0.5, 0, 0], [1, 0, 0, 0]]), ("SFG",), 0.2157615),
]  # fmt: skip


@pytest.mark.parametrize(("policy_SA", "grid", "nats"), INFORMATION)
def test_mutual_information(policy_SA, grid, nats):
    assert mutual_information([policy_SA], [grid]) == pytest.approx(nats, abs=1e-6)
    # Twice the same map tells nothing new
    assert mutual_information([policy_SA] * 2, [grid] * 2) == pytest.approx(nats, abs=1e-6)


def test_mutual_information_is_taken_over_all_maps_together():
    tables = [constant_policy(2, action) for action in (0, 2)]
    assert mutual_information(tables, [("SG",), ("SG",)]) == pytest.approx(math.log(2))


VERDICTS = [
    (EXPERT, "learned: 11/11 states, 100 % of optimal"),
    (constant_policy(16, 1), "state-blind: always DOWN (2/11 states, 6 % of optimal)"),
    # The same most probable action everywhere is state-blind, too, if less sure of itself
    (np.full((16, 4), [0.1, 0.1, 0.7, 0.1]), "state-blind: always RIGHT (2/11 states, 3 % of optimal)"),
    # One state apart from the habit does not make a policy that reads its state
    (with_rows(GRID, np.eye(4)[[1] * 10 + [2]]), "nearly state-blind: DOWN in 10 of 11 states (1/11 states"),
    # What a model's policy is when no completion can be read
    (uniform_policy(16), "uniformly random in every state (0/11 states, 2 % of optimal)"),
    # A uniform row is an answer that could not be read, and no LEFT
    (with_rows(GRID, [*np.full((10, 4), 0.25), [0, 1, 0, 0]]), "partly learned: 1/11 states, 2 % of optimal, 10 "),
    (with_rows(GRID, [*np.full((2, 4), 0.25), *np.eye(4)[[0] * 9]]), "state-blind: always LEFT (3/11 states, 0 % of "),
    (with_rows(GRID, [*np.full((5, 4), 0.25), *np.eye(4)[[0] * 5 + [1]]]), "nearly state-blind: LEFT in 5 of 6 states"),
    # The expert but for the last two states before the goal
    (with_rows(GRID, [*EXPERT[acting_states(GRID)][:9], *np.eye(4)[[3, 3]]]), "partly learned: 9/11"),
]  # fmt: skip


@pytest.mark.parametrize(("policy_SA", "verdict"), VERDICTS)
def test_verdict(policy_SA, verdict):
    scores = [score_policy(GRID, True, policy_SA, 100)]
    assert policy_verdict([policy_SA], [GRID], scores).startswith(verdict)


def test_where_one_action_is_optimal_everywhere_it_is_learned():
    policy_SA, grid = constant_policy(4, 2), ("SFFG",)
    assert policy_verdict([policy_SA], [grid], [score_policy(grid, False, policy_SA, 10)]).startswith("learned: 3/3")


def test_one_state_cannot_be_state_blind():
    policy_SA, grid = constant_policy(2, 2), ("SG",)
    assert policy_verdict([policy_SA], [grid], [score_policy(grid, False, policy_SA, 10)]).startswith("learned: 1/1")


# Collapse ------------------------------------------------------------------------------------------------------


def stopped_at(unanimous_shares: list[float | None], stop_when: str, entropies: list[float] | None = None):
    """Feed one share of unanimous groups a step; the step at which the run is stopped, and the last verdict.

    None is a step on completions that the step before has trained on already.
    """
    trainer = SimpleNamespace(_metrics={"train": {"frac_reward_zero_std": [], "reward/random": []}})
    diagnostics = PolicyDiagnostics(trainer, None, [GRID], 0, stop_when, {"reward/random": 0.7})
    for step, share in enumerate(unanimous_shares, start=1):
        trainer._metrics["train"]["frac_reward_zero_std"] = [] if share is None else [share]
        if entropies is not None:  # one a micro-batch
            trainer._metrics["train"]["action/entropy"] = list(entropies)
        diagnostics.on_log(None, None, None)  # of the step before
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=step, max_steps=1000), control)
        if control.should_training_stop:
            return step, diagnostics.with_collapse("partly learned", step)
    assert trainer._metrics["train"]["reward/random"] == [0.7] * len(unanimous_shares)
    return None, diagnostics.with_collapse("partly learned", len(unanimous_shares))


COLLAPSES = [
    # unanimous shares, option, step of the stop, what the verdict says
    ([1.0] * 20, "collapsed", 1 + COLLAPSE_STEPS, "since step 1"),
    ([1.0] * 20, "never", None, "since step 1"),
    ([1.0] * 20, "optimal", None, "since step 1"),
    ([0.5] * 20, "collapsed", None, "partly learned"),
    # As long as it has not lasted it is no collapse, and is not called one
    ([0.5] * 15 + [1.0] * COLLAPSE_STEPS, "collapsed", None, "partly learned"),
    ([1.0] * 20, "either", 1 + COLLAPSE_STEPS, "since step 1"),
    # One group with variance starts the count again
    ([1.0, 1.0, 1.0, 0.9] * 5, "collapsed", None, "partly learned"),
    ([0.5, 1.0, 0.9] + [1.0] * 20, "collapsed", 4 + COLLAPSE_STEPS, "since step 4"),
]


@pytest.mark.parametrize(("shares", "stop_when", "step", "words"), COLLAPSES)
def test_collapse(shares, stop_when, step, words):
    stopped, verdict = stopped_at(shares, stop_when)
    assert stopped == step
    assert words in verdict
    assert ("collapsed" in verdict) == ("since" in words)


def test_steps_on_completions_used_before_say_nothing_new():
    assert stopped_at([0.5] + [None] * 20, "collapsed") == (None, "partly learned")
    assert stopped_at([1.0] + [None] * 20, "collapsed")[0] == 1 + COLLAPSE_STEPS


def test_the_expected_objective_collapses_with_its_action_entropy_only():
    assert stopped_at([1.0] * 20, "collapsed", [0.4, 0.001]) == (None, "partly learned")
    assert stopped_at([1.0] * 20, "collapsed", [0.002, 0.001])[0] == 1 + COLLAPSE_STEPS


def test_what_is_not_logged_yet_is_of_the_steps_before():
    """`--logging_steps` above 1: the trainer keeps all values until then. Four micro-batches a step."""
    trainer = SimpleNamespace(_metrics={"train": defaultdict(list)})
    diagnostics = PolicyDiagnostics(trainer, None, [GRID], 0, "collapsed", {})
    metrics = trainer._metrics["train"]
    since = []
    for step, shares in enumerate([[1.0, 0.5, 1.0, 1.0], [1.0] * 4, [], [1.0] * 4], start=1):
        metrics["frac_reward_zero_std"] += shares
        metrics["action/entropy"] += [0.01 if step > 1 else 1.0]
        state = SimpleNamespace(global_step=step, max_steps=1000)
        diagnostics.on_step_end(ARGUMENTS, state, SimpleNamespace(should_training_stop=False))
        since.append(diagnostics.unanimous_since)
    assert since == [None, 2, 2, 2]


def test_a_learned_policy_agrees_and_has_not_collapsed():
    diagnostics = PolicyDiagnostics(None, None, [GRID], 0, "never", {})
    diagnostics.unanimous_since = 3
    assert diagnostics.with_collapse("learned: 11/11", 20) == "learned: 11/11"


# Evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_at_its_interval_and_after_the_last_step():
    """The figures of two maps, one solved and one walked DOWN."""
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
    trainer = SimpleNamespace(
        _metrics={"train": defaultdict(list)}, accelerator=accelerator, model=None,
        callback_handler=SimpleNamespace(callbacks=[]),
    )  # fmt: skip
    policies = ModelPolicies([EXPERT, constant_policy(16, 1)], 0.5, [])
    asked: list = []
    reader = SimpleNamespace(is_slippery=True, policies=lambda *_: asked.append(1) or policies)
    diagnostics = PolicyDiagnostics(trainer, reader, [GRID] * 2, 3, "never", {})
    diagnostics.started = 0.0
    for step in range(1, 8):
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=step, max_steps=7), control)
        metrics = trainer._metrics["train"]
        assert len(metrics["policy/optimal_states"]) == (step >= 3)  # the last one, no mean of several
        assert len(asked) == [0, 0, 1, 1, 1, 2, 3][step - 1]
    figures = {name: values[-1] for name, values in metrics.items() if name.startswith("policy/")}
    assert figures.pop("policy/mutual_information") > 0
    assert figures == pytest.approx(
        {
            "policy/success_probability": (14 / 17 + 0.04949) / 2,
            "policy/success_at_horizon": (0.74018 + 0.04944) / 2,
            "policy/percent_of_optimal": (100 + 6.0048) / 2,
            "policy/optimal_states": 11 + 2,
            "policy/format_validity": 0.5,
        },
        abs=1e-3,
    )


@pytest.mark.parametrize("stop_when", ["optimal", "either"])
@pytest.mark.parametrize(
    ("percents", "step"),
    [([50.0, 100.0, 100.0, 100.0], 3), ([100.0, 99.0, 100.0, 99.0], None), ([100.0, 100.0], 2)],
)
def test_stops_where_the_optimum_is_steady(percents, step, stop_when, monkeypatch):
    trainer = SimpleNamespace(_metrics={"train": {"frac_reward_zero_std": [0.0]}})
    diagnostics = PolicyDiagnostics(trainer, None, [GRID], 1, stop_when, {})
    monkeypatch.setattr(diagnostics, "evaluate", lambda n: [SimpleNamespace(percent_of_optimal=percents[n - 1])])
    stops = []
    for n in range(1, len(percents) + 1):
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=n, max_steps=1000), control)
        stops.append(control.should_training_stop)
    assert stops == [step is not None and n >= step for n in range(1, len(percents) + 1)]


def test_one_map_at_its_optimum_is_not_all_of_them(monkeypatch):
    trainer = SimpleNamespace(_metrics={"train": {"frac_reward_zero_std": [0.0]}})
    diagnostics = PolicyDiagnostics(trainer, None, [GRID] * 2, 1, "optimal", {})
    scores = [SimpleNamespace(percent_of_optimal=percent) for percent in (100.0, 50.0)]
    monkeypatch.setattr(diagnostics, "evaluate", lambda _: scores)
    for step in range(1, 5):
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=step, max_steps=1000), control)
        assert not control.should_training_stop


# metrics.jsonl -------------------------------------------------------------------------------------------------


def log_steps(path, resumed_from: int, last: int) -> MetricsFile:
    """What a trainer does that resumes after step `resumed_from` and is killed after step `last`."""
    callback = MetricsFile(path)
    state = SimpleNamespace(global_step=resumed_from, max_steps=10, is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    for step in range(resumed_from + 1, last + 1):
        state.global_step = step
        callback.on_log(None, state, None, logs={"reward": step / 10})
    return callback


def steps_in(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


RESUMES = [
    # what stands behind step 4 when the run resumes from the checkpoint of step 3
    "",
    # the last line is half written
    '{"step": 5, "seconds": 1.0, "rew',
    '{"step": 5, "seconds": 1.0, "rew\n',
    "{",
    "\n",
    "\x00\x00\x00",
]


@pytest.mark.parametrize("rest", RESUMES)
def test_metrics_are_cut_back_to_the_checkpoint(rest, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 0, 4)
    assert steps_in(path) == [1, 2, 3, 4]
    path.write_text(path.read_text() + rest)
    log_steps(path, 3, 6)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().out.splitlines()[-1].startswith("step  6/10  reward 0.6")


def test_seconds_go_on_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "seconds": 100.0}\n{"step": 2, "seconds": 200.0}\n')
    log_steps(path, 1, 2)
    assert 100 <= json.loads(path.read_text().splitlines()[-1])["seconds"] < 110


def test_a_run_from_the_beginning_leaves_nothing_of_an_older_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 0, 4)
    log_steps(path, 0, 1)
    assert steps_in(path) == [1]


def test_the_trainers_closing_summary_is_no_step(tmp_path):
    callback = log_steps(tmp_path / "metrics.jsonl", 0, 1)
    state = SimpleNamespace(global_step=1, max_steps=1, is_world_process_zero=True)
    callback.on_log(None, state, None, logs={"train_runtime": 1.0})
    assert steps_in(callback.path) == [1]
