"""What a training run notices about itself: collapse, the steady optimum; a log that survives kills."""

import json
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from llm_policy.grpo.diagnostics import COLLAPSE_STEPS, OPTIMAL_LINE, Judgement, MetricsFile, PolicyDiagnostics

ARGUMENTS = SimpleNamespace(
    logging_strategy="steps", save_strategy="steps", steps_per_generation=1, num_iterations=1,
    gradient_accumulation_steps=1,
)  # fmt: skip
PARTLY_LEARNED = Judgement({}, "partly learned")


# Collapse ------------------------------------------------------------------------------------------------------


def stopped_at(unanimous_shares: list[float | None], stop_when: str, entropies: list[float] | None = None):
    """Feed one share of unanimous groups a step; the step at which the run is stopped, and the last verdict.

    None is a step on completions that the step before has trained on already.
    """
    trainer = SimpleNamespace(_metrics={"train": {"frac_reward_zero_std": [], "reward/random": []}})
    diagnostics = PolicyDiagnostics(trainer, None, 0, stop_when, {"reward/random": 0.7})
    for step, share in enumerate(unanimous_shares, start=1):
        trainer._metrics["train"]["frac_reward_zero_std"] = [] if share is None else [share]
        if entropies is not None:  # one a micro-batch
            trainer._metrics["train"]["action/entropy"] = list(entropies)
        diagnostics.on_log(None, None, None)  # of the step before
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=step, max_steps=1000), control)
        if control.should_training_stop:
            return step, diagnostics.with_collapse(PARTLY_LEARNED, step)
    assert trainer._metrics["train"]["reward/random"] == [0.7] * len(unanimous_shares)
    return None, diagnostics.with_collapse(PARTLY_LEARNED, len(unanimous_shares))


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


def test_a_run_ends_with_a_batch_of_completions():
    """They are not saved: a run that goes on from the middle of one would have other batches than before."""
    twice = SimpleNamespace(**vars(ARGUMENTS) | {"num_iterations": 2})
    trainer = SimpleNamespace(_metrics={"train": {}}, last_rewards=torch.tensor([0.0, 1.0]))
    diagnostics = PolicyDiagnostics(trainer, None, 0, "best", {}, full_reward=1.0)
    stops = []
    for step in (3, 4):
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(twice, SimpleNamespace(global_step=step, max_steps=1000), control)
        stops.append(control.should_training_stop)
    assert stops == [False, True]


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


@pytest.mark.parametrize(("reward", "stop"), [(1.5, None), (1.4, 1 + COLLAPSE_STEPS)])
def test_who_earns_all_that_there_is_has_not_collapsed(reward, stop):
    """With a flawed expert that is no optimum of the game."""
    trainer = SimpleNamespace(_metrics={"train": defaultdict(list)})
    diagnostics = PolicyDiagnostics(trainer, None, 0, "collapsed", {OPTIMAL_LINE: 1.5})
    stops = []
    for step in range(1, 10):
        trainer._metrics["train"].update({"frac_reward_zero_std": [1.0], "action/entropy": [0.001], "reward": [reward]})
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=step, max_steps=1000), control)
        diagnostics.on_log(None, None, None)
        stops += [step] * control.should_training_stop
    assert stops[:1] == ([] if stop is None else [stop])


def test_what_is_not_logged_yet_is_of_the_steps_before():
    """`--logging_steps` above 1: the trainer keeps all values until then. Four micro-batches a step."""
    trainer = SimpleNamespace(_metrics={"train": defaultdict(list)})
    diagnostics = PolicyDiagnostics(trainer, None, 0, "collapsed", {})
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
    diagnostics = PolicyDiagnostics(None, None, 0, "never", {})
    diagnostics.unanimous_since = 3
    learned = Judgement({}, "learned: 11/11", is_optimal=True)
    assert diagnostics.with_collapse(learned, 20) == "learned: 11/11"


# Evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_at_its_interval_and_after_the_last_step(capsys):
    """tests/test_tabular_judge.py has the figures of a lake."""
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
    trainer = SimpleNamespace(
        _metrics={"train": defaultdict(list)}, accelerator=accelerator, model="the model",
        callback_handler=SimpleNamespace(callbacks=[]),
    )  # fmt: skip
    asked: list = []

    def judge(model) -> Judgement:
        asked.append(model)
        return Judgement({"optimal_states": 10 + len(asked), "success_probability": 0.5}, f"verdict {len(asked)}")

    diagnostics = PolicyDiagnostics(trainer, judge, 3, "never", {})
    diagnostics.started = 0.0
    for step in range(1, 8):
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=step, max_steps=7), control)
        metrics = trainer._metrics["train"]
        assert len(metrics["policy/optimal_states"]) == (step >= 3)  # the last one, no mean of several
        assert len(asked) == [0, 0, 1, 1, 1, 2, 3][step - 1]
        assert getattr(control, "should_log", False) == (step in (3, 6, 7)), "under its own step, whatever the interval"
    assert set(asked) == {"the model"}
    figures = {name: values[-1] for name, values in metrics.items() if name.startswith("policy/")}
    assert figures == {"policy/optimal_states": 13.0, "policy/success_probability": 0.5}
    assert 0 < metrics["time/evaluation_share"][-1] < 1
    assert capsys.readouterr().out.splitlines() == ["step 3: verdict 1", "step 6: verdict 2", "step 7: verdict 3"]


@pytest.mark.parametrize("stop_when", ["optimal", "either"])
@pytest.mark.parametrize(
    ("optimal", "step"),
    [([False, True, True, True], 3), ([True, False, True, False], None), ([True, True], 2)],
)
def test_stops_where_the_optimum_is_steady(optimal, step, stop_when, monkeypatch):
    trainer = SimpleNamespace(_metrics={"train": {"frac_reward_zero_std": [0.0]}})
    diagnostics = PolicyDiagnostics(trainer, None, 1, stop_when, {})
    monkeypatch.setattr(diagnostics, "evaluate", lambda n: Judgement({}, "", is_optimal=optimal[n - 1]))
    stops = []
    for n in range(1, len(optimal) + 1):
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=n, max_steps=1000), control)
        stops.append(control.should_training_stop)
    assert stops == [step is not None and n >= step for n in range(1, len(optimal) + 1)]


@pytest.mark.parametrize(("earned", "stops"), [(1.0, True), (0.9, False)])
def test_mean_stops_where_all_completions_earn_the_most(earned, stops):
    trainer = SimpleNamespace(_metrics={"train": {}}, last_rewards=torch.full((4,), earned))
    diagnostics = PolicyDiagnostics(trainer, None, 0, "mean", {}, full_reward=1.0)
    control = SimpleNamespace(should_training_stop=False)
    diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=1, max_steps=9), control)
    assert control.should_training_stop == stops


def test_it_waits_for_the_policy_that_samples(monkeypatch):
    """Greedily optimal from the first evaluation on, sampled from the fourth; the samples leave no trace."""
    percents = iter([60.0, 97.9, 98.0])
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
    trainer = SimpleNamespace(_metrics={"train": {"frac_reward_zero_std": [0.0]}}, accelerator=accelerator, model=None)

    def sampled(_) -> Judgement:
        torch.rand(1)
        return Judgement({"percent_of_optimal": next(percents)}, "")

    diagnostics = PolicyDiagnostics(trainer, None, 1, "optimal", {}, sampled)
    monkeypatch.setattr(diagnostics, "evaluate", lambda n: Judgement({}, "", is_optimal=True))
    stops, random_state = [], torch.get_rng_state()
    for n in range(1, 5):
        control = SimpleNamespace(should_training_stop=False)
        diagnostics.on_step_end(ARGUMENTS, SimpleNamespace(global_step=n, max_steps=1000), control)
        stops.append(control.should_training_stop)
    assert stops == [False, False, False, True]
    assert trainer._metrics["train"]["policy/sampled_percent_of_optimal"] == [98.0]
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(("percent", "is_settled"), [(87.7, True), (87.5, False)])
def test_who_does_as_the_expert_is_asked_for_no_more(percent, is_settled, capsys):
    """On the 8x8 lake the discounted expert has 89.4 % of the optimum, and nobody who follows him 98."""
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
    trainer = SimpleNamespace(_metrics={"train": {}}, accelerator=accelerator, model=None)
    sampled = Judgement({"percent_of_optimal": percent}, "")
    diagnostics = PolicyDiagnostics(trainer, None, 1, "optimal", {}, lambda _: sampled)
    assert diagnostics.is_settled(Judgement({"percent_of_optimal": 89.4}, "")) == is_settled
    assert capsys.readouterr().out == f"sampled: {percent} % of optimal (87.6 to stop)\n"


def test_a_task_that_knows_no_percent_is_not_waited_for():
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
    trainer = SimpleNamespace(_metrics={"train": {}}, accelerator=accelerator, model=None)
    assert PolicyDiagnostics(trainer, None, 1, "optimal", {}, lambda _: Judgement({}, "")).is_settled(Judgement({}, ""))
    assert trainer._metrics == {"train": {}}


def test_the_picture_of_an_evaluation(monkeypatch):
    """To TensorBoard, under the title of its step; a task without pictures gets none."""
    drawn = []
    writer = SimpleNamespace(add_figure=lambda *figure: drawn.append(figure))
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
    trainer = SimpleNamespace(_metrics={"train": defaultdict(list)}, accelerator=accelerator, model=None)
    for draw in (None, lambda title: f"picture of {title}"):
        diagnostics = PolicyDiagnostics(trainer, lambda _, draw=draw: Judgement({}, "", draw=draw), 1, "never", {})
        diagnostics.started = 0.0
        monkeypatch.setattr(diagnostics, "_tensorboard_writer", lambda: writer)
        diagnostics.evaluate(4)
    assert drawn == [("policy", "picture of step 4", 4)]


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


def test_the_time_left_is_that_of_the_steps_that_are_left(tmp_path, capsys):
    lines = MetricsFile(tmp_path / "metrics.jsonl", may_end_early=True)
    state = SimpleNamespace(global_step=4, max_steps=10, is_world_process_zero=True)
    lines.on_train_begin(None, state, None)
    lines.log.began -= 60
    state.global_step = 6
    lines.on_log(None, state, None, logs={"reward": 1.0})
    assert "at most 2.0 min left" in capsys.readouterr().out


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
