"""What a training run says about itself: how good it is while it learns, whether it collapsed, a resumable log."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOConfig

from llm_policy import processes
from llm_policy.grpo.expected import REWARD_ROUNDING
from llm_policy.hardware import give_memory_back
from llm_policy.metrics_log import MetricsLog

BATCH_CONDITIONS = ("best", "mean")  # of a batch's rewards is the largest that there is
STOP_CONDITIONS = ("optimal", "collapsed", "either", *BATCH_CONDITIONS, "never")
COLLAPSE_STEPS = 5  # so many further steps without a single group that has variance
OPTIMAL_LINE = "reward/optimal policy"  # of `reward_lines`: all that there is to earn
DEAD_ENTROPY = 0.05  # nats: below it one action has more than 99 % of the probability
SETTLED_PERCENT = 98.0  # of the optimum: what the policy that samples must reach before a run stops there
STEADY_EVALUATIONS = 2  # so many in a row at the optimum: a state that is right by a hair is wrong after rounding


def steps_per_batch(training: GRPOConfig) -> int:
    """Optimiser steps on one batch of completions."""
    return max(1, training.steps_per_generation * training.num_iterations // training.gradient_accumulation_steps)


@dataclass(frozen=True)
class Judgement:
    """How good a model is, as its task sees it.

    Attributes:
        metrics: figures by name; the log has them under `policy/`.
        verdict: one line in words.
        is_optimal: nothing is left to learn.
        draw: title -> a picture; None where there is nothing to see.
    """

    metrics: Mapping[str, float]
    verdict: str
    is_optimal: bool = False
    draw: Callable[[str], Figure] | None = None


class PolicyDiagnostics(TrainerCallback, ExportableState):
    """Judges the greedy policy every `evaluate_steps` steps and stops the run when told to.

    Adds the judgement's metrics to the step's, under `policy/`, and `time/evaluation_share`; to TensorBoard its
    picture.

    Args:
        judge: model -> how good it is.
        sampled: model -> how good it is where it samples. `stop_when` optimal waits for it, if the judgement has a
            `percent_of_optimal`: a greedy policy is optimal as soon as the best action is the likeliest.
        reward_lines: what policies that do not read the prompt would earn, logged beside the reward.
        full_reward: the most that a completion can earn; `stop_when` best and mean wait for it in a batch.
    """

    def __init__(
        self,
        trainer,
        judge: Callable[[PreTrainedModel], Judgement],
        evaluate_steps: int,
        stop_when: str,
        reward_lines: Mapping[str, float],
        sampled: Callable[[PreTrainedModel], Judgement] | None = None,
        full_reward: float | None = None,
    ) -> None:
        self.trainer = trainer
        self.judge = judge
        self.evaluate_steps = evaluate_steps
        self.stop_when = stop_when
        self.reward_lines = reward_lines
        self.sampled = sampled
        self.full_reward = full_reward
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
        self.has_stopped &= stopped_by == self.stop_when  # told to stop otherwise, or never, it continues

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
        names = ("frac_reward_zero_std", "action/entropy", "reward")
        unanimous_shares, entropies, rewards = (self._of_this_step(name) for name in names)
        if unanimous_shares:  # empty where a batch is used again: nothing new is known
            # The objective `expected` has a gradient in unanimous groups, too, as long as more than one action lives.
            is_dead = np.mean(entropies or 0.0) < DEAD_ENTROPY
            # Nor is it dead where it earns all that the expert gives, though his best may be no optimum
            is_dead &= not rewards or np.mean(rewards) < self.reward_lines.get(OPTIMAL_LINE, np.inf) - REWARD_ROUNDING
            if min(unanimous_shares) < 1.0 or not is_dead:
                self.unanimous_since = None
            elif self.unanimous_since is None:
                self.unanimous_since = state.global_step
        due = self.evaluate_steps and state.global_step % self.evaluate_steps == 0
        if due or state.global_step == state.max_steps:
            judgement = self.evaluate(state.global_step)
            self.optimal_evaluations = self.optimal_evaluations + 1 if judgement.is_optimal else 0
            if self.stop_when in ("optimal", "either") and self.optimal_evaluations >= STEADY_EVALUATIONS:
                self.has_stopped = self.has_stopped or self.is_settled(judgement)
        if self.stop_when in ("collapsed", "either") and self.has_collapsed(state.global_step):
            self.has_stopped = True
        if self.stop_when in BATCH_CONDITIONS and self.full_reward is not None:
            rewards_B = self.trainer.last_rewards
            earned = rewards_B.max() if self.stop_when == "best" else rewards_B.mean()
            self.has_stopped |= bool(earned >= self.full_reward)
        if self.has_stopped and state.global_step % steps_per_batch(args) == 0:  # completions are not saved
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"  # an evaluation that is interrupted begins from there
        if (due or self.has_stopped or state.global_step == state.max_steps) and args.logging_strategy != "no":
            control.should_log = True  # whatever --logging_steps: else the figures come under a later step, or never

    def on_log(self, args, state, control, **kwargs):
        self.counted = {}  # the trainer has emptied its lists

    def _of_this_step(self, name: str) -> list[float]:
        """What this step has added to the values of `name`: one per micro-batch, kept until they are logged."""
        values, counted = self.trainer._metrics["train"].get(name, []), self.counted.get(name, 0)
        self.counted[name] = len(values)
        return values[counted:]

    def evaluate(self, step: int) -> Judgement:
        """Judge the greedy policy now, add the figures to the step's metrics and the picture to TensorBoard."""
        started = time.perf_counter()
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with self.trainer.accelerator.autocast():
            judgement = self.judge(model)
        print(f"step {step}: {self.with_collapse(judgement, step)}", flush=True)
        give_memory_back()
        self.evaluation_seconds += time.perf_counter() - started
        values = {f"policy/{name}": value for name, value in judgement.metrics.items()}
        values["time/evaluation_share"] = self.evaluation_seconds / (time.perf_counter() - self.started)
        for name, value in values.items():
            self.trainer._metrics["train"][name] = [float(value)]  # of the last evaluation before a log, no mean
        writer = self._tensorboard_writer()
        if writer is not None and judgement.draw is not None:
            writer.add_figure("policy", judgement.draw(f"step {step}"), step)
        return judgement

    def is_settled(self, greedy: Judgement) -> bool:
        """Whether the sampled policy is nearly as good as the greedy one; leaves the random state as it is."""
        if self.sampled is None:
            return True
        started = time.perf_counter()
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # of several PyTorch would warn
        with self.trainer.accelerator.autocast(), torch.random.fork_rng(devices):
            percent = self.sampled(model).metrics.get("percent_of_optimal")
        self.evaluation_seconds += time.perf_counter() - started
        if percent is None:
            return True
        self.trainer._metrics["train"]["policy/sampled_percent_of_optimal"] = [percent]
        # Where the expert's discount asks for other actions, who does as the expert stays below the optimum
        needed = SETTLED_PERCENT / 100 * min(100.0, greedy.metrics.get("percent_of_optimal", 100.0))
        print(f"sampled: {percent:.1f} % of optimal ({needed:.3g} to stop)", flush=True)
        return percent >= needed

    def has_collapsed(self, step: int) -> bool:
        return self.unanimous_since is not None and step - self.unanimous_since >= COLLAPSE_STEPS

    def with_collapse(self, judgement: Judgement, step: int) -> str:
        """The verdict and, where it holds, since when no group has had any variance.

        Groups that agree on the optimal action are what learning ends in, no collapse.
        """
        if not self.has_collapsed(step) or judgement.is_optimal:
            return judgement.verdict
        return f"{judgement.verdict}; collapsed: all groups unanimous since step {self.unanimous_since}"

    def _tensorboard_writer(self):
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                return callback.tb_writer
        return None


class MetricsFile(TrainerCallback):
    """`metrics.jsonl`: a line per logged step, cut back to the checkpoint on resume; a short line on the terminal.

    Args:
        shown: the judgement's metrics in the short line: name in the log -> label.
        may_end_early: the time that is left is then the most that it can take.
    """

    def __init__(self, path: Path, shown: Mapping[str, str] | None = None, may_end_early: bool = False) -> None:
        self.path = path
        self.at_most = "at most " if may_end_early else ""
        self.shown = {
            "reward": "reward",
            **(shown or {}),
            "frac_reward_zero_std": "unanimous",
            "action/entropy": "action entropy",
            "completions/mean_length": "tokens",
        }

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin(state)

    def begin(self, state: TrainerState) -> None:
        """Leave out what stands behind the checkpoint that a run resumes from."""
        self.first_step = state.global_step
        if processes.is_main():
            self.log = MetricsLog(self.path, state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        self.log.write(state.global_step, logs)
        done = state.global_step - self.first_step
        left = self.log.seconds_here / max(done, 1) * (state.max_steps - state.global_step) / 60
        shown = [f"{label} {logs[key]:.3g}" for key, label in self.shown.items() if logs.get(key) is not None]
        width = len(str(state.max_steps))
        print(
            f"step {state.global_step:{width}}/{state.max_steps}  {'  '.join(shown)}  "
            f"{self.at_most}{left:.1f} min left",
            flush=True,
        )
