"""ProPS: whoever proposes parameters is the optimiser; the loop rolls them out and reports the returns.

Source: arXiv 2511.21928. Departures, each an option. configs/props_frozen_lake.yaml has the published forms of 1,
2, 3 and 5.

1. `pool_duplicates`: a policy that is proposed again is rolled out again. Its episodes are pooled and shown as mean +-
   standard error. Published: every proposal has a line of its own.
2. `history`: the best few and the latest few. Published: all of them; small models then repeat what they read.
3. `optimum_hint`: none, or the exact one. Published: 1.0, out of reach on the slippery lake.
4. `retries`: the model is told what is wrong with an unusable answer, and asked again. An iteration without a usable
   answer is *failed*: it is lost, and no episode is played or counted.
5. `ask_reason`: a line of reasoning is asked for only where it is true. It follows the numbers, so it cannot improve
   them, and a small model spends most of its tokens on it.

Iterations count from 1. The warm-up policies are iterations 0, -1, ... before them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from llm_policy.chat import Messages
from llm_policy.environments.gym_env import GymEnvironment, seed_of
from llm_policy.environments.mdp import optimal_return
from llm_policy.errors import InputError, check_choices
from llm_policy.policy_search.answer_log import CUT, AnswerLog
from llm_policy.policy_search.parameters import AnswerError, Parameters, PolicySpace, SearchProblem
from llm_policy.policy_search.prompts import HISTORY, corrected_messages, search_messages, tried_text

OPTIMUM_HINTS = ("none", "exact")


@dataclass
class SearchSettings:
    """The search itself, whoever proposes."""

    iterations: int = field(default=40, metadata={"help": "Policies that are asked for."})
    episodes: int = field(default=20, metadata={"help": "Episodes that each proposed policy plays."})
    warm_up: int = field(default=20, metadata={"help": "Random policies before the first question."})
    retries: int = field(default=1, metadata={"help": "Further questions after an unusable answer."})
    history: str = field(
        default="best_and_recent", metadata={"help": f"Which policies are shown: {' or '.join(HISTORY)}."}
    )
    history_best: int = field(default=5, metadata={"help": "best_and_recent: how many of the best."})
    history_recent: int = field(default=5, metadata={"help": "best_and_recent: how many of the latest."})
    pool_duplicates: bool = field(
        default=True, metadata={"help": "Pool repeated policies; show mean +- standard error."}
    )
    # A YAML file may hold a number; with None among the types, the parser takes text
    optimum_hint: float | str | None = field(
        default="none", metadata={"help": "Best return that is told: none, exact (toy text) or a number."}
    )
    describe_environment: bool = field(default=False, metadata={"help": "ProPS+: describe the environment."})
    ask_reason: bool = field(default=False, metadata={"help": "Ask for a line of reasoning after the parameters."})
    seed: int = field(default=0, metadata={"help": "Of warm-up, proposals, episodes and judgement."})

    def __post_init__(self) -> None:
        self.optimum_hint = str(self.optimum_hint)
        check_choices(self, {"history": HISTORY})
        if self.optimum_hint not in OPTIMUM_HINTS and not _is_number(self.optimum_hint):
            raise InputError(f"--optimum_hint {self.optimum_hint!r}: expected {', '.join(OPTIMUM_HINTS)} or a number")


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def told_optimum(environment: GymEnvironment, settings: SearchSettings) -> float | None:
    """The best return that the model is told; None where it is told nothing."""
    if settings.optimum_hint == "none":
        return None
    if settings.optimum_hint != "exact":
        return float(settings.optimum_hint or "nan")
    if environment.mdp is None:
        raise InputError(f"--optimum_hint exact: {environment.env_id} has no transition table; take none or a number")
    return float(optimal_return(environment.mdp, environment.horizon_steps))


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
    """What was tried, in order. With `pool_duplicates` each policy stands once, with all its episodes."""

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
        """The policy of the highest mean return. Ties go to more episodes, then to the earlier policy."""
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


# Search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A question to a proposer: a model reads the messages, a search without a model reads the history."""

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
    is_cut: bool = False  # by the limit of tokens


class Proposer(Protocol):
    def propose(self, request: Request) -> Answer: ...


@dataclass(frozen=True)
class Step:
    """One iteration as it ended.

    Attributes:
        returns: of this iteration's rollout; None for a failed one.
        error: what was wrong with the last answer of a failed one.
        best: the best policy so far; None while nothing was rolled out.
        best_mean: its mean return so far, over the search's own episodes.
        episodes: all that were played so far.
    """

    iteration: int
    returns: list[float] | None
    is_repeat: bool
    error: str | None
    best: Parameters | None
    best_mean: float
    episodes: int


def search(
    problem: SearchProblem,
    proposer: Proposer,
    settings: SearchSettings,
    *,
    optimum: float | None = None,
    description: str | None = None,
    log: AnswerLog | None = None,
    on_step: Callable[[Step], Any] = lambda step: None,
) -> tuple[History, list[Step]]:
    """Warm up, then ask, roll out and report, `settings.iterations` times.

    What `log` holds already is taken from it; it is neither asked nor rolled out again.

    Returns:
        the history and one `Step` per iteration, warm-up included.
    """
    log = AnswerLog(None) if log is None else log
    history = History(settings.pool_duplicates)
    steps = []
    for iteration in range(1 - settings.warm_up, settings.iterations + 1):
        parameters, error = None, None
        if iteration < 1:
            parameters = problem.space.draw(np.random.default_rng(seed_of(settings.seed, "warm-up", iteration)))
        else:
            messages = prompt_of(problem.space, history, settings, iteration, optimum, description)
            parameters, error = _ask(problem.space, proposer, settings, messages, history, iteration, log)
        returns, is_repeat = None, parameters in history if parameters is not None else False
        if parameters is not None:
            record = log.rollout(iteration)
            if record is None:
                seed = seed_of(settings.seed, "episodes", iteration)
                returns = problem.returns(parameters, settings.episodes, seed)
                values = {"kind": "rollout", "iteration": iteration, "parameters": list(parameters), "returns": returns}
                record = log.append(values)
            elif record["parameters"] != list(parameters) or len(record["returns"]) != settings.episodes:
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
    space: PolicySpace,
    history: History,
    settings: SearchSettings,
    iteration: int,
    optimum: float | None,
    description: str | None,
) -> Messages:
    """The prompt of one iteration from the history so far."""
    return search_messages(
        space,
        [
            tried_text(space, t.parameters, t.mean, t.standard_error if settings.pool_duplicates else None)
            for t in history.shown(settings)
        ],
        history=settings.history,
        is_pooled=settings.pool_duplicates,
        episodes=settings.episodes,
        iteration=iteration,
        iterations=settings.iterations,
        optimum=optimum,
        description=description,
        ask_reason=settings.ask_reason,
    )


def longest_prompt(
    space: PolicySpace, settings: SearchSettings, optimum: float | None, description: str | None, answer: str
) -> Messages:
    """About the longest prompt of this search, with a correction of `answer`."""
    policies = settings.warm_up + settings.iterations
    if settings.history == "best_and_recent":
        policies = min(policies, settings.history_best + settings.history_recent)
    history = History(pool_duplicates=False)
    for i in range(policies):
        # From the best to the worst, so that the best are not also the latest
        history.add(i, (space.lowest,) * space.count, [-1000.0 - i, -1001.1 - i])
    messages = prompt_of(space, history, settings, settings.iterations, optimum, description)
    error = "value 100 is 'x', expected a number"
    return corrected_messages(messages, answer, error, space, settings.ask_reason)


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
        elif record["prompt"] != prompt or not _is_as_read(space, record):
            raise _other_run(log, iteration)
        if record["parameters"] is not None:
            return tuple(record["parameters"]), None
        error = record["error"]
        # Only the last failure is shown: all of them would fill the context.
        prompt = corrected_messages(messages, record["answer"], str(error), space, settings.ask_reason)
    return None, error


def _is_as_read(space: PolicySpace, record: dict) -> bool:
    """Whether a recorded answer names the parameters that are recorded with it."""
    parameters, _ = _read(space, Answer(record["answer"]))
    return record["parameters"] == (None if parameters is None else list(parameters))


def _read(space: PolicySpace, answer: Answer) -> tuple[Parameters | None, str | None]:
    try:
        return space.read_answer(answer.text), None
    except AnswerError as error:
        cut = f"{CUT}{answer.tokens_out} tokens)" if answer.is_cut else ""
        return None, f"{error}{cut}"


def _other_run(log: AnswerLog, iteration: int) -> InputError:
    return InputError(
        f"{log.path}: iteration {iteration} was recorded by another run (other settings, or another version); "
        "choose another --output_dir, or delete this one"
    )
