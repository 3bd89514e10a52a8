"""The command of policy search: the table and the files it leaves, resuming, and what it says to bad input."""

import json
import math
import os
import shutil
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium.envs.registration import EnvSpec
from PIL import Image
from safetensors.torch import load_file, save_file
from stub_endpoint import stub_endpoint
from tiny_models import build_tiny_model

import search_policy
from llm_policy.environments.gym_env import make_gym_environment
from llm_policy.errors import InputError, run_script
from llm_policy.policy_search import proposers
from llm_policy.policy_search.answer_log import read_log
from llm_policy.policy_search.endpoint import KEY_VARIABLE
from llm_policy.policy_search.judge import (
    PolicyValue,
    Row,
    SearchComparison,
    SearchJudge,
    published_of,
    row_of,
    verdict_of,
)
from llm_policy.policy_search.parameters import search_problem
from llm_policy.policy_search.proposers import ProposerSettings, make_proposer
from llm_policy.policy_search.search import SearchSettings, Step
from llm_policy.run_files import ROOT, only_process_in, resolved_config
from search_policy import closing_lines, main, read_arguments

KEY = "sk-secret-0123456789"
GOOD = "parameters: " + ", ".join("1" * 16)
FILES = {
    "COMPLETE", "answers.jsonl", "evaluation.json", "curve.png", "result.txt", "resolved_config.yaml", "run.json",
}  # fmt: skip


def small_run(output_dir, *more) -> list[str]:
    """Arguments of a run of a fraction of a second; what stands in `more` wins."""
    options = {"proposer": "random", "iterations": 5, "episodes": 4, "warm_up": 3, "judge_episodes": 5}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [*arguments, "--output_dir", str(output_dir), *map(str, more)]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


# A run and its files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lake_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("lake") / "out"
    assert main(small_run(out, "--iterations", 30, "--seed", 3)) == 0
    return out


def test_files(lake_run):
    assert {path.name for path in lake_run.iterdir()} == FILES
    run = json.loads((lake_run / "run.json").read_text())
    assert (run["env_id"], run["seed"], run["horizon_steps"], run["config"]) == ("FrozenLake-v1", 3, 100, "defaults")
    assert set(run["versions"]) >= {"gymnasium", "numpy", "torch", "transformers"}
    with Image.open(lake_run / "curve.png") as picture:
        picture.load()
        assert picture.width > picture.height > 300


def test_evaluation(lake_run):
    evaluation = json.loads((lake_run / "evaluation.json").read_text())
    rows = {row["policy"]: row for row in evaluation["policies"]}
    assert list(rows) == ["optimal without a limit", "uniform random policy", "hill climbing", "random search"]
    assert rows["optimal without a limit"]["value"] == pytest.approx(0.7402, abs=1e-4)
    assert rows["optimal without a limit"]["value_without_limit"] == pytest.approx(14 / 17)
    assert rows["uniform random policy"]["value"] == pytest.approx(0.0139, abs=1e-4)
    assert rows["random search"]["episodes"] == rows["hill climbing"]["episodes"] == (3 + 30) * 4
    # Judged exactly, and not by the draw that chose it
    returns = [r["returns"] for r in read_log(lake_run / "answers.jsonl") if r["kind"] == "rollout"]
    assert rows["random search"]["search_mean"] == max(sum(each) / 4 for each in returns) > 0
    assert 0 < rows["random search"]["value"] != rows["random search"]["search_mean"]
    for name in ("random search", "hill climbing"):
        curve = evaluation["curves"][name]
        assert curve["iteration"] == list(range(31))
        assert curve["value"][-1] == rows[name]["value"]
    assert evaluation["curves"]["random search"]["value"][0] == evaluation["curves"]["hill climbing"]["value"][0]
    assert evaluation["published"]["ProPS"] == ".57 (.17)"
    assert evaluation["cost"]["calls"] == 30


def test_result(lake_run):
    lines = (lake_run / "result.txt").read_text().splitlines()
    assert "judged exactly" in lines[0]
    assert any("0.7402" in line and "0.8235" in line for line in lines)
    assert "best policy: " in "\n".join(lines)
    assert any(line.startswith("published, not run here (arXiv 2511.21928; ProPS asks GPT-4o") for line in lines)
    assert lines[-2].startswith("cost: 30 calls, 0 tokens in, 0 out, ")
    assert lines[-1].startswith("verdict: random search ")


def test_a_finished_run_is_shown_again(lake_run, capsys):
    before = {path: path.stat().st_mtime_ns for path in lake_run.iterdir()}
    assert main(small_run(lake_run, "--iterations", 30, "--seed", 3)) == 0
    printed = capsys.readouterr().out
    assert "holds a finished run" in printed
    assert (lake_run / "result.txt").read_text() in printed
    assert {path: path.stat().st_mtime_ns for path in lake_run.iterdir()} == before


def test_the_resolved_config_and_the_recorded_answers_repeat_the_run(lake_run, tmp_path):
    out = tmp_path / "again"
    config = ["--config", str(lake_run / "resolved_config.yaml"), "--output_dir", str(out)]
    assert main([*config, "--proposer", "recorded", "--answers", str(lake_run / "answers.jsonl")]) == 0
    assert (out / "answers.jsonl").read_bytes() == (lake_run / "answers.jsonl").read_bytes()
    first, again = (json.loads((folder / "evaluation.json").read_text()) for folder in (lake_run, out))
    assert first["policies"][-1]["parameters"] == again["policies"][-1]["parameters"]
    assert first["curves"]["random search"] == again["curves"]["ProPS, recorded"]


def test_other_environments(tmp_path, capsys):
    assert main(small_run(tmp_path / "pole", "--env_id", "CartPole-v1")) == 0
    evaluation = json.loads((tmp_path / "pole/evaluation.json").read_text())
    rows = {row["policy"]: row for row in evaluation["policies"]}
    assert list(rows) == ["uniform random policy", "hill climbing", "random search"]
    assert all(row["standard_error"] >= 0 and row["value_without_limit"] is None for row in rows.values())
    assert evaluation["judge_episodes"] == 5
    assert "solved at a return of 475" in capsys.readouterr().out
    limited = ["--env_id", "CartPole-v1", "--horizon_steps", "20"]
    assert main(small_run(tmp_path / "limited", *limited)) == 0
    assert "solved at" not in capsys.readouterr().out
    paid = ["--env_options", '{"reward_schedule": [10, -10, 0.1]}', "--proposer", "random"]
    assert main(small_run(tmp_path / "paid", *paid)) == 0
    assert "optimal" not in (printed := capsys.readouterr().out), "to walk on for ever pays without a limit"
    assert "return in 100 steps" in printed
    assert main(small_run(tmp_path / "cliff", "--env_id", "CliffWalking-v1", "--proposer", "hill_climbing")) == 0
    rows = {row["policy"]: row for row in json.loads((tmp_path / "cliff/evaluation.json").read_text())["policies"]}
    assert rows["optimal without a limit"]["value"] == -13
    assert math.isinf(float(rows["hill climbing"]["value_without_limit"]))


def test_without_baselines_and_with_options(tmp_path):
    options = ["--env_options", '{"map_name": "8x8", "is_slippery": false}', "--baselines", "false"]
    assert main(small_run(tmp_path / "out", *options, "--horizon_steps", 14)) == 0
    rows = json.loads((tmp_path / "out/evaluation.json").read_text())["policies"]
    assert [row["policy"] for row in rows] == ["optimal without a limit", "uniform random policy", "random search"]
    assert (rows[0]["value"], len(rows[2]["parameters"])) == (1.0, 64)


# Models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A tiny model with room for a prompt: its tokenizer takes about one token per letter."""
    folder = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def test_a_local_model(tiny_model, tmp_path, capsys):
    model = ["--proposer", "local", "--model_name_or_path", tiny_model, "--dtype", "float32", "--iterations", 3]
    assert main(small_run(tmp_path / "out", *model)) == 0
    answers = [r for r in read_log(tmp_path / "out/answers.jsonl") if r["kind"] == "answer"]
    assert [(r["iteration"], r["attempt"], r["error"]) for r in answers] == [(1, 0, None), (2, 0, None), (3, 0, None)]
    assert "0 of 3 iterations failed" in capsys.readouterr().out


def test_a_local_model_left_to_itself(tiny_model, tmp_path, capsys):
    model = ["--constrained", "false", "--proposer", "local", "--model_name_or_path", tiny_model, "--dtype", "float32"]
    model += ["--iterations", 2]
    assert main(small_run(tmp_path / "out", *model, "--describe_environment", "true")) == 0
    answers = [r for r in read_log(tmp_path / "out/answers.jsonl") if r["kind"] == "answer"]
    assert [(r["iteration"], r["attempt"]) for r in answers] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(r["error"] and r["answer"].startswith("parameters:") and r["tokens_in"] > 500 for r in answers)
    assert "frozen lake" in answers[0]["prompt"][1]["content"]
    printed = capsys.readouterr().out
    assert "verdict: ProPS+, model gave no usable answer; its policy is the best of the warm-up" in printed
    assert "With the episodes of the failed iterations as well: random search " in printed
    assert "2 of 2 iterations failed" in printed
    rows = {r["policy"]: r for r in json.loads((tmp_path / "out/evaluation.json").read_text())["policies"]}
    assert rows["ProPS+, model"]["episodes"] == rows["random search"]["episodes"] == 3 * 4


def endpoint_run(output_dir, base_url, *more):
    pytest.importorskip("openai", reason="requirements-endpoint.txt")
    endpoint = ["--proposer", "endpoint", "--base_url", base_url, "--model_name", "model-1", "--endpoint_retries", 1]
    return small_run(output_dir, *endpoint, *more)


def test_a_run_whose_endpoint_went_down_resumes(tmp_path, capsys):
    out = tmp_path / "out"
    with stub_endpoint(GOOD, "nonsense", 500) as server, pytest.raises(SystemExit) as leaving:
        run_script(lambda: main(endpoint_run(out, server.base_url)))
    assert leaving.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert "status 500 after at most 1 more tries" in line
    assert "the same command resumes" in line
    assert not (out / "evaluation.json").exists()
    with stub_endpoint(GOOD) as server:  # elsewhere
        assert main(endpoint_run(out, server.base_url)) == 0
    assert "2 earlier answers, not asked again" in capsys.readouterr().out
    assert len(server.requests) == 5 - 2 + 1
    assert json.loads((out / "evaluation.json").read_text())["cost"]["calls"] == 6
    assert KEY not in "".join(path.read_text() for path in out.iterdir() if path.suffix != ".png")


def test_interrupted(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_policy, "search", interrupted)
        assert main(small_run(tmp_path / "out")) == 75
    assert "the same command resumes" in capsys.readouterr().out
    assert main(small_run(tmp_path / "out")) == 0


def test_a_search_goes_on_with_the_model_that_it_began_with(tiny_model, tmp_path, monkeypatch):
    own = tmp_path / "model"
    shutil.copytree(tiny_model, own)
    model = ["--proposer", "local", "--model_name_or_path", own, "--dtype", "float32", "--iterations", 2]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_policy, "search", interrupted)
        assert main(small_run(tmp_path / "out", *model)) == 75
    weights = load_file(own / "model.safetensors")
    save_file({name: w + 0.01 for name, w in weights.items()}, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="the model changed since the run was begun"):
        main(small_run(tmp_path / "out", *model))


def test_a_finished_search_that_was_edited_is_not_shown(tmp_path):
    assert main(small_run(tmp_path / "out")) == 0
    (tmp_path / "out/result.txt").write_text("ProPS beats everything\n")
    with pytest.raises(InputError, match=r"result\.txt: is not as it was written; put the old file back"):
        main(small_run(tmp_path / "out"))


def test_another_proposer_is_named_and_no_option_that_hangs_on_it(lake_run):
    with pytest.raises(InputError, match=r"^--proposer .*was begun with random"):
        main(["--output_dir", str(lake_run)])


def test_only_one_process_writes(tmp_path, capsys):
    out = tmp_path / "out"
    with only_process_in(out), pytest.raises(InputError, match="another process is at work there"):
        main(small_run(out))
    assert main(small_run(out)) == 0
    assert {path.name for path in out.iterdir()} == FILES, "no lock is left"


def test_a_lost_result_is_written_again(tmp_path):
    assert main(small_run(tmp_path)) == 0
    text = (tmp_path / "result.txt").read_text()
    (tmp_path / "result.txt").unlink()
    assert main(small_run(tmp_path)) == 0

    def without_times(lines):
        return [line for line in lines.splitlines() if not line.startswith("cost: ")]

    assert without_times((tmp_path / "result.txt").read_text()) == without_times(text)


def test_silent_parts_are_announced(tiny_model, tmp_path, capsys):
    model = ["--proposer", "local", "--model_name_or_path", tiny_model, "--dtype", "float32", "--iterations", 2]
    assert main(small_run(tmp_path / "out", *model)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"loading {tiny_model} in float32"
    after_search = lines[lines.index(next(line for line in lines if line.startswith("iteration 2/2"))) + 1 :]
    assert after_search[:3] == [
        "random search, 2 iterations",
        "hill climbing, 2 iterations",
        "judging the policies exactly",
    ]


def test_the_number_format_is_measured_once_for_a_search(tiny_model, tmp_path, capsys, monkeypatch):
    """A search that is resumed keeps the format it began with, because another one gives other answers."""
    arguments = small_run(tmp_path / "out", "--proposer", "local", "--model_name_or_path", tiny_model)
    monkeypatch.setattr(search_policy, "faster_format", lambda on_gpu: ("float32", ""))
    assert main([*arguments, "--iterations", "1"]) == 0
    assert f"loading {tiny_model} in float32" in capsys.readouterr().out
    monkeypatch.setattr(search_policy, "faster_format", lambda on_gpu: ("bfloat16", ""))
    (_, proposing, _), _ = read_arguments(arguments)
    assert proposing.dtype == "float32"
    (_, proposing, _), _ = read_arguments([*arguments, "--output_dir", str(tmp_path / "other")])
    assert proposing.dtype == "bfloat16"


def test_published_figures_stand_beside_the_usual_environment_alone():
    assert published_of(make_gym_environment("FrozenLake-v1"))["ProPS"] == ".57 (.17)"
    for options, steps in (({"is_slippery": False}, None), ({}, 50)):
        assert published_of(make_gym_environment("FrozenLake-v1", options, steps)) == {}


def test_the_real_command(tmp_path):
    command = [sys.executable, "search_policy.py", *small_run(tmp_path / "out")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "FrozenLake-v1: 16 parameters (a table of actions), at most 100 steps per episode"
    assert lines[1].startswith("warm-up: 3 random policies")
    assert lines[2].startswith("iteration 1/5: return ")
    assert lines[-1].startswith("saved ")
    assert done.stderr.splitlines()[0] == "search_policy.py: loading PyTorch, Transformers and TRL ..."


def test_help_is_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", ["props_frozen_lake.yaml", "props_frozen_lake_improved.yaml"])
def test_configs(name):
    (script, proposing, settings), config = read_arguments(["--config", f"configs/{name}"])
    assert config == f"configs/{name}"
    assert (settings.iterations, settings.episodes, settings.warm_up) == (400, 20, 20)
    published = name == "props_frozen_lake.yaml"
    assert settings.pool_duplicates is not published
    assert settings.history == ("whole" if published else "best_and_recent")
    assert settings.optimum_hint == ("1.0" if published else "exact")
    assert (script.env_id, proposing.proposer) == ("FrozenLake-v1", "endpoint")


def test_flags_win_over_the_config():
    flags = ["--iterations", "7", "--proposer", "random"]
    (_, proposing, settings), _ = read_arguments([*flags, "--config=configs/props_frozen_lake.yaml"])
    assert (settings.iterations, proposing.proposer, settings.episodes) == (7, "random", 20)


def test_env_options_may_be_a_mapping(tmp_path):
    (tmp_path / "config.yaml").write_text("env_options: {map_name: 8x8}\n")
    (script, *_), _ = read_arguments(["--config", str(tmp_path / "config.yaml")])
    assert script.options == {"map_name": "8x8"}


# SearchComparison ----------------------------------------------------------------------------------------------------

VERDICTS = [
    # (value, standard error) of the search and of the other, what is said
    ((0.5, None), (0.4, None), "beats random search"),
    ((0.4, None), (0.5, None), "does not beat random search"),
    ((0.4, None), (0.4, None), "equals random search"),
    ((400.0, 10.0), (430.0, 20.0), "cannot be told from random search"),
    ((500.0, 10.0), (430.0, 20.0), "beats random search"),
    ((300.0, 10.0), (430.0, 20.0), "does not beat random search"),
]


@pytest.mark.parametrize(("searched", "other", "words"), VERDICTS)
def test_verdicts(searched, other, words):
    rows = Row("ProPS", PolicyValue(*searched)), Row("random search", PolicyValue(*other))
    assert words in verdict_of(rows[0], rows[1:])


COST = {"failed_iterations": 0, "iterations": 2, "unusable_answers": 2, "repeated_policies": 0}
COST |= dict.fromkeys(("calls", "tokens_in", "tokens_out", "answer_seconds", "seconds"), 1)


def test_a_search_without_a_policy_has_no_best_of_the_warm_up():
    problem = search_problem("FrozenLake-v1")
    compared = SearchComparison([], [], Row("ProPS", None), {})
    cost = COST | {"failed_iterations": 2}
    assert closing_lines(problem, compared, {}, cost)[-1] == "verdict: ProPS found no policy at all"


CURVES = [  # iterations, values, whether it is said
    ([0, 1, 2], [0.4, 0.4, 0.4], True),
    ([0, 1, 2], [0.4, 0.4, 0.5], False),
    ([1, 2], [0.4, 0.4], False),  # without a warm-up
]


@pytest.mark.parametrize(("iterations", "values", "is_said"), CURVES)
def test_a_search_that_adds_nothing_to_its_warm_up_says_so(iterations, values, is_said):
    found = SearchComparison([], [], Row("ProPS", PolicyValue(values[-1], None)), {"ProPS": (iterations, values)})
    lines = closing_lines(search_problem("FrozenLake-v1"), found, {}, COST)
    assert ("No proposal was better than the best random policy of the warm-up." in lines) == is_said


def test_a_baseline_is_read_at_the_same_number_of_episodes():
    steps = [Step(i, [0.0], False, None, (i,), float(i), 4 * i) for i in range(1, 6)]
    row = row_of("random search", steps, lambda parameters: PolicyValue(float(parameters[0])), episodes=12)
    assert (row.parameters, row.episodes, row.judgement.value) == ((3,), 12, 3.0)
    assert row_of("nothing", steps, None, episodes=3).judgement is None


# Bad input -----------------------------------------------------------------------------------------------------

CONFIGS = {
    "unknown_key.yaml": "iteratons: 3\n",
    "list.yaml": "- a\n",
    "not_yaml.yaml": "a: [1\nb: }",
    "bad_value.yaml": "iterations: many\n",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("places")
    build_tiny_model(tmp / "model")  # a context of 512 tokens
    for name, text in CONFIGS.items():
        (tmp / name).write_text(text)
    (tmp / "file").write_text("kept")
    (tmp / "other").mkdir()
    (tmp / "other/resolved_config.yaml").write_text("seed: 1\n")
    (tmp / "damaged").mkdir()
    (tmp / "damaged/answers.jsonl").write_text("not json\n")
    return tmp


LOCAL = ["--proposer", "local", "--model_name_or_path", "{tmp}/model", "--dtype", "float32"]
ENDPOINT = ["--proposer", "endpoint", "--model_name", "m", "--base_url", "http://127.0.0.1:9/v1"]
BAD_INPUT = [
    # further arguments, what the line names
    (["--iteratons", "3"], "--iteratons"),
    (["stray"], "stray"),
    (["--config"], "--config: expected the path"),
    (["--config", "{tmp}/nowhere.yaml"], "--config {tmp}/nowhere.yaml: no such file"),
    (["--config", "{tmp}/unknown_key.yaml"], "iteratons"),
    (["--config", "{tmp}/list.yaml"], "must contain a YAML mapping"),
    (["--config", "{tmp}/not_yaml.yaml"], "{tmp}/not_yaml.yaml"),
    (["--iterations", "many"], "'many'"),
    (["--iterations", "0"], "--iterations 0: expected an integer of at least 1"),
    (["--iterations", "100000", "--episodes", "1000"], "--iterations 100000 x --episodes 1000: 1e+08 episodes"),
    (["--judge_episodes", "1000000", "--horizon_steps", "1000000"], "1e+12 steps, expected at most 1e+09"),
    (["--proposer", "oracle"], "--proposer 'oracle': expected one of local, endpoint, random"),
    (["--history", "none"], "--history 'none': expected one of whole, best_and_recent"),
    (["--history", "whole", "--history_best", "3"], "--history_best: is for --history best_and_recent"),
    (["--resume", "yes"], "--resume 'yes': expected one of auto, never"),
    (["--dtype", "int3"], "--dtype 'int3'"),
    (["--temperature", "-1"], "--temperature -1: expected a number of at least 0"),
    (["--judge_episodes", "1"], "--judge_episodes 1: expected an integer of at least 2"),
    (["--env_options", "{{"], "is no JSON"),
    (["--env_options", "[" * 100_000], "is nested too deeply"),
    (["--env_options", "[1]"], "expected a JSON object"),
    (["--env_options", '{{"is_slippery": "false"}}'], '--env_options: is_slippery "false": expected true or false'),
    (["--env_options", '{{"is_slippery": null}}'], "--env_options: is_slippery null: expected true or false"),
    (["--env_options", '{{"is_slippery": 5}}'], "--env_options: is_slippery 5: expected true or false"),
    (["--env_options", '{{"desc": ["SXG"]}}'], "--env_options: desc: row 1, column 2 has the unknown letter 'X'"),
    (["--env_options", '{{"desc": ["SH", "HF"]}}'], "--env_options: desc: 'SH|HF' has no goal"),
    (["--env_options", '{{"success_rate": -1}}'], "FrozenLake-v1: its table has the probability -1"),
    (["--env_options", '{{"reward_schedule": [1e308, 0, 0]}}'], "a reward that is no number, or above 1e+100"),
    (["--env_id", "\udcff"], "--env_id '\\udcff': holds a byte that is no UTF-8"),
    (["--proposer", "recorded", "--answers", ""], "--answers '': names nothing"),
    (["--proposer", "endpoint"], "--proposer endpoint: needs --model_name"),
    (["--proposer", "local", "--base_url", "http://h/v1"], "--base_url: is for --proposer endpoint, and this is"),
    (["--proposer", "hill_climbing", "--temperature", "0.3"], "--temperature: is for --proposer local or endpoint"),
    (["--proposer", "endpoint", "--model_name", "m", "--dtype", "float32"], "--dtype: is for --proposer local, and"),
    (["--env_options", '{{"max_episode_steps": 5}}'], "--env_options: max_episode_steps 5: is --horizon_steps here"),
    (["--proposer", "local", "--answers", "a.jsonl"], "--answers: is for --proposer recorded, and this is"),
    (["--proposer", "local", "--answer_prefix", "I say parameters:"], "has to begin the line `parameters:`"),
    (["--proposer", "recorded"], "--proposer recorded: needs --answers"),
    (["--proposer", "local", "--model_name", "m"], "--model_name: is for --proposer endpoint or recorded, and this is"),
    (["--model_name_or_path=m"], "--model_name_or_path: is for --proposer local or recorded, and this is --pr"),
    (["--proposer", "recorded", "--answers", "{tmp}/nowhere"], "{tmp}/nowhere: cannot be read"),
    # The environment
    (["--env_id", "FrozenLakee-v1"], "--env_id FrozenLakee-v1: "),
    (["--env_id", "Blackjack-v1"], "--env_id Blackjack-v1: observations Tuple"),
    (["--env_id", "CartPole-v1", "--optimum_hint", "exact"], "CartPole-v1 has no transition table"),
    (["--env_id", "Acrobot-v1", "--describe_environment", "true"], "--description_file"),
    (["--describe_environment", "true", "--description_file", "{tmp}/nowhere"], "--description_file {tmp}/nowhere"),
    (["--description_file", "{tmp}/nowhere"], "--description_file {tmp}/nowhere: needs --describe_environment true"),
    # The context
    ([*LOCAL], "exceeds the model's context of 512"),
    ([*LOCAL, "--env_id", "Taxi-v4"], "--env_id Taxi-v4: 500 parameters per policy make prompts of up to "),
    ([*ENDPOINT, "--env_id", "Taxi-v4", "--context_tokens", "4096"], "exceeds the model's context of 4096"),
    ([*ENDPOINT, "--history", "whole", "--iterations", "4000", "--context_tokens", "9999"], "of 9999"),
    # The model
    (["--proposer", "local", "--model_name_or_path", "{tmp}/nowhere"], "{tmp}/nowhere: no such folder"),
    # The key does not belong here
    (["--api_key", KEY], "--api_key"),
    (["--proposer", "endpoint", "--model_name", "m", "--base_url", "http://u:p@h/v1"], "holds a user, password"),
    # The output folder
    (["--output_dir", "{tmp}/other"], "--proposer random: {tmp}/other was begun with the default; "),
    (["--output_dir", "{tmp}/other", "--resume", "never"], "--output_dir {tmp}/other: holds a run; choose another"),
    (["--output_dir", "{tmp}/file"], "--output_dir {tmp}/file: is a file"),
    (["--output_dir", "/proc/no"], "--output_dir /proc/no: cannot be written"),
    (["--output_dir", "{tmp}/damaged"], "holds answers.jsonl, but no run"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "message"), BAD_INPUT, ids=[" ".join(more)[:80] for more, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_writes_nothing(more, message, places, tmp_path, monkeypatch, capsys):
    if "http://127.0.0.1:9/v1" in more or "http://u:p@h/v1" in more:
        pytest.importorskip("openai", reason="requirements-endpoint.txt")

    def files():
        return {path: path.stat().st_mtime_ns for folder in (places, tmp_path) for path in folder.rglob("*")}

    before = files()
    more = [text.format(tmp=places) for text in more]
    monkeypatch.setattr(sys, "argv", ["search_policy.py", *small_run(tmp_path / "out", *more)])
    with pytest.raises(SystemExit) as leaving:
        run_script(main)
    assert leaving.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert message.format(tmp=places) in lines[0]
    assert files() == before


def test_a_bad_value_in_a_config_is_named(places, capsys):
    with pytest.raises(SystemExit):
        run_script(lambda: main(["--config", str(places / "bad_value.yaml")]))
    assert "many" in capsys.readouterr().err


def test_an_endpoint_that_refused_the_first_question_may_be_asked_otherwise(tmp_path):
    """Else a misspelt model would keep the folder for ever."""
    flags = ["--proposer", "endpoint", "--output_dir", str(tmp_path)]
    begun, _ = read_arguments([*flags, "--model_name", "typo"])
    (tmp_path / "resolved_config.yaml").write_text(yaml.safe_dump(resolved_config(*begun)))
    rollout = {"kind": "rollout", "iteration": -1, "parameters": [0.0], "returns": [1.0]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(rollout) + "\n")
    mended, _ = read_arguments([*flags, "--model_name", "right", "--temperature", "0.5"])
    assert not search_policy.is_finished(tmp_path, mended)
    other, _ = read_arguments([*flags, "--model_name", "right", "--seed", "9"])
    with pytest.raises(InputError, match="--seed 9: "):
        search_policy.is_finished(tmp_path, other)
    answer = {
        "kind": "answer", "iteration": 0, "attempt": 0, "prompt": [], "answer": "", "error": None, "parameters": None,
        "tokens_in": 1, "tokens_out": 1, "seconds": 0.1,
    }  # fmt: skip
    (tmp_path / "answers.jsonl").write_text(f"{json.dumps(rollout)}\n{json.dumps(answer)}\n")
    with pytest.raises(InputError, match=r"run\.json: is gone, and it says which model gave the answers in answers"):
        search_policy.is_finished(tmp_path, begun)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match=r"--model_name right: .* was begun with typo"):
        search_policy.is_finished(tmp_path, mended)


def test_what_was_recorded_may_stand_beside_the_settings_it_was_recorded_with(tmp_path):
    settings = {"proposer": "local", "dtype": "float32", "temperature": 0.5, "base_url": "http://h/v1"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    flags = ["--config", str(tmp_path / "config.yaml"), "--proposer", "recorded", "--answers", "a.jsonl"]
    (_, proposing, _), _ = read_arguments(flags)
    assert (proposing.proposer, proposing.temperature) == ("recorded", 0.5)


def test_settings_survive_the_resolved_config(tmp_path):
    flags = ["--optimum_hint", "0.5", "--history_best", "3", "--env_options", '{"map_name": "8x8"}']
    first, _ = read_arguments([*flags, "--context_tokens", "9", "--proposer", "endpoint", "--model_name", "m"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolved_config(*first)))
    again, _ = read_arguments(["--config", str(tmp_path / "config.yaml")])
    assert first == again


def test_the_optimum_and_the_description_of_a_file_are_told(tmp_path):
    (tmp_path / "lake.txt").write_text("Ice as far as you see.\n")
    told = ["--optimum_hint", "exact", "--describe_environment", "true", "--description_file", tmp_path / "lake.txt"]
    assert main(small_run(tmp_path / "out", *told)) == 0
    prompts = [r["prompt"][1]["content"] for r in read_log(tmp_path / "out/answers.jsonl") if r["kind"] == "answer"]
    for prompt in prompts:
        assert "\n\nIce as far as you see.\n\nThe best possible return is about 0.7442.\n\n" in prompt


def test_settings_reach_the_model(tiny_model):
    own = {"model_name_or_path": str(tiny_model), "dtype": "float32", "temperature": 0.5, "max_completion_tokens": 7}

    def config_of(ask_reason: bool):
        chosen = SearchSettings(seed=3, ask_reason=ask_reason)
        proposer = make_proposer(search_problem("FrozenLake-v1"), ProposerSettings(**own), chosen, None, None)
        assert proposer.seed == 3
        return proposer.generation_config

    one_line, with_reason = config_of(False), config_of(True)
    assert (one_line.temperature, one_line.max_new_tokens) == (0.5, 7)
    assert set(with_reason.eos_token_id) < set(one_line.eos_token_id), "a line break is no end before the reason"


def test_settings_reach_the_endpoint(monkeypatch):
    monkeypatch.setattr(proposers, "EndpointProposer", lambda *arguments: arguments)
    own = {"model_name": "m", "base_url": "http://h/v1", "max_completion_tokens": 77, "temperature": 0.3}
    own |= {"endpoint_retries": 4, "endpoint_timeout_seconds": 9.0}
    made = make_proposer(
        search_problem("FrozenLake-v1"), ProposerSettings("endpoint", **own), SearchSettings(seed=5), None, None
    )
    assert made == ("m", "http://h/v1", 77, 0.3, 5, 4, 9.0)


class Coins(gymnasium.Env):
    """Twenty coins; whoever guesses one has a point."""

    observation_space, action_space = gymnasium.spaces.Discrete(1), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, float(action == self.np_random.integers(2)), False, False, {}


def test_a_random_policy_does_not_draw_the_numbers_of_the_environment(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Coins-v0", EnvSpec("Coins-v0", Coins, max_episode_steps=20))
    assert SearchJudge(search_problem("Coins-v0"), 100, 0).of_uniform_random().value == pytest.approx(10, abs=1)


def test_a_sampled_value_has_the_standard_error_of_its_mean():
    problem, parameters = search_problem("CartPole-v1"), (0.0,) * 10
    judges = SearchJudge(problem, 20, 0)
    totals = problem.returns(parameters, 20, judges.seed)
    assert judges(parameters).value == np.mean(totals)
    assert judges(parameters).standard_error == pytest.approx(np.std(totals, ddof=1) / 20**0.5)
