"""Which checkpoints are whole: a kill in the middle of a write costs the steps since the last one and no more."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from llm_policy.errors import WRITE_ERRORS, InputError, writing

COMPLETE_MARK = "COMPLETE"


@contextmanager
def written_whole(checkpoint: Path) -> Iterator[None]:
    """Around the write of `checkpoint`: marks it complete at the end, removes it where the write fails.

    `InputError` where the disk refuses (full, read-only, no permission); the checkpoints before it stay.
    """
    (checkpoint / COMPLETE_MARK).unlink(missing_ok=True)
    kept = latest_checkpoint(checkpoint.parent)
    survivor = f"{kept.name} survives" if kept else "there is no earlier one"
    with writing(checkpoint, f"{survivor}. Free disk space, then --resume_from_checkpoint auto"):
        try:
            yield
            (checkpoint / COMPLETE_MARK).touch()
        except WRITE_ERRORS:
            shutil.rmtree(checkpoint, ignore_errors=True)
            raise


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None."""
    complete = {steps: path for steps, path in _numbered(output_dir).items() if (path / COMPLETE_MARK).exists()}
    return complete[max(complete)] if complete else None


def supersede(checkpoint: Path) -> None:
    """A run resumes from `checkpoint`: those after it count as incomplete until they are written again."""
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


def checkpoint_to_resume_from(output_dir: Path, resume: str | None) -> Path | None:
    """What `resume` names, or with `auto` the latest complete one; None: from the beginning."""
    if resume is None:
        return None
    if resume == "auto":
        remove_incomplete(output_dir)
        return latest_checkpoint(output_dir)
    checkpoint = Path(resume)
    if not all((checkpoint / name).exists() for name in (COMPLETE_MARK, TRAINER_STATE_NAME)):
        raise InputError(f"--resume_from_checkpoint {resume}: no complete checkpoint there; try auto")
    checkpoint = checkpoint.resolve()
    if checkpoint.parent != output_dir.resolve():
        raise InputError(f"--resume_from_checkpoint {resume}: belongs to another run than --output_dir {output_dir}")
    if not checkpoint.name.removeprefix("checkpoint-").isdecimal():
        raise InputError(f"--resume_from_checkpoint {resume}: expected a folder checkpoint-STEPS; try auto")
    return checkpoint
