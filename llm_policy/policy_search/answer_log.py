"""What a search was answered and what it rolled out, on disk: a killed run resumes from it, a finished one replays."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt

from llm_policy.errors import InputError, writing
from llm_policy.reading import parse_json, read_text

CUT = " (the answer was cut after "  # in the recorded error of an answer that was


class AnswerLog:
    """`answers.jsonl`: one line per answer and one per rollout, each written before anything else is done.

    answer: iteration, attempt, prompt (messages), answer (text), error (null or what the parser said), parameters (null
        or the numbers), tokens_in, tokens_out, seconds.
    rollout: iteration, parameters, returns (one per episode).
    A line that a kill left half written is dropped. Without a path nothing is kept on disk.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._answers: dict[tuple[int, int], dict] = {}
        self._rollouts: dict[int, dict] = {}
        if path is not None and path.exists():
            for record in read_log(path):
                self._remember(record)
            _cut_torn_line(path)

    def answer(self, iteration: int, attempt: int) -> dict | None:
        return self._answers.get((iteration, attempt))

    def rollout(self, iteration: int) -> dict | None:
        return self._rollouts.get(iteration)

    @property
    def answers(self) -> list[dict]:
        return list(self._answers.values())

    def append(self, record: dict) -> dict:
        self._remember(record)
        if self.path is not None:
            with writing(self.path, "make room, and the same command resumes"), self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        return record

    def _remember(self, record: dict) -> None:
        if record["kind"] == "answer":
            self._answers[record["iteration"], record["attempt"]] = record
        else:
            self._rollouts[record["iteration"]] = record


class _Record(BaseModel, strict=True):
    iteration: int


class _Answer(_Record):
    attempt: NonNegativeInt
    prompt: list[dict[str, str]]
    answer: str
    error: str | None
    parameters: list[FiniteFloat] | None
    tokens_in: NonNegativeInt
    tokens_out: NonNegativeInt
    seconds: Annotated[FiniteFloat, Field(ge=0)]


class _Rollout(_Record):
    parameters: list[FiniteFloat]
    returns: Annotated[list[FiniteFloat], Field(min_length=1)]


_KINDS: dict[str, type[_Record]] = {"answer": _Answer, "rollout": _Rollout}


def read_log(path: str | Path) -> list[dict]:
    """The records of an `answers.jsonl`, without a half-written last line; `InputError` for any other file."""
    try:
        lines = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); expected the answers.jsonl of a run") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # after the last line break: nothing, or half a record
        try:
            record = parse_json(line)
            _KINDS[record["kind"]].model_validate(record)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: line {number} is no record of an answer or a rollout; expected an answers.jsonl"
            ) from error
        records.append(record)
    return records


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
