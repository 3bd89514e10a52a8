import json

import pytest

import report

ROW = {"optimal_success": 0.8235, "optimal_at_horizon": 0.7442, "acting_states": 11.0}


def policy(name: str, success: float, states: int) -> dict:
    return ROW | {
        "policy": name, "success_probability": success, "success_at_horizon": success / 2, "optimal_states": states,
        "percent_of_optimal": 100 * success,
    }  # fmt: skip


def write_seed(folder, success: float, is_slippery: bool = True) -> None:
    folder.mkdir(parents=True)
    policies = [
        policy("optimal", 0.8235, 11),
        policy("uniform random", 0.0139, 0),
        policy("trained, greedy", success, 9),
        policy("trained, sampled", success / 2, 9),
    ]
    (folder / "evaluation.json").write_text(json.dumps({"is_slippery": is_slippery, "policies": policies}))
    steps = [{"step": 1, "seconds": 30.0}, {"step": 2, "seconds": 60.0, "policy/success_probability": success}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    (folder / "result.txt").write_text(f"a table\nverdict: says {success} (warm start 5 steps, GRPO 30)\n")
    (folder / "minutes.txt").write_text("4.25\n")
    (folder / "run.json").write_text('{"observation": "spaced"}')
    if not (folder.parent / "command.txt").exists():
        (folder.parent / "command.txt").write_text(f"python results/run.py --name {folder.parent.name}\n")


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for seed, success in ((1, 0.8), (2, 0.4)):
        write_seed(tmp_path / f"canonical_slippery/seed-{seed}", success)
    write_seed(tmp_path / "dry/seed-1", 1.0, is_slippery=False)
    (tmp_path / "dry/seed-2").mkdir()  # still running
    return tmp_path


def test_training_table(results):
    found = report.training_results()
    assert {name: len(seeds) for name, seeds in found.items()} == {"canonical_slippery": 2, "dry": 1}
    lines = report.training_table(found).splitlines()
    assert lines[2] == (
        "| [canonical_slippery](results/canonical_slippery) | 2 | **0.6000** (0.8000, 0.4000) of 0.8235 "
        "| **0.3000** (0.4000, 0.2000) of 0.7442 | **0.1500** (0.2000, 0.1000) | 9, 9 of 11 | 4.2, 4.2 | says 0.4 |"
    )
    names = [line.split("|")[1].strip(" *") for line in lines[4:]]
    assert names == [
        "optimal, slippery", "uniform random, slippery", "optimal, not slippery", "uniform random, not slippery",
    ]  # fmt: skip


def test_the_worst_of_equal_seeds_has_fewest_optimal_states(results):
    for seed, states in ((1, 6), (2, 3), (3, 4)):
        folder = results / f"poor/seed-{seed}"
        write_seed(folder, 0.0)
        evaluation = json.loads((folder / "evaluation.json").read_text())
        evaluation["policies"][2]["optimal_states"] = states
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
        (folder / "result.txt").write_text(f"verdict: {states} states\n")
    [line] = [row for row in report.training_table(report.training_results()).splitlines() if "[poor]" in row]
    assert line.endswith("| 3 states |")


def test_ablation_table(results):
    for name, options in (("kl", ""), ("prompt", "--config configs/laptop_original.yaml ")):
        folder = results / f"ablation_{name}"
        folder.mkdir()
        flags = f"-- --max_steps 40 --{name} 1 --stop_when either --beta 2"
        (folder / "command.txt").write_text(f"python results/run.py --name ablation_{name} {options}{flags}\n")
        write_seed(folder / "seed-1", 0.3)
    metrics = results / "canonical_slippery/seed-1/metrics.jsonl"
    metrics.write_text(metrics.read_text() + json.dumps({"step": 5, "policy/percent_of_optimal": 100.0}) + "\n")
    assert report.ablation_table(report.training_results()).splitlines()[2:] == [
        "| *canonical_slippery, unchanged* | **0.6000** (0.8000, 0.4000) | 9, 9 of 11 | 5, never | 5, 2 | 4, 4 "
        "| says 0.4 |",
        "| [`--kl 1 --beta 2`](results/ablation_kl) | **0.3000** (0.3000) | 9 of 11 | never | 2 | 4 | says 0.3 |",
        "| [`--prompt 1 --beta 2`](results/ablation_prompt) | **0.3000** (0.3000) | 9 of 11 | never | 2 | 4 "
        "| says 0.3 |",
    ]


def test_maps_table(results):
    for seed, success in ((1, 0.5), (2, 0.7)):
        folder = results / f"random_maps_dry/seed-{seed}"
        write_seed(folder, success)
        evaluation = json.loads((folder / "evaluation.json").read_text())
        others = (("untrained, greedy", 0.01), ("shortest path", 0.2), ("best constant action (LEFT)", 0.1))
        evaluation["policies"] += [policy(name, value, 1) for name, value in others]
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    row = "| [random_maps_dry](results/random_maps_dry) | spaced | **60.0** (50.0, 70.0) | 1.0 | 20.0 | 10.0 | 1.4 "
    row += "| 0.8235 | 9.0, 9.0 of 11.0 | {} | {} | 2, 2 | 4, 4 |"

    def rows() -> list[str]:
        return report.maps_table({"random_maps_dry": report.training_results()["random_maps_dry"]}).splitlines()[2:]

    assert rows() == [row.format("", "")]
    # SFG: RIGHT twice. SF|FG: two best actions, DOWN, RIGHT
    for seed, letters in ((1, ["RR.", "RDD."]), (2, ["RL.", "DD.."])):
        path = results / f"random_maps_dry/seed-{seed}/evaluation.json"
        evaluation = json.loads(path.read_text()) | {"is_slippery": False, "maps": ["SFG", "SF|FG"]}
        evaluation["policies"][2]["actions"] = letters
        path.write_text(json.dumps(evaluation))
    assert rows() == [row.format("none, 100 %, 50 %, none", "dead end 1, no answer 1")]


@pytest.mark.parametrize(
    ("grid", "letters", "expected"),
    [
        ("SFF|FHF|FFG", "DDDDRRRR.", ""),
        ("SHF|FFF|FFG", "RRDDDDRR.", "hole 1"),
        ("SFF|FHF|FHG", "DDDD.DD..", "dead end 1"),
        ("SFF|FFF|FFG", "RLDDDDRR.", "detour 1"),
        ("SFF|FHF|FHG", "ULDDDDRR.", "edge 1"),
    ],
)  # fmt: skip
def test_first_wrong_step_of_a_map_that_is_lost(grid, letters, expected):
    seed = {"is_slippery": False, "maps": [grid], "policies": {"trained, greedy": {"actions": [letters]}}}
    assert report._first_wrong_steps([seed]) == expected


def test_speed_table(results):
    (results / "step_time").mkdir()
    parts = {"sampling": 2.0, "training_pass": 3.0, "rest": 0.5, "tokens": 100.0}
    rounds = {"stock TRL": (40.0, 42.0), "packed": (10.0, 7.0)}
    content = {
        "device": "2 CPU threads",
        "medians": {"stock TRL": {"seconds": 40.0, **parts}, "packed": {"seconds": 10.0, **parts}},
        "rounds": {name: [{"seconds": s} for s in steps] for name, steps in rounds.items()},
        "peak_memory_gb": {"stock TRL": 5.0, "packed": 4.0},
    }
    (results / "step_time/one.json").write_text(json.dumps(content))
    assert "**stock / packed: 5.00** (4.00 to 6.00 in 2 rounds), 2 CPU threads" in report.speed_table()


def test_probe_table(results):
    path = results / "probe.json"
    content = {"percent_of_optimal": {"place": {"not slippery": [10.0, 20.0], "slippery": [5.0, 6.0]}}}
    path.write_text(json.dumps(content))
    assert report.probe_table(path).splitlines() == [
        "| a small network reads | not slippery, percent of optimal | slippery, percent of optimal |",
        "|---|---|---|",
        "| place | **15.0** (10.0, 20.0) | **5.5** (5.0, 6.0) |",
    ]


def test_search_table(results):
    for seed, value in ((1, 0.3), (2, 0.1)):
        folder = results / f"props_frozen_lake/seed-{seed}"
        folder.mkdir(parents=True)
        rows = [{"policy": "optimal", "value": 0.7402, "episodes": None}]
        rows += [{"policy": name, "value": value, "episodes": 400} for name in ("random search", "ProPS, model")]
        content = {"env_id": "FrozenLake-v1", "searched": "ProPS, model", "policies": rows, "published": {"PPO": ".16"}}
        (folder / "evaluation.json").write_text(json.dumps(content))
        (folder / "minutes.txt").write_text("2.50\n")
    lines = report.search_table(report.training_results()).splitlines()
    assert "props_frozen_lake" not in report.training_results()
    assert [line.split("|")[2].strip() for line in lines[2:]] == [
        "optimal", "random search", "ProPS, model", "GRPO, objective expected", "*PPO, published*",
    ]  # fmt: skip
    assert "| 2 | **0.2000** (0.3000, 0.1000) | 400, 400 | 2.5, 2.5 |" in lines[4]
    assert "**0.3000** (0.4000, 0.2000)" in lines[5]  # within the limit, greedy


def test_curves_are_drawn(results, monkeypatch):
    drawn, draw = {}, report.curves_figure

    def curves_figure(curves, lines, *labels):
        drawn.update(curves=curves, lines=lines, labels=labels)
        return draw(curves, lines, *labels)

    monkeypatch.setattr(report, "curves_figure", curves_figure)
    report.write_curves({"ours": report.training_results()["canonical_slippery"]}, results / "curves.png")
    assert drawn["curves"] == {"ours (2 seeds)": [([1.0], [0.8]), ([1.0], [0.4])]}, "minutes, success"
    assert drawn["lines"] == {"optimal": 0.8235, "uniform random": 0.0139}
    assert drawn["labels"][0] == "minutes of GRPO, CPU"
    assert (results / "curves.png").stat().st_size > 10_000


def test_a_section_is_replaced_and_nothing_else():
    begin, end = (marker.format(name="speed") for marker in report.MARKERS)
    text = f"before\n{begin}\nold \\1\n{end}\nafter\n"
    new = report.with_section(text, "speed", "| new \\1 |")
    assert new == f"before\n{begin}\n| new \\1 |\n{end}\nafter\n"
    assert report.with_section(new, "speed", "| new \\1 |") == new
    with pytest.raises(SystemExit, match=r"README\.md: no line"):
        report.with_section("nothing", "speed", "")


def test_the_readme_is_what_results_say(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report.py", "--check"])
    assert report.main() == 0, capsys.readouterr().out


def test_no_label_of_a_line_stands_on_another():
    lines = {"optimal": 100.0, "uniform random": 2.5, "best constant action": 0.0}
    axes = report.curves_figure({"ours": [([1.0, 2.0], [0.0, 90.0])]}, lines, "minutes", "percent").axes[0]
    heights = {text.get_text().strip(): text.get_position()[1] for text in axes.texts}
    assert heights == pytest.approx({"best constant action": 0.0, "uniform random": 6.0, "optimal": 100.0})
