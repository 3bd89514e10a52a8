"""What a training run says about itself: exact success while it learns, a verdict in words, a resumable log."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from transformers import TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState

from llm_policy.environments.frozen_lake import ACTIONS, Grid, acting_states, default_horizon, lake_mdp
from llm_policy.environments.mdp import AGREEMENT_GAMMA, OPTIMAL_PERCENT, optimal_actions, optimal_q
from llm_policy.plots import policy_figure
from llm_policy.environments.policy_table import PolicyReader, PolicyScore, score_policy
from llm_policy.run_files import write_whole

STOP_CONDITIONS = ("optimal", "collapsed", "either", "never")
COLLAPSE_STEPS = 5  # so many further steps without a single group that has variance
DEAD_ENTROPY = 0.05  # nats: below it one action has more than 99 % of the probability
NEARLY_ALWAYS = 0.8  # share of the states with one action
STEADY_EVALUATIONS = 2  # so many in a row at the optimum: a state that is right by a hair is wrong after rounding


def _acting_rows(policies_SA: Sequence[np.ndarray], grids: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray]:
    """Rows (N, A) of all acting states, and which of them choose an action: a uniform one is no readable answer."""
    rows_NA = np.concatenate([p[acting_states(g)] for p, g in zip(policies_SA, grids, strict=True)])
    return rows_NA, np.ptp(rows_NA, axis=1) > 1e-9


def mutual_information(policies_SA: Sequence[np.ndarray], grids: Sequence[Grid]) -> float:
    """I(state; action) in nats over uniformly drawn acting states: 0 for a state-blind policy, at most ln 4.

    States whose answer could not be read (a uniform row) are left out.
    """
    rows_NA, chooses_N = _acting_rows(policies_SA, grids)
    if not chooses_N.any():
        return 0.0
    rows_NA = rows_NA[chooses_N]

    def entropy(p: np.ndarray) -> np.ndarray:
        return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)

    return max(0.0, float(entropy(rows_NA.mean(0)) - entropy(rows_NA).mean()))


def policy_verdict(policies_SA: Sequence[np.ndarray], grids: Sequence[Grid], scores: Sequence[PolicyScore]) -> str:
    """One line about greedy policies: random, learned, state-blind or nearly so, or how far it came."""
    rows_NA, chooses_N = _acting_rows(policies_SA, grids)
    right, states = sum(s.optimal_states for s in scores), sum(s.acting_states for s in scores)
    percent = float(np.mean([s.percent_of_optimal for s in scores]))
    summary = f"{right}/{states} states, {percent:.0f} % of optimal"
    readable = int(chooses_N.sum())
    if not readable:
        return f"uniformly random in every state ({summary})"
    if readable < states:
        summary += f", {states - readable} without readable answer"
    if percent >= OPTIMAL_PERCENT:
        return f"learned: {summary}"
    chosen_A = np.bincount(rows_NA[chooses_N].argmax(1), minlength=len(ACTIONS))
    habit, times = ACTIONS[int(chosen_A.argmax())], int(chosen_A.max())
    if times == readable > 1:
        return f"state-blind: always {habit} ({summary})"
    if times >= NEARLY_ALWAYS * readable > 1:
        return f"nearly state-blind: {habit} in {times} of {readable} states ({summary})"
    return f"partly learned: {summary}"


class PolicyDiagnostics(TrainerCallback, ExportableState):
    """Judges the greedy policy exactly every `evaluate_steps` steps and stops the run when told to.

    Adds to the step's metrics: `policy/success_probability`, `policy/success_at_horizon`,
    `policy/percent_of_optimal`, `policy/optimal_states`, `policy/format_validity`, `policy/mutual_information` and
    `time/evaluation_share`; to TensorBoard a picture of the policy.
    """

    def __init__(
        self,
        trainer,
        reader: PolicyReader,
        grids: Sequence[Grid],
        evaluate_steps: int,
        stop_when: str,
        reward_lines: dict[str, float],
    ) -> None:
        self.trainer = trainer
        self.reader = reader
        self.grids = list(grids)
        self.evaluate_steps = evaluate_steps
        self.stop_when = stop_when
        self.reward_lines = reward_lines
        self.unanimous_since: int | None = None
        self.evaluation_seconds = 0.0
        self.optimal_evaluations = 0  # in a row
        self.has_stopped = False  # by `stop_when`
        self.counted: dict[str, int] = {}  # values of a metric up to the step before, since the last log

    def state(self) -> dict:
        """What a checkpoint keeps of it, so that a resumed run stops where it would have stopped."""
        kept = ("unanimous_since", "optimal_evaluations", "has_stopped", "stop_when")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in kept}}

    def restore(self, state: TrainerState) -> None:
        kept = dict(state.stateful_callbacks.get(type(self).__name__, self.state())["attributes"])
        stopped_by = kept.pop("stop_when", self.stop_when)
        vars(self).update(kept)
        self.has_stopped &= stopped_by == self.stop_when  # told to stop otherwise, or never, it goes on

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # a resumed run's own intervals, not those in the checkpoint
        self.restore(state)
        self.started = time.perf_counter()
        writer = self._tensorboard_writer()
        if writer is not None:
            # Regular expressions: without the ends `train/reward` would draw reward_std and the parts, too
            lines = [f"^{re.escape(f'train/{name}')}$" for name in ("reward", *self.reward_lines)]
            writer.add_custom_scalars({"reward": {"beside what a state-blind policy earns": ["Multiline", lines]}})

    def on_step_end(self, args, state, control, **kwargs):
        metrics = self.trainer._metrics["train"]
        for name, value in self.reward_lines.items():
            metrics[name].append(value)
        unanimous_shares, entropies = (self._of_this_step(name) for name in ("frac_reward_zero_std", "action/entropy"))
        if unanimous_shares:  # empty where a batch is used again: nothing new is known
            # The objective `expected` has a gradient in unanimous groups, too, as long as more than one action lives.
            is_dead = np.mean(entropies or 0.0) < DEAD_ENTROPY
            if min(unanimous_shares) < 1.0 or not is_dead:
                self.unanimous_since = None
            elif self.unanimous_since is None:
                self.unanimous_since = state.global_step
        due = self.evaluate_steps and state.global_step % self.evaluate_steps == 0
        if due or state.global_step == state.max_steps:
            scores = self.evaluate(state.global_step)
            is_optimal = min(s.percent_of_optimal for s in scores) >= OPTIMAL_PERCENT
            self.optimal_evaluations = self.optimal_evaluations + 1 if is_optimal else 0
            if self.stop_when in ("optimal", "either") and self.optimal_evaluations >= STEADY_EVALUATIONS:
                self.has_stopped = True
        if self.stop_when in ("collapsed", "either") and self.has_collapsed(state.global_step):
            self.has_stopped = True
        if self.has_stopped:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"  # an evaluation that is interrupted begins from there

    def on_log(self, args, state, control, **kwargs):
        self.counted = {}  # the trainer has emptied its lists

    def _of_this_step(self, name: str) -> list[float]:
        """What this step has added to the values of `name`: one a micro-batch; they are kept until they are logged."""
        values, counted = self.trainer._metrics["train"].get(name, []), self.counted.get(name, 0)
        self.counted[name] = len(values)
        return values[counted:]

    def evaluate(self, step: int) -> list[PolicyScore]:
        """Judge the greedy policy now, add the figures to the step's metrics and the picture to TensorBoard."""
        started = time.perf_counter()
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with self.trainer.accelerator.autocast():
            policies = self.reader.policies(model, self.grids)
        scores = [
            score_policy(grid, self.reader.is_slippery, table, default_horizon(grid), policies.format_validity)
            for grid, table in zip(self.grids, policies.tables, strict=True)
        ]
        verdict = policy_verdict(policies.tables, self.grids, scores)
        print(f"step {step}: {self.with_collapse(verdict, step)}", flush=True)
        self.evaluation_seconds += time.perf_counter() - started
        values = {
            "policy/success_probability": np.mean([s.success_probability for s in scores]),
            "policy/success_at_horizon": np.mean([s.success_at_horizon for s in scores]),
            "policy/percent_of_optimal": np.mean([s.percent_of_optimal for s in scores]),
            "policy/optimal_states": sum(s.optimal_states for s in scores),
            "policy/format_validity": policies.format_validity,
            "policy/mutual_information": mutual_information(policies.tables, self.grids),
            "time/evaluation_share": self.evaluation_seconds / (time.perf_counter() - self.started),
        }
        for name, value in values.items():
            self.trainer._metrics["train"][name] = [float(value)]  # of the last evaluation before a log, no mean
        writer = self._tensorboard_writer()
        if writer is not None:
            mdp = lake_mdp(self.grids[0], self.reader.is_slippery)
            optimal_SA = optimal_actions(optimal_q(mdp, AGREEMENT_GAMMA))
            figure = policy_figure([(f"step {step}: {verdict}", self.grids[0], policies.tables[0], optimal_SA)])
            writer.add_figure("policy", figure, step)
        return scores

    def has_collapsed(self, step: int) -> bool:
        return self.unanimous_since is not None and step - self.unanimous_since >= COLLAPSE_STEPS

    def with_collapse(self, verdict: str, step: int) -> str:
        """`verdict` and, where it holds, since when no group has had any variance.

        Groups that agree on the optimal action are what learning ends in, no collapse.
        """
        if not self.has_collapsed(step) or verdict.startswith("learned"):
            return verdict
        return f"{verdict}; collapsed: 100 % unanimous groups since step {self.unanimous_since}"

    def _tensorboard_writer(self):
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                return callback.tb_writer
        return None


class MetricsFile(TrainerCallback):
    """`metrics.jsonl`: one line a logged step, cut back to the checkpoint on resume; one short line on the terminal."""

    SHOWN: ClassVar[dict[str, str]] = {
        "reward": "reward",
        "policy/success_probability": "success",
        "policy/optimal_states": "optimal states",
        "frac_reward_zero_std": "unanimous",
        "action/entropy": "action entropy",
        "completions/mean_length": "tokens",
    }

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds_before = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self.first_step = time.perf_counter(), state.global_step
        self.cut_back(state)

    def cut_back(self, state: TrainerState) -> None:
        """Leave out what stands behind the checkpoint that a run goes on from."""
        kept = []
        if self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if self._step(line) <= state.global_step]
        if kept:
            self.seconds_before = json.loads(kept[-1])["seconds"]
        write_whole(self.path, "".join(f"{line}\n" for line in kept))

    @staticmethod
    def _step(line: str) -> float:
        try:
            return json.loads(line)["step"]
        except json.JSONDecodeError:  # cut off by a kill
            return float("inf")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        seconds = time.perf_counter() - self.started
        record = {"step": state.global_step, "seconds": round(self.seconds_before + seconds, 1), **logs}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        done = state.global_step - self.first_step
        left = seconds / max(done, 1) * (state.max_steps - state.global_step) / 60
        shown = [f"{label} {logs[key]:.3g}" for key, label in self.SHOWN.items() if logs.get(key) is not None]
        width = len(str(state.max_steps))
        print(
            f"step {state.global_step:{width}}/{state.max_steps}  {'  '.join(shown)}  {left:.1f} min left", flush=True
        )
