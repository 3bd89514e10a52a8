"""The command: models asked as they were trained, baselines by name, the files that it leaves, what it refuses."""

import errno
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import build_tiny_model

import evaluate_policy
from evaluate_policy import EvaluationArguments, main, model_answers
from llm_policy.adapters import check_whole
from llm_policy.chat import Reader
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, FrozenLake
from llm_policy.environments.policy_table import constant_policy
from llm_policy.errors import InputError, run_script
from tasks.tabular_judge import TableJudge

GRID = CANONICAL_GRIDS["4x4"]
RIGHT = 2


# A model's answers -----------------------------------------------------------------------------------------------


def test_greedy_and_sampled_policies_of_a_model(monkeypatch):
    def answers(model, samples=0) -> dict:
        return {"policies": [np.full((16, 4), samples)], "format_validity": samples / 10}

    for name in ("load_tokenizer", "load_model", "context_tokens", "check_prompt"):
        monkeypatch.setattr(evaluate_policy, name, lambda *_, **__: torch.nn.Linear(1, 1))
    judge = SimpleNamespace(answers=answers, first_prompt=lambda: [], reader=Reader(None))
    monkeypatch.setattr(evaluate_policy, "judge_of", lambda *_: judge)

    found = model_answers("m", {}, EvaluationArguments(["m"], samples_per_state=4), {})
    assert {name: a["policies"][0][0, 0] for name, a in found.items()} == {"m, greedy": 0, "m, sampled": 4}
    assert {name: a["format_validity"] for name, a in found.items()} == {"m, greedy": 0.0, "m, sampled": 0.4}
    assert list(model_answers("m", {}, EvaluationArguments(["m"], samples_per_state=0), {})) == ["m, greedy"]


def test_each_run_is_read_as_it_was_trained(tmp_path, monkeypatch):
    """Two runs, two observations; the maps and the dynamics must be the same."""
    shared = {"maps": ["SFG"], "is_slippery": False, "dtype": "float32"}
    settings = {"one": {"observation": "grid"}, "two": {"observation": "spaced", "max_completion_length": 9}}
    for name, own in settings.items():
        build_tiny_model(tmp_path / name)
        (tmp_path / name / "run.json").write_text(json.dumps(shared | own))
    seen = []

    def answers(judge, model, samples=0):
        lakes, reader = judge.environments, judge.reader
        first = judge.words.messages(lakes[0], 0)[1]["content"]
        seen.append((judge.settings["observation"], first, reader.max_completion_tokens, lakes, model.dtype))
        policies = [constant_policy(len(lake.mdp.terminal_S), RIGHT, 4) for lake in lakes]
        return {"policies": policies, "format_validity": 1.0}

    monkeypatch.setattr(TableJudge, "answers", answers)
    runs = [str(tmp_path / name) for name in settings]
    arguments = ["--samples_per_state", "0", "--episodes", "2"]
    assert main(["--policies", *runs, *arguments]) == 0
    of_both = ([FrozenLake(("SFG",), is_slippery=False)], torch.float32)
    spaced = "You are at row 0, column 0.\nA F G\nLEFT: edge, DOWN: edge, RIGHT: ice, UP: edge."
    assert seen == [("grid", "AFG", 64, *of_both), ("spaced", spaced, 9, *of_both)]
    (tmp_path / "two/run.json").write_text(json.dumps(shared | {"maps": ["SG"]}))
    with pytest.raises(
        InputError, match=r"these runs were judged on different maps; judge them one by one or give --map"
    ):
        main(["--policies", *runs, *arguments])
    assert main(["--policies", *runs, *arguments, "--map", "4x4"]) == 0


def test_thoughts_of_a_run_are_judged_by_its_own_words(tmp_path, monkeypatch, capsys):
    """All thoughts are true; the judge that draws the table knows nothing of what the run was taught to think."""
    build_tiny_model(tmp_path / "run")
    settings = {"maps": ["SF|HG"], "is_slippery": False, "observation": "cells", "thought": "neighbours"}
    (tmp_path / "run/run.json").write_text(json.dumps(settings | {"dtype": "float32"}))
    monkeypatch.setattr(Reader, "completions", lambda _self, _model, _prompts, _samples, guesses: list(guesses))
    arguments = ["--policies", str(tmp_path / "run"), "random", "--samples_per_state", "0"]
    assert main([*arguments, "--output_dir", str(tmp_path / "out")]) == 0
    told = "greedy: 100.0% of thoughts are true, 100.0% of their words, 100.0% of those that say what is rare on a map."
    assert told in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out/thoughts.png").exists()
    written = json.loads((tmp_path / "out/evaluation.json").read_text())["thoughts"]
    assert written[f"{tmp_path / 'run'}, greedy"]["true_thoughts"] == 1.0
    # Without a model that thinks, no picture of an earlier judgement stays
    assert main(["--policies", "random", "--output_dir", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out/thoughts.png").exists()


def test_a_judgement_that_cannot_be_saved_leaves_the_one_before(tmp_path, monkeypatch):
    arguments = ["--policies", "random", "--output_dir", str(tmp_path)]
    assert main(arguments) == 0
    before = (tmp_path / "evaluation.json").read_text()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(InputError, match="No space left"):
        main([*arguments, "--seed", "5"])
    assert (tmp_path / "evaluation.json").read_text() == before


# The command -----------------------------------------------------------------------------------------------------


def test_command_with_baselines(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["--policies", "random", "constant:left", "expert", "--episodes", "400", "--output_dir", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "FrozenLake-v1 SFFF|FHFH|FFFH|HFFG, slippery" in printed
    assert f"saved {out}: evaluation.json" in printed
    content = json.loads((out / "evaluation.json").read_text())
    assert content["maps"] == ["|".join(GRID)]
    judged = {p["policy"]: p for p in content["policies"]}
    assert list(judged)[3:] == ["random", "constant:left", "expert"]
    assert judged["expert"]["success_probability"] == pytest.approx(14 / 17, abs=1e-6)
    assert judged["expert"]["percent_of_optimal"] == pytest.approx(100, abs=1e-6)
    assert np.shape(judged["random"]["policy_SA"]) == (16, 4)
    low, high = judged["expert"]["simulated_interval"]
    assert low < 0.7402 < high
    assert "format_validity" not in judged["random"]
    with Image.open(out / "policy.png") as picture:
        picture.load()
        assert picture.size == (4 * 3.0 * 120, 3.7 * 120)
        assert len(set(picture.convert("RGB").resize((200, 50)).getdata())) > 20, "an empty picture"


def test_command_with_another_map(tmp_path, capsys):
    path = tmp_path / "map.txt"
    path.write_text("SFG\n")
    assert main(["--policies", "constant:RIGHT", "--map", str(path), "--is_slippery", "false", "--episodes", "5"]) == 0
    assert "FrozenLake-v1 SFG, not slippery" in capsys.readouterr().out


def test_command_with_a_model(tmp_path, capsys):
    folder = build_tiny_model(tmp_path / "model", "gemma")
    arguments = ["--policies", str(folder), "--samples_per_state", "2", "--max_completion_length", "8"]
    arguments += ["--dtype", "float32", "--episodes", "10", "--output_dir", str(tmp_path / "out")]
    assert main(arguments) == 0
    judged = json.loads((tmp_path / "out/evaluation.json").read_text())["policies"]
    assert [p["policy"] for p in judged[3:]] == [f"{folder}, greedy", f"{folder}, sampled"]
    assert judged[3]["format_validity"] == 0.0
    # It says nothing readable, and so moves at random
    assert judged[3]["success_probability"] == pytest.approx(0.0139, abs=5e-4)
    # Same seed, same answer
    (tmp_path / "first.json").write_text((tmp_path / "out/evaluation.json").read_text())
    assert main(arguments) == 0
    assert (tmp_path / "out/evaluation.json").read_text() == (tmp_path / "first.json").read_text()
    capsys.readouterr()


def test_command_with_another_task(tmp_path, capsys):
    out, policies = tmp_path / "out", ["random", "expert", "constant:pickup"]
    arguments = ["--task", "taxi", "--policies", *policies, "--episodes", "5", "--output_dir", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Taxi-v4" in printed.splitlines()
    assert "return in 200 steps" in printed
    content = json.loads((out / "evaluation.json").read_text())
    assert content["env_id"] == "Taxi-v4"
    random, expert, pickup = content["policies"][3:]
    assert expert["percent_of_optimal"] == pytest.approx(100.0, abs=1e-6)
    assert random["percent_of_optimal"] < -100  # standing still is at 0
    assert expert["return_at_horizon"] == pytest.approx(7.93, abs=1e-6)
    assert pickup["policy"] == "constant:pickup"
    assert pickup["percent_of_optimal"] < random["percent_of_optimal"]
    assert (out / "policy.png").stat().st_size > 1000


def test_a_run_of_another_task_is_judged_on_that(tmp_path, capsys):
    folder = build_tiny_model(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps({"task": "cliff_walking", "dtype": "float32"}))
    arguments = ["--samples_per_state", "0", "--episodes", "2", "--max_completion_length", "4"]
    assert main(["--policies", str(folder), *arguments]) == 0
    assert "CliffWalking-v1\n" in capsys.readouterr().out
    lake = build_tiny_model(tmp_path / "lake")
    (lake / "run.json").write_text(json.dumps({"maps": ["SG"], "is_slippery": False, "dtype": "float32"}))
    with pytest.raises(InputError, match=r"these runs were judged on different task; judge them one by one"):
        main(["--policies", str(folder), str(lake), *arguments])


def test_to_name_the_task_of_a_run_changes_nothing():
    runs = {"runs/lines": {"task": "drawing", "target": "9-vertical-lines", "wanted": "lines"}}
    found = [
        evaluate_policy.shared_settings(runs, evaluate_policy.EvaluationArguments(policies=list(runs), task=task))
        for task in (None, "drawing")
    ]
    assert found[0] == found[1] == runs["runs/lines"]


@pytest.mark.parametrize(("others", "shared"), [(True, {"show_functions": True}), (False, {})])
def test_what_all_runs_say_is_asked_of_a_model_beside_them(others, shared):
    about = {"task": "drawing", "target": "9-vertical-lines", "wanted": [[1]]}
    runs = {"one": about | {"show_functions": True}, "two": about | {"show_functions": others}, "a/model": {}}
    assert (
        evaluate_policy.shared_settings(runs, evaluate_policy.EvaluationArguments(policies=[*runs])) == about | shared
    )


BAD_INPUT = [
    # arguments, what the line names ({tmp}: an empty folder with file.txt, model/ and run/run.json in it)
    ([], "--policies"),
    (["--policies"], "--policies"),
    (["--policies", "random", "--polices", "x"], "unknown arguments: --polices x"),
    (["--policies", "random", "--episodes", "many"], "'many'"),
    (["--policies", "random", "--episodes", "0"], "--episodes 0: expected an integer of at least 1"),
    (
        ["--policies", "random", "--samples_per_state", "-1"],
        "--samples_per_state -1: expected an integer of at least 0",
    ),
    (["--policies", "random", "--seed", "-1"], "--seed -1: expected an integer of at least 0"),
    (["--policies", "random", "--horizon_steps", "0"], "--horizon_steps 0: expected an integer of at least 1"),
    (["--policies", "random", "--map", "5x5"], "map 5x5: no such file"),
    (["--policies", "constant:NORTH"], "--policies 'constant:NORTH': expected a run folder"),
    (["--policies", "random", "--task", "nonsense"], "--task nonsense: expected one of frozen_lake, cliff_walking"),
    (
        ["--policies", "constant:LEFT", "--task", "taxi"],
        "--policies 'constant:LEFT': expected a run folder, a model or",
    ),
    (["--policies", "shortest-path", "--task", "taxi"], "shortest-path is for lakes"),
    (["--policies", "random", "--task", "taxi", "--map", "8x8"], "--map 8x8: the task taxi has no such choice"),
    (["--policies", "random", "--task", "riddles", "--episodes", "9"], "--episodes 9: the task riddles has no such"),
    (
        ["--policies", "random", "--task", "arc", "--max_completion_length", "9"],
        "--max_completion_length 9: the task arc has no such choice",
    ),
    (["--policies", "random", "--task", "taxi", "--is_slippery", "true"], "--is_slippery True: the task taxi"),
    (["--policies", "random", "--test_dataset", "x.jsonl"], "--test_dataset x.jsonl: the task frozen_lake has no such"),
    (["--policies", "random", "--task", "riddles", "--horizon_steps", "7"], "--horizon_steps 7: the task riddles has"),
    (["--policies", "random", "--task", "arc", "--observation", "cells"], "--observation cells: the task arc has no"),
    (
        ["--policies", "random", "--observation", "grid"],
        "--observation grid: is for language models, and there is none",
    ),
    (["--policies", "random", "--dtype", "float16"], "--dtype float16: is for language models, and there is none here"),
    (["--policies", "random", "expert", "random"], "--policies: random stands there twice; name each policy once"),
    (["--policies", "{tmp}/begun"], "{tmp}/begun: is not finished; --resume_from_checkpoint auto resumes it"),
    (["--policies", "{tmp}/search"], "{tmp}/search: is a run of search_policy.py; its result.txt is its judgement"),
    (["--policies", "{tmp}/nowhere"], "{tmp}/nowhere: no such folder"),
    (["--policies", "{tmp}/empty"], "{tmp}/empty: is an empty folder"),
    (["--policies", "{tmp}/run"], "{tmp}/run/run.json: is no JSON"),
    (["--policies", "{tmp}/letters"], "run.json: maps: row 1, column 1 has the unknown letter 'X'"),
    (["--policies", "{tmp}/ragged"], "run.json: maps: row 2 'F' has 1 cells, expected 2 as in row 1"),
    (["--policies", "{tmp}/gone"], "{tmp}/gone/run.json: is gone, and it says what the run is judged on"),
    (["--policies", "{tmp}/old"], "--policies {tmp}/old: run.json names no map; give --map"),
    (["--policies", "{tmp}/model", "--dtype", "int3"], "'int3'"),
    (["--policies", "{tmp}/model", "--observation", "pixels"], "--observation 'pixels'"),
    (["--policies", "{tmp}/model", "--max_completion_length", "500"], "context of 512 tokens"),
    (["--policies", "random", "--output_dir", "{tmp}/file.txt"], "--output_dir {tmp}/file.txt: is a file"),
    (["--policies", "random", "--output_dir", "{tmp}/begun"], "--output_dir {tmp}/begun: holds a run; choose"),
    (
        ["--policies", "random", "--output_dir", "{tmp}/model"],
        "--output_dir {tmp}/model: holds ",
    ),
    (["--policies", "random", "--output_dir", "/proc/no"], "--output_dir /proc/no: cannot be written"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("places")
    build_tiny_model(tmp / "model")
    for name in ("empty", "run", "begun"):
        (tmp / name).mkdir()
    (tmp / "begun" / "resolved_config.yaml").touch()
    (tmp / "file.txt").write_text("kept")
    (tmp / "run" / "run.json").write_text('{"maps":')
    for name, grid in {"letters": "XX", "ragged": "SF|F"}.items():
        (tmp / name).mkdir()
        (tmp / name / "run.json").write_text(json.dumps({"maps": [grid], "is_slippery": True}))
    (tmp / "gone").mkdir()
    for name in ("evaluation.json", "resolved_config.yaml"):
        (tmp / "gone" / name).touch()
    (tmp / "search").mkdir()
    (tmp / "search" / "run.json").write_text('{"env_id": "CartPole-v1", "horizon_steps": 500}')
    (tmp / "old").mkdir()
    (tmp / "old" / "run.json").write_text('{"map": ["SG"], "is_slippery": false}')
    return tmp


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_line(arguments, message, places, monkeypatch, capsys):
    before = sorted(places.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["evaluate_policy.py", *(a.format(tmp=places) for a in arguments)])
    with pytest.raises(SystemExit) as leaving:
        run_script(main)
    assert leaving.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message.format(tmp=places) in lines[0]
    assert sorted(places.rglob("*")) == before
    assert (places / "file.txt").read_text() == "kept"


def test_half_of_a_policy_is_not_judged_but_the_run_is_from_within(tmp_path, monkeypatch):
    """GRPO's part of the adapter stands on the warm start; the run's folder holds both, joined."""
    run = tmp_path / "run"
    for part in ("warm_start", "grpo"):
        (run / part).mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"maps": ["SFG"], "is_slippery": False}))
    with pytest.raises(InputError, match=f"trained on top of another adapter; name the run's folder, {run}"):
        main(["--policies", str(run / "grpo")])
    monkeypatch.chdir(run)
    # An empty run folder is refused as such, not as half of a policy
    with pytest.raises(InputError, match=r"has no config\.json or adapter_config\.json"):
        main(["--policies", "."])


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_is_not_judged_on_another_base_than_its_own(shared, places, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved_config.yaml").touch()
    settings = {"maps": ["SFG"], "is_slippery": False, "made_from": {"model": "0123456789abcdef"}}
    settings["on_shared_warm_start"] = shared
    (run / "run.json").write_text(json.dumps(settings))
    (run / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(places / "model"), "r": 2}))
    (run / "adapter_model.safetensors").touch()
    monkeypatch.setattr(evaluate_policy, "load_model", lambda *_, **__: None)
    with pytest.raises(InputError, match=f"^{run}: the model changed since the run was begun; .*, or train again$"):
        main(["--policies", str(run)])


@pytest.mark.parametrize("settings", [{"on_adapter": True}, {"on_shared_warm_start": True}, {}])
def test_half_of_a_policy_is_not_trained_further(settings, tmp_path):
    """The warm start lies in the run, or elsewhere (--warm_start_folder). Alone it is a whole adapter."""
    (tmp_path / "run.json").write_text(json.dumps(settings))
    for name in ("grpo", "checkpoint-5", *([] if settings else ["warm_start"])):
        (tmp_path / name).mkdir()
    for name in ("grpo", "checkpoint-5"):
        with pytest.raises(InputError, match=f"--model_name_or_path .*{name}: trained on top of another adapter"):
            check_whole("--model_name_or_path", str(tmp_path / name))
    if not settings:
        check_whole("--model_name_or_path", str(tmp_path / "warm_start"))


def test_options_stand_above_what_a_run_says(tmp_path, monkeypatch):
    build_tiny_model(tmp_path / "run")
    said = {"maps": ["SFG"], "is_slippery": False, "observation": "grid", "dtype": "float32"}
    (tmp_path / "run/run.json").write_text(json.dumps(said | {"max_completion_length": 9}))
    seen = []

    def answers(judge, model, samples=0):
        (lake,) = judge.environments
        settings = judge.settings
        seen.append((lake.is_slippery, settings["observation"], judge.reader.max_completion_tokens, model.dtype))
        return {"policies": [np.full((3, 4), 0.25)], "format_validity": 1.0}

    monkeypatch.setattr(TableJudge, "answers", answers)
    options = {"is_slippery": "true", "observation": "cells", "max_completion_length": 7, "dtype": "bfloat16"}
    options |= {"samples_per_state": 0, "episodes": 2}
    flags = [str(text) for name, value in options.items() for text in (f"--{name}", value)]
    assert main(["--policies", str(tmp_path / "run"), *flags]) == 0
    assert seen == [(True, "cells", 7, torch.bfloat16)]


def test_a_model_beside_a_run_is_asked_in_the_words_of_the_run(tmp_path, monkeypatch, capsys):
    build_tiny_model(tmp_path / "run")
    build_tiny_model(tmp_path / "plain")
    said = {"maps": ["SFG"], "is_slippery": False, "observation": "cells", "thought": "search", "dtype": "float32"}
    (tmp_path / "run/run.json").write_text(json.dumps(said | {"max_completion_length": 9}))
    seen = []

    def answers(judge, model, samples=0):
        seen.append((judge.settings["observation"], judge.settings["thought"], judge.reader.max_completion_tokens))
        return {"policies": [np.full((3, 4), 0.25)], "format_validity": 1.0}

    monkeypatch.setattr(TableJudge, "answers", answers)
    flags = ["--samples_per_state", "0", "--episodes", "2", "--policies", str(tmp_path / "plain")]
    monkeypatch.setattr(evaluate_policy, "cost_of", lambda dtype, on_gpu: f"{dtype} costs time")
    assert main([*flags, str(tmp_path / "run")]) == 0
    assert "float32 costs time" in capsys.readouterr().out.splitlines()  # the run's own format
    assert seen == [("cells", "search", 9)] * 2
    # Runs that differ leave it its own
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (tmp_path / "other/run.json").write_text(json.dumps(said | {"observation": "grid", "max_completion_length": 9}))
    seen.clear()
    assert main([*flags, str(tmp_path / "run"), str(tmp_path / "other")]) == 0
    assert seen == [("coordinates", "search", 9), ("cells", "search", 9), ("grid", "search", 9)]


def test_samples_do_not_depend_on_who_is_judged_before(tmp_path, monkeypatch):
    drawn = []

    def answers(_judge, _model, samples=0):
        drawn.append(torch.rand(1).item())
        return {"policies": [np.full((16, 4), 0.25)], "format_validity": 1.0}

    monkeypatch.setattr(TableJudge, "answers", answers)
    first, second = (str(build_tiny_model(tmp_path / name)) for name in ("first", "second"))
    options = ("--dtype", "float32", "--samples_per_state", "1", "--episodes", "2")
    assert main(["--policies", first, second, *options]) == 0
    assert main(["--policies", second, *options]) == 0
    assert drawn[:2] == drawn[2:4] == drawn[4:]
