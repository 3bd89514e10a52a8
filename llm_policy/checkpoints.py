"""Which checkpoints are whole: a kill in the middle of a write costs the steps since the last one and no more.

A checkpoint ends with a list of all that a resumed run needs, with sizes and checksums. So a run that resumes ends as
one that was never stopped, or says which file is gone or changed, whatever happened to the disk in between.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter
from transformers.trainer import TRAINER_STATE_NAME

from llm_policy.errors import WRITE_ERRORS, InputError, writing
from llm_policy.run_files import write_whole

COMPLETE_MARK = "COMPLETE"  # the list
LISTED = TypeAdapter(dict[str, tuple[int, str]])
"""File, as seen from the run's folder -> (bytes, their SHA-256)."""
GROWING = ".jsonl"  # logs: what is listed of them is their beginning


@contextmanager
def written_whole(folder: Path, stands_on: Iterable[Path] = ()) -> Iterator[None]:
    """Around the write of `folder`: marks it complete at the end, removes it where the write fails.

    `InputError` where the disk refuses (full, read-only, no permission); the checkpoints before it stay.

    Args:
        stands_on: files and folders beside it that a run needs as well to resume from it; those that exist are listed.
    """
    (folder / COMPLETE_MARK).unlink(missing_ok=True)
    marked = _marked(folder.parent)
    survivor = f"{marked[max(marked)].name} survives" if marked else "there is no earlier one"
    with writing(folder, f"{survivor}. Free disk space, then --resume_from_checkpoint auto"):
        try:
            yield
            listed = {}
            for path in (folder, *stands_on):
                files = sorted(path.rglob("*")) if path.is_dir() else [path]
                for file in filter(Path.is_file, files):
                    size = file.stat().st_size
                    listed[str(file.relative_to(folder.parent))] = (size, _sha256(file, size))
            write_whole(folder / COMPLETE_MARK, LISTED.dump_json(listed, indent=1).decode())
        except WRITE_ERRORS:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that `written_whole` has marked, or with what it stands on; None if nothing is."""
    mark = folder / COMPLETE_MARK
    try:
        listed = LISTED.validate_json(mark.read_bytes())
    except (OSError, ValueError):
        return f"{mark}: is no list of files"
    if not listed:
        return f"{mark}: lists no file"
    for name, (size, sha256) in listed.items():
        file = folder.parent / name
        if not file.is_file():
            return f"{file}: is gone"
        found = file.stat().st_size
        may_be = found >= size if file.suffix == GROWING else found == size
        if not may_be or _sha256(file, size) != sha256:
            return f"{file}: is not as it was written"
    return None


def _sha256(file: Path, size: int) -> str:
    """Of the first `size` bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(min(size, 2**20)):
            digest.update(piece)
            size -= len(piece)
    return digest.hexdigest()


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The whole checkpoint with the most steps, and a line for each damaged one after it; None where none is marked.

    `InputError` where some are marked and none is whole.
    """
    marked, wrong = _marked(output_dir), ""
    for steps in sorted(marked, reverse=True):
        damaged = damage(marked[steps])
        if damaged is None:
            return marked[steps]
        wrong = damaged
        print(f"{wrong}; {marked[steps].name} is left out", flush=True)
    if marked:
        raise InputError(
            f"--output_dir {output_dir}: none of its checkpoints is whole ({wrong}); choose another folder, or delete "
            "this one to begin again"
        )
    return None


def _marked(output_dir: Path) -> dict[int, Path]:
    """Steps -> checkpoint that was written to its end."""
    return {steps: path for steps, path in _numbered(output_dir).items() if (path / COMPLETE_MARK).exists()}


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
        checkpoint = latest_checkpoint(output_dir)
        if checkpoint:
            supersede(checkpoint)  # damaged ones count no longer
        return checkpoint
    checkpoint = Path(resume)
    if not all((checkpoint / name).exists() for name in (COMPLETE_MARK, TRAINER_STATE_NAME)):
        raise InputError(f"--resume_from_checkpoint {resume}: no complete checkpoint there; try auto")
    checkpoint = checkpoint.resolve()
    if checkpoint.parent != output_dir.resolve():
        raise InputError(f"--resume_from_checkpoint {resume}: belongs to another run than --output_dir {output_dir}")
    if not checkpoint.name.removeprefix("checkpoint-").isdecimal():
        raise InputError(f"--resume_from_checkpoint {resume}: expected a folder checkpoint-STEPS; try auto")
    if wrong := damage(checkpoint):
        raise InputError(f"--resume_from_checkpoint {resume}: {wrong}; try auto")
    return checkpoint
