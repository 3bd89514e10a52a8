"""Two processes that train together end as one does, stop together, and say in one line what went wrong.

Most processes here are forked children of the test, as in tests/test_resume.py: imports take longer than the runs.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from conftest import at_call, forked
from safetensors.torch import load_file
from test_train_script import metrics_of, small_run
from trl import GRPOConfig, ModelConfig

import train_script
from llm_policy import launch, processes
from llm_policy.errors import EXIT_INPUT_ERROR, EXIT_INTERRUPTED, InputError
from llm_policy.grpo import lifecycle, stages
from llm_policy.grpo.arguments import ScriptArguments, check_processes
from llm_policy.grpo.trainer import PolicyTrainer
from llm_policy.run_files import ROOT

TIMEOUT_SECONDS = 300
# Eight completions of two groups: four in each of two processes
RUN = ("--warm_start_prompts", 11, "--save_steps", 3, "--max_steps", 3, "--report_to", "none", "--evaluate_steps", 3)


def nothing() -> None:
    pass


def together(
    work: Callable[[], int | None], folder: Path, sabotage: dict[int, Callable[[], None]] | None = None, count: int = 2
) -> list[int]:
    """Exit codes of `count` forked processes that call `work`; what each says goes to its log in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def join_in(rank: int) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # the test's own runs have made one
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        torch.set_num_threads(1)
        (sabotage or {}).get(rank, nothing)()

    children = [forked(work, folder / f"process-{rank}.log", partial(join_in, rank)) for rank in range(count)]
    codes: dict[int, int] = {}
    until = time.monotonic() + TIMEOUT_SECONDS
    while len(codes) < count and time.monotonic() < until:
        for child in set(children) - set(codes):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = [(folder / f"process-{rank}.log").read_text() for rank in range(count)]
    assert len(codes) == count, f"no end after {TIMEOUT_SECONDS} s: {said}"
    return [codes[child] for child in children]


def train_together(arguments: list[str], folder: Path, **how) -> list[int]:
    def train() -> int:
        code = train_script.main(arguments)
        assert not torch.distributed.is_initialized()  # else the interpreter's end is SIGABRT now and then
        return code

    return together(train, folder, **how)


def last_line(folder: Path, rank: int) -> str:
    return (folder / f"process-{rank}.log").read_text().strip().splitlines()[-1]


# One run -----------------------------------------------------------------------------------------------------------

OBJECTIVES = {
    "natural": (),
    "grpo": ("--objective", "grpo", "--form_coef", 0),
    "grpo, rewards over the batch": ("--objective", "grpo", "--form_coef", 0, "--scale_rewards", "batch"),
    "natural, accumulated, thoughts rehearsed": ("--gradient_accumulation_steps", 2, "--thought_coef", 0.5),
    "distillation": ("--objective", "distillation"),
    "trl's own pass": ("--objective", "grpo", "--form_coef", 0, "--packed", "false", "--temperature", 1.0),
}


@pytest.mark.parametrize("more", OBJECTIVES.values(), ids=OBJECTIVES)
def test_two_processes_end_as_one_does(more, answering_llama, tmp_path):
    """Same completions, rewards and weights, up to rounding; every metric once."""
    one, two = tmp_path / "one", tmp_path / "two"
    batch, half = ("--per_device_train_batch_size", 8), ("--per_device_train_batch_size", 4)
    assert train_together(small_run(answering_llama, one, *RUN, *more, *batch), tmp_path, count=1) == [0]
    assert train_together(small_run(answering_llama, two, *RUN, *more, *half), tmp_path) == [0, 0]
    if "--packed" in more:  # TRL's own sampling draws other numbers in every process
        assert len(metrics_of(two)) == 3
        return
    for folder in (".", "grpo", "warm_start"):
        expected, found = (load_file(out / folder / "adapter_model.safetensors") for out in (one, two))
        assert expected.keys() == found.keys()
        # By norms: Adam's step of a number whose gradient is all but zero goes either way, as the processor rounds
        away = {name: float((found[name] - of_one).norm() / of_one.norm()) for name, of_one in expected.items()}
        assert statistics.median(away.values()) < 1e-3, (folder, away)
        assert max(away.values()) < 0.05, (folder, away)
    for expected, found in zip(metrics_of(one), metrics_of(two), strict=True):
        assert expected.keys() == found.keys()
        compared = {"reward", "num_tokens", "frac_reward_zero_std", "action/entropy", "thought/log_probability"}
        for name in expected.keys() & compared:
            assert found[name] == pytest.approx(expected[name], rel=1e-3), (expected["step"], name)
    judged = [json.loads((out / "evaluation.json").read_text())["policies"] for out in (one, two)]
    assert [policy["policy"] for policy in judged[0]] == [policy["policy"] for policy in judged[1]]
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in two.iterdir())


def signal_at_step(number: int) -> Callable[[], None]:
    return at_call(torch.optim.AdamW, "step", number, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))


def test_a_signal_to_one_process_stops_both_and_the_run_resumes(answering_llama, tmp_path):
    """Both at the same step with one checkpoint; resumed, the run ends byte for byte as one that nobody stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    half = ("--per_device_train_batch_size", 4, "--resume_from_checkpoint", "auto")
    warm_start_steps = 2
    assert train_together(small_run(answering_llama, whole, *RUN, *half), tmp_path) == [0, 0]
    asked = small_run(answering_llama, stopped, *RUN, *half)
    codes = train_together(asked, tmp_path, sabotage={1: signal_at_step(warm_start_steps + 2)})
    assert codes == [EXIT_INTERRUPTED, EXIT_INTERRUPTED]
    assert last_line(tmp_path, 0) == (
        "SIGUSR1: checkpoint of step 2 written; --resume_from_checkpoint auto resumes from it"
    )
    assert [path.name for path in stopped.glob("checkpoint-*")] == ["checkpoint-2"]
    assert train_together(asked, tmp_path) == [0, 0]
    adapters = [(out / "adapter_model.safetensors").read_bytes() for out in (whole, stopped)]
    assert adapters[0] == adapters[1]
    assert len(metrics_of(stopped)) == 3


def test_a_signal_while_the_processes_tell_each_other_counts_the_next_time(monkeypatch):
    stop = lifecycle.StopOnSignal(1)

    def others_have_none(own: list) -> list:
        stop.received = "SIGUSR1"
        return [*own, None]

    monkeypatch.setattr(processes, "gathered", others_have_none)
    assert not stop.received_anywhere()
    assert stop.received_anywhere()


def test_another_number_of_processes_resumes_and_says_what_differs(answering_llama, tmp_path):
    out = tmp_path / "out"

    def asked(batch: int) -> list[str]:
        return small_run(
            answering_llama, out, *RUN, "--per_device_train_batch_size", batch, "--resume_from_checkpoint", "auto"
        )

    first, second = signal_at_step(3), signal_at_step(1)  # the warm start takes two
    assert train_together(asked(4), tmp_path, sabotage={0: first}) == [EXIT_INTERRUPTED] * 2
    assert train_together(asked(8), tmp_path, sabotage={0: second}, count=1) == [EXIT_INTERRUPTED]
    assert train_together(asked(4), tmp_path) == [0, 0]
    said = [line for line in (tmp_path / "process-0.log").read_text().splitlines() if " processes before, now " in line]
    same = "other random numbers; 8 completions are sampled at a time"
    assert said == [f"2 processes before, now 1: {same}", f"1 processes before, now 2: {same}"]
    assert len(metrics_of(out)) == 3


def test_a_process_that_has_nothing_to_learn_from_takes_part(answering_llama, tmp_path):
    """Otherwise the others would wait for its gradient for ever."""

    def without_advantages() -> None:
        original = PolicyTrainer._generate_and_score_completions

        def scored(self, inputs):
            output = original(self, inputs)
            return {**output, "advantages": torch.zeros_like(output["advantages"])}

        PolicyTrainer._generate_and_score_completions = scored

    arguments = small_run(
        answering_llama, tmp_path / "out", *RUN, *OBJECTIVES["grpo"], "--per_device_train_batch_size", 4
    )
    assert train_together(arguments, tmp_path, sabotage={1: without_advantages}) == [0, 0]


# What goes wrong -----------------------------------------------------------------------------------------------


def test_a_process_that_dies_ends_the_run_with_a_line(answering_llama, tmp_path):
    out = tmp_path / "out"
    dies = at_call(torch.optim.AdamW, "step", 4, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    codes = train_together(
        small_run(answering_llama, out, *RUN, "--per_device_train_batch_size", 4), tmp_path, sabotage={1: dies}
    )
    assert codes == [EXIT_INTERRUPTED, -signal.SIGKILL]
    assert last_line(tmp_path, 0) == (
        "another process of this run has ended, and it alone knows why; --resume_from_checkpoint auto resumes from the "
        "last checkpoint"
    )


@pytest.mark.parametrize("what", ["options", "code", "data"])
def test_processes_that_were_started_differently_are_refused(what, answering_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("llm_policy.errors.MAIN_SPEAKS_FIRST_SECONDS", 0)
    out, number = tmp_path / "out", iter(range(9))

    def differ() -> None:
        if what == "code":
            train_script.run_files.source_facts = lambda: {"code": "other"}
        elif what == "data":
            stages.model_checksum = lambda *_: f"other {next(number)}"

    def main() -> int:
        more = ("--seed", os.environ["RANK"]) if what == "options" else ()
        return train_script.main(small_run(answering_llama, out, *RUN, "--per_device_train_batch_size", 4, *more))

    assert together(main, tmp_path, sabotage={1: differ}) == [EXIT_INPUT_ERROR] * 2
    name = {"options": "--seed: 1", "code": "code: other", "data": "model: other 0"}[what]
    assert last_line(tmp_path, 0).startswith(f"error: {name} in process 1, ")
    assert last_line(tmp_path, 1).startswith(f"error: process 1: {name} in process 1, ")
    assert not out.exists() or not any(out.iterdir())


def test_a_disk_that_the_processes_do_not_share_is_refused(tmp_path, monkeypatch):
    """Each has a folder of its own under the same name, as with a local disk on every node."""
    monkeypatch.setattr("llm_policy.errors.MAIN_SPEAKS_FIRST_SECONDS", 0)

    def work() -> None:
        processes.SEEN_WITHIN_SECONDS = 1
        torch.distributed.init_process_group("gloo")
        folder = tmp_path / os.environ["RANK"]
        folder.mkdir()
        if processes.is_main():
            (folder / "adapter.json").write_text("{}")
        processes.wait_for_files(folder)

    assert together(work, tmp_path)[1] == EXIT_INPUT_ERROR
    assert "does not see it after 1 s; put --output_dir on a disk that all nodes share" in last_line(tmp_path, 1)


def test_a_disk_that_is_slow_to_show_files_is_waited_for(tmp_path):
    def work() -> None:
        torch.distributed.init_process_group("gloo")
        if processes.is_main():
            (tmp_path / "written.json").write_text("{}")
        original = processes._size
        since = time.monotonic()
        processes._size = lambda path: original(path) if time.monotonic() > since + 1 else -1
        processes.wait_for_files(tmp_path, ["written.json"])
        assert time.monotonic() > since + 1

    assert together(work, tmp_path) == [0, 0]


REFUSED = {
    "a group in two processes": (
        {"num_generations": 4, "per_device_train_batch_size": 6},
        {},
        "--per_device_train_batch_size 6: 6 completions of each of 2 processes",
    ),
    "the trainer's own FSDP": ({"fsdp": ["full_shard"]}, {}, "--fsdp, --deepspeed: "),
    "the trainer's own DeepSpeed": ({"deepspeed": "zero3.json"}, {}, "--fsdp, --deepspeed: "),
    "DeepSpeed": ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "--fsdp, --deepspeed: "),
    "FSDP and packing": (
        {},
        {"ACCELERATE_USE_FSDP": "true"},
        "FSDP: no process holds the whole model, .* --objective grpo --packed false --form_coef 0 --warm_start never "
        "--evaluate_steps 0 --stop_when never and no quantised weights",
    ),
}


@pytest.mark.parametrize(("options", "environment", "words"), REFUSED.values(), ids=REFUSED)
def test_what_several_processes_cannot_do_is_one_line(options, environment, words, monkeypatch):
    config = GRPOConfig(output_dir="out", use_cpu=True, bf16=False, report_to="none", max_steps=2)
    for name, value in options.items():
        setattr(config, name, value)
    config.steps_per_generation = 1
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda _: 2))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^{words}"):
        check_processes(config, ScriptArguments(), ModelConfig())


# A model in pieces -------------------------------------------------------------------------------------------------

WHOLE = (
    *("--objective", "grpo", "--packed", "false", "--form_coef", 0, "--action_entropy_coef", 0),
    *("--warm_start", "never", "--evaluate_steps", 0, "--per_device_train_batch_size", 4),
)


def in_pieces() -> None:
    """What `accelerate launch` sets from configs/accelerate/fsdp.yaml; and on CPUs accelerate would not look at it."""
    settings = yaml.safe_load((ROOT / "configs" / "accelerate" / "fsdp.yaml").read_text())["fsdp_config"]
    os.environ |= {name.upper(): str(value) for name, value in settings.items()} | {"ACCELERATE_USE_FSDP": "true"}
    original = AcceleratorState.__init__

    def with_fsdp(self, *arguments, **options) -> None:
        if not AcceleratorState._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # which makes it read the rest
        original(self, *arguments, **options)
        self._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp


def test_a_model_in_pieces_learns_the_same(answering_llama, tmp_path):
    """FSDP: the adapter of two processes that hold the model each, also after an interruption."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train_together(small_run(answering_llama, whole, *RUN, *WHOLE), tmp_path) == [0, 0]
    asked = small_run(answering_llama, pieces, *RUN, *WHOLE, "--resume_from_checkpoint", "auto")

    def stopped() -> None:
        in_pieces()
        signal_at_step(2)()

    codes = train_together(asked, tmp_path, sabotage={0: in_pieces, 1: stopped})
    assert codes == [EXIT_INTERRUPTED] * 2, (tmp_path / "process-0.log").read_text()
    assert train_together(asked, tmp_path, sabotage={0: in_pieces, 1: in_pieces}) == [0, 0]
    assert last_line(tmp_path, 0).endswith(f"where the whole model fits: python evaluate_policy.py --policies {pieces}")
    expected, found = (load_file(out / "adapter_model.safetensors") for out in (whole, pieces))
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0.02, atol=1e-4, msg=name)
    assert (pieces / "checkpoint-3" / "pytorch_model_fsdp.bin").exists()  # it was FSDP
    saved = (pieces / "adapter_model.safetensors").read_bytes()
    assert train_together(asked, tmp_path, sabotage={0: in_pieces, 1: in_pieces}) == [0, 0]  # asked for once more
    assert (pieces / "adapter_model.safetensors").read_bytes() == saved


# The launcher ------------------------------------------------------------------------------------------------------


def launched(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "llm_policy.launch", "--nproc_per_node", "2", "train_script.py", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_launcher_passes_signals_and_exit_codes_on(answering_llama, tmp_path):
    """One line on a wrong option, and code 2; a checkpoint after USR1, and code 75; nothing is said twice."""
    wrong = launched(*small_run(answering_llama, tmp_path / "wrong", "--per_device_train_batch_size", 6))
    out = tmp_path / "out"
    long = ("--max_steps", 500, "--save_steps", 500, "--evaluate_steps", 0)
    going = launched(*small_run(answering_llama, out, *RUN, "--per_device_train_batch_size", 4, *long))
    said = wrong.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert wrong.returncode == EXIT_INPUT_ERROR, said
    assert [line for line in said.splitlines() if "error" in line.lower()] == [
        "error: --per_device_train_batch_size 6: 6 completions of each of 2 processes (x --steps_per_generation 1), "
        "expected a multiple of --num_generations 4, so that a group stays in one process"
    ]
    for line in going.stdout:
        if line.startswith("step   5/500"):
            break
    going.send_signal(signal.SIGUSR1)
    rest, errors = going.communicate(timeout=TIMEOUT_SECONDS)
    assert going.returncode == EXIT_INTERRUPTED, errors
    assert rest.strip().splitlines()[-1].startswith("SIGUSR1: checkpoint of step ")
    assert sum("SIGUSR1: finishing the step" in line for line in rest.splitlines()) == 1
    assert len(list(out.glob("checkpoint-*"))) == 1


def test_a_launcher_under_nohup_outlives_its_terminal(tmp_path):
    (tmp_path / "waits.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(2)\nprint('done')\n")
    command = [sys.executable, "-m", "llm_policy.launch", "--nproc_per_node", "1", str(tmp_path / "waits.py")]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGHUP)
    assert child.communicate(timeout=TIMEOUT_SECONDS)[0] == "done\n"
    assert child.returncode == 0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_file_hears_once_a_minute_how_far_long_work_is(is_terminal, monkeypatch, capsys):
    seconds = [1000.0]
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    bar = processes.progress(range(180), "judging")
    bar._time = lambda: seconds[0]
    bar.start_t = bar.last_print_t = seconds[0]
    for _ in bar:
        seconds[0] += 1.0
    shown = capsys.readouterr().err.count("judging")
    assert shown > 100 if is_terminal else 1 <= shown <= 3


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--nproc_per_node", "0", "expected at least one process"),
        ("--nproc_per_node", "-1", "expected at least one process"),
        ("--nproc_per_node", "abc", "abc"),
        ("--nnodes", "two", "two"),
        ("--nnodes", "0", "nnodes|nodes"),
        ("--nnodes", "1:2:3", "1:2:3"),
        ("--max_restarts", "-1", "max_restarts"),
    ],
)
def test_a_wrong_number_of_processes_is_one_line(option, value, words, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # of this process
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(InputError, match=words) as error:
        launch.main([f"{option}={value}", "train_script.py"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("port", "signalled", "code"),
    [
        ("silent", False, EXIT_INPUT_ERROR),
        ("taken", False, EXIT_INPUT_ERROR),
        ("free", False, EXIT_INPUT_ERROR),
        ("free", True, EXIT_INTERRUPTED),
    ],
)
def test_processes_that_cannot_meet_end_within_two_minutes(port, signalled, code, monkeypatch, tmp_path):
    """Another program has the port, and says nothing; the second node does not come; a signal does."""
    monkeypatch.setattr(launch, "MEET_WITHIN_SECONDS", 60 if signalled else 3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        if port == "silent":
            other.listen()
        elif port == "free":
            other.close()
        arguments = ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "1", "--nnodes", "2"]
        child = forked(lambda: launch.main([*arguments, "train_script.py"]), tmp_path / "log")
        if signalled:
            time.sleep(2)  # it waits for the second node
            os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    words = "interrupted" if signalled else f"error: --rdzv_endpoint {endpoint}: the processes do not meet there"
    assert words in (tmp_path / "log").read_text()
