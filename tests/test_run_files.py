"""What every run leaves in its folder: a configuration that repeats it, run.json, one process at a time."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies
from trl import GRPOConfig, ModelConfig

import evaluate_policy
import tasks.frozen_lake
from llm_policy.command_line import parse_arguments
from llm_policy.errors import InputError
from llm_policy.grpo.arguments import ScriptArguments
from llm_policy.run_files import (
    CONFIG_FILE,
    ROOT,
    RUN_FILE,
    RunSettings,
    check_made_from,
    check_output_dir,
    check_same_run,
    checksum,
    commit,
    finished_text,
    only_process_in,
    processes_before,
    resolved_config,
    run_settings,
    write_run_files,
    write_whole,
)

LAPTOP = str(ROOT / "configs/laptop.yaml")
TRAINING_GROUPS = (ScriptArguments, tasks.frozen_lake.Arguments, GRPOConfig, ModelConfig)


@dataclass
class Small:
    """Options of a script that trains nothing."""

    seed: int = 0
    names: list[str] = field(default_factory=list)
    output_dir: str = "out"


JSON_VALUES = (
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text()
)


@pytest.fixture
def nothing_is_writable(monkeypatch):
    """A disk that refuses, to root as well."""

    def refuse(path, *_, **__):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)


# The configuration -------------------------------------------------------------------------------------------------


def test_only_what_differs_from_its_default_is_in_the_configuration():
    assert resolved_config(Small()) == {}
    assert resolved_config(Small(seed=3), Small(names=["a"])) == {"seed": 3, "names": ["a"]}
    assert resolved_config(Small(names=[object()])) == {}, "only what a YAML file can say"
    shared = ["a"]
    twice = resolved_config(Small(names=shared)) | {"again": resolved_config(Small(names=shared))}
    assert "*" not in yaml.safe_dump(twice), "aliases are refused when it is read back"


def test_a_resolved_config_repeats_the_run_and_does_not_resume_it():
    training = GRPOConfig(output_dir="out", resume_from_checkpoint="auto", use_cpu=True, bf16=False)
    assert resolved_config(training)["output_dir"] == "out"
    assert "resume_from_checkpoint" not in resolved_config(training)


def test_a_run_file_nested_too_deeply_is_one_line(tmp_path):
    (tmp_path / RUN_FILE).write_text("[" * 100_000)
    with pytest.raises(InputError, match="is nested too deeply"):
        run_settings(tmp_path)


def test_optional_arguments_survive_the_resolved_config(tmp_path):
    arguments = ["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"num_cycles": 2}', "--beta", "0.1"]
    arguments += ["--reward_weights", "0.5", "0.3", "0.2", "--lora_target_modules", "q_proj", "v_proj"]
    groups, _ = parse_arguments(["--config", LAPTOP, *arguments], TRAINING_GROUPS, description="d")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolved_config(*groups)))
    again, _ = parse_arguments([f"--config={tmp_path}/config.yaml"], TRAINING_GROUPS, description="d")
    for one, other in zip(groups, again, strict=True):
        assert str(one) == str(other)


# Writing -----------------------------------------------------------------------------------------------------------


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert commit() == "unknown"


def test_no_half_of_a_file_is_seen(tmp_path, monkeypatch):
    file = tmp_path / "result.txt"
    write_whole(file, "first")
    write_whole(file, "second")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("result.txt", "second")]

    class Killed(Exception):
        pass

    def killed(path, text, **_):
        os.write(os.open(path, os.O_CREAT | os.O_WRONLY), text[:2].encode())
        raise Killed

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(Killed):
        write_whole(file, "third")
    assert file.read_text() == "second"


def test_a_file_is_utf_8_whatever_the_terminal_is(tmp_path):
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    program = (
        "import sys, pathlib, llm_policy.run_files as r; r.write_whole(pathlib.Path(sys.argv[1]), '\\u2500 \\xe9')"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "file"], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "\u2500 \xe9"


def test_a_run_says_what_it_is_and_a_resumed_one_keeps_it(tmp_path, monkeypatch):
    out, groups, settings = tmp_path / "runs/out", [Small(seed=7)], {"task": "taxi"}
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py", "--seed", "7", "--names", "a b"])
    write_run_files(out, groups, "configs/x.yaml", 7, settings, "a CPU, 2 CPU threads")
    assert yaml.safe_load((out / CONFIG_FILE).read_text()) == {"seed": 7}
    assert (processes_before(out), processes_before(tmp_path)) == (1, None)
    first = run_settings(out)
    assert (first["config"], first["seed"], first["task"]) == ("x.yaml", 7, "taxi")
    assert (first["command"], first["device"]) == ("python script.py --seed 7 --names 'a b'", "a CPU, 2 CPU threads")
    assert len(first["commit"]) in (len("unknown"), 40)
    assert {"date", "python", "versions"} <= set(first)

    monkeypatch.setattr(sys, "argv", ["script.py", "--seed", "7", "--resume_from_checkpoint", "auto"])
    for times in (1, 2):
        write_run_files(out, groups, "configs/y.yaml", 7, {"task": "other", "new": 1}, "a GPU", processes=times + 1)
        second = run_settings(out)
        parts = second.pop("resumed")
        assert len(parts) == times
        assert set(parts[0]) == {"date", "command", "commit", "device", "processes"}
        assert processes_before(out) == times + 1
        assert (parts[-1]["device"], "auto" in parts[-1]["command"]) == ("a GPU", True)
        assert second == first | {"new": 1}, "the beginning keeps its command, commit and device"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, nothing_is_writable):
    words = rf"^--output_dir {tmp_path}: cannot be written \(.*No space left.*\); once it can, --again resumes the run$"
    with pytest.raises(InputError, match=words):
        write_run_files(tmp_path, [Small()], "", 0, {}, "a CPU", resume="--again")


def test_settings_of_what_is_no_run(tmp_path):
    assert run_settings(tmp_path) == {}
    assert run_settings("google/gemma-2b-it") == {}
    (tmp_path / RUN_FILE).write_text(json.dumps({"seed": 1})[:-1])
    with pytest.raises(InputError, match=f"^{tmp_path / RUN_FILE}: is no JSON .*; put the old file back"):
        run_settings(tmp_path)


def test_a_run_whose_run_file_is_gone_or_a_pipe_is_one_line(tmp_path):
    """It was judged on the default lake."""
    (tmp_path / CONFIG_FILE).touch()
    assert run_settings(tmp_path) == {}, "killed before it was written"
    (tmp_path / "evaluation.json").touch()
    with pytest.raises(InputError, match=f"^{tmp_path / RUN_FILE}: is gone, and it says what the run is judged on"):
        run_settings(tmp_path)
    os.mkfifo(tmp_path / RUN_FILE)
    with pytest.raises(InputError, match=f"^{tmp_path / RUN_FILE}: is no JSON .is no regular file.; put the old"):
        run_settings(tmp_path)


def test_of_several_options_that_differ_the_one_that_decides_is_named(tmp_path):
    """`--task taxi` on a lake's run was answered with the completion length that the task sets."""

    @dataclass
    class Tasked(Small):
        task: str = "frozen_lake"
        length: int = 32

    (tmp_path / CONFIG_FILE).write_text("seed: 3\n")
    with pytest.raises(InputError, match=rf"^--task taxi: {tmp_path} was begun with the default; resume with that"):
        check_same_run(tmp_path, [Tasked(seed=3, task="taxi", length=48)], ())


def test_a_run_of_another_script_is_said_to_be_one(tmp_path, monkeypatch):
    (tmp_path / CONFIG_FILE).write_text("seed: 3\n")
    (tmp_path / RUN_FILE).write_text('{"command": "python train_script.py --seed 3"}')
    monkeypatch.setattr(sys, "argv", ["../search_policy.py"])
    with pytest.raises(InputError, match=f"^--output_dir {tmp_path}: holds a run of train_script.py; choose another"):
        check_same_run(tmp_path, [Small(seed=3)], ())
    monkeypatch.setattr(sys, "argv", ["a_notebook.py"])  # which may call the script's main
    check_same_run(tmp_path, [Small(seed=3)], ())


def test_a_run_with_checkpoints_and_without_its_run_file_is_not_resumed(tmp_path):
    """With it what the run was made from was gone, and other data or another model were taken."""
    (tmp_path / CONFIG_FILE).write_text("seed: 3\n")
    check_same_run(tmp_path, [Small(seed=3)], ())
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(
        InputError, match=f"^{tmp_path / RUN_FILE}: is gone, and it says what the run was made from; put"
    ):
        check_same_run(tmp_path, [Small(seed=3)], ())


def test_a_run_is_resumed_with_what_it_was_made_from(tmp_path):
    now = {"data": checksum([1.0]), "model": "a"}
    check_made_from(tmp_path, now)
    for begun in ({"seed": 0}, {"made_from": {}}, {"made_from": now}):
        (tmp_path / RUN_FILE).write_text(json.dumps(begun))
        check_made_from(tmp_path, now)
    (tmp_path / RUN_FILE).write_text(json.dumps({"made_from": {"data": checksum([2.0]), "model": "a"}}))
    with pytest.raises(InputError, match=f"^{tmp_path}: the data changed since the run was begun; put"):
        check_made_from(tmp_path, now)


WRONG_TYPES = {
    "task": [3, None, ["taxi"]],
    "maps": ["SFFF", [], [3], {}, None],
    "is_slippery": ["false", 0, None],
    "seed": [-1, "0"],
    "horizon_steps": [0, -5, "100", 2.5],
    "max_completion_length": [0, "32", None],
    "observation": [1],
    "dtype": [16],
    "on_adapter": ["yes", 1],
    "on_shared_warm_start": ["yes", 1],
    "made_from": [3, {"data": 1}],
    "resumed": [{}, ["x"]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG_TYPES.items() for value in values])
def test_a_run_file_of_wrong_types_is_one_line(name, value, tmp_path):
    """ "false" was judged as slippery."""
    (tmp_path / RUN_FILE).write_text(json.dumps({"seed": 0, name: value}))
    with pytest.raises(InputError, match=rf"^{tmp_path / RUN_FILE}: {name}\S* .*; put the old file back") as caught:
        run_settings(tmp_path)
    assert "\n" not in str(caught.value)


RUN_FILES = strategies.dictionaries(
    strategies.sampled_from(sorted(RunSettings.model_fields)) | strategies.text(),
    JSON_VALUES | strategies.lists(JSON_VALUES) | strategies.dictionaries(strategies.text(), JSON_VALUES),
)


@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=strategies.text() | RUN_FILES.map(json.dumps) | JSON_VALUES.map(json.dumps))
def test_whatever_a_run_file_holds_it_is_read_or_refused_in_one_line(text, tmp_path):
    (tmp_path / RUN_FILE).write_bytes(text.encode(errors="surrogatepass"))
    try:
        found = run_settings(tmp_path)
    except InputError as error:
        found, line = None, str(error)
    assert isinstance(found, dict) if found is not None else "\n" not in line


@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=strategies.text() | strategies.dictionaries(strategies.text(), JSON_VALUES).map(json.dumps))
def test_whatever_a_configuration_holds_it_is_the_same_run_or_refused_in_one_line(text, tmp_path):
    (tmp_path / CONFIG_FILE).write_bytes(text.encode(errors="surrogatepass"))
    line = ""
    try:
        check_same_run(tmp_path, [Small(seed=3)], ())
    except InputError as error:
        line = str(error)
    assert line.startswith((str(tmp_path), "--"))
    assert "\n" not in line


# Who may write in a folder -----------------------------------------------------------------------------------------


def test_one_process_at_a_time(tmp_path):
    out = tmp_path / "runs/out"
    with only_process_in(out):
        assert out.is_dir()
        with pytest.raises(InputError, match=f"^--output_dir {out}: another process is at work there; wait for it"):
            only_process_in(out).__enter__()
    assert not out.exists(), "left empty"
    with only_process_in(out):
        (out / "file").touch()
    assert [path.name for path in out.iterdir()] == ["file"]


def test_two_evaluations_in_one_folder(tmp_path):
    (tmp_path / "note.partial").touch()
    with only_process_in(tmp_path), pytest.raises(InputError, match=f"^--output_dir {tmp_path}: another process"):
        evaluate_policy.main(["--policies", "random", "--output_dir", str(tmp_path)])


def test_a_killed_process_leaves_no_lock(tmp_path):
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    else:
        lock = only_process_in(tmp_path)  # named, or its end would come with the garbage
        lock.__enter__()
        os._exit(3)
    assert (tmp_path / ".lock").exists()
    with only_process_in(tmp_path):
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"^--output_dir {tmp_path / 'file/out'}: cannot be written "):
        only_process_in(tmp_path / "file/out").__enter__()


def test_a_folder_with_another_run_is_not_written_to(tmp_path):
    check_output_dir(tmp_path, resumes=False)
    check_output_dir(tmp_path / "nothing", resumes=False)
    for trace in (tmp_path / "one" / CONFIG_FILE, tmp_path / "two" / "checkpoint-5"):
        trace.parent.mkdir()
        if trace.name != CONFIG_FILE:
            trace.mkdir()
        else:
            trace.touch()
            check_output_dir(trace.parent, resumes=True)
        with pytest.raises(InputError, match=f"^--output_dir {trace.parent}: holds a run; choose another folder"):
            check_output_dir(trace.parent, resumes=False)
    (tmp_path / "file").touch()
    for resumes in (False, True):
        with pytest.raises(InputError, match=f"^--output_dir {tmp_path / 'file'}: is a file; name a folder"):
            check_output_dir(tmp_path / "file", resumes)


FOREIGN = [
    ".bashrc",
    "config.json",
    "run.json",
    "trainer_state.json",
    "result.txt",
    "my notes.txt",
    "adapter_model.safetensors",
]


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_files_of_others_is_not_written_to(name, resumes, tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "resolved_config.partial").touch()
    check_output_dir(tmp_path, resumes)
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=f"^--output_dir {tmp_path}: holds {name}, but no run; name a new or an empty"):
        check_output_dir(tmp_path, resumes)


def test_an_evaluation_replaces_its_own_files_and_no_runs(tmp_path):
    (tmp_path / "evaluation.json").touch()
    check_output_dir(tmp_path, False, own=("evaluation.json", "policy.png"))
    (tmp_path / "evaluation.json").unlink()
    (tmp_path / "policy.png").write_text("the user's")
    with pytest.raises(InputError, match=r"holds policy.png, but no run"):
        check_output_dir(tmp_path, False, own=("evaluation.json", "policy.png"))
    (tmp_path / CONFIG_FILE).touch()
    with pytest.raises(InputError, match=r"holds a run; choose another folder$"):
        check_output_dir(tmp_path, False, own=("evaluation.json", "policy.png"))


@pytest.mark.parametrize("name", ["checkpoint-1", "grpo", "warm_start", "runs"])
def test_a_file_in_the_place_of_a_folder_of_the_run(name, tmp_path):
    (tmp_path / CONFIG_FILE).touch()
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=f"^--output_dir {tmp_path}: {name} is not a folder; delete it or move it aw"):
        check_output_dir(tmp_path, resumes=True)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["metrics.jsonl", "untrained.json", "adapter_model.safetensors", "run.partial"])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_of_the_run(name, make, tmp_path):
    (tmp_path / CONFIG_FILE).touch()
    (tmp_path / "notes v1.5").mkdir()
    check_output_dir(tmp_path, resumes=True)
    make(tmp_path / name)
    with pytest.raises(InputError, match=f"^--output_dir {tmp_path}: {name} is not a regular file; delete it or move"):
        check_output_dir(tmp_path, resumes=True)


def test_no_run_begins_in_a_checkpoint_of_another(tmp_path):
    """It would be deleted with the checkpoint."""
    (tmp_path / "checkpoint-5/mine").mkdir(parents=True)
    check_output_dir(tmp_path / "checkpoint-5/mine", resumes=False)
    (tmp_path / CONFIG_FILE).touch()
    with pytest.raises(InputError, match="lies in a checkpoint of another run; choose another folder"):
        check_output_dir(tmp_path / "checkpoint-6", resumes=False)
    with pytest.raises(InputError, match="lies in a checkpoint of another run; choose another folder"):
        check_output_dir(tmp_path / "checkpoint-5/mine", resumes=False)


def test_no_file_behind_a_link_is_overwritten(tmp_path):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "run.partial").symlink_to("victim")
    write_whole(tmp_path / "run.json", "{}")
    assert [(tmp_path / name).read_text() for name in ("victim", "run.json")] == ["kept", "{}"]


def test_a_finished_run_without_its_result_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"result.txt: cannot be read .*; delete evaluation.json there"):
        finished_text(tmp_path)
    (tmp_path / "result.txt").touch()
    with pytest.raises(InputError, match=r"result.txt: cannot be read \(is empty\); delete evaluation.json there"):
        finished_text(tmp_path)
    (tmp_path / "result.txt").write_text("verdict\n")
    assert finished_text(tmp_path) == f"{tmp_path} holds a finished run:\nverdict\n"


SAME_RUN = [
    # of the configuration, of the command, what may differ, what the line says (None: accepted)
    ("{seed: 3}", Small(seed=3), (), None),
    ("{}", Small(), (), None),
    ("", Small(), (), r"{out}/resolved_config.yaml: cannot be read \(.*\); choose another folder"),
    ("[seed, 3]", Small(), (), r"{out}/resolved_config.yaml: cannot be read \(.*\); choose another folder"),
    ("{seed: 3}", Small(seed=4), ("seed",), None),
    ("{seed: 3}", Small(seed=3, output_dir="moved"), ("output_dir",), None),
    ("{seed: 3}", Small(seed=4), (), "--seed 4: {out} was begun with 3; resume with that, or choose another --output"),
    ("{seed: 3}", Small(), (), r"--seed \(its default\): {out} was begun with 3; resume with that"),
    ("{}", Small(seed=4), (), "--seed 4: {out} was begun with the default; resume with that"),
    ("{names: [a]}", Small(names=["b"]), ("seed",), r"--names \['b'\]: {out} was begun with \['a'\]; resume with that"),
    ("a: [1\nb: }", Small(), (), r"{out}/resolved_config.yaml: cannot be read \(.*\); choose another folder"),
    ("text", Small(), (), r"{out}/resolved_config.yaml: cannot be read \(.*\); choose another folder"),
]


@pytest.mark.parametrize(("begun", "now", "may_differ", "message"), SAME_RUN)
def test_a_run_is_resumed_with_its_own_options(begun, now, may_differ, message, tmp_path):
    (tmp_path / CONFIG_FILE).write_text(begun)
    if message is None:
        check_same_run(tmp_path, [now], may_differ)
    else:
        with pytest.raises(InputError, match="^" + message.format(out=tmp_path)) as caught:
            check_same_run(tmp_path, [now], may_differ)
        assert "\n" not in str(caught.value)


def test_an_empty_folder_holds_no_run(tmp_path):
    check_same_run(tmp_path, [Small(seed=4)], ())


@pytest.mark.parametrize("left", ["run.json", "checkpoint-5/COMPLETE"])
def test_a_run_without_its_configuration_is_not_resumed(left, tmp_path):
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).touch()
    with pytest.raises(
        InputError, match=f"^{tmp_path / CONFIG_FILE}: is gone, so that the run there cannot be resumed"
    ):
        check_same_run(tmp_path, [Small()], ())
