"""Which checkpoints are whole: a kill in the middle of a write costs the steps since the last one and no more."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from llm_policy.errors import InputError

COMPLETE_MARK = "COMPLETE"
# What a disk that refuses says, through torch and safetensors, too
DISK_WORDS = (
    "No space left", "Disk quota exceeded", "Read-only file system", "PytorchStreamWriter failed writing",
    "inline_container.cc",
)  # fmt: skip


@contextmanager
def written_whole(checkpoint: Path) -> Iterator[None]:
    """Around the write of `checkpoint`: marks it complete at the end, removes it where the write fails.

    `InputError` where the disk refuses (full, read-only, no permission); the checkpoints before it stay.
    """
    (checkpoint / COMPLETE_MARK).unlink(missing_ok=True)
    try:
        yield
        (checkpoint / COMPLETE_MARK).touch()
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap a full disk in their own
        shutil.rmtree(checkpoint, ignore_errors=True)
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in DISK_WORDS):
            raise  # out of GPU memory, say
        kept = latest_checkpoint(checkpoint.parent)
        survivor = f"{kept.name} survives" if kept else "there is no earlier one"
        raise InputError(
            f"{checkpoint}: could not be written ({' '.join(str(error).split())}); {survivor}. "
            "Free disk space, then --resume_from_checkpoint auto"
        ) from error


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None."""
    complete = {steps: path for steps, path in _numbered(output_dir).items() if (path / COMPLETE_MARK).exists()}
    return complete[max(complete)] if complete else None


def supersede(checkpoint: Path) -> None:
    """A run goes on from `checkpoint`: those after it count as incomplete until they are written again."""
    for steps, path in _numbered(checkpoint.parent).items():
        if steps > int(checkpoint.name.removeprefix("checkpoint-")):
            (path / COMPLETE_MARK).unlink(missing_ok=True)
    os.utime(checkpoint)  # transformers rotates by age


def remove_incomplete(output_dir: Path) -> None:
    """Delete what a kill left half written."""
    for path in _numbered(output_dir).values():
        if not (path / COMPLETE_MARK).exists():
            shutil.rmtree(path, ignore_errors=True)


def _numbered(output_dir: Path) -> dict[int, Path]:
    """Steps -> checkpoint folder, without copies under a name of one's own."""
    steps_of = {path: path.name.removeprefix("checkpoint-") for path in output_dir.glob("checkpoint-*")}
    return {int(steps): path for path, steps in steps_of.items() if steps.isdecimal()}
