"""A run that is told to end: it finishes what is under way, writes a checkpoint, and says what goes on with it."""

import signal
from typing import NoReturn

from llm_policy.errors import EXIT_INTERRUPTED
from llm_policy.startup import say_at_once

RESUME = "--resume_from_checkpoint auto"


class Interruption:
    """SIGTERM, SIGUSR1 or Ctrl-C: finish a part, write a checkpoint, leave with `EXIT_INTERRUPTED`.

    A second Ctrl-C does not wait. `leave_if_received` says where the run may leave. With `at_once` it leaves
    immediately, because what is under way is begun again by a resumed run.

    Args:
        part: what is finished before the checkpoint, "the step".
    """

    def __init__(self, part: str) -> None:
        self.received: str | None = None  # the signal's name
        self.at_once = False
        self.part = part
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's Ctrl-C is not for what it put aside with &
                signal.signal(number, self._receive)

    def _receive(self, number, _frame) -> None:
        if number == signal.SIGINT and self.received:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if self.at_once:
            self.leave(f"leaving the evaluation; {RESUME} begins it again")
        say_at_once(f"{self.received}: finishing {self.part}, then a checkpoint")

    def leave(self, words: str) -> NoReturn:
        """SystemExit with `EXIT_INTERRUPTED`; `words` say what is left and what resumes it."""
        say_at_once(f"{self.received}: {words}")
        raise SystemExit(EXIT_INTERRUPTED)

    def received_anywhere(self) -> bool:
        """Whether a signal came, in whichever process of the run."""
        return self.received is not None

    def leave_if_received(self, words: str) -> None:
        if self.received_anywhere():
            self.leave(words)
