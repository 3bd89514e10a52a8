"""The first moments of a script, before the heavy imports: PyTorch, Transformers and TRL take 10 seconds or 50.

This module must stay free of such imports.
"""

import io
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

EXIT_INPUT_ERROR = 2
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
SIGNALS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
}


class OutputError(Exception):
    """Standard output takes no more. No `OSError`, so that nobody on its way takes it for another file's."""


class _Stream(io.FileIO):
    """Standard output or standard error: from the first failing write on, what is left goes nowhere."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.fileno() == 1:
                raise OutputError(f"standard output takes no more ({error.strerror})") from error
            return len(data)  # there is no other place to say it


def process_index() -> int:
    """This process's number among those that torchrun or a like launcher started; 0, the main one, where none did."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def process_count() -> int:
    """How many such a launcher started; 1 where none did."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else 1


def announce(module_name: str, what: str = "PyTorch, Transformers and TRL") -> None:
    """`prepare`, and say on standard error what is being loaded, if `module_name` is the script that was called.

    Scripts call it before they import anything that takes time.
    """
    prepare(module_name)
    if module_name == "__main__" and process_index() == 0:
        print(f"{Path(sys.argv[0]).name}: loading {what} ...", file=sys.stderr, flush=True)


def prepare(module_name: str) -> None:
    """For the script that was called: `guard_streams`, and a signal to leave is one line and a code.

    Of several processes the main one alone speaks; the others keep standard error for what they alone know.
    """
    if module_name == "__main__":
        guard_streams()
        if process_index() > 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of weights that are loaded, too
        for number, usual in SIGNALS.items():
            if signal.getsignal(number) is usual:  # else it is ignored, as in the background of a shell
                signal.signal(number, _leave)


def _leave(*_) -> None:
    """At once: a KeyboardInterrupt would be taken for a failed import by some packages."""
    if process_index() == 0:
        with suppress(OSError):
            os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def say_at_once(text: str) -> None:
    """A line on standard output, past its buffer: a signal's handler may have interrupted a write to that."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="backslashreplace"))


def interrupts_raise() -> None:
    """Ctrl-C is a KeyboardInterrupt again. Other signals stay one line and a code until a script takes them."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def guard_streams() -> None:
    """Standard output and error that are closed, full, or lack a letter of a path end in no traceback.

    Leaves with one line and code 2 where standard output is closed: a file opened later would take its place.
    """
    is_closed = [_is_closed(number) for number in range(3)]
    for _ in filter(None, is_closed):
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, the stream's
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        is_plain = stream is getattr(sys, f"__{name}__") and not isinstance(getattr(stream, "buffer", None), _Buffer)
        if is_plain:  # else a test or a notebook has put its own there
            setattr(sys, name, _guarded(number, stream))
    if is_closed[1]:
        print("error: standard output is closed; send it to a file, or to /dev/null", file=sys.stderr)
        sys.exit(EXIT_INPUT_ERROR)


class _Buffer(io.BufferedWriter):
    """Over a `_Stream`, by which a stream that is guarded already is known. With `python -u` it keeps nothing back."""

    keeps = True

    def write(self, data) -> int:
        written = super().write(data)
        if not self.keeps:
            self.flush()
        return written


def _guarded(number: int, stream: io.TextIOWrapper | None) -> io.TextIOWrapper:
    options: dict[str, Any] = {"encoding": "utf-8"}
    if stream is not None:
        stream.flush()
        options = {name: getattr(stream, name) for name in ("encoding", "line_buffering", "write_through")}
    buffer = _Buffer(_Stream(number, "w", closefd=False))
    buffer.keeps = not options.get("write_through")
    return io.TextIOWrapper(buffer, errors="backslashreplace", **options)


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False
