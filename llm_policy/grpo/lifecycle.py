"""How a training run is interrupted, resumed and ended: signals, what a checkpoint says, the last step."""

from pathlib import Path

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig

from llm_policy import processes
from llm_policy.checkpoints import COMPLETE_MARK
from llm_policy.errors import InputError
from llm_policy.grpo.diagnostics import MetricsFile, PolicyDiagnostics
from llm_policy.grpo.trainer import PolicyTrainer
from llm_policy.interruption import Interruption
from llm_policy.models import not_finite

SAME_EPOCH = 1e-6  # an epoch's part is a sum of steps


class StopOnSignal(TrainerCallback, Interruption):
    """After the step, if the trainer takes steps; all processes of a run leave together.

    Args:
        steps_per_batch: optimiser steps on one batch of completions. These are not saved, so that a checkpoint waits
            for their last use.
    """

    def __init__(self, steps_per_batch: int) -> None:
        super().__init__("the step")
        self.steps_per_batch = steps_per_batch

    def received_anywhere(self) -> bool:
        """Whether any process of the run had got a signal; then all have, and leave at the same place.

        One that comes while the processes tell each other counts the next time: the others do not know of it.
        """
        told = [name for name in processes.gathered([self.received]) if name]
        if told:
            self.received = self.received or told[0]
        return bool(told)

    def on_step_end(self, args, state, control, **kwargs):
        if self.received_anywhere() and state.global_step % self.steps_per_batch == 0:
            control.should_save = True
            control.should_training_stop = True


class StopAtNonFinite(TrainerCallback):
    """Ends the run before the first step whose gradient is no number, or after one that leaves such a weight.

    Otherwise it would train to the end, save an adapter of nan, and sample nothing that says so.
    """

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not args.fp16:  # there the scaler looks for it, and leaves the step out
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            self.check(gradients, "gradient", state.global_step + 1)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.check(weights, "weight", state.global_step + 1)

    @staticmethod
    def check(tensors: dict[str, torch.Tensor], what: str, step: int) -> None:
        """`InputError` where one of the tensors holds nan or inf."""
        if processes.in_pieces():  # each process sees its pieces of them, and all must stop
            own = not_finite({name: tensor.to_local() for name, tensor in tensors.items()})
            bad = next(filter(None, processes.gathered([own])), None)
        else:
            bad = not_finite(tensors)
        if bad:
            raise InputError(
                f"step {step}: the {what} of {bad} is no number (nan or inf); earlier checkpoints stay. "
                "Lower --learning_rate, or look at the rewards (metrics.jsonl)"
            )


def check_length(option: str, most: int, resume: Path | None) -> None:
    """`InputError` where a run is to end before the checkpoint that it resumes from; below 1 `most` is no limit."""
    taken = int(resume.name.rpartition("-")[2]) if resume else 0
    if 0 < most < taken:
        raise InputError(f"--{option} {most}: {resume} has taken {taken} already; give at least that")


def check_epochs(training: GRPOConfig, resume: Path | None) -> None:
    """`check_length` for a run whose end is a number of epochs."""
    if resume is None or training.max_steps > 0:
        return
    state = TrainerState.load_from_json(str(resume / TRAINER_STATE_NAME))
    one_step = state.epoch / max(1, state.global_step)  # the last one may end behind the last epoch
    if state.epoch > training.num_train_epochs + one_step:
        raise InputError(
            f"--num_train_epochs {training.num_train_epochs:g}: {resume} has taken {state.epoch:.3g} already; give at "
            "least that"
        )


def has_ended(checkpoint: Path, training: GRPOConfig, stop_when: str) -> bool:
    """Whether a run had taken its last step, or had stopped by `stop_when`, when it wrote `checkpoint`."""
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    diagnostics = state.stateful_callbacks.get(PolicyDiagnostics.__name__, {"attributes": {}})
    if training.max_steps > 0:
        is_last = state.global_step >= training.max_steps
    else:
        is_last = state.epoch >= training.num_train_epochs - SAME_EPOCH
    kept = diagnostics["attributes"]
    has_stopped = kept.get("has_stopped", False) and kept.get("stop_when", stop_when) == stop_when
    return is_last or has_stopped


def train_or_restore(
    trainer: PolicyTrainer, diagnostics: PolicyDiagnostics, metrics: MetricsFile, resume: Path | None
) -> None:
    """Train, from `resume` on if there is one; a run that was killed after its last step is only read back."""
    if resume and has_ended(resume, trainer.args, diagnostics.stop_when):  # the trainer would take one more step
        trainer.model.load_adapter(str(resume), adapter_name="default", is_trainable=True)
        trainer.state = TrainerState.load_from_json(str(resume / TRAINER_STATE_NAME))
        diagnostics.restore(trainer.state)
        metrics.begin(trainer.state)
    else:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def last_step_is_saved(trainer: PolicyTrainer) -> bool:
    checkpoint = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    return (checkpoint / COMPLETE_MARK).exists()
