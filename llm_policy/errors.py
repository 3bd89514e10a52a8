"""One kind of error for what a user gave: a line with the file, the value and the remedy, and exit code 2."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from llm_policy.startup import (
    EXIT_INPUT_ERROR,
    EXIT_INTERRUPTED,
    OutputError,
    guard_streams,
    interrupts_raise,
    process_count,
    process_index,
)

OPTION_ERRORS = (AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError)
# What a disk that refuses says, through torch and safetensors, too
DISK_WORDS = (
    "No space left", "Disk quota exceeded", "Read-only file system", "PytorchStreamWriter failed writing",
    "inline_container.cc",
)  # fmt: skip
MAIN_SPEAKS_FIRST_SECONDS = 10
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # torch and safetensors wrap a full disk in their own


class InputError(Exception):
    """What the user gave cannot be used. The message is one line: where, what was found, what was expected."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).splitlines()))


def check_alone() -> None:
    """`InputError` where a launcher started several processes: all of them would do the same and write the same."""
    if (count := process_count()) > 1:
        raise InputError(f"{count} processes: this script runs in one; start it without torchrun or llm_policy.launch")


def check_choices(arguments: object, choices: Mapping[str, Collection[str]]) -> None:
    """`InputError` for the first field of `arguments` whose value is none of those allowed for it."""
    for name, allowed in choices.items():
        if getattr(arguments, name) not in allowed:
            raise InputError(f"--{name} {getattr(arguments, name)!r}: expected one of {', '.join(allowed)}")


def disk_refuses(error: BaseException | None) -> bool:
    """Whether a library's error means a full or read-only disk."""
    return any(words in str(error) for words in DISK_WORDS)


@contextmanager
def writing(path: str | Path, remedy: str) -> Iterator[None]:
    """Around the write of `path`: one line where that fails (full, read-only, no permission), then `remedy`."""
    try:
        yield
    except WRITE_ERRORS as error:
        if isinstance(error, RuntimeError) and not disk_refuses(error):
            raise  # out of GPU memory, say
        raise InputError(f"{path}: cannot be written ({' '.join(str(error).split())}); {remedy}") from error


@contextmanager
def library_errors(what: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Around a library's own check of options: one line, `what` and the library's words."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def packages_of(extra: str) -> Iterator[None]:
    """Around imports that need `extra`, a requirements file: one line where a package is missing."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"a package is missing ({error}); pip install -r {extra}") from error


@contextmanager
def disk_errors(remedy: str) -> Iterator[None]:
    """Around a whole run: one line for a disk that refuses, whatever was being written; all other errors pass.

    TensorBoard writes in a thread of its own, whose traceback would stand before that line.
    """
    usual = threading.excepthook
    threading.excepthook = lambda failed: None if disk_refuses(failed.exc_value) else usual(failed)
    try:
        yield
    except WRITE_ERRORS as error:
        if not disk_refuses(error):
            raise
        raise InputError(f"the disk refuses ({error}); {remedy}") from error
    finally:
        threading.excepthook = usual


def ended_by(number: int) -> str:
    """Words for a process that a signal ended.

    >>> ended_by(signal.SIGKILL)
    'was ended by SIGKILL, mostly for want of memory'
    """
    why = ", mostly for want of memory" if number == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(number).name}{why}"


def _say_error(words: str) -> None:
    """On standard error. A process beside the main one waits until that one would have ended with the same error."""
    number = process_index()
    if number > 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_INPUT_ERROR))  # the launcher's, when the main one ends
        time.sleep(MAIN_SPEAKS_FIRST_SECONDS)
    print(f"error: {f'process {number}: ' if number else ''}{words}", file=sys.stderr)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit: its return value as exit code, an `InputError` as one line and code 2.

    Ctrl-C where nothing else takes it is one line and `EXIT_INTERRUPTED`; so is standard output that takes no more
    (`| head`, a full disk), with code 2.
    """
    guard_streams()
    code: int | str | None
    try:
        interrupts_raise()
        try:
            code = main()
        except SystemExit as leaving:  # of --help, say, which has printed
            code = leaving.code
        sys.stdout.flush()
    except (InputError, OutputError) as error:
        _say_error(str(error))
        code = EXIT_INPUT_ERROR
    except KeyboardInterrupt:
        if process_index() == 0:
            print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    else:
        if process_count() == 1 or not code:
            sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OutputError):
            stream.flush()
    if process_count() > 1:
        os._exit(code if isinstance(code, int) else 1)  # at once: see `processes.one_of_several`
    sys.exit(code)
