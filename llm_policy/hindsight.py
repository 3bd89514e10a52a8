"""Hindsight replay: whatever a sample did, it is the right answer to the question how to do that.

After hindsight experience replay (Andrychowicz et al. 2017, arXiv 1707.01495), for a model that answers in one piece.
An epoch samples replies to the one prompt that counts, sees what each of them did, asks for that in a prompt, and
teaches the reply as the answer to it. No reward is learnt from. It says which replies are taught last, and when it is
solved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftModel
from torch.utils.tensorboard import SummaryWriter
from trl.trainer.utils import add_fused_lm_head

from llm_policy.adapters import learning_state, restore_learning_state
from llm_policy.chat import Messages, Reader, sampling_config
from llm_policy.checkpoints import read_state, written_whole
from llm_policy.errors import InputError
from llm_policy.grpo.trainer import MergedCopy
from llm_policy.grpo.warm_start import add_gradient, packs
from llm_policy.metrics_log import MetricsLog
from llm_policy.models import not_finite
from llm_policy.run_files import METRICS_FILE
from llm_policy.sampling import sample_completions

STATE_FILE = "hindsight.pt"


@dataclass(frozen=True)
class Attempt:
    """What came of one reply.

    Attributes:
        reward: how close it came to what was asked, in [0, 1].
        outcome: what it did; attempts with the same teach the same. None where it did nothing that can be asked for.
        prompt, reply: the question that it answers, and the answer as it is taught.
        error: the kind of failure, for the log; "" where there was none.
    """

    reward: float
    outcome: str | None = None
    prompt: Messages | None = None
    reply: str = ""
    error: str = ""


@dataclass
class HindsightSettings:
    """How it samples and learns."""

    samples: int = field(default=128, metadata={"help": "Programs that are sampled in an epoch."})
    temperature: float = field(default=0.9, metadata={"help": "Of these."})
    sure_samples: int = field(default=8, metadata={"help": "Further programs, as the model is sure of them."})
    sure_temperature: float = field(default=0.1, metadata={"help": "Of those."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Of AdamW, constant; 0, the control: samples alone."})
    batch_size: int = field(default=8, metadata={"help": "Programs per optimiser step."})


class HindsightLearner:
    """A model, what it has seen itself do, and the optimiser that teaches it that."""

    def __init__(self, model: PeftModel, reader: Reader, prompt: Messages, settings: HindsightSettings) -> None:
        self.model, self.reader, self.prompt, self.settings = model, reader, prompt, settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.learning_rate, weight_decay=0.0)
        self.seen: set[str] = set()
        self.epoch = self.generations = 0
        self.best = 0.0  # reward so far
        self.packed: bool | None = None  # whether replies may share a row, once asked
        self._merged: MergedCopy | None = None

    def sample(self) -> list[str]:
        """Replies to the prompt: most of them varied, some as the model is sure of them."""
        if self._merged is None and MergedCopy.is_possible(self.model) and MergedCopy.has_room(self.model):
            self._merged = MergedCopy(self.model)
        model = self.model if self._merged is None else self._merged.refreshed()
        texts = []
        for count, temperature in (
            (self.settings.samples, self.settings.temperature),
            (self.settings.sure_samples, self.settings.sure_temperature),
        ):
            if count:
                longest = self.reader.max_completion_tokens
                config = sampling_config(model, self.reader.tokenizer, longest, temperature)
                ids = sample_completions(model, [self.reader.prompt(self.prompt)], config, count)
                texts += self.reader.tokenizer.batch_decode(ids, skip_special_tokens=True)
        self.generations += len(texts)
        return texts

    def forget_merged_copy(self) -> None:
        """Give the memory of the copy that samples back."""
        self._merged = None

    def lessons(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """The shortest reply for everything new that was done, what is furthest from the goal first."""
        shortest: dict[str, Attempt] = {}
        for attempt in attempts:
            if attempt.outcome is None or attempt.outcome in self.seen:
                continue
            best = shortest.get(attempt.outcome)
            if best is None or len(attempt.reply) < len(best.reply):
                shortest[attempt.outcome] = attempt
        self.seen.update(shortest)
        return sorted(shortest.values(), key=lambda attempt: attempt.reward)

    def learn(self, lessons: Sequence[Attempt]) -> float | None:
        """One pass over the lessons, in their order. Returns its batches' mean loss (nats per token), or None."""
        base_model = self.model.get_base_model()
        add_fused_lm_head(base_model, outputs=("log_probs", "entropy"))
        self.model.train()
        losses = []
        try:
            taught = [(lesson.prompt, [lesson.reply]) for lesson in lessons if lesson.prompt]
            if self.packed is None and taught:
                self.packed = packs(self.model, self.reader, taught)
            for first in range(0, len(taught), self.settings.batch_size):
                batch = taught[first : first + self.settings.batch_size]
                loss, _ = add_gradient(self.model, self.reader, batch, bool(self.packed))
                torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
        finally:
            vars(base_model).pop("forward", None)  # the fused head
            self.model.eval()
        if bad := not_finite(dict(self.model.named_parameters())):
            raise InputError(
                f"epoch {self.epoch}: the weight {bad} is no number (nan or inf); earlier checkpoints stay. "
                "Lower --learning_rate"
            )
        return sum(losses) / len(losses) if losses else None

    # Resume ------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, stands_on: Sequence[Path], seconds: float) -> None:
        """All that a resumed run needs; with the random numbers it samples what it would have sampled."""
        state = {
            **learning_state(self.model, self.optimizer),
            "seen": sorted(self.seen),
            "epoch": self.epoch,
            "best": self.best,
            "generations": self.generations,
            "packed": self.packed,
            "seconds": seconds,
        }
        with written_whole(folder, stands_on):
            torch.save(state, folder / STATE_FILE)

    def restore(self, folder: Path) -> float:
        """The inverse of `save`; returns the seconds that the run has taken."""
        state = read_state(folder / STATE_FILE)
        restore_learning_state(state, self.model, self.optimizer)
        self.seen, self.epoch, self.generations = set(state["seen"]), state["epoch"], state["generations"]
        self.best, self.packed = state["best"], state["packed"]
        return state["seconds"]


class HindsightLog:
    """metrics.jsonl, TensorBoard, and a line per epoch."""

    def __init__(self, folder: Path, epoch: int, seconds: float) -> None:
        self.metrics = MetricsLog(folder / METRICS_FILE, epoch, seconds)
        self.writer = SummaryWriter(str(folder / "runs"))

    @property
    def seconds(self) -> float:
        return self.metrics.seconds

    def write(self, epoch: int, epochs: int, metrics: dict[str, float], words: str) -> None:
        self.metrics.write(epoch, metrics)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()
        print(f"epoch {epoch}/{epochs}  {words}  {self.seconds / 60:.1f} min", flush=True)
