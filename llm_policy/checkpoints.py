"""Which checkpoints and finished runs are whole: a kill in the middle of a write costs the steps since the last one.

A checkpoint ends with a list of all that a resumed run needs, with sizes and checksums. So a run that resumes ends as
one that was never stopped, or says which file is gone or changed, whatever happened to the disk in between.
"""

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from pydantic import TypeAdapter
from transformers.trainer import TRAINER_STATE_NAME

from llm_policy.errors import WRITE_ERRORS, InputError, writing
from llm_policy.interruption import RESUME
from llm_policy.run_files import (
    EVALUATION_FILE,
    JUDGE_AGAIN,
    RESULT_FILE,
    check_output_dir,
    check_same_run,
    finished_text,
    write_whole,
)

COMPLETE_MARK = "COMPLETE"  # the list
BEGUN_MARK = "COMPLETE.partial"  # until the list is written
LISTED = TypeAdapter(dict[str, tuple[int, str]])
"""File, as seen from the list's own folder -> (bytes, their SHA-256)."""
GROWING = ".jsonl"  # logs: what is listed of them is their beginning


def read_state(file: Path) -> dict:
    """What `torch.save` wrote; `InputError` for a damaged file. Nothing in it is executed."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"{file}: cannot be read ({' '.join(str(error).split())[:200]}); train again") from error


@contextmanager
def written_whole(folder: Path, stands_on: Iterable[Path] = ()) -> Iterator[None]:
    """Around the write of `folder`: marks it complete at the end, removes it where the write fails.

    `InputError` where the disk refuses (full, read-only, no permission); the checkpoints before it stay.

    Args:
        stands_on: files and folders beside it that a run needs as well to resume from it; those that exist are listed.
    """
    _unmark(folder)
    marked = _marked(folder.parent)
    survivor = f"{marked[max(marked)].name} survives" if marked else "there is no earlier one"
    with writing(folder, f"{survivor}. Free disk space, then {RESUME}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / BEGUN_MARK).touch()
            yield
            write_list(folder, [folder, *stands_on])
        except WRITE_ERRORS:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def write_list(folder: Path, paths: Iterable[Path]) -> None:
    """Mark `folder` complete: the list of `paths`, of whole folders among them, with what is there now."""
    listed = {}
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.name != BEGUN_MARK:
                size = file.stat().st_size
                listed[os.path.relpath(file, folder)] = (size, _sha256(file, size))
    write_whole(folder / COMPLETE_MARK, LISTED.dump_json(listed, indent=1).decode())


def finish(folder: Path, text: str, save: Callable[[Path], None], names: Iterable[str]) -> None:
    """Write what came of a run, mark it as finished, and say what lies in its folder.

    Args:
        text: result.txt.
        save: writes evaluation.json and pictures there.
        names: of the files that have to stay as they are now.
    """
    _unmark(folder)  # it may have been finished before, and is judged again
    write_whole(folder / RESULT_FILE, text)
    save(folder)
    write_list(folder, [folder / name for name in names])
    files = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    print(f"saved {folder}: {', '.join(files)}")


def check_finished(output_dir: Path) -> None:
    """`InputError` where a file of a finished run is not as the run left it. One from before the list passes."""
    is_listed = all((output_dir / name).exists() for name in (EVALUATION_FILE, COMPLETE_MARK))
    if is_listed and (wrong := damage(output_dir)):
        raise InputError(f"{wrong}; put the old file back, or {JUDGE_AGAIN}")


def is_finished(
    output_dir: Path,
    groups: Sequence,
    resume: str | None,
    may_differ: Collection[str],
    until_it_ends: Collection[str] = (),
) -> bool:
    """Before a training: whether the run in its folder has ended already. Then its result is printed again.

    `InputError` where the folder is not to be used, holds another run, or a file of a finished one is gone or changed.

    Args:
        groups: the arguments.
        resume: `--resume_from_checkpoint`.
        may_differ: arguments in which a run may be taken up otherwise than it was begun.
        until_it_ends: those in which it may as long as it has not ended.
    """
    has_ended = resume == "auto" and (output_dir / EVALUATION_FILE).exists()
    if resume:
        check_same_run(output_dir, groups, {*may_differ, *(() if has_ended else until_it_ends)})
    check_output_dir(output_dir, resumes=resume is not None)
    if has_ended:
        check_finished(output_dir)
        print(finished_text(output_dir), end="")
    return has_ended


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that has a list, or with what it stands on; None if nothing is."""
    mark = folder / COMPLETE_MARK
    try:
        listed = LISTED.validate_json(mark.read_bytes())
    except (OSError, ValueError):
        return f"{mark}: is no list of files"
    if not listed:
        return f"{mark}: lists no file"
    for name, (size, sha256) in listed.items():
        file = Path(os.path.normpath(folder / name))
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
    return {steps: path for steps, path in _numbered(output_dir).items() if _is_marked(path)}


def _is_marked(folder: Path) -> bool:
    return (folder / COMPLETE_MARK).is_file()


def supersede(checkpoint: Path) -> None:
    """A run resumes from `checkpoint`: those after it count as incomplete until they are written again."""
    for steps, path in _numbered(checkpoint.parent).items():
        if steps > int(checkpoint.name.removeprefix("checkpoint-")):
            _unmark(path)


def _unmark(folder: Path) -> None:
    if (folder / COMPLETE_MARK).exists():
        (folder / COMPLETE_MARK).replace(folder / BEGUN_MARK)


def cut_logs(checkpoint: Path, names: Iterable[str]) -> None:
    """Bring logs of the run, those of `names` that grow, back to where they were when `checkpoint` was written."""
    listed = LISTED.validate_json((checkpoint / COMPLETE_MARK).read_bytes())
    for name in names:
        file = checkpoint.parent / name
        size, _ = listed.get(os.path.relpath(file, checkpoint), (None, ""))
        if size is not None and file.suffix == GROWING:
            with writing(file, f"make it writable, then {RESUME}"), file.open("r+b") as stream:
                stream.truncate(size)


def keep_newest(output_dir: Path, most: int) -> None:
    """Delete whole checkpoints but the `most` with the most steps, and nobody's copies under another name."""
    marked = _marked(output_dir)
    for steps in sorted(marked)[:-most]:
        shutil.rmtree(marked[steps])


def remove_incomplete(output_dir: Path) -> None:
    """Delete what a kill left half written."""
    for path in _numbered(output_dir).values():
        if not (path / COMPLETE_MARK).exists():
            shutil.rmtree(path, ignore_errors=True)


def check_own(output_dir: Path) -> None:
    """`InputError` for a file in a checkpoint that the run did not write: it would be deleted with the checkpoint."""
    lists: dict[Path, set[str]] = {}
    for path in _numbered(output_dir).values():
        if not (path / BEGUN_MARK).exists():  # half written: all of it is ours
            with suppress(ValueError):  # no list of files: `damage` says so
                lists[path] = (
                    set(LISTED.validate_json((path / COMPLETE_MARK).read_bytes())) if _is_marked(path) else set()
                )
    for path, listed in lists.items():
        known = listed or set().union(*lists.values())  # a kill while it was deleted leaves it without its list
        for file in path.rglob("*"):
            if file.is_file() and str(file.relative_to(path)) not in {COMPLETE_MARK, *known}:
                raise InputError(f"{file}: is no file of the run, which deletes old checkpoints; move it away")


def _numbered(output_dir: Path) -> dict[int, Path]:
    """Steps -> checkpoint folder, without copies under a name of one's own."""
    steps_of = {path: path.name.removeprefix("checkpoint-") for path in output_dir.glob("checkpoint-*")}
    return {int(steps): path for path, steps in steps_of.items() if steps.isdecimal()}


def checkpoint_to_resume_from(output_dir: Path, resume: str | None) -> Path | None:
    """What `resume` names, or with `auto` the latest complete one; None: from the beginning."""
    if resume is None:
        return None
    check_own(output_dir)
    if resume == "auto":
        remove_incomplete(output_dir)
        checkpoint = latest_checkpoint(output_dir)
        if checkpoint:
            supersede(checkpoint)  # damaged ones count no longer
        elif (output_dir / COMPLETE_MARK).exists():
            raise InputError(
                f"--output_dir {output_dir}: holds a finished run without checkpoints, so that it cannot go on; "
                f"python evaluate_policy.py --policies {output_dir} judges it again"
            )
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
