"""Baselines by name, simulation against the exact value, the command and the files it leaves."""

import json
import sys

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import build_tiny_model

from evaluate_policy import (
    EvaluatedPolicy,
    baseline_table,
    evaluate_policies,
    is_baseline,
    main,
    model_policies,
    print_table,
    run_settings,
    save_evaluation,
    simulate,
)
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, lake_mdp
from llm_policy.environments.mdp import optimal_policy
from llm_policy.environments.policy_table import ModelPolicies, constant_policy, score_policy, uniform_policy
from llm_policy.errors import InputError, run_script
from llm_policy.plots import policy_figure

GRID = CANONICAL_GRIDS["4x4"]
LEFT, DOWN, RIGHT, UP = range(4)


def success(name: str, is_slippery: bool = True, grid=GRID) -> float:
    *_, judged = evaluate_policies({name: [baseline_table(name, grid, is_slippery)]}, [grid], is_slippery, episodes=10)
    return judged.mean("success_probability")


BASELINE_SCORES = [
    # name, slippery, success without a step limit
    ("random", True, 0.0139),
    ("constant:LEFT", True, 0.0),
    ("constant:DOWN", True, 0.0495),
    ("constant:right", True, 0.032),
    ("expert", True, 14 / 17),
    ("expert", False, 1.0),
    ("shortest-path", False, 1.0),
    # Learned from 100,000 steps and five learners, and still the optimum
    ("q-learning", True, 14 / 17),
]


@pytest.mark.parametrize(("name", "is_slippery", "value"), BASELINE_SCORES)
def test_baselines(name, is_slippery, value):
    assert is_baseline(name)
    assert success(name, is_slippery) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("name", ["constant:NORTH", "constant", "constant:", "expert:now", "random:1", "oracle", ""])
def test_unknown_baselines(name):
    with pytest.raises(InputError, match=f"--policies '{name}': expected a run folder, a model or one of random"):
        baseline_table(name, GRID, True)


def test_a_model_is_no_baseline():
    assert not any(is_baseline(name) for name in ("google/gemma-2b-it", "runs/laptop", "randomly"))


# Simulation ----------------------------------------------------------------------------------------------------

SIMULATED = [
    # policy, slippery, exact success within 100 steps
    (optimal_policy(lake_mdp(GRID)), True, 0.7402),
    (constant_policy(16, DOWN), True, 0.0495),
    (uniform_policy(16), True, 0.0139),
    (optimal_policy(lake_mdp(GRID, False)), False, 1.0),
]


@pytest.mark.parametrize(("policy_SA", "is_slippery", "exact"), SIMULATED)
def test_simulation_agrees_with_the_exact_value(policy_SA, is_slippery, exact):
    episodes = 2000
    successes = simulate(GRID, is_slippery, policy_SA, 100, episodes, seed=0)
    assert abs(successes / episodes - exact) <= 4 * np.sqrt(exact * (1 - exact) / episodes)


def test_simulation_stops_at_the_horizon():
    policy_SA = optimal_policy(lake_mdp(GRID, False))
    assert [simulate(GRID, False, policy_SA, steps, 3, seed=0) for steps in (5, 6)] == [0, 3]


def test_simulation_follows_its_seed():
    policy_SA = optimal_policy(lake_mdp(GRID))
    counts = [simulate(GRID, True, policy_SA, 100, 300, seed) for seed in (0, 0, 1, 2)]
    assert counts[0] == counts[1]
    assert len(set(counts)) > 1


INTERVALS = [
    # successes, episodes, Wilson's 95 % interval (statsmodels.stats.proportion.proportion_confint)
    (0, 10, 0.0, 0.2775),
    (10, 10, 0.7225, 1.0),
    (5, 10, 0.2366, 0.7634),
    (740, 1000, 0.7119, 0.7662),
    (1, 1000, 0.00018, 0.00565),
]


@pytest.mark.parametrize(("successes", "episodes", "low", "high"), INTERVALS)
def test_wilson_interval(successes, episodes, low, high):
    interval = EvaluatedPolicy("a policy", [], [], successes, episodes).simulated_interval
    assert interval == pytest.approx((low, high), abs=1e-4)


# The comparison ------------------------------------------------------------------------------------------------


def test_optimum_random_and_the_best_constant_action_stand_in_front():
    judged = evaluate_policies({"mine": [constant_policy(16, UP)]}, [GRID], True, validities={"mine": 0.5}, episodes=10)
    assert [p.name for p in judged] == ["optimal", "uniform random", "best constant action (DOWN)", "mine"]
    assert [p.format_validity for p in judged] == [None, None, None, 0.5]
    text = print_table(judged, "FrozenLake")
    for shown in ("0.8235", "0.7402", "0.0139", "0.0495", "11/11", "50 %", "0.7442"):
        assert shown in text


def test_several_maps_are_averaged():
    grids = [("SFFG",), ("SFHG",)]
    judged = evaluate_policies({"right": [constant_policy(4, RIGHT)] * 2}, grids, False, episodes=3)
    assert judged[-1].mean("success_probability") == 0.5
    assert judged[-1].simulated_episodes == 4
    assert judged[-1].simulated_successes == 2
    # LEFT is as good as anything on a map that cannot be crossed, so no single best action can be named
    assert judged[2].name == "best constant action"


def test_each_map_has_the_step_limit_of_its_size():
    judged = evaluate_policies({}, [GRID, CANONICAL_GRIDS["8x8"]], True, episodes=2)
    assert [score.horizon_steps for score in judged[0].scores] == [100, 200]
    assert "in 100 or 200 steps" in " ".join(print_table(judged, "two lakes").split())


def test_greedy_and_sampled_policies_of_a_model():
    class Reader:
        def policies(self, model, grids, samples=0):
            return ModelPolicies([np.full((16, 4), samples)], samples / 10, [])

    tables, validities = model_policies(None, Reader(), [GRID], "m", 4)
    assert {name: t[0][0, 0] for name, t in tables.items()} == {"m, greedy": 0, "m, sampled": 4}
    assert validities == {"m, greedy": 0.0, "m, sampled": 0.4}
    assert list(model_policies(None, Reader(), [GRID], "m", 0)[0]) == ["m, greedy"]


def test_evaluation_of_several_maps_names_every_action(tmp_path):
    grids = [("SFF", "FHF", "FFG"), ("SHF", "FFF", "FHG"), ("SFF", "HHF", "FFG")]
    tables = [baseline_table("shortest-path", grid, True) for grid in grids]
    save_evaluation(evaluate_policies({"a model, greedy": tables}, grids, True, episodes=3), grids, True, tmp_path)
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["maps"] == ["SFF|FHF|FFG", "SHF|FFF|FHG", "SFF|HHF|FFG"]
    judged = {policy["policy"]: policy for policy in content["policies"]}
    assert set(judged["uniform random"]["actions"]) == {"." * 9}
    policy = judged["a model, greedy"]
    assert all(row != "." * 9 for row in policy["actions"])
    for rows, letters, percent in zip(content["maps"], policy["actions"], policy["percents_of_optimal"], strict=True):
        named = [np.full(4, 0.25) if letter == "." else np.eye(4)["LDRU".index(letter)] for letter in letters]
        score = score_policy(tuple(rows.split("|")), True, np.array(named), 100)
        assert percent == pytest.approx(score.percent_of_optimal, abs=0.01)
    with Image.open(tmp_path / "policy.png") as picture:
        assert picture.size == (3 * 3.0 * 120, 3.7 * 120)


def test_arrows_point_where_the_policy_goes():
    optimal_SA = np.eye(4, dtype=bool)[[RIGHT, RIGHT, LEFT]]
    figure = policy_figure([("a lake", ("SFG",), np.eye(4)[[RIGHT, DOWN, LEFT]], optimal_SA)])
    *_, right, down = figure.axes[0].patches
    assert right.get_xy()[:, 0].max() == pytest.approx(0.88)
    assert right.get_xy()[:, 1].max() < 0.6
    assert down.get_xy()[:, 1].max() == pytest.approx(0.88), "y grows downwards"
    green, red = (matplotlib.colors.to_rgb(colour) for colour in ("#1a8a4a", "#c0392b"))
    assert (right.get_facecolor()[:3], down.get_facecolor()[:3]) == (green, red)


def test_run_settings(tmp_path):
    (tmp_path / "run.json").write_text('{"maps": ["SG"], "is_slippery": false}')
    assert run_settings(tmp_path) == {"maps": ["SG"], "is_slippery": False}
    assert run_settings(tmp_path / "nowhere") == {}


def test_each_run_is_read_as_it_was_trained(tmp_path, monkeypatch):
    """Two runs, two observations; the maps and the dynamics must be the same."""
    shared = {"maps": ["SFG"], "is_slippery": False, "dtype": "float32"}
    settings = {"one": {"observation": "grid"}, "two": {"observation": "spaced", "max_completion_length": 9}}
    for name, own in settings.items():
        build_tiny_model(tmp_path / name)
        (tmp_path / name / "run.json").write_text(json.dumps(shared | own))
    seen = []

    def policies(reader, model, grids, samples=0):
        seen.append((reader.observation, reader.max_completion_tokens, reader.is_slippery, grids, model.dtype))
        return ModelPolicies([constant_policy(len(g) * len(g[0]), RIGHT) for g in grids], 1.0, [])

    monkeypatch.setattr("evaluate_policy.PolicyReader.policies", policies)
    runs = [str(tmp_path / name) for name in settings]
    arguments = ["--samples_per_state", "0", "--episodes", "2"]
    assert main(["--policies", *runs, *arguments]) == 0
    of_both = (False, [("SFG",)], torch.float32)
    assert seen == [("grid", 64, *of_both), ("spaced", 9, *of_both)]
    (tmp_path / "two/run.json").write_text(json.dumps(shared | {"maps": ["SG"]}))
    with pytest.raises(InputError, match=r"of runs with other maps; judge them one by one or give --map"):
        main(["--policies", *runs, *arguments])
    assert main(["--policies", *runs, *arguments, "--map", "4x4"]) == 0


# The command ---------------------------------------------------------------------------------------------------


def test_command_with_baselines(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["--policies", "random", "constant:left", "expert", "--episodes", "400", "--output_dir", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "FrozenLake SFFF|FHFH|FFFH|HFFG, slippery" in printed
    assert f"saved {out}/evaluation.json" in printed
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
    assert "FrozenLake SFG, not slippery" in capsys.readouterr().out


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
    (["--policies", "{tmp}/nowhere"], "{tmp}/nowhere: no such folder"),
    (["--policies", "{tmp}/empty"], "{tmp}/empty: is an empty folder"),
    (["--policies", "{tmp}/run"], "{tmp}/run/run.json: is no JSON"),
    (["--policies", "{tmp}/old"], "--policies {tmp}/old: run.json names no map; give --map"),
    (["--policies", "{tmp}/model", "--dtype", "int3"], "'int3'"),
    (["--policies", "{tmp}/model", "--observation", "pixels"], "--observation 'pixels'"),
    (["--policies", "{tmp}/model", "--max_completion_length", "500"], "context of 512 tokens"),
    (["--policies", "random", "--output_dir", "{tmp}/file.txt"], "--output_dir {tmp}/file.txt: cannot be written"),
    (["--policies", "random", "--output_dir", "/proc/no"], "--output_dir /proc/no: cannot be written"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("places")
    build_tiny_model(tmp / "model")
    for name in ("empty", "run"):
        (tmp / name).mkdir()
    (tmp / "file.txt").write_text("kept")
    (tmp / "run" / "run.json").write_text('{"maps":')
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
    with pytest.raises(InputError, match=f"trained on top of an adapter; judge the run's folder, {run}"):
        main(["--policies", str(run / "grpo")])
    monkeypatch.chdir(run)
    # An empty run folder is refused as such, not as half of a policy
    with pytest.raises(InputError, match=r"has no config\.json or adapter_config\.json"):
        main(["--policies", "."])
