"""Runs programs that a model wrote. They are hostile until shown otherwise, and none runs in this process.

Each program gets a session of its own in a worker process of pydantic-monty, an interpreter without files, network or
imports of the host, with limits on time, memory, depth and output. A session is thrown away after its program.
"""

import datetime
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llm_policy.errors import InputError
from llm_policy.hardware import granted_threads

try:
    import pydantic_monty as monty
except ImportError:  # said when a sandbox is made
    monty = None

Grid = list[list[int]]
"""Rows of colors 0 to 9, 1 to 30 of either."""

COLORS, LONGEST_SIDE = 10, 30
LONGEST_CODE = 20_000  # characters
PRINTED = 64 << 10  # bytes
LIMITS = {
    "max_feed_duration_secs": 1.0,
    "max_memory": 64 << 20,
    "max_recursion_depth": 200,
    "max_suspensions": 100,  # questions to the host: names that are not there, sleep
}
# No clock and no chance from outside: the same program draws the same picture
POLICY = {"sleep": "zero", "datetime": datetime.datetime(2000, 1, 1), "random_start": {"seed": 0}}
MOST_WORKERS = 8
NAME = "task"
# What can go wrong, as the log counts it
PARSE, NO_FUNCTION, TIMEOUT, OUT_OF_MEMORY, RUNTIME, BAD_OUTPUT, CRASHED = ERRORS = (
    "parse", "no_function", "timeout", "memory", "runtime", "bad_output", "crashed",
)  # fmt: skip
UNREADABLE = (TypeError, ValueError, OverflowError, RecursionError)  # a set of pictures, say, which no host can build
FENCE = re.compile(r"`{3,}(?:[ \t]*(?:[a-zA-Z]\w*)?[ \t]*\n)?")
DEFINITIONS = (re.compile(rf"^[ \t]*def {NAME}\b", re.MULTILINE), re.compile(r"^[ \t]*def ", re.MULTILINE))
FUNCTIONS = (Path(__file__).parent / "functions.py").read_text()


@dataclass(frozen=True)
class Outcome:
    """What a program drew, or why nothing came of it."""

    grid: Grid | None
    error: str = ""  # one of ERRORS
    message: str = ""


def code_of(completion: str) -> str:
    """The program in a reply: what stands in its fence, or all of a reply without one.

    Of what stands before, in and behind fences, the first part that defines `task`, else any function, where one does.

    >>> code_of("def task(img):\\n    return img\\n```\\nThis does it.")
    'def task(img):\\n    return img\\n'
    >>> code_of("Sure!\\n```python\\ndef task(img): pass\\n```")
    'def task(img): pass\\n'
    """
    before, *rest = FENCE.split(completion)
    defining = (part for definition in DEFINITIONS for part in (before, *rest) if definition.search(part))
    return next(defining, rest[0] if rest else before)


class Sandbox:
    """Runs programs in worker processes, which begin with the first program and end with this process or `close`.

    Args:
        workers: so many at most; None: one for each core.
    """

    def __init__(self, workers: int | None = None) -> None:
        if monty is None:
            raise InputError(
                "--task drawing: the package pydantic-monty is missing, without which no program is run; "
                "pip install -r requirements-drawing.txt"
            )
        self.workers = workers or min(granted_threads() or os.cpu_count() or 1, MOST_WORKERS)
        self._pool = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.__exit__(None, None, None)
            self._pool = None

    def run_all(self, codes: Sequence[str], given: Grid) -> list[Outcome]:
        """What each program makes of `given`, in their order.

        The number of workers shows in programs near the limit of time alone.
        """
        distinct = list(dict.fromkeys(codes))
        if self._pool is None:
            self._pool = monty.Monty(max_processes=self.workers).__enter__()
        with ThreadPoolExecutor(self.workers) as threads:
            outcomes = dict(zip(distinct, threads.map(lambda code: self._run(code, given), distinct), strict=True))
        return [outcomes[code] for code in codes]

    def _run(self, code: str, given: Grid) -> Outcome:
        if len(code) > LONGEST_CODE:
            return Outcome(None, PARSE, f"{len(code)} characters, {LONGEST_CODE} is the most")
        outcome = self._tried(code, given)
        # Ctrl-C in a terminal reaches the workers, too, and is no program's fault
        return self._tried(code, given) if outcome.error == CRASHED else outcome

    def _tried(self, code: str, given: Grid) -> Outcome:
        try:
            with self._pool.checkout(limits=LIMITS, os_policy=POLICY) as session:
                return _drawn(session, code, given)
        except monty.MontyError as error:
            return _failed(error)


def _drawn(session, code: str, given: Grid) -> Outcome:
    printed = monty.CollectString(max_bytes=PRINTED)
    session.feed_run(FUNCTIONS)
    with suppress(*UNREADABLE):  # of its last value, which nobody asks for
        session.feed_run(code, print_callback=printed)
    try:
        is_there = session.feed_run(f"type({NAME}) is type(lambda: 0)", print_callback=printed) is True
    except monty.MontyError as error:
        if _failed(error).error != RUNTIME:
            raise
        is_there = False
    if not is_there:
        return Outcome(None, NO_FUNCTION, f"no function {NAME}")
    try:
        drawn = session.feed_run(f"{NAME}(Img(given))", inputs={"given": given}, print_callback=printed)
    except UNREADABLE as error:
        return Outcome(None, BAD_OUTPUT, f"what it returns cannot be read: {error}")
    rows = drawn.attributes.get("rows") if isinstance(drawn, monty.MontyClassProxy) else drawn
    if problem := grid_problem(rows):
        return Outcome(None, BAD_OUTPUT, problem)
    return Outcome([list(row) for row in rows])


def grid_problem(rows: object) -> str:
    """Why `rows` is no `Grid`; empty if it is one."""
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, list | tuple) for row in rows):
        return f"{type(rows).__name__}, expected rows of colors"
    if not 1 <= len(rows) <= LONGEST_SIDE or not 1 <= len(rows[0]) <= LONGEST_SIDE:
        return f"{len(rows)} rows of {len(rows[0])}, expected 1 to {LONGEST_SIDE} of either"
    if any(len(row) != len(rows[0]) for row in rows):
        return "rows of several lengths"
    if bad := [color for row in rows for color in row if type(color) is not int or not 0 <= color < COLORS]:
        return f"color {_shown(bad[0])}, expected 0 to {COLORS - 1}"
    return ""


def _shown(color: object) -> str:
    if type(color) in (bool, float) or (type(color) is int and abs(color) < 10**9):
        return repr(color)
    return f"of type {type(color).__name__}"  # a nested list may be longer than memory, written out


def _failed(error: Exception) -> Outcome:
    message = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, monty.MontySyntaxError):
        return Outcome(None, PARSE, message)
    if isinstance(error, monty.MontyCrashedError):
        return Outcome(None, TIMEOUT if error.timed_out else CRASHED, message)
    kinds = {"TimeoutError": TIMEOUT, "MemoryError": OUT_OF_MEMORY}
    return Outcome(None, kinds.get(message.partition(":")[0], RUNTIME), message)
