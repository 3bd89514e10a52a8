"""train_script.sh on no cluster: stubs stand for python and scontrol and note what they are asked for."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from llm_policy.models import ROOT

# Runs until a signal comes and leaves as train_script.py does
PYTHON = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then
  if [[ -n "${SLOW:-}" ]]; then touch importing; exec sleep 20; fi
  exit 0
fi
trap 'exit 75' USR1 TERM
echo "$@" >arguments.partial && mv arguments.partial arguments
for _ in {1..200}; do sleep 0.05; done
"""
SCONTROL = '#!/usr/bin/env bash\nif [[ $1 == show ]]; then echo node-a; else echo "$@" >>requeued; fi\n'
SRUN = '#!/usr/bin/env bash\necho "$1 $2" >asked\nshift 2\nexec "$@"\n'


SLURM = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_JOB_NAME": "job"}


def batch_job(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    """The batch file at work in `folder`; `environment` is SLURM's, none for a call without it."""
    for name, text in (("python", PYTHON), ("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copy(ROOT / "train_script.sh", folder)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        ["bash", folder / "train_script.sh", *arguments],
        env=inherited | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        # As from a terminal: where the tests run in the background, Ctrl-C is ignored, and bash cannot trap that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def arguments_of_training(folder: Path) -> list[str]:
    """What train_script.py is called with, once the stub has started."""
    for _ in range(400):
        if (folder / "arguments").exists():
            break
        time.sleep(0.05)
    return (folder / "arguments").read_text().split()


@pytest.mark.parametrize(
    ("received", "restarts", "requeues"),
    # near the time limit; cancelled; near the limit for the twenty-first time
    [(signal.SIGUSR1, "0", True), (signal.SIGTERM, "0", False), (signal.SIGUSR1, "20", False)],
)
def test_only_the_time_limit_requeues(received, restarts, requeues, tmp_path):
    slurm = SLURM | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": restarts}
    job = batch_job(tmp_path, "--max_steps", "2", **slurm)
    assert arguments_of_training(tmp_path) == [
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


def test_slurm_starts_the_copy_in_its_spool_folder(tmp_path):
    """SLURM copies the file elsewhere; the work is done where `sbatch` was called."""
    (tmp_path / "submitted").mkdir()
    job = batch_job(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path / "submitted"), **SLURM)
    assert arguments_of_training(tmp_path / "submitted")[:4] == ["train_script.py", "--seed", "0", "--output_dir"]
    job.terminate()
    job.communicate(timeout=20)


def test_an_allocation_works_where_the_file_lies_in_a_folder_of_its_own(tmp_path):
    """`salloc` says where it was called, and its jobs are no array."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train_script.py").touch()
    job = batch_job(
        tmp_path, SLURM_JOB_ID="77", SLURM_JOB_NAME="interactive", SLURM_SUBMIT_DIR=str(tmp_path / "elsewhere")
    )
    assert arguments_of_training(tmp_path)[:5] == [
        "train_script.py", "--seed", "0", "--output_dir", "runs/interactive-77/seed-0",
    ]  # fmt: skip
    job.terminate()
    job.communicate(timeout=20)


PROCESSES = {
    # name: what SLURM says of the job, how the processes are started, what srun is asked for
    "two GPUs": ({"SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS": "1"}, "--nproc_per_node 2", None),
    "two nodes of four GPUs": (
        {"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"},
        "--nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint node-a:20007",
        "--ntasks=2 --cpus-per-task=8",
    ),
    "two tasks without GPUs": (
        {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node-a"},
        "--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint node-a:20007",
        "--ntasks=2 --cpus-per-task=8",
    ),
}


@pytest.mark.parametrize(("given", "started", "asked"), PROCESSES.values(), ids=PROCESSES)
def test_a_process_for_every_gpu_and_task(given, started, asked, tmp_path):
    job = batch_job(tmp_path, **SLURM, **given, SLURM_CPUS_PER_TASK="8")
    found = arguments_of_training(tmp_path)
    assert found[: found.index("--seed")] == ["-m", "llm_policy.launch", *started.split(), "train_script.py"]
    time.sleep(0.3)  # the shell has set its traps by then
    job.send_signal(signal.SIGUSR1)
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == 75, printed
    assert ((tmp_path / "asked").read_text().strip() if asked else None) == asked


def test_several_tasks_of_a_node_with_gpus_are_refused(tmp_path):
    """Each would start a process for every GPU."""
    job = batch_job(tmp_path, **SLURM, SLURM_GPUS_ON_NODE="4", SLURM_NTASKS_PER_NODE="4", SLURM_NTASKS="4")
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == 2
    assert printed.startswith("error: 4 tasks on 1 nodes: one task of a node starts a process for each GPU")
    allocation = {"SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "4"}  # salloc -n 4
    job = batch_job(tmp_path, **SLURM, **allocation)
    job.communicate(timeout=20)
    assert job.returncode == 2


@pytest.mark.parametrize("argument", ["--seed", "--seed=1", "--output_dir", "--output_dir=runs/x", "--output-dir"])
def test_seed_and_folder_are_the_arrays(argument, tmp_path):
    job = batch_job(tmp_path, argument, "1", **SLURM)
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == 2
    assert printed.startswith(f"error: {argument}: the array's index is the seed")
    assert not (tmp_path / "arguments").exists()


# Without SLURM ----------------------------------------------------------------------------------------------------


def local_job(folder: Path, *arguments: str, leave_with: int = signal.SIGTERM) -> tuple[list[str], str]:
    """train_script.py's arguments and what is printed, of a call that is interrupted once training has started."""
    (folder / "arguments").unlink(missing_ok=True)
    job = batch_job(folder, *arguments)
    found = arguments_of_training(folder)
    time.sleep(0.3)  # the shell has set its traps by then
    job.send_signal(leave_with)
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == 75, printed
    return found, printed


def test_without_slurm_the_same_arguments_get_the_same_folder(tmp_path):
    def folder(*arguments: str) -> str:
        found, printed = local_job(tmp_path, *arguments)
        assert found[:4] == ["train_script.py", "--seed", "0", "--output_dir"]
        assert found[5:] == ["--resume_from_checkpoint", "auto", *arguments]
        assert f"folder {found[4]}\n" in printed
        return found[4]

    plain, short = folder(), folder("--max_steps", "2")
    assert re.fullmatch(r"runs/local-[0-9a-f]{8}/seed-0", plain)
    assert folder() == plain
    assert folder("--max_steps", "2") == short
    assert len({plain, short, folder("--max_steps", "20"), folder("--max_steps=2")}) == 4


@pytest.mark.parametrize("arguments", [["--output_dir", "runs/x"], ["--output_dir=runs/x"], ["--output-dir", "runs/x"]])
def test_without_slurm_the_folder_can_be_named(arguments, tmp_path):
    found, printed = local_job(tmp_path, "--max_steps", "2", *arguments)
    assert found == [
        "train_script.py",
        "--seed",
        "0",
        "--resume_from_checkpoint",
        "auto",
        "--max_steps",
        "2",
        *arguments,
    ]
    assert "folder runs/local" not in printed


def test_without_slurm_the_seed_is_still_refused(tmp_path):
    job = batch_job(tmp_path, "--seed", "1")
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == 2
    assert "python train_script.py takes the option" in printed


def test_control_c_waits_for_the_checkpoint(tmp_path):
    local_job(tmp_path, leave_with=signal.SIGINT)


def test_control_c_while_the_versions_are_being_imported(tmp_path):
    """To the whole group, as from a terminal."""
    job = batch_job(tmp_path, SLOW="1")
    while not (tmp_path / "importing").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(job.pid, signal.SIGINT)
    printed, _ = job.communicate(timeout=10)
    assert (job.returncode, printed.splitlines()[-1]) == (75, "interrupted")
    assert not (tmp_path / "arguments").exists()
