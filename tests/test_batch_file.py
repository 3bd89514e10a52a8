"""train_script.sh without SLURM: a stub in the place of python, and one that notes what scontrol is asked for."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llm_policy.models import ROOT

# Runs until a signal comes and leaves as train_script.py does
PYTHON = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then exit 0; fi
trap 'exit 75' USR1 TERM
echo "$@" >arguments.partial && mv arguments.partial arguments
for _ in {1..200}; do sleep 0.05; done
"""
SCONTROL = '#!/usr/bin/env bash\necho "$@" >>requeued\n'


def batch_job(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    for name, text in (("python", PYTHON), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_JOB_NAME": "job"}
    return subprocess.Popen(
        ["bash", ROOT / "train_script.sh", *arguments],
        env=os.environ | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("received", "restarts", "requeues"),
    # near the time limit; cancelled; near the limit for the twenty-first time
    [(signal.SIGUSR1, "0", True), (signal.SIGTERM, "0", False), (signal.SIGUSR1, "20", False)],
)
def test_only_the_time_limit_requeues(received, restarts, requeues, tmp_path):
    job = batch_job(tmp_path, "--max_steps", "2", SLURM_ARRAY_TASK_ID="3", SLURM_RESTART_COUNT=restarts)
    for _ in range(400):
        if (tmp_path / "arguments").exists():
            break
        time.sleep(0.05)
    assert (tmp_path / "arguments").read_text().split() == [
        "train_script.py", "--seed", "3", "--output_dir", "runs/job-5/seed-3", "--resume_from_checkpoint", "auto",
        "--max_steps", "2",
    ]  # fmt: skip
    time.sleep(0.3)  # the shell has set its traps by then
    job.send_signal(received)
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == 75, printed
    asked = tmp_path / "requeued"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if requeues else "")
    assert ("ask for more --time" in printed) is (restarts == "20")


@pytest.mark.parametrize("argument", ["--seed", "--output_dir=runs/x", "--output-dir"])
def test_seed_and_folder_are_the_arrays(argument, tmp_path):
    job = batch_job(tmp_path, argument, "1")
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == 2
    assert printed.startswith(f"error: {argument}: the array's index is the seed")
    assert not (tmp_path / "arguments").exists()
