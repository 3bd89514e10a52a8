"""What happens between updates: metrics, a line on the terminal, TensorBoard, checkpoints, and leaving on a signal."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat

from llm_policy.checkpoints import keep_newest, read_state, written_whole
from llm_policy.errors import InputError
from llm_policy.interruption import RESUME, Interruption
from llm_policy.metrics_log import MetricsLog
from llm_policy.models import not_finite
from llm_policy.policy_gradient.arguments import LINES, SAVES, PolicyGradientArguments
from llm_policy.policy_gradient.learner import (
    STATE_FILE,
    Learner,
    restore_chance,
    restore_training,
    training_state,
)
from llm_policy.run_files import METRICS_FILE

BLOCK = 25  # episodes per point of the curve, as in Verma and Shukla's figure
SECONDS_BETWEEN_LINES = 2  # on the terminal
FIRST_ESTIMATE = 1000  # steps, after which the time left is said
TENSORBOARD_FOLDER = "runs"
# stable-baselines3's name -> ours
METRICS = {
    "train/approx_kl": "kl",
    "train/kl_divergence_loss": "kl",
    "train/policy_objective": "surrogate_improvement",
    "train/policy_gradient_loss": "policy_gradient_loss",
    "train/is_line_search_success": "line_search_success",
    "train/clip_fraction": "clip_fraction",
    "train/entropy_loss": "entropy_loss",
    "train/value_loss": "value_loss",
    "train/explained_variance": "explained_variance",
    "train/std": "action_std",
    "train/loss": "loss",
}


class Progress(BaseCallback):
    """Called by the algorithm. Everything happens right after an update, when no step is half taken.

    Args:
        learner: what is trained.
        folder: the run's.
        resume: a checkpoint that the run goes on from.
        stands_on: files that a resumed run needs beside its checkpoint.
    """

    def __init__(
        self,
        learner: Learner,
        folder: Path,
        arguments: PolicyGradientArguments,
        resume: Path | None,
        stands_on: Sequence[Path] = (),
    ) -> None:
        super().__init__()
        self.learner, self.folder, self.total = learner, folder, arguments.timesteps
        self.max_episodes = arguments.max_episodes or math.inf
        self.logging_steps = arguments.logging_steps or max(1, self.total // LINES)
        self.save_steps = arguments.save_steps or max(1, self.total // SAVES)
        self.stands_on = [folder / METRICS_FILE, *stands_on]
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []
        self.logged_at = self.saved_at = 0
        self.resumed_state: dict | None = None  # until the first rollout begins
        resumed_at, seconds_before = 0, 0.0
        if resume is not None:
            self.resumed_state = state = read_state(resume / STATE_FILE)
            extra = restore_training(learner, state)
            self.episode_returns, self.episode_lengths = extra["episode_returns"], extra["episode_lengths"]
            resumed_at, seconds_before = state["timesteps"], extra["seconds"]
            self.logged_at, self.saved_at = extra["logged_at"], resumed_at
        self.metrics = MetricsLog(folder / METRICS_FILE, resumed_at, seconds_before)
        self.began_at, self.began_at_episode = learner.algorithm.num_timesteps, len(self.episode_returns)
        self.ended = None if self.steps_left else self.metrics.seconds_before
        self.said_estimate, self.printed_at = False, -math.inf
        learner.algorithm.set_logger(Logger(str(folder), [TensorBoardOutputFormat(str(folder / TENSORBOARD_FOLDER))]))
        self.stop = Interruption("the update")

    @property
    def seconds(self) -> float:
        """Of training, parts before an interruption included and judging left out."""
        return self.metrics.seconds if self.ended is None else self.ended

    def _has_all_episodes(self) -> bool:
        return len(self.episode_returns) >= self.max_episodes

    @property
    def steps_left(self) -> int:
        """0 as well when all episodes have been played."""
        return 0 if self._has_all_episodes() else max(0, self.total - self.learner.algorithm.num_timesteps)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.episode_returns.append(float(info["episode"]["r"]))
                self.episode_lengths.append(int(info["episode"]["l"]))
        if not self.said_estimate and self.num_timesteps - self.began_at >= FIRST_ESTIMATE:
            self.said_estimate = True
            print(f"step {self.num_timesteps:,}/{self.total:,}: {self.time_left()}", flush=True)
        return not self._has_all_episodes()  # False: the algorithm drops the rollout and leaves

    def spent(self) -> str:
        """What the training took, in words."""
        steps, episodes = self.learner.algorithm.num_timesteps, len(self.episode_returns)
        return f"{steps:,} steps, {episodes:,} episodes, {self.seconds / 60:.1f} min"

    def time_left(self) -> str:
        """In minutes, at the pace of this call so far."""
        done, spent = self.num_timesteps - self.began_at, self.metrics.seconds_here
        left = self.steps_left / done * spent
        if played := len(self.episode_returns) - self.began_at_episode:
            left = min(left, (self.max_episodes - len(self.episode_returns)) / played * spent)
        return f"{done / spent:,.0f} steps/s, {max(0.0, left) / 60:.1f} min left"

    def _on_rollout_start(self) -> None:
        """After an update, or at the very beginning."""
        steps = self.num_timesteps
        if self.resumed_state is not None:
            restore_chance(self.learner, self.resumed_state)
            self.resumed_state = None
            return
        if steps == 0:
            return
        self._check_weights()
        if steps - self.logged_at >= self.logging_steps:
            self.log()
        if self.stop.received or steps - self.saved_at >= self.save_steps:
            self.save()
        self._leave_if_received()

    def _on_training_end(self) -> None:
        """After the last update."""
        self._check_weights()
        if not self.learner.algorithm._n_updates:
            raise InputError(
                f"--max_episodes {self.max_episodes}: played within {self.num_timesteps} steps, before the first "
                "update; give more episodes, or a smaller --n_steps, in another --output_dir"
            )
        if self.logged_at < self.num_timesteps:
            self.log()
        self.save()
        self.ended = self.metrics.seconds
        self._leave_if_received()

    def _leave_if_received(self) -> None:
        self.stop.leave_if_received(f"checkpoint of step {self.num_timesteps} written; {RESUME} resumes from it")

    def _check_weights(self) -> None:
        if bad := not_finite(dict(self.learner.policy.named_parameters())):
            raise InputError(
                f"step {self.num_timesteps}: the weight {bad} is no number (nan or inf); earlier checkpoints stay. "
                "Lower --learning_rate, or look at the returns (metrics.jsonl)"
            )

    def log(self) -> None:
        """One line in metrics.jsonl, the same figures in TensorBoard, and a short line on the terminal."""
        steps, recent = self.num_timesteps, self.episode_returns[-BLOCK:]
        logged = self.logger.name_to_value
        metrics: dict[str, float] = {"episodes": len(self.episode_returns)}
        if recent:
            metrics[f"mean_return_of_{BLOCK}_episodes"] = float(np.mean(recent))
            metrics["mean_episode_length"] = float(np.mean(self.episode_lengths[-BLOCK:]))
        metrics |= {ours: float(logged[theirs]) for theirs, ours in METRICS.items() if theirs in logged}
        if self.learner.reader is not None:
            metrics["cache_hit_rate"] = self.learner.reader.encoder.hit_rate
        metrics["steps_per_second"] = round((steps - self.began_at) / self.metrics.seconds_here, 1)
        self.metrics.write(steps, metrics)
        for name, value in metrics.items():
            self.logger.record(f"run/{name}", value)
        self.logger.dump(steps)
        self.logged_at = steps
        shown = [f"step {steps:,}/{self.total:,}", f"{len(self.episode_returns):,} episodes"]
        if recent:
            shown.append(f"mean return of the last {len(recent)}: {np.mean(recent):.4g}")
        if "kl" in metrics:
            shown.append(f"KL {metrics['kl']:.2g}")
        if time.perf_counter() - self.printed_at >= SECONDS_BETWEEN_LINES or steps >= self.total:
            print("  ".join([*shown, self.time_left()]), flush=True)
            self.printed_at = time.perf_counter()

    def save(self) -> None:
        """A checkpoint; the one before it goes."""
        folder = self.folder / f"checkpoint-{self.num_timesteps}"
        extra = {
            "episode_returns": self.episode_returns,
            "episode_lengths": self.episode_lengths,
            "seconds": self.seconds,
            "logged_at": self.logged_at,
        }
        with written_whole(folder, stands_on=self.stands_on):
            torch.save(training_state(self.learner, extra), folder / STATE_FILE)
        keep_newest(folder.parent, 1)
        self.saved_at = self.num_timesteps


def block_means(returns: list[float]) -> tuple[list[int], list[float]]:
    """Episodes so far, and the mean return of each `BLOCK` of them; an unfinished block is left out.

    >>> block_means([0.0] * 25 + [1.0] * 30)
    ([25, 50], [0.0, 1.0])
    """
    ends = range(BLOCK, len(returns) + 1, BLOCK)
    return list(ends), [float(np.mean(returns[end - BLOCK : end])) for end in ends]
