"""`metrics.jsonl`: what a run logs, a line per step, and how long it has taken."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llm_policy.reading import parse_json
from llm_policy.run_files import write_whole


class MetricsLog:
    """Adds lines to `file`, cut back to the checkpoint that a run resumes from.

    Args:
        step: of that checkpoint; 0 without one.
        seconds: that the run had taken by then; None: what the last of the lines that stay says.
    """

    def __init__(self, file: Path, step: int, seconds: float | None = None) -> None:
        kept = cut_back(file, step)
        if seconds is None:
            seconds = kept[-1]["seconds"] if kept else 0.0
        self.file, self.seconds_before, self.began = file, seconds, time.perf_counter()

    @property
    def seconds(self) -> float:
        """That the run has taken, with the parts before interruptions."""
        return self.seconds_before + self.seconds_here

    @property
    def seconds_here(self) -> float:
        """The same since it was begun or resumed."""
        return time.perf_counter() - self.began

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step, "seconds": round(self.seconds, 2), **metrics}
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")


def cut_back(file: Path, step: int) -> list[dict]:
    """Leave out the lines after `step`, and one that a kill cut; returns what those left say."""
    kept = {line: record for line, record in _lines(file).items() if record["step"] <= step}
    write_whole(file, "".join(f"{line}\n" for line in kept))
    return list(kept.values())


def read_logged(file: Path) -> list[dict]:
    """The lines so far."""
    return list(_lines(file).values())


def _lines(file: Path) -> dict[str, dict]:
    """Line -> what it says, without one that a kill cut."""
    found = {}
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        with suppress(ValueError, TypeError, KeyError):
            record = parse_json(line)
            if record["step"] >= 0 and record["seconds"] >= 0:
                found[line] = record
    return found
