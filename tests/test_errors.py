"""How a script ends: its code, and one line at most for what a user gave or did."""

import os
import subprocess
import sys

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
