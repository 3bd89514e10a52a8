"""What ends a run, and what does not."""

import os
import signal

from llm_policy.interruption import Interruption


def test_a_shells_ctrl_c_does_not_reach_what_was_put_aside():
    """A shell starts `command &` of a script with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = Interruption("the step")
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.received is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == "SIGTERM"
