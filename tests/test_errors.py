"""How a script ends: its code, and one line at most for what a user gave or did."""

import os
import signal
import subprocess
import sys
import time

import pytest

from llm_policy.errors import InputError, run_script
from llm_policy.run_files import ROOT


def leave(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving:
        run_script(main)
    return leaving.value.code, capsys.readouterr().err


def raises(error: BaseException):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("a.csv: no such file"), 2, "error: a.csv: no such file\n"),
        (InputError("a\nb: of\r\nseveral lines"), 2, "error: a b: of several lines\n"),
        (KeyboardInterrupt(), 75, "interrupted\n"),
    ],
)
def test_one_line_and_a_code(error, code, line, capsys):
    assert leave(raises(error), capsys) == (code, line)


def test_what_main_returns_is_the_code(capsys):
    assert leave(lambda: 75, capsys) == (75, "")
    assert leave(lambda: None, capsys) == (None, "")


def test_errors_of_our_own_keep_their_traceback():
    with pytest.raises(FileNotFoundError):
        run_script(raises(FileNotFoundError(2, "No such file", "x")))


PRINTS = "from llm_policy.errors import run_script; run_script(lambda: print('\\u2500 \\u00e9 ' * 100000))"


ON_A_DISK = (
    "from llm_policy.errors import disk_errors, run_script; run_script(disk_errors('free space')(lambda: print(1)))"
)
HELP = "from llm_policy.errors import run_script; run_script(lambda: (print(1), exit(0)))"
INPUT_ERROR = "from llm_policy import errors; errors.run_script(lambda: errors.check_choices(errors, {'sys': ()}))"
ANNOUNCED = "from llm_policy.startup import announce; announce('__main__', 'all'); "
TROUBLES = [
    # program, redirection, code, what standard error says
    (ON_A_DISK, ">/dev/full", 2, "error: standard output takes no more (No space left on device)\n"),
    (HELP, ">/dev/full", 2, "error: standard output takes no more (No space left on device)\n"),
    (PRINTS, ">&-", 2, "error: standard output is closed; send it to a file, or to /dev/null\n"),
    (ANNOUNCED, ">&-", 2, "error: standard output is closed; send it to a file, or to /dev/null\n"),
    (ANNOUNCED + PRINTS, "2>&-", 0, ""),
    (ANNOUNCED + PRINTS, "2>/dev/full", 0, ""),
    (ANNOUNCED + INPUT_ERROR, "2>/dev/full", 2, ""),
    (ANNOUNCED + INPUT_ERROR, ">/dev/full 2>&1", 2, ""),
]


@pytest.mark.parametrize(("program", "redirection", "code", "line"), TROUBLES)
def test_streams_that_are_closed_or_full(program, redirection, code, line):
    call = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program]
    found = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (code, line)


def test_unbuffered_streams_keep_nothing_back():
    program = "import sys, time\nsys.stderr.write('bar')\nsys.stdout.write('half a line')\ntime.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", ANNOUNCED + program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    found = child.stdout.read(11), child.stderr.read(len("-c: loading all ...\nbar"))
    assert child.poll() is None, "what was kept back comes when a process ends"
    child.kill()
    child.communicate()
    assert found == (b"half a line", b"-c: loading all ...\nbar")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_a_script_is_being_imported(number):
    """A package may take a KeyboardInterrupt for its own failure."""
    program = "import time\ntry: time.sleep(20)\nexcept BaseException: print('swallowed')"
    child = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCED + "\n" + program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stderr.readline() == "-c: loading all ...\n"
    time.sleep(0.1)
    child.send_signal(number)
    assert child.communicate(timeout=10) == ("", "interrupted\n")
    assert child.returncode == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_a_script_is_at_work(number):
    """Before a training run has its own handlers, and in every other script."""
    work = "lambda: (print(1, flush=True), time.sleep(20))"
    program = f"import time\nfrom llm_policy.errors import run_script\nrun_script({work})"
    child = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCED + "\n" + program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stdout.readline() == "1\n"
    time.sleep(0.1)  # in the middle of a write the line would come twice
    child.send_signal(number)
    assert child.communicate(timeout=10) == ("", "-c: loading all ...\ninterrupted\n")
    assert child.returncode == 75


FAILS_IN_A_THREAD = """
import threading
from llm_policy.errors import disk_errors

def fail(words):
    raise OSError(words)

with disk_errors("free space"):
    for words in ("No space left on device", "something else"):
        thread = threading.Thread(target=fail, args=(words,))
        thread.start()
        thread.join()
"""


def test_a_thread_that_meets_a_full_disk_leaves_the_word_to_the_main_one():
    """TensorBoard's writer put its traceback before the line."""
    found = subprocess.run([sys.executable, "-c", FAILS_IN_A_THREAD], cwd=ROOT, capture_output=True, text=True)
    assert "No space left" not in found.stderr
    assert found.stderr.splitlines()[-1] == "OSError: something else"


@pytest.mark.parametrize("output", ["closed", "/dev/full"])
def test_output_that_takes_no_more(output):
    """As under `| head` and on a full disk."""
    reading, writing = os.pipe()
    os.close(reading)
    target = writing if output == "closed" else os.open(output, os.O_WRONLY)
    found = subprocess.run([sys.executable, "-c", PRINTS], cwd=ROOT, stdout=target, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 2
    assert found.stderr.startswith("error: standard output takes no more (")
    assert len(found.stderr.splitlines()) == 1


def test_a_terminal_without_a_letter_gets_its_number():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    found = subprocess.run([sys.executable, "-c", PRINTS], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(r"\u2500 \xe9 ")
