"""When and by which code a result was made, by git."""

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from llm_policy.errors import InputError
from llm_policy.report import files

Made = list[tuple[str, int, str]]  # when a file's content came about: date, Unix time of the commit, commit


def git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=files.ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = " ".join((getattr(error, "stderr", "") or str(error)).split())
        raise InputError(f"git {arguments[0]}: {reason}; the dates of results need git and a full clone") from error


@cache
def history() -> dict[str, tuple[int, str]]:
    """Commit -> Unix time and date. One call of git for the whole history, because there are many runs."""
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        raise InputError("git: a shallow clone lacks the dates of results; run `git fetch --unshallow`")
    lines = (line.split() for line in git("log", "--format=%H %ct %cs").splitlines())
    return {commit: (int(seconds), date) for commit, seconds, date in lines}


def made(file: Path) -> Made:
    """When and by which code a result was made, by its run.json or by what a benchmark wrote: one entry per part.

    The date is that of the file, else that of the commit. Where the file names a commit that is not known, or
    neither, both are of the first commit that holds this content, whatever its path was then.
    """
    content = files.read_json(file)
    entries = []
    for part in (content, *content.get("resumed", [])):
        commit, date = part.get("commit", "").replace("unknown", ""), part.get("date", "")[:10]
        seconds, commit_date = history().get(commit, (0, ""))
        if commit_date or (date and not commit):
            entries.append((date or commit_date, seconds, commit))
    return entries or first_committed(file)


def first_committed(file: Path) -> Made:
    """The first commit with this content of the file; [] where none has it yet."""
    known = history()
    blob = git("hash-object", str(file)).strip()
    commits = git("log", "--reverse", "--format=%H", f"--find-object={blob}").split()
    return [(known[commit][1], known[commit][0], commit) for commit in commits[:1]]


def date_and_commit(entries: Made) -> str:
    """The first and the last, or one where they are the same: `2026-11-21..2026-11-22, da26d60..8286edd`."""
    if not entries:
        return "not committed yet"
    ordered = sorted(entries)
    spans = ([date for date, _, _ in ordered], [commit[:7] for _, _, commit in ordered if commit])
    return ", ".join(found[0] if found[0] == found[-1] else f"{found[0]}..{found[-1]}" for found in spans if found)


def made_by(seeds: Sequence[dict]) -> str:
    return date_and_commit([entry for seed in seeds for entry in seed["made"]])
