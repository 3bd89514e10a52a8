"""ProPS: whoever proposes parameters is the optimiser; the loop rolls them out and tells it the returns.

Source: arXiv 2511.21928. Departures, each an option whose published form is in configs/props_frozen_lake.yaml:

1. `pool_duplicates`: a policy proposed again is rolled out again and its episodes are pooled, shown as mean +- standard
   error. Published: every proposal is a line of its own.
2. `history`: the best few and the latest few instead of all of it, on which small models loop.
3. `optimum_hint`: none, or the exact one. Published: 1.0, out of reach on the slippery lake.
4. After an answer that cannot be used the model is told what is wrong, `retries` times. Then the iteration is *failed*:
   nothing is rolled out, the turn is lost and no episode is counted.
5. `ask_reason`: the line of reasoning is asked for only where it is true. Behind the numbers it cannot improve them,
   and a small model spends most of its tokens on it.

Iterations count from 1; the warm-up policies stand before them as iterations 0, -1, ...
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llm_policy.errors import InputError, check_at_least, check_choices
from llm_policy.policy_search.parameters import AnswerError, Parameters, PolicySpace, Task, roll_out
from llm_policy.policy_search.prompts import HISTORY, corrected_messages, search_messages, tried_text
from prompts import Messages

OPTIMUM_HINTS = ("none", "exact")


@dataclass
class SearchSettings:
    """The search itself, whoever proposes."""

    iterations: int = field(default=40, metadata={"help": "Policies that the proposer is asked for."})
    episodes: int = field(default=20, metadata={"help": "Episodes that each proposed policy is rolled out for."})
    warm_up: int = field(default=20, metadata={"help": "Uniformly random policies before the first question."})
    retries: int = field(default=1, metadata={"help": "Further tries after an answer that cannot be used."})
    history: str = field(default="best_and_recent", metadata={"help": f"What is shown: {', '.join(HISTORY)}."})
    history_best: int = field(default=5, metadata={"help": "best_and_recent: so many of the best policies ..."})
    history_recent: int = field(default=5, metadata={"help": "... and so many of the latest."})
    pool_duplicates: bool = field(
        default=True, metadata={"help": "Pool the episodes of repeated policies; show mean +- standard error."}
    )
    optimum_hint: str = field(
        default="none",
        metadata={"help": "Best return told to the model: none, exact (toy text) or a number, true or not."},
    )
    describe_environment: bool = field(default=False, metadata={"help": "ProPS+: describe the environment."})
    ask_reason: bool = field(default=False, metadata={"help": "Ask for a line of reasoning behind the parameters."})
    seed: int = field(default=0, metadata={"help": "Of warm-up, proposals and episodes."})

    def __post_init__(self) -> None:
        self.optimum_hint = str(self.optimum_hint)  # in YAML it may be a number
        check_choices(self, {"history": HISTORY})
        if self.optimum_hint not in OPTIMUM_HINTS and not _is_number(self.optimum_hint):
            raise InputError(f"--optimum_hint {self.optimum_hint!r}: expected {', '.join(OPTIMUM_HINTS)} or a number")
        least = {
            "iterations": 1,
            "episodes": 1,
            "warm_up": 0,
            "retries": 0,
            "history_best": 0,
            "history_recent": 0,
            "seed": 0,
        }
        check_at_least(self, least)


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def seed_of(seed: int, purpose: str, iteration: int = 0, attempt: int = 0) -> int:
    """One seed per random decision: a resumed run, which skips some of them, makes the others as before."""
    entropy = [seed, zlib.crc32(purpose.encode()), iteration + 2**31, attempt]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


# History ---------------------------------------------------------------------------------------------------------


@dataclass
class Tried:
    """A policy of the history and the returns of all its episodes."""

    parameters: Parameters
    returns: list[float]
    first_iteration: int
    last_iteration: int

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def standard_error(self) -> float | None:
        """Of the mean; None for a single episode."""
        episodes = len(self.returns)
        return float(np.std(self.returns, ddof=1) / episodes**0.5) if episodes > 1 else None


class History:
    """What was tried, in order. With `pool_duplicates` each policy once, with all its episodes."""

    def __init__(self, pool_duplicates: bool = True) -> None:
        self.pool_duplicates = pool_duplicates
        self.tried: list[Tried] = []
        self._of_parameters: dict[Parameters, Tried] = {}

    def add(self, iteration: int, parameters: Parameters, returns: Sequence[float]) -> Tried:
        known = self._of_parameters.get(parameters)
        if known is not None and self.pool_duplicates:
            known.returns.extend(returns)
            known.last_iteration = iteration
            return known
        added = Tried(parameters, list(returns), iteration, iteration)
        self.tried.append(added)
        self._of_parameters[parameters] = added
        return added

    def __contains__(self, parameters: Parameters) -> bool:
        return parameters in self._of_parameters

    @property
    def best(self) -> Tried | None:
        """The highest mean return; of equal ones the one with more episodes, then the earlier one."""
        return max(self.tried, key=lambda tried: (tried.mean, len(tried.returns), -tried.first_iteration), default=None)

    @property
    def episodes(self) -> int:
        return sum(len(tried.returns) for tried in self.tried)

    def shown(self, settings: SearchSettings) -> list[Tried]:
        """What the model sees: all in order, or the best and the latest with the best last."""
        if settings.history == "whole":
            return list(self.tried)
        best_first = sorted(self.tried, key=lambda tried: (-tried.mean, -tried.last_iteration))
        latest_first = sorted(self.tried, key=lambda tried: -tried.last_iteration)
        kept = best_first[: settings.history_best] + latest_first[: settings.history_recent]
        return sorted(
            {id(tried): tried for tried in kept}.values(), key=lambda tried: (tried.mean, tried.last_iteration)
        )


# Log -------------------------------------------------------------------------------------------------------------


class AnswerLog:
    """`answers.jsonl`: a line per answer and a line per rollout, each written before the next thing is done.

    answer: iteration, attempt, prompt (messages), answer (text), error (null or what the parser said), parameters (null
        or the numbers), tokens_in, tokens_out, seconds.
    rollout: iteration, parameters, returns (one an episode).
    A line that a kill left half written is dropped. Without a path nothing is kept.
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
            try:
                with self.path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                raise InputError(f"{self.path}: cannot be written ({error}); then the same command goes on") from error
        return record

    def _remember(self, record: dict) -> None:
        if record["kind"] == "answer":
            self._answers[record["iteration"], record["attempt"]] = record
        else:
            self._rollouts[record["iteration"]] = record


_RECORD_KEYS = {
    "answer": {"iteration", "attempt", "prompt", "answer", "error", "parameters", "tokens_in", "tokens_out", "seconds"},
    "rollout": {"iteration", "parameters", "returns"},
}


def read_log(path: str | Path) -> list[dict]:
    """The whole lines of an `answers.jsonl`; `InputError` for a file that is none."""
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); expected the answers.jsonl of a run") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # behind the last line break stands nothing, or half a record
        try:
            record = json.loads(line)
            is_record = _RECORD_KEYS[record["kind"]] <= set(record)
        except (ValueError, KeyError, TypeError):
            is_record = False
        if not is_record:
            raise InputError(f"{path}: line {number} is no record of an answer or a rollout; expected an answers.jsonl")
        records.append(record)
    return records


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


# Search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a proposer is asked: the prompt for a model, the history for a search without one."""

    messages: Messages
    history: History
    iteration: int
    attempt: int


@dataclass(frozen=True)
class Answer:
    """What a proposer said, and what it cost."""

    text: str
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    is_cut: bool = False  # at the limit of tokens


class Proposer(Protocol):
    def propose(self, request: Request) -> Answer: ...


@dataclass(frozen=True)
class Step:
    """One iteration as it ended.

    Attributes:
        returns: of this iteration's rollout; None for a failed one.
        error: what was wrong with the last answer of a failed one.
        best: the incumbent afterwards; None while nothing was rolled out.
        best_mean: its mean return as known then, over the search's own episodes.
        episodes: rolled out so far, in all.
    """

    iteration: int
    returns: list[float] | None
    is_repeat: bool
    error: str | None
    best: Parameters | None
    best_mean: float
    episodes: int


def search(
    task: Task,
    proposer: Proposer,
    settings: SearchSettings,
    *,
    optimum: float | None = None,
    description: str | None = None,
    log: AnswerLog | None = None,
    on_step: Callable[[Step], Any] = lambda step: None,
) -> tuple[History, list[Step]]:
    """Warm up, then ask, roll out and tell, `settings.iterations` times.

    What `log` holds already is taken from it and neither asked nor rolled out again.

    Returns:
        the history and a `Step` per iteration, warm-up included.
    """
    log = AnswerLog(None) if log is None else log
    history = History(settings.pool_duplicates)
    steps = []
    for iteration in range(1 - settings.warm_up, settings.iterations + 1):
        parameters, error = None, None
        if iteration < 1:
            parameters = task.space.draw(np.random.default_rng(seed_of(settings.seed, "warm-up", iteration)))
        else:
            messages = prompt_of(task, history, settings, iteration, optimum, description)
            parameters, error = _ask(task.space, proposer, settings, messages, history, iteration, log)
        returns, is_repeat = None, parameters in history if parameters is not None else False
        if parameters is not None:
            record = log.rollout(iteration)
            if record is None:
                seed = seed_of(settings.seed, "episodes", iteration)
                returns = roll_out(task, parameters, settings.episodes, seed)
                values = {"kind": "rollout", "iteration": iteration, "parameters": list(parameters), "returns": returns}
                record = log.append(values)
            elif record["parameters"] != list(parameters):
                raise _other_run(log, iteration)
            returns = record["returns"]
            history.add(iteration, parameters, returns)
        best = history.best
        steps.append(
            Step(
                iteration, returns, is_repeat, error, best.parameters if best else None,
                best.mean if best else float("nan"), history.episodes,
            )
        )  # fmt: skip
        on_step(steps[-1])
    return history, steps


def prompt_of(
    task: Task,
    history: History,
    settings: SearchSettings,
    iteration: int,
    optimum: float | None,
    description: str | None,
) -> Messages:
    """The prompt of one iteration from the history so far."""
    return search_messages(
        task.space,
        [
            tried_text(task.space, t.parameters, t.mean, t.standard_error if settings.pool_duplicates else None)
            for t in history.shown(settings)
        ],
        history=settings.history,
        episodes=settings.episodes,
        iteration=iteration,
        iterations=settings.iterations,
        optimum=optimum,
        description=description,
        ask_reason=settings.ask_reason,
    )


def longest_prompt(
    task: Task, settings: SearchSettings, optimum: float | None, description: str | None, answer: str
) -> Messages:
    """About the longest prompt that this search can come to, a correction of `answer` included."""
    policies = settings.warm_up + settings.iterations
    if settings.history == "best_and_recent":
        policies = min(policies, settings.history_best + settings.history_recent)
    history = History(pool_duplicates=False)
    for i in range(policies):
        # The best first, so that the best and the latest are not the same ones
        history.add(i, (task.space.lowest,) * task.space.count, [-1000.0 - i, -1001.1 - i])
    messages = prompt_of(task, history, settings, settings.iterations, optimum, description)
    error = "value 100 is 'x', expected a number"
    return corrected_messages(messages, answer, error, task.space, settings.ask_reason)


def _ask(
    space: PolicySpace, proposer: Proposer, settings: SearchSettings, messages: Messages, history: History,
    iteration: int, log: AnswerLog,
) -> tuple[Parameters | None, str | None]:  # fmt: skip
    """The parameters that the proposer names, or None and what was wrong with its last answer."""
    prompt, error = messages, None
    for attempt in range(settings.retries + 1):
        record = log.answer(iteration, attempt)
        if record is None:
            answer = proposer.propose(Request(prompt, history, iteration, attempt))
            parameters, error = _read(space, answer)
            record = log.append(
                {
                    "kind": "answer",
                    "iteration": iteration,
                    "attempt": attempt,
                    "prompt": prompt,
                    "answer": answer.text,
                    "error": error,
                    "parameters": None if parameters is None else list(parameters),
                    "tokens_in": answer.tokens_in,
                    "tokens_out": answer.tokens_out,
                    "seconds": round(answer.seconds, 3),
                }
            )
        elif record["prompt"] != prompt:
            raise _other_run(log, iteration)
        if record["parameters"] is not None:
            return tuple(record["parameters"]), None
        error = record["error"]
        # Only the last failure is shown: a growing dialogue of failures would fill the context.
        prompt = corrected_messages(messages, record["answer"], str(error), space, settings.ask_reason)
    return None, error


def _read(space: PolicySpace, answer: Answer) -> tuple[Parameters | None, str | None]:
    try:
        return space.read_answer(answer.text), None
    except AnswerError as error:
        cut = f" (the answer was cut after {answer.tokens_out} tokens)" if answer.is_cut else ""
        return None, f"{error}{cut}"


def _other_run(log: AnswerLog, iteration: int) -> InputError:
    return InputError(
        f"{log.path}: iteration {iteration} was recorded by another run (other settings or version); "
        "choose another --output_dir, or delete this one"
    )
