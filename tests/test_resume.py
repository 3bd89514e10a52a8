"""A run that was stopped and resumed, at whatever moment, ends as one that never was: adapter, log and verdict.

The runs are forked children of the test, for a process of their own costs six seconds of imports.
"""

import dataclasses
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import at_call, forked
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_train_script import metrics_of, small_run
from transformers import Trainer, TrainerState
from trl import GRPOConfig

import evaluate_policy
import llm_policy.checkpoints
import llm_policy.grpo.warm_start
import tasks.tabular_judge
import train_script
from llm_policy.checkpoints import check_finished, checkpoint_to_resume_from, latest_checkpoint
from llm_policy.environments import expert_q
from llm_policy.errors import DISK_WORDS, EXIT_INPUT_ERROR, EXIT_INTERRUPTED, InputError
from llm_policy.grpo import lifecycle, stages
from llm_policy.grpo.diagnostics import MetricsFile
from llm_policy.run_files import ROOT
from tasks.tabular_judge import TableJudge

KILLED = -signal.SIGKILL
TIMEOUT_SECONDS = 120

NO_PICTURES = ("--report_to", "none")  # TensorBoard's take a while
# Names of runs: further arguments. 11 states: five batches of two prompts per epoch, or two batches of four.
SETTINGS = {
    "plain": ("--max_steps", 4, "--save_steps", 2, "--evaluate_steps", 0, "--save_total_limit", 2),
    # The checkpoints of steps 1 and 3 fall in the middle of an epoch
    "accumulated": ("--max_steps", 3, "--save_steps", 1, "--gradient_accumulation_steps", 2, "--evaluate_steps", 0),
    # Each batch of completions serves two steps
    "reused": ("--max_steps", 4, "--save_steps", 2, "--num_iterations", 2, "--evaluate_steps", 0),
    # Stops by itself at step 2: `pretend_optimal` says that it is there
    "stopped": ("--max_steps", 6, "--save_steps", 1, "--evaluate_steps", 1, "--stop_when", "optimal"),
    # The warm start only where it is needed, as the configurations have it: here it is
    "auto": (
        *("--max_steps", 2, "--save_steps", 1, "--evaluate_steps", 0),
        *("--warm_start", "auto", "--warm_start_threshold", 1),
    ),
    # TRL's own pass with a reference model and a rate that falls
    "stock": (
        *("--max_steps", 2, "--save_steps", 1, "--objective", "grpo", "--packed", "false", "--beta", 0.1),
        *("--lr_scheduler_type", "cosine", "--evaluate_steps", 0),
    ),
}


def run(arguments: list[str], log: Path, sabotage: Callable[[], None] = lambda: None) -> int:
    """`train_script.py` with `arguments` in a forked child in which `sabotage` was called; its exit code."""
    # OpenMP's workers belong to the thread that began them and do not survive a fork: a new thread has none to wait for
    with ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(forked_run, arguments, log, sabotage).result()


def forked_run(arguments: list[str], log: Path, sabotage: Callable[[], None]) -> int:
    def before() -> None:
        sabotage()
        if "stopped" in log.name:
            pretend_optimal()
        if "auto" in log.name:
            pretend_half_well_formed()

    child = forked(lambda: train_script.main(arguments), log, before)
    for _ in range(TIMEOUT_SECONDS * 50):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"no end after {TIMEOUT_SECONDS} s:\n{log.read_text()}")


@pytest.fixture(scope="module")
def never_interrupted(answering_llama, tmp_path_factory):
    """Setting -> the folder of a run that nobody stopped; made once."""
    folder, made = tmp_path_factory.mktemp("never_interrupted"), {}
    # One run here, and the children inherit what it loaded; frozen, or each would copy all that it searches for garbage
    assert train_script.main(small_run(answering_llama, folder / "here", *NO_PICTURES, *SETTINGS["plain"])) == 0
    made["plain"] = folder / "here"
    gc.collect()
    gc.freeze()

    def get(setting: str) -> Path:
        if setting not in made:
            out, log = folder / setting, folder / f"{setting}.log"
            code = run(small_run(answering_llama, out, *NO_PICTURES, *SETTINGS[setting]), log)
            assert code == 0, log.read_text()
            made[setting] = out
        return made[setting]

    yield get
    gc.unfreeze()


def assert_same_end(out: Path, reference: Path) -> None:
    adapter, expected = (load_file(folder / "adapter_model.safetensors") for folder in (out, reference))
    assert adapter.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(adapter[name], expected[name])]
    assert not different
    lines, expected_lines = metrics_of(out), metrics_of(reference)
    assert [line["step"] for line in lines] == [line["step"] for line in expected_lines]
    for name in ("reward", "loss", "completions/mean_length", "policy/success_probability"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in expected_lines], name
    assert (out / "result.txt").read_text() == (reference / "result.txt").read_text()
    assert (out / "evaluation.json").read_text() == (reference / "evaluation.json").read_text()


# Sabotage: what is done to a child before it starts ------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at_step(step: int) -> Callable[[], None]:
    """Killed before the optimiser takes its step `step`; the warm start takes two."""
    return at_call(torch.optim.AdamW, "step", step, lambda *_: kill())


def killed_in_write(number: int) -> Callable[[], None]:
    """Killed with a file half written. A checkpoint calls torch.save four times: arguments, optimiser, rate, RNG."""

    def act(_, path):
        Path(path).write_bytes(b"half")
        kill()

    return at_call(torch, "save", number, act)


def killed_with_half(name: str) -> Callable[[], None]:
    """Killed before the file `name`, written under another name until it is whole, takes its own."""

    def sabotage() -> None:
        replace = Path.replace

        def killed(path, target):
            if Path(target).name == name:
                kill()
            return replace(path, target)

        Path.replace = killed

    return sabotage


def signalled_at_step(step: int, number: signal.Signals) -> Callable[[], None]:
    return at_call(torch.optim.AdamW, "step", step, lambda *_: os.kill(os.getpid(), number))


def signal_in(owner, name: str) -> Callable[[], None]:
    return at_call(owner, name, 1, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))


def pretend_optimal() -> None:
    score_policy = tasks.tabular_judge.score_policy
    tasks.tabular_judge.score_policy = lambda *arguments: dataclasses.replace(
        score_policy(*arguments), percent_of_optimal=100.0
    )


def pretend_half_well_formed() -> None:
    """How many samples of a tiny model are well-formed depends on the processor's rounding; here it is half of them."""
    llm_policy.grpo.warm_start.sampled_format_validity = lambda *_: 0.5


def disk_full(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


def disk_full_in_safetensors(*_) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def disk_full_in_torch(*_) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0")


# The tests -----------------------------------------------------------------------------------------------------

KILLS = [
    # setting, checkpoint that is whole afterwards (None: none), sabotage
    # Before anything was learnt: with the configuration half written, run.json, the untrained model's answers
    ("plain", None, killed_with_half("resolved_config.yaml")),
    ("plain", None, killed_with_half("run.json")),
    ("plain", None, at_call(TableJudge, "answers", 1, lambda *_: kill())),
    ("plain", None, killed_with_half("untrained.json")),
    # In the warm start, before the list of its files, and after it
    ("plain", None, killed_at_step(2)),
    ("plain", None, killed_with_half("COMPLETE")),
    ("plain", None, killed_at_step(2 + 1)),
    # Before the first checkpoint, right after it
    ("plain", None, killed_at_step(2 + 2)),
    ("plain", 2, killed_at_step(2 + 3)),
    # In the middle of a checkpoint, the second: its optimiser, RNG, trainer state
    ("plain", 2, killed_in_write(4 + 2)),
    ("plain", 2, killed_in_write(4 + 4)),
    ("plain", 2, at_call(TrainerState, "save_to_json", 2, lambda *_: kill())),
    # All is written but the mark
    ("plain", 2, at_call(llm_policy.checkpoints, "write_whole", 3, lambda *_: kill())),
    # After the last step: the adapter's two parts are not yet joined; they are, but nothing was judged
    ("plain", 4, at_call(PeftModel, "save_pretrained", 5, lambda *_: kill())),
    ("plain", 4, at_call(tasks.tabular_judge, "save_evaluation", 1, lambda *_: kill())),
    ("plain", 4, killed_with_half("result.txt")),
    # Judged, but evaluation.json, the mark of a finished run, is half written
    ("plain", 4, killed_with_half("evaluation.json")),
    # In the middle of an epoch and of an accumulation
    ("accumulated", 1, killed_at_step(2 + 2)),
    ("accumulated", 2, killed_in_write(2 * 4 + 3)),
    ("accumulated", 3, at_call(tasks.tabular_judge, "evaluate_policies", 1, lambda *_: kill())),
    # With completions that serve several steps
    ("reused", 2, killed_at_step(2 + 4)),
    # After the run has stopped by itself: it must not learn any further
    ("stopped", 1, killed_at_step(2 + 2)),
    ("stopped", 2, at_call(tasks.tabular_judge, "evaluate_policies", 1, lambda *_: kill())),
    ("auto", None, killed_at_step(2)),
    ("auto", None, killed_at_step(2 + 1)),
    ("auto", 1, killed_at_step(2 + 2)),
    ("stock", 1, killed_at_step(2 + 2)),
]


@pytest.mark.parametrize(("setting", "checkpoint", "sabotage"), KILLS)
def test_kill(setting, checkpoint, sabotage, never_interrupted, answering_llama, tmp_path):
    reference = never_interrupted(setting)
    out, log = tmp_path / "out", tmp_path / f"{setting}.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS[setting])
    assert run(arguments, log, sabotage) == KILLED
    whole = latest_checkpoint(out)
    assert (whole and whole.name) == (checkpoint and f"checkpoint-{checkpoint}")
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == 0, log.read_text()
    assert_same_end(out, reference)


def test_the_warm_start_that_is_taken_where_needed_takes_both_its_steps(never_interrupted):
    """What the kills of the setting `auto` rely on."""
    report = json.loads((never_interrupted("auto") / "warm_start/report.json").read_text())
    assert (report["steps"], report["format_validity"]) == (2, 0.5)


def test_many_kills_in_one_run(never_interrupted, answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "plain.log"
    arguments = [*small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"]), "--resume_from_checkpoint", "auto"]
    # In the warm start; after it; in the first checkpoint; after it; in the second checkpoint; in the last evaluation
    steps = (killed_at_step(1), killed_at_step(2 + 1), killed_in_write(3), killed_at_step(3), killed_in_write(2))
    for sabotage in (*steps, at_call(tasks.tabular_judge, "evaluate_policies", 1, lambda *_: kill())):
        assert run(arguments, log, sabotage) == KILLED
    assert run(arguments, log) == 0, log.read_text()
    assert_same_end(out, never_interrupted("plain"))


SIGNALS = [
    # setting, signal, optimiser step in which it comes, checkpoint that it leaves
    ("plain", signal.SIGTERM, 2 + 1, 1),
    ("plain", signal.SIGINT, 2 + 1, 1),
    ("plain", signal.SIGUSR1, 2 + 3, 3),
    # In the first of two steps on the same completions: the checkpoint waits for the second
    ("reused", signal.SIGUSR1, 2 + 1, 2),
    # In the warm start: begun again
    ("plain", signal.SIGTERM, 1, None),
]


@pytest.mark.parametrize(("setting", "number", "step", "checkpoint"), SIGNALS)
def test_signal(setting, number, step, checkpoint, never_interrupted, answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / f"{setting}.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS[setting])
    assert run(arguments, log, signalled_at_step(step, number)) == EXIT_INTERRUPTED, log.read_text()
    assert f"{number.name}: finishing the step, then a checkpoint" in log.read_text()
    whole = latest_checkpoint(out)
    assert (whole and whole.name) == (checkpoint and f"checkpoint-{checkpoint}")
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == 0, log.read_text()
    assert_same_end(out, never_interrupted(setting))


def test_signal_in_the_last_step_leaves_the_evaluation_to_the_resumed_run(never_interrupted, answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "plain.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"])
    assert run(arguments, log, signalled_at_step(2 + 4, signal.SIGTERM)) == EXIT_INTERRUPTED
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == 0, log.read_text()
    assert_same_end(out, never_interrupted("plain"))


def test_a_run_that_stops_by_itself_leaves_a_checkpoint_of_that_step(answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "stopped.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["stopped"], "--save_steps", 5)
    assert run(arguments, log, signal_in(tasks.tabular_judge, "evaluate_policies")) == EXIT_INTERRUPTED
    assert latest_checkpoint(out).name == "checkpoint-2"
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == 0, log.read_text()
    assert [line["step"] for line in metrics_of(out)] == [1, 2]


# Of the untrained model, of the trained
EVALUATIONS = [(TableJudge, "answers"), (tasks.tabular_judge, "evaluate_policies")]


@pytest.mark.parametrize(("owner", "name"), EVALUATIONS)
def test_signal_in_an_evaluation_leaves_at_once(owner, name, never_interrupted, answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "plain.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"])
    assert run(arguments, log, signal_in(owner, name)) == EXIT_INTERRUPTED
    assert "leaving the evaluation; --resume_from_checkpoint auto begins it again" in log.read_text()
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == 0, log.read_text()
    assert_same_end(out, never_interrupted("plain"))


def test_signal_to_the_real_command(answering_llama, tmp_path):
    out = tmp_path / "out"
    arguments = small_run(answering_llama, out, "--max_steps", 100_000, "--save_steps", 100_000, "--evaluate_steps", 0)
    process = subprocess.Popen(
        [sys.executable, "-u", "train_script.py", *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert any(line.startswith("step      2/100000") for line in process.stdout), process.stderr.read()
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == EXIT_INTERRUPTED
    step = latest_checkpoint(out).name.rpartition("-")[2]
    assert f"SIGTERM: checkpoint of step {step} written; --resume_from_checkpoint auto resumes from it" in printed


def test_what_may_change_on_the_way_and_what_may_not(answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"])
    assert run(arguments, log, killed_at_step(3)) == KILLED
    resumed = [*arguments, "--resume_from_checkpoint", "auto"]
    assert run([*resumed, "--beta", "0.5"], log) == EXIT_INPUT_ERROR
    assert "--beta 0.5: " in log.read_text()
    first = json.loads((out / "run.json").read_text())
    assert run([*resumed, "--max_steps", "4", "--save_steps", "1"], log) == 0, log.read_text()
    assert latest_checkpoint(out).name == "checkpoint-4"
    assert (out / "checkpoint-3").exists(), "the interval is the new one"
    second = json.loads((out / "run.json").read_text())
    assert len(second.pop("resumed")) == 1
    assert second == first, "the beginning keeps its command, commit and device"


def test_a_run_that_stopped_by_itself_resumes_where_it_is_told_to(answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["stopped"])
    assert run(arguments, log, pretend_optimal) == 0, log.read_text()
    assert [line["step"] for line in metrics_of(out)] == [1, 2]
    more = ("--resume_from_checkpoint", str(out / "checkpoint-2"), "--stop_when", "never", "--max_steps", 3)
    assert run([*arguments, *map(str, more)], log) == 0, log.read_text()
    assert [line["step"] for line in metrics_of(out)] == [1, 2, 3]


def test_a_checkpoint_of_another_run_is_refused(never_interrupted, answering_llama, tmp_path):
    other = never_interrupted("plain")
    arguments = small_run(answering_llama, tmp_path / "out", *NO_PICTURES, *SETTINGS["plain"])
    log = tmp_path / "log"
    assert run([*arguments, "--resume_from_checkpoint", str(other / "checkpoint-4")], log) == EXIT_INPUT_ERROR
    assert "belongs to another run than --output_dir" in log.read_text()


def test_resume_from_a_named_checkpoint(never_interrupted, answering_llama, tmp_path):
    """Not from the last one: what came after it is done again."""
    out, log = tmp_path / "out", tmp_path / "accumulated.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["accumulated"], "--save_total_limit", 10)
    assert run(arguments, log, killed_at_step(2 + 3)) == KILLED
    assert run([*arguments, "--resume_from_checkpoint", str(out / "checkpoint-1")], log) == 0, log.read_text()
    assert_same_end(out, never_interrupted("accumulated"))


DISKS = [
    # checkpoint that survives, where the disk is full
    # The second checkpoint's weights, optimiser
    (2, at_call(Trainer, "_save", 2, disk_full_in_safetensors)),
    (2, at_call(torch, "save", 4 + 2, disk_full_in_torch)),
    # The first checkpoint's optimiser
    (None, at_call(torch, "save", 2, disk_full)),
    # The files before, between and after the checkpoints
    (None, at_call(Path, "replace", 1, disk_full)),
    (2, at_call(MetricsFile, "on_log", 3, disk_full)),
    (4, at_call(PeftModel, "save_pretrained", 5, disk_full_in_safetensors)),
    (4, at_call(tasks.tabular_judge, "save_evaluation", 1, disk_full)),
]


@pytest.mark.parametrize(("checkpoint", "sabotage"), DISKS)
def test_disk_full(checkpoint, sabotage, never_interrupted, answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "plain.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"])
    assert run(arguments, log, sabotage) == EXIT_INPUT_ERROR, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "--resume_from_checkpoint auto" in line
    assert any(words in line for words in DISK_WORDS)
    whole = latest_checkpoint(out)
    assert (whole and whole.name) == (checkpoint and f"checkpoint-{checkpoint}")
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == 0, log.read_text()
    assert_same_end(out, never_interrupted("plain"))


def test_a_killed_run_is_not_overwritten_by_chance(answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "plain.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"])
    assert run(arguments, log, killed_at_step(2 + 3)) == KILLED
    (out / ".lock").unlink()  # the kill left it, and freed it
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run(arguments, log) == EXIT_INPUT_ERROR
    assert "holds a run" in log.read_text()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files


def test_different_seeds_end_differently(never_interrupted, answering_llama, tmp_path):
    """Otherwise the comparisons above would prove nothing."""
    out, log = tmp_path / "out", tmp_path / "plain.log"
    assert run(small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"], "--seed", 1), log) == 0
    with pytest.raises(AssertionError):
        assert_same_end(out, never_interrupted("plain"))
    rewards = [json.dumps(line["reward"]) for line in metrics_of(never_interrupted("plain"))]
    assert len(set(rewards)) > 1


DAMAGE = {
    "gone": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "changed": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
}
BESIDE = ("warm_start", "untrained.json", "metrics.jsonl")  # what every checkpoint stands on
EVERY_STEP = ("--max_steps", 4, "--save_steps", 1, "--evaluate_steps", 0, "--save_total_limit", 2)


@pytest.fixture(scope="module")
def killed(answering_llama, tmp_path_factory):
    """A run that was killed with two checkpoints, and its command."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = small_run(answering_llama, folder / "out", *NO_PICTURES, *EVERY_STEP)
    assert run(arguments, folder / "plain.log", killed_at_step(2 + 3)) == KILLED
    return folder / "out", arguments


@pytest.mark.parametrize("how", DAMAGE)
def test_no_damaged_file_is_resumed_from(how, killed, tmp_path, capsys):
    """Every file of the later checkpoint, and every one that both checkpoints stand on."""
    out, _ = killed
    files = [file.relative_to(out) for file in sorted(out.rglob("*")) if file.is_file()]
    of_checkpoint = [file for file in files if file.parts[0] == "checkpoint-2"]
    beside = [file for file in files if file.parts[0] in BESIDE]
    assert {"optimizer.pt", "rng_state.pth", "scheduler.pt"} < {file.name for file in of_checkpoint}
    assert {"untrained.json", "adapter_model.safetensors", "report.json"} < {file.name for file in beside}
    for number, file in enumerate([*of_checkpoint, *beside]):
        if (how, file.name) == ("gone", "COMPLETE") and file in of_checkpoint:
            continue  # as a kill in the middle of its write leaves it
        copy = tmp_path / str(number)
        shutil.copytree(out, copy)
        DAMAGE[how](copy / file)
        # The earlier checkpoint stands on the first line of the log alone
        first_line = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
        log = (copy / "metrics.jsonl").read_bytes() if (copy / "metrics.jsonl").exists() else b""
        if file in of_checkpoint or (file.name == "metrics.jsonl" and log.startswith(first_line)):
            assert checkpoint_to_resume_from(copy, "auto") == copy / "checkpoint-1"
        else:
            with pytest.raises(InputError, match="none of its checkpoints is whole"):
                checkpoint_to_resume_from(copy, "auto")
        assert f"{copy / file}: is" in capsys.readouterr().out
        shutil.rmtree(copy)


def test_a_run_with_a_damaged_checkpoint_ends_as_one_that_was_never_killed(killed, never_interrupted, tmp_path):
    out, arguments = tmp_path / "out", killed[1]
    shutil.copytree(killed[0], out)
    (out / "checkpoint-2/optimizer.pt").unlink()
    resumed = [*arguments, "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    assert run(resumed, tmp_path / "plain.log") == 0, (tmp_path / "plain.log").read_text()
    assert f"{out}/checkpoint-2/optimizer.pt: is gone; checkpoint-2 is left out" in (tmp_path / "plain.log").read_text()
    assert_same_end(out, never_interrupted("plain"))


def change_expert(arguments: list[str], out: Path) -> None:
    csv = Path(arguments[arguments.index("--expert_csv") + 1])
    csv.write_text(csv.read_text().replace("0.5", "0.6"))


def change_model(arguments: list[str], out: Path) -> None:
    weights = Path(arguments[arguments.index("--model_name_or_path") + 1]) / "model.safetensors"
    DAMAGE["changed"](weights)


@pytest.mark.parametrize(("change", "what"), [(change_expert, "data"), (change_model, "model")])
def test_a_run_is_not_resumed_with_another_expert_or_model(change, what, answering_llama, tmp_path):
    """It was trained half on the one and half on the other."""
    model, csv, log = tmp_path / "model", tmp_path / "expert.csv", tmp_path / "plain.log"
    shutil.copytree(answering_llama, model)
    shutil.copy(ROOT / "expert_demos_batched_avg_q.csv", csv)
    out, more = tmp_path / "out", ["--expert_csv", str(csv), *NO_PICTURES, *EVERY_STEP]
    arguments = small_run(model, out, *more)
    assert run(arguments, log, killed_at_step(2 + 2)) == KILLED
    change(arguments, out)
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == EXIT_INPUT_ERROR
    assert f"error: {out}: the {what} changed since the run was begun; put the old" in log.read_text()


def test_a_run_does_not_end_before_the_checkpoint_that_it_resumes_from(killed, tmp_path):
    """It did, and its configuration then named fewer steps than it had taken."""
    out, log = tmp_path / "out", tmp_path / "plain.log"
    shutil.copytree(killed[0], out)
    step = int(latest_checkpoint(out).name.removeprefix("checkpoint-"))
    before = (out / "resolved_config.yaml").read_text()
    more = ["--output_dir", str(out), "--resume_from_checkpoint", "auto", "--max_steps", str(step - 1)]
    assert run([*killed[1], *more], log) == EXIT_INPUT_ERROR
    assert f"has taken {step} already; give at least that" in log.read_text()
    assert (out / "resolved_config.yaml").read_text() == before


def test_a_checkpoint_is_judged_on_its_runs_lake(answering_llama, tmp_path):
    """It was judged on the slippery canonical one."""
    (tmp_path / "map.txt").write_text("SFG\n")
    out, csv = tmp_path / "out", tmp_path / "lake.csv"
    made = ["--map", str(tmp_path / "map.txt"), "--is_slippery", "false", "--rows", "states", "--output", str(csv)]
    expert_q.main(made)
    flags = ["--expert_csv", csv, "--is_slippery", "false", "--warm_start", "never", *NO_PICTURES]
    assert train_script.main(small_run(answering_llama, out, *flags)) == 0
    policies = [str(out / "checkpoint-1"), str(out)]
    asked = ["--samples_per_state", "0", "--episodes", "2", "--output_dir", str(tmp_path / "judged")]
    assert evaluate_policy.main(["--policies", *policies, *asked]) == 0
    judged = json.loads((tmp_path / "judged" / "evaluation.json").read_text())
    assert (judged["maps"], judged["is_slippery"]) == (["SFG"], False)
    assert [row["policy"] for row in judged["policies"][-2:]] == [f"{policy}, greedy" for policy in policies]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"policies": [[1]], "format_validity": 1}'])
@pytest.mark.parametrize("name", [stages.UNTRAINED_FILE, stages.WARM_START_FILE])
def test_answers_that_were_damaged_are_asked_for_again(name, text, never_interrupted, answering_llama, tmp_path):
    """They ended in a traceback after the training."""
    out, log = tmp_path / "out", tmp_path / "plain.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"])
    assert run(arguments, log, killed_at_step(2 + 1)) == KILLED
    (out / name).write_text(text)
    assert run([*arguments, "--resume_from_checkpoint", "auto"], log) == 0, log.read_text()
    assert_same_end(out, never_interrupted("plain"))


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", stages.FINISHED)
def test_a_finished_run_that_was_damaged_is_one_line(name, how, never_interrupted, tmp_path):
    """It was shown, and judged, as if nothing were wrong."""
    out = shutil.copytree(never_interrupted("plain"), tmp_path / "out")
    check_finished(out)
    DAMAGE[how](out / name)
    if name == "evaluation.json" and how == "gone":
        check_finished(out)  # is how a run is judged again
    else:
        with pytest.raises(InputError, match=f"^{out / name}: is .*; put the old file back, or delete evaluation.json"):
            check_finished(out)
        with pytest.raises(InputError, match=f"{out / name}: "):
            evaluate_policy.main(["--policies", str(out)])


@pytest.mark.parametrize("gone", ["warm_start", "resolved_config.yaml"])
def test_a_run_without_what_it_stands_on_is_refused(gone, killed, tmp_path):
    """Under `--warm_start auto` and another seed, too: both were accepted in silence."""
    out, arguments = tmp_path / "out", killed[1]
    shutil.copytree(killed[0], out)
    shutil.rmtree(out / gone) if (out / gone).is_dir() else (out / gone).unlink()
    resumed = [*arguments, "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    log = tmp_path / "plain.log"
    assert run(resumed, log) == EXIT_INPUT_ERROR
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert f"{out / gone}" in line
    assert "is gone" in line


LENGTHS = [
    # what is asked for, whether a run of four steps in two epochs has ended with that
    ({"max_steps": 4}, True),
    ({"max_steps": 5}, False),
    ({"max_steps": -1, "num_train_epochs": 2}, True),
    ({"max_steps": -1, "num_train_epochs": 3}, False),
    ({"max_steps": -1, "num_train_epochs": 1.9}, True),
    ({"max_steps": -1, "num_train_epochs": 2.1}, False),
]


@pytest.mark.parametrize(("asked", "has_ended"), LENGTHS)
def test_a_run_that_is_asked_for_more_steps_or_epochs_has_not_ended(asked, has_ended, tmp_path):
    TrainerState(epoch=2.0, global_step=4, max_steps=4, num_train_epochs=3).save_to_json(
        str(tmp_path / "trainer_state.json")
    )
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **asked)
    assert lifecycle.has_ended(tmp_path, config, "never") is has_ended


@pytest.mark.parametrize(("epochs", "is_enough"), [(3, True), (2, True), (1.6, True), (1, False)])
def test_fewer_epochs_than_were_taken_are_refused(epochs, is_enough, tmp_path):
    """The last step may end behind the last epoch, by less than a step."""
    TrainerState(epoch=2.0, global_step=4).save_to_json(str(tmp_path / "trainer_state.json"))
    options = {"max_steps": -1, "num_train_epochs": epochs}
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    with (
        nullcontext() if is_enough else pytest.raises(InputError, match=r"--num_train_epochs 1: .* has taken 2 already")
    ):
        lifecycle.check_epochs(config, tmp_path)


def test_a_finished_run_that_is_taken_up_earlier_is_finished_no_longer(never_interrupted, answering_llama, tmp_path):
    """Killed on the way it goes on from there: neither its old result nor its old last checkpoint counts."""
    out, log = shutil.copytree(never_interrupted("plain"), tmp_path / "out"), tmp_path / "plain.log"
    arguments = small_run(answering_llama, out, *NO_PICTURES, *SETTINGS["plain"])
    asked = [*arguments, "--resume_from_checkpoint", str(out / "checkpoint-2")]
    assert run(asked, log, killed_at_step(1)) == KILLED
    left = {path.name for path in out.iterdir()}
    assert not left & {"evaluation.json", "result.txt", "COMPLETE", "adapter_model.safetensors"}
    assert latest_checkpoint(out).name == "checkpoint-2"
    with pytest.raises(InputError, match="is not finished"):
        evaluate_policy.main(["--policies", str(out)])


def test_a_signal_in_the_last_evaluation_loses_no_run_without_checkpoints(answering_llama, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    more = ("--save_strategy", "no", "--max_steps", 1, "--evaluate_steps", 0)
    arguments = small_run(answering_llama, out, *NO_PICTURES, *more)
    assert run(arguments, log, signal_in(tasks.tabular_judge, "evaluate_policies")) == 0, log.read_text()
    assert (out / "evaluation.json").exists()


def test_a_second_interrupt_from_the_keyboard_does_not_wait(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # of this process
    stop = lifecycle.StopOnSignal(1)
    stop._receive(signal.SIGINT, None)
    assert stop.received == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        stop._receive(signal.SIGINT, None)
