import json
import os
import re
import subprocess

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import report
from llm_policy.errors import InputError
from llm_policy.plots import curves_figure
from llm_policy.report import (
    ablations,
    dates,
    drawing,
    files,
    lakes,
    maps,
    other_games,
    policy_gradient,
    speed,
    supervision,
)
from llm_policy.report.cells import listed

# The history in which the results below were made: commit -> Unix time and date
COMMITS = {"a" * 40: (300, "2026-11-22"), "b" * 40: (100, "2026-11-21"), "c" * 40: (200, "2026-11-21")}
WHEN = "2026-11-21, bbbbbbb"

ROW = {"optimal_success": 0.8235, "optimal_at_horizon": 0.7442, "acting_states": 11.0, "maps": 1}


def policy(name: str, success: float, states: int) -> dict:
    return ROW | {
        "policy": name, "success_probability": success, "success_at_horizon": success / 2, "optimal_states": states,
        "percent_of_optimal": 100 * success, "horizon_steps": 100.0,
    }  # fmt: skip


def write_seed(folder, success: float, is_slippery: bool = True, run: dict | None = None) -> None:
    folder.mkdir(parents=True)
    policies = [
        policy("optimal", 0.8235, 11),
        policy("uniform random", 0.0139, 0),
        policy("trained, greedy", success, 9),
        policy("trained, sampled", success / 2, 9),
    ]
    (folder / "evaluation.json").write_text(json.dumps({"is_slippery": is_slippery, "policies": policies}))
    steps = [
        {"step": 1, "seconds": 30.0, "learning_rate": 5e-4},
        {"step": 2, "seconds": 60.0, "policy/success_probability": success},
    ]
    steps = [step | {"step_time": 30.0, "completions/mean_length": 39.0} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    (folder / "result.txt").write_text(f"a table\nverdict: says {success} (warm start 5 steps, GRPO 30)\n")
    (folder / "minutes.txt").write_text("4.25\n")
    (folder / "run.json").write_text(json.dumps({"observation": "spaced", "commit": "b" * 40} | (run or {})))
    if not (folder.parent / "command.txt").exists():
        (folder.parent / "command.txt").write_text(f"python results/run.py --name {folder.parent.name}\n")


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(files, "RESULTS", folder)
    monkeypatch.setattr(dates, "history", lambda: COMMITS)
    for seed, success in ((1, 0.8), (2, 0.4)):
        write_seed(folder / f"canonical/canonical_slippery/seed-{seed}", success)
    write_seed(folder / "canonical/dry/seed-1", 1.0, is_slippery=False)
    (folder / "canonical/dry/seed-2").mkdir()  # still running
    return folder


def write_search(folder) -> None:
    for seed, value in ((1, 0.3), (2, 0.1)):
        (folder / f"seed-{seed}").mkdir(parents=True)
        rows = [{"policy": "optimal", "value": 0.7402, "episodes": None}]
        names = ("random search", "hill climbing", "ProPS, model")
        rows += [{"policy": name, "value": value, "episodes": 400} for name in names]
        content = {
            "env_id": "FrozenLake-v1", "horizon_steps": 100, "searched": "ProPS, model", "policies": rows,
            "published": {"PPO": ".16"},
        }  # fmt: skip
        (folder / f"seed-{seed}/evaluation.json").write_text(json.dumps(content))
        (folder / f"seed-{seed}/minutes.txt").write_text("2.50\n")
        (folder / f"seed-{seed}/run.json").write_text(json.dumps({"commit": "c" * 40}))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_results_section(results):
    found = lakes.training_results()
    assert {name: len(seeds) for name, seeds in found.items()} == {"canonical_slippery": 2, "dry": 1}
    lines = lakes.results_section(found).splitlines()
    assert lines[2] == (
        "| [canonical_slippery](results/canonical/canonical_slippery) | 2 | **0.6000** (0.8000, 0.4000) of 0.8235 "
        "| **0.3000** (0.4000, 0.2000) of 0.7442 | **0.1500** (0.2000, 0.1000) | 9, 9 of 11 | 4.2, 4.2 | says 0.4 "
        f"| {WHEN} |"
    )
    names = [line.split("|")[1].strip(" *") for line in lines[4:]]
    assert names == [
        "optimal, slippery", "uniform random, slippery", "optimal, not slippery", "uniform random, not slippery",
    ]  # fmt: skip


def test_the_summary_sets_each_score_beside_its_optimum(results):
    (results / "canonical/canonical_slippery").rename(results / "canonical/natural_slippery")
    for seed in (1, 2):
        file = results / f"canonical/natural_slippery/seed-{seed}/evaluation.json"
        evaluation = json.loads(file.read_text())
        others = (policy("best constant action (DOWN)", 0.05, 2), policy("untrained, greedy", 0.01, 0))
        evaluation["policies"] += others
        file.write_text(json.dumps(evaluation))
    write_seed(results / "maps_never_seen/thought_search_dry/seed-7", 0.9, is_slippery=False)
    file = results / "maps_never_seen/thought_search_dry/seed-7/evaluation.json"
    file.write_text(file.read_text().replace('"policy":', '"maps": 200, "policy":'))
    write_search(results / "policy_search/props_frozen_lake")
    lines = report.all_sections(lakes.training_results())["summary"].splitlines()
    lake, within = "slippery lake: success", "slippery lake: success within 100 steps"
    assert [cells(line) for line in lines[2:]] == [
        [
            "[GRPO, this repository](results/canonical/natural_slippery)", lake, "**0.6000** (0.8000, 0.4000)",
            "0.8235", "2", "4", WHEN,
        ],
        ["untrained model", lake, "0.0100", "0.8235", "none", "", WHEN],
        ["best constant action (DOWN)", lake, "0.0500", "0.8235", "none", "", WHEN],
        ["uniformly random policy", lake, "0.0139", "0.8235", "none", "", WHEN],
        [
            "[GRPO, this repository: it searches the map in its thought]"
            "(results/maps_never_seen/thought_search_dry)",
            "200 maps never seen, not slippery: percent of the optimum", "**90.0** (90.0)", "100", "1", "4", WHEN,
        ],
        [
            "[GRPO, this repository](results/canonical/natural_slippery)", within, "**0.3000** (0.4000, 0.2000)",
            "0.4118", "2", "4", WHEN,
        ],
        [
            "[ProPS, model](results/policy_search/props_frozen_lake)", within, "**0.2000** (0.3000, 0.1000)", "0.7402",
            "2", "2", "2026-11-21, ccccccc",
        ],
        ["hill climbing", within, "**0.2000** (0.3000, 0.1000)", "0.7402", "2", "", "2026-11-21, ccccccc"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([{"commit": "b" * 40}], "2026-11-21, bbbbbbb"),
        # in the order of their commits, not of the seeds
        ([{"commit": "a" * 40}, {"commit": "c" * 40}], "2026-11-21..2026-11-22, ccccccc..aaaaaaa"),
        ([{"commit": "c" * 40}, {"commit": "b" * 40}], "2026-11-21, bbbbbbb..ccccccc"),
        ([{"commit": "b" * 40, "resumed": [{"commit": "a" * 40}]}], "2026-11-21..2026-11-22, bbbbbbb..aaaaaaa"),
        # the day of the run, where it is kept, is not the day of its code
        ([{"commit": "b" * 40, "date": "2026-11-25T10:00:00+00:00"}], "2026-11-25, bbbbbbb"),
        ([{"commit": "unknown", "date": "2026-11-25"}], "2026-11-25"),
    ],
)
def test_a_row_has_the_dates_and_commits_of_its_runs(results, runs, expected):
    for seed, run in enumerate(runs):
        write_seed(results / f"canonical/other/seed-{seed}", 0.3, run=run)
    [line] = [row for row in lakes.results_section(lakes.training_results()).splitlines() if "[other]" in row]
    assert line.endswith(f"| {expected} |")


def test_a_file_without_a_known_commit_has_the_date_of_its_content_in_git(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(dates, "history", dates.history.__wrapped__)

    def git(*arguments: str, day: int = 1) -> str:
        when = f"2026-11-{day:02}T12:00:00+0000"
        names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}
        dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        command = ["git", "-c", "commit.gpgsign=false", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | names | dates, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    old, moved = tmp_path / "old.json", tmp_path / "moved.json"
    old.write_text('{"device": "one thread"}')
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first", day=3)
    first = git("rev-parse", "HEAD")
    git("mv", "old.json", "moved.json")
    assert dates.date_and_commit(dates.made(moved)) == f"2026-11-03, {first[:7]}"
    git("commit", "-q", "-m", "moved", day=5)
    assert dates.date_and_commit(dates.made(moved)) == f"2026-11-03, {first[:7]}"
    (tmp_path / "run.json").write_text(json.dumps({"commit": git("rev-parse", "HEAD")}))
    assert dates.date_and_commit(dates.made(tmp_path / "run.json")).startswith("2026-11-05, ")
    unknown = {"commit": "f" * 40, "date": "2026-11-20"}  # of a machine that had another history
    (tmp_path / "run.json").write_text(json.dumps(unknown))
    git("add", ".")
    git("commit", "-q", "-m", "run", day=6)
    assert dates.date_and_commit(dates.made(tmp_path / "run.json")).startswith("2026-11-0")
    moved.write_text('{"device": "two threads"}')
    assert dates.date_and_commit(dates.made(moved)) == "not committed yet"


def test_without_git_one_line_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match=r"git rev-parse: .*; the dates of results need git and a full clone"):
        dates.history.__wrapped__()


def test_the_worst_of_equal_seeds_has_fewest_optimal_states(results):
    for seed, states in ((1, 6), (2, 3), (3, 4)):
        folder = results / f"canonical/poor/seed-{seed}"
        write_seed(folder, 0.0)
        evaluation = json.loads((folder / "evaluation.json").read_text())
        evaluation["policies"][2]["optimal_states"] = states
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
        (folder / "result.txt").write_text(f"verdict: {states} states\n")
    [line] = [row for row in lakes.results_section(lakes.training_results()).splitlines() if "[poor]" in row]
    assert line.endswith(f"| 3 states | {WHEN} |")


def test_ablations_section(results):
    options_of = {"kl": "", "mine": "--config mine.yaml ", "prompt": "--config configs/laptop_original.yaml "}
    for name, options in options_of.items():
        folder = results / f"ablations/ablation_{name}"
        folder.mkdir(parents=True)
        older = " --form_coef 0 --lora_dropout 0.05" if name == "kl" else ""
        flags = f"-- --max_steps 40 --{name} 1 --stop_when either --beta 2 --objective expected{older}"
        (folder / "command.txt").write_text(f"python results/run.py --name ablation_{name} {options}{flags}\n")
        write_seed(folder / "seed-1", 0.3)
    # Without an objective it is the default's, of which there is no unchanged result here
    folder = results / "ablations/ablation_form"
    folder.mkdir()
    (folder / "command.txt").write_text("python results/run.py --name ablation_form -- --max_steps 40 --form_coef 0\n")
    write_seed(folder / "seed-1", 0.3)
    # An objective alone is a change of the default
    folder = results / "ablations/ablation_objective"
    folder.mkdir()
    (folder / "command.txt").write_text("python results/run.py --name ablation_objective -- --objective grpo\n")
    write_seed(folder / "seed-1", 0.3)
    # What the unchanged command says as well is no change
    command = results / "canonical/canonical_slippery/command.txt"
    flags = "--objective expected --beta 3 --form_coef 0 --lora_dropout 0.05"
    command.write_text(f"python results/run.py --name canonical_slippery -- {flags}\n")
    metrics = results / "canonical/canonical_slippery/seed-1/metrics.jsonl"
    metrics.write_text(
        metrics.read_text() + json.dumps({"step": 5, "seconds": 9.0, "policy/percent_of_optimal": 100.0}) + "\n"
    )
    assert ablations.ablations_section(lakes.training_results()).splitlines()[2:] == [
        "| [`--form_coef 0`](results/ablations/ablation_form) | **0.3000** (0.3000) | 9 of 11 | never | 2 | 4 "
        f"| says 0.3 | {WHEN} |",
        "| [`--objective grpo`](results/ablations/ablation_objective) | **0.3000** (0.3000) | 9 of 11 | never | 2 | 4 "
        f"| says 0.3 | {WHEN} |",
        "| *canonical_slippery, unchanged* | **0.6000** (0.8000, 0.4000) | 9, 9 of 11 | 5, never | 5, 2 | 4, 4 "
        f"| says 0.4 | {WHEN} |",
        "| [`--kl 1 --beta 2`](results/ablations/ablation_kl) | **0.3000** (0.3000) | 9 of 11 | never | 2 | 4 "
        f"| says 0.3 | {WHEN} |",
        "| [`--prompt 1 --beta 2 --objective expected`](results/ablations/ablation_prompt) | **0.3000** (0.3000) "
        f"| 9 of 11 | never | 2 | 4 | says 0.3 | {WHEN} |",
        "| [`--mine 1 --beta 2 --objective expected`](results/ablations/ablation_mine) | **0.3000** (0.3000) "
        f"| 9 of 11 | never | 2 | 4 | says 0.3 | {WHEN} |",
    ]


def test_supervision_section(results):
    folder = results / "supervision/cloning_slippery"
    folder.mkdir(parents=True)
    (folder / "command.txt").write_text("python results/run.py --name cloning_slippery -- --learning_rate 1e-3\n")
    for seed in (1, 2):
        write_seed(folder / f"seed-{seed}", 0.5)
        metrics = folder / f"seed-{seed}/metrics.jsonl"
        metrics.write_text(metrics.read_text().replace("0.0005", "0.001"))
        file = folder / f"seed-{seed}/evaluation.json"
        evaluation = json.loads(file.read_text())
        evaluation["policies"].append(policy("warm start, greedy", seed / 100, seed))
        file.write_text(json.dumps(evaluation))
    rows = [cells(line) for line in report.all_sections(lakes.training_results())["supervision"].splitlines()[2:]]
    assert rows == [
        [
            "[expected](results/canonical/canonical_slippery)", "2", "0.0005", "**0.6000** (0.8000, 0.4000)",
            "**0.1500** (0.2000, 0.1000)", "9, 9 of 11", "never, never", "2, 2", "4.2, 4.2", WHEN,
        ],
        [
            "[cloning](results/supervision/cloning_slippery)", "2", "0.001", "**0.5000** (0.5000, 0.5000)",
            "**0.1250** (0.1250, 0.1250)", "9, 9 of 11", "never, never", "2, 2", "4.2, 4.2", WHEN,
        ],
        ["*warm start, greedy, slippery*", "2", "", "**0.0150** (0.0100, 0.0200)", "", "1, 2 of 11", "", "", "", WHEN],
    ]  # fmt: skip


def test_flaws_section(results):
    """A row for an expert that all ways of teaching were tried with, and none for another."""
    names = ["natural_wrong_tenth", "cloning_wrong_tenth", "distillation_wrong_tenth", "natural_labels_only"]
    for number, name in enumerate(names):
        write_seed(results / "supervision" / name / "seed-1", number / 10)
    rows = supervision.flaws_section(lakes.training_results()).splitlines()[2:]
    label = "[best and worst exchanged in a tenth of the states](results/supervision/natural_wrong_tenth)"
    assert [cells(row) for row in rows] == [
        [label, "**0.0000** (0.0000)", "**0.1000** (0.1000)", "**0.2000** (0.2000)", "9, 9, 9 of 11", "2", WHEN]
    ]


def write_played(
    folder, actor: str, scores: dict, horizon_steps: int = 100, env_id: str = "FrozenLake-v1", config: str = "{}"
) -> None:
    """A finished seed of train_policy_gradient.py; `scores` by policy, of a lake or of episodes."""
    folder.mkdir(parents=True)
    run = {"env_id": env_id, "algorithm": "ppo", "actor": actor, "horizon_steps": horizon_steps, "commit": "b" * 40}
    (folder / "run.json").write_text(json.dumps(run))
    is_exact = env_id == "FrozenLake-v1"
    rows = [policy(n, s, 9) if is_exact else {"policy": n, "mean_return": s} for n, s in scores.items()]
    (folder / "evaluation.json").write_text(json.dumps({"env_options": {}, "policies": rows}))
    line = {"step": 1000, "episodes": 40, "seconds": 2.0, "mean_return_of_25_episodes": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "minutes.txt").write_text("0.5\n")
    (folder / "resolved_config.yaml").write_text(config)
    (folder.parent / "command.txt").write_text("python")


def test_policy_gradient_section(results):
    """What looks at nothing, then each actor, then GRPO on the same lake; exact scores and those of episodes apart."""
    (results / "canonical/canonical_slippery").rename(results / "canonical/natural_slippery")
    scores = {
        "optimal": 0.8, "uniform random": 0.02, "untrained, greedy": 0.1, "trained, greedy": 0.6,
        "trained, sampled": 0.5,
    }  # fmt: skip
    write_played(results / "policy_gradient/lake/seed-1", "frozen", scores, config="center: false\n")
    of_episodes = {name: 100 * score for name, score in scores.items() if name != "optimal"}
    for seed, uniform in ((1, 2.0), (2, 4.0)):
        scores_of_pole = of_episodes | {"uniform random": uniform}
        write_played(results / f"policy_gradient/pole/seed-{seed}", "mlp", scores_of_pole, 500, "CartPole-v1")
    trained = lakes.training_results()
    for seeds in trained.values():
        for seed in seeds:
            seed["policies"]["untrained, greedy"] = policy("untrained, greedy", 0.0, 0)
    found = {"policy": "ours", "value": 55.0, "episodes": 1200}
    search = {
        "env_id": "CartPole-v1",
        "horizon_steps": 500,
        "searched": "ours",
        "policies": {"ours": found},
        "minutes": 2.0,
    }
    search["made"] = trained["natural_slippery"][0]["made"]
    section = policy_gradient.policy_gradient_section(policy_gradient.policy_gradients(), trained, {"search": [search]})
    rows = [cells(row) for row in section.splitlines()[2:]]
    lake, pole = "FrozenLake-v1: success in 100 steps", "CartPole-v1: return in 500 steps"
    assert [row[:5] for row in rows] == [
        [lake, "optimal", "1", "0.4000", ""],
        [lake, "uniform random", "1", "0.0100", ""],
        [
            lake, "[PPO, frozen, not centred](results/policy_gradient/lake)", "1", "**0.3000** (0.3000)",
            "**0.2500** (0.2500)",
        ],
        [
            lake, "[GRPO, this repository](results/canonical/natural_slippery)", "2", "**0.3000** (0.4000, 0.2000)",
            "**0.1500** (0.2000, 0.1000)",
        ],
        [pole, "uniform random", "2", "**3.0** (2.0, 4.0)", ""],
        [pole, "[PPO, mlp](results/policy_gradient/pole)", "2", "**60.0** (60.0, 60.0)", "**50.0** (50.0, 50.0)"],
        [pole, "[ours](results/policy_search/search)", "1", "**55.0** (55.0)", ""],
    ]  # fmt: skip
    assert rows[2][5:] == ["**0.0500** (0.0500)", "1,000", "40", "0.5", "500", WHEN]


def test_a_budget_of_episodes_is_named_and_no_curve_of_its_own(results):
    scores = {"trained, greedy": 60.0, "trained, sampled": 50.0, "untrained, greedy": 9.0}
    config = "max_episodes: 1200\n"
    write_played(results / "policy_gradient/short/seed-1", "mlp", scores, 500, "CartPole-v1", config)
    played = policy_gradient.policy_gradients()
    assert "[PPO, mlp, 1,200 episodes](results/policy_gradient/short)" in policy_gradient.policy_gradient_section(
        played, {}, {}
    )
    policy_gradient.write_episode_curves()
    assert not list((results.parent / "docs").glob("pictures/policy_gradient*"))


def test_a_game_that_pays_no_success_is_shown_by_its_return(results):
    """Its exact rows have both, and the optimum's success would be 1."""
    folder = results / "policy_gradient/cliff/seed-1"
    write_played(folder, "mlp", {"trained, greedy": 1.0}, 100, "CliffWalking-v1")
    rows = [
        policy(name, 1.0, 37) | {"return_at_horizon": -13.0}
        for name in ("optimal", "trained, greedy", "trained, sampled", "untrained, greedy")
    ]
    (folder / "evaluation.json").write_text(json.dumps({"env_options": {}, "policies": rows}))
    section = policy_gradient.policy_gradient_section(policy_gradient.policy_gradients(), {}, {})
    _, row = [cells(line) for line in section.splitlines()[2:]]
    assert row[0] == "CliffWalking-v1: return in 100 steps"
    assert row[3] == "**-13.0** (-13.0)"


def test_the_curves_of_episodes_are_drawn(results):
    scores = {"trained, greedy": 60.0, "trained, sampled": 50.0, "untrained, greedy": 9.0}
    write_played(results / "policy_gradient/pole/seed-1", "mlp", scores, 500, "CartPole-v1")
    file = results / "policy_gradient/short_pole/seed-1/evaluation.json"
    write_played(file.parent, "mlp", scores, 500, "CartPole-v1")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"env_options": {"sutton_barto_reward": True}}))
    policy_gradient.write_episode_curves()
    pictures = {file.name for file in (results.parent / "docs/pictures").iterdir()}
    assert pictures == {
        f"policy_gradient_CartPole_{options}{axis}.png"
        for options in ("", "sutton_barto_reward_true_")
        for axis in ("steps", "episodes", "minutes")
    }


@pytest.mark.parametrize(("lines", "points"), [(3, [(3, 2.0)]), (8, [(8, 4.5)]), (10, [(2, 1.5), (10, 6.5)])])
def test_the_last_point_of_a_curve_is_a_mean_of_as_many_as_the_others(lines, points):
    metrics = [{"step": 0}, *({"step": n, "mean_return_of_25_episodes": float(n)} for n in range(1, lines + 1))]
    x, y = policy_gradient._episode_curve({"metrics": metrics}, lambda line: line["step"])
    assert list(zip(x, y, strict=True)) == points


@pytest.mark.parametrize("name", ["evaluation.json", "run.json", "metrics.jsonl", "minutes.txt"])
@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"a": ', "\x00"])
def test_a_damaged_policy_gradient_is_one_line(results, name, text):
    folder = results / "policy_gradient/pole/seed-1"
    write_played(folder, "mlp", {"trained, greedy": 60.0}, 500, "CartPole-v1")
    (folder / name).write_text(text)
    with pytest.raises(InputError) as raised:
        policy_gradient.policy_gradients()
    assert "\n" not in str(raised.value)


def test_other_games_section(results):
    """What looks at nothing, then the model before and after, by return; a row of the summary as well."""

    def row(name: str, score: float) -> dict:
        return {
            "policy": name, "return_at_horizon": score, "optimal_return": -13.0, "optimal_states": 9.0,
            "acting_states": 37.0, "horizon_steps": 100.0,
        }  # fmt: skip

    for seed, trained in ((1, -13.0), (2, -15.0)):
        folder = results / f"other_games/cliff/seed-{seed}"
        folder.mkdir(parents=True)
        rows = [row("optimal", -13.0), row("untrained, greedy", -100.0), row("trained, greedy", trained)]
        (folder / "evaluation.json").write_text(json.dumps({"env_id": "CliffWalking-v1", "policies": rows}))
        (folder / "run.json").write_text(json.dumps({"commit": "b" * 40}))
        (folder / "minutes.txt").write_text("9.6\n")
    games = other_games.other_games()
    where = "CliffWalking-v1: return in 100 steps"
    assert [cells(line) for line in other_games.other_games_section(games).splitlines()[2:]] == [
        [where, "optimal", "", "-13.0", "9 of 37", "", WHEN],
        [where, "untrained, greedy", "2", "**-100.0** (-100.0, -100.0)", "9, 9 of 37", "", WHEN],
        [where, "[trained, greedy](results/other_games/cliff)", "2", "**-14.0** (-13.0, -15.0)", "9, 9 of 37",
         "10, 10", WHEN],
    ]  # fmt: skip
    assert other_games.summary_row("cliff", games["cliff"]) == [
        "[GRPO, this repository](results/other_games/cliff)", where, "**-14.0** (-13.0, -15.0)", "-13.0", 2, "10", WHEN,
    ]  # fmt: skip


def write_drawn(
    folder, best: tuple[float, ...], learner: str | None = None, sampled: bool = True, model: str = "Llama-1B"
) -> None:
    """A finished seed of the drawing task: the best program of each batch."""
    folder.mkdir(parents=True)
    (folder / "resolved_config.yaml").write_text(f"model_name_or_path: data/models/{model}\n")
    run = {"target": "5-vertical-lines", "learner": learner, "commit": "b" * 40}
    (folder / "run.json").write_text(json.dumps({name: value for name, value in run.items() if value}))
    names = ["trained, greedy", *(["trained, sampled"] if sampled else [])]
    rows = [{"policy": name, "mean": 0.75, "programs": 64, "perfect": 3} for name in names]
    found = {"share": max(best), "generation": 16 * len(best) - 3, "code": ""}
    evaluation = {"baselines": {"nothing drawn": 0.0}, "policies": rows, "found": found}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    lines = [
        {"step": i, "seconds": 30.0 * i, "reward": share / 2, "drawing/best": share, "drawing/generations": 16.0 * i}
        for i, share in enumerate(best, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "minutes.txt").write_text("4.5\n")


def test_drawing_section(results):
    write_drawn(results / "drawing/lines_grpo/seed-1", (0.4, 0.6))
    write_drawn(results / "drawing/lines_hindsight/seed-1", (0.6, 0.8, 1.0), "hindsight")
    write_drawn(results / "drawing/another_model/seed-1", (1.0,), model="Qwen-1B.gguf")
    rows = [cells(row) for row in drawing.drawing_section(drawing.drawings()).splitlines()[2:]]
    assert rows == [
        [
            "5-vertical-lines", "Llama-1B", "[GRPO](results/drawing/lines_grpo)", "**0 of 1**", "none", "32", "1.0",
            "2", "0.40 0.20", "0.60 0.30", "0.75 3/64", "4.5", WHEN,
        ],
        [
            "5-vertical-lines", "Llama-1B", "[hindsight replay](results/drawing/lines_hindsight)", "**1 of 1**", "45",
            "48", "1.5", "3", "0.60 0.30", "1.00 0.50", "0.75 3/64", "4.5", WHEN,
        ],
        [
            "5-vertical-lines", "Qwen-1B", "[GRPO](results/drawing/another_model)", "**1 of 1**", "13", "16", "0.5",
            "1", "1.00 0.50", "1.00 0.50", "0.75 3/64", "4.5", WHEN,
        ],
    ]  # fmt: skip
    drawing.write_drawing_curves()
    pictures = {file.name for file in (results.parent / "docs/pictures").iterdir()}
    assert pictures == {
        f"drawing_5_vertical_lines_{model}_{axis}.png"
        for model in ("llama_1b", "qwen_1b")
        for axis in ("generations", "minutes")
    }


def test_a_drawing_without_samples_has_an_empty_cell(results):
    write_drawn(results / "drawing/lines_grpo/seed-1", (0.4, 0.6), sampled=False)
    (row,) = [cells(row) for row in drawing.drawing_section(drawing.drawings()).splitlines()[2:]]
    assert row[10] == ""


@pytest.mark.parametrize(
    "name", ["evaluation.json", "run.json", "metrics.jsonl", "minutes.txt", "resolved_config.yaml"]
)
@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"a": ', "\x00"])
def test_a_damaged_drawing_is_one_line(results, name, text):
    folder = results / "drawing/lines/seed-1"
    write_drawn(folder, (0.4,))
    (folder / name).write_text(text)
    with pytest.raises(InputError) as raised:
        drawing.drawings()
    assert "\n" not in str(raised.value)


def test_the_warm_start_alone_is_a_row_of_the_results(results):
    seed = results / "canonical/canonical_slippery/seed-1"
    for folder in (seed, seed.with_name("seed-2")):
        evaluation = json.loads((folder / "evaluation.json").read_text())
        evaluation["policies"].append(policy("warm start, greedy", 0.04, 2))
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    rows = [cells(line) for line in lakes.results_section(lakes.training_results()).splitlines()]
    (row,) = (row for row in rows if "warm start" in row[0])
    assert row[:6] == [
        "*warm start, greedy, slippery*", "2", "**0.0400** (0.0400, 0.0400)", "**0.0200** (0.0200, 0.0200)", "",
        "2, 2 of 11",
    ]  # fmt: skip


def test_the_summary_counts_the_optimum_of_many_seeds(results):
    for seed in range(1, 8):
        write_seed(results / f"canonical/natural_slippery/seed-{seed}", 1.0 if seed < 7 else 0.3)
    row = report.all_sections(lakes.training_results())["summary"].splitlines()[2]
    assert "| **0.9000** (the optimum in 6 of 7) | 0.8235 | 7 |" in row


def test_maps_section(results):
    for seed, success in ((1, 0.5), (2, 0.7)):
        folder = results / f"maps_never_seen/random_maps_dry/seed-{seed}"
        write_seed(folder, success)
        evaluation = json.loads((folder / "evaluation.json").read_text())
        others = (
            ("untrained, greedy", 0.01), ("warm start, greedy", 0.02), ("shortest path", 0.2),
            ("best constant action (LEFT)", 0.1),
        )  # fmt: skip
        evaluation["policies"] += [policy(name, value, 1) for name, value in others]
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    row = "| [random_maps_dry](results/maps_never_seen/random_maps_dry) | spaced | **60.0** (50.0, 70.0) | 1.0 | 2.0 "
    row += f"| 20.0 | 10.0 | 1.4 | 0.8235 | 9.0, 9.0 of 11.0 | {{}} | {{}} | 2, 2 | 4, 4 | {WHEN} |"

    def rows() -> list[str]:
        return maps.maps_section({"random_maps_dry": lakes.training_results()["random_maps_dry"]}).splitlines()[2:]

    assert rows() == [row.format("", "")]
    # SFG: RIGHT twice. SF|FG: two best actions, DOWN, RIGHT
    for seed, letters in ((1, ["RR.", "RDD."]), (2, ["RL.", "DD.."])):
        path = results / f"maps_never_seen/random_maps_dry/seed-{seed}/evaluation.json"
        evaluation = json.loads(path.read_text()) | {"is_slippery": False, "maps": ["SFG", "SF|FG"]}
        evaluation["policies"][2]["actions"] = letters
        path.write_text(json.dumps(evaluation))
    assert rows() == [row.format("none, 100 %, 50 %, none", "dead end 1, no answer 1 of 4")]


def test_thoughts_have_a_table_of_their_own(results):
    for seed, success in ((1, 0.5), (2, 0.7)):
        folder = results / f"maps_never_seen/thought_neighbours_dry/seed-{seed}"
        write_seed(folder, success, is_slippery=False, run={"commit": "b" * 40, "thought": "neighbours"})
        evaluation = json.loads((folder / "evaluation.json").read_text())
        evaluation["policies"] += [policy("untrained, greedy", 0.01, 1), policy("warm start, greedy", 0.02, 1)]
        followed = {"changed": success, "thought": 0.75, "prompt": 0.05, "neither": 0.2, "states": 100}
        evaluation["thoughts"] = {
            "warm start, greedy": {"true_thoughts": 0.951},
            "trained, greedy": {"true_thoughts": 0.99, "behind_false_thoughts": followed},
        }
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    found = maps.of_maps(lakes.training_results())
    assert (list(found["maps"]), list(found["thoughts"])) == ([], ["thought_neighbours_dry"])
    assert maps.thoughts_section(found["thoughts"]).splitlines()[2:] == [
        "| [thought_neighbours_dry](results/maps_never_seen/thought_neighbours_dry) | neighbours, not slippery | 39 "
        "| **60.0** (50.0, 70.0) | 2.0 | 1.0 | 9.0, 9.0 of 11.0 |  | 95.1, 95.1 % | 99.0, 99.0 % | 50, 70 % "
        f"| 75 / 5 / 20, 75 / 5 / 20 % | 2, 2 | 30, 30 | 4, 4 | {WHEN} |"
    ]
    # The second seed with --judge_warm_start false
    evaluation["policies"].pop()
    del evaluation["thoughts"]["warm start, greedy"]
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    section = maps.thoughts_section(maps.of_maps(lakes.training_results())["thoughts"])
    assert "| 2.0 | 1.0 | 9.0, 9.0 of 11.0 |  | 95.1, - % | 99.0, 99.0 % |" in section


def test_a_table_of_thoughts_tells_larger_maps_and_a_gpu(results, monkeypatch):
    of = {"thought_small": ("SFFF|FFFF|FFFF|FFFG", "2 CPU threads"), "thought_large": ("SFFFF|FFFFG", "2 CPU threads")}
    of["thought_gpu"] = ("SFFF|FFFF|FFFF|FFFG", "NVIDIA H200")
    for name, (grid, device) in of.items():
        folder = results / f"maps_never_seen/{name}/seed-1"
        write_seed(folder, 0.5, is_slippery=False, run={"device": device})
        evaluation = json.loads((folder / "evaluation.json").read_text()) | {"maps": [grid]}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    found = maps.of_maps(lakes.training_results())["thoughts"]
    rows = [cells(row) for row in maps.thoughts_section(found).splitlines()[2:]]
    assert {row[0].partition("]")[0]: (row[1], row[-2]) for row in rows} == {
        "[thought_gpu": ("place, not slippery", "4 (NVIDIA H200)"),
        "[thought_large": ("place, not slippery, 2x5", "4"),
        "[thought_small": ("place, not slippery", "4"),
    }
    pictures = []
    monkeypatch.setattr(maps, "write_curves", lambda found, *_: pictures.append(list(found)))
    maps.write_map_curves(lakes.training_results())
    assert pictures == [["thought_small"], []]
    # One seed more, on a GPU: minutes that do not compare
    write_seed(results / "maps_never_seen/thought_small/seed-2", 0.5, is_slippery=False, run={"device": "NVIDIA H200"})
    (row,) = maps.thoughts_section({"x": lakes.training_results()["thought_small"]}).splitlines()[2:]
    assert cells(row)[-2] == "4, 4 (CPU, NVIDIA H200)"
    maps.write_map_curves(lakes.training_results())
    assert pictures[2:] == [[], []]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("is_slippery",), "no"), (("maps",), []), (("maps",), ["SFG", "SFG"]), (("maps",), ["SFFG"]),
        (("thoughts",), None), (("thoughts", "trained, greedy", "behind_false_thoughts"), {"changed": 1.0}),
        (("policies", 2, "maps"), None), (("policies", 2, "actions"), []), (("policies", 2, "actions"), ["R"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_judgement_of_maps_is_one_line(results, place, value):
    folder = results / "maps_never_seen/thought_search/seed-1"
    write_seed(folder, 0.5, is_slippery=False)
    evaluation = json.loads((folder / "evaluation.json").read_text()) | {"maps": ["SFG"], "thoughts": {}}
    evaluation["policies"][2]["actions"] = ["RR."]
    evaluation["thoughts"]["trained, greedy"] = {"behind_false_thoughts": {"states": 0}}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    seeds = {"thought_search": lakes.training_results()["thought_search"]}
    (row,) = maps.thoughts_section(seeds).splitlines()[2:]  # no state was asked behind a false thought
    assert cells(row)[9:12] == ["", "", ""]
    inner = evaluation
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    with pytest.raises(InputError, match=r"^results/maps_never_seen/thought_search/seed-1: its files are damaged"):
        lakes.training_results()


@pytest.mark.parametrize("name", ["step_time", "completions/mean_length"])
def test_steps_of_maps_without_their_figures_are_one_line(results, name):
    folder = results / "maps_never_seen/thought_search/seed-1"
    write_seed(folder, 0.5, is_slippery=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    del lines[1][name]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(InputError, match=r"^results/maps_never_seen/thought_search/seed-1: its files are damaged"):
        lakes.training_results()


def test_a_row_of_the_warm_start_is_of_the_seeds_that_judged_it(results):
    for seed in (1, 2, 3):
        folder = results / f"canonical/natural_slippery/seed-{seed}"
        write_seed(folder, 0.5)
        evaluation = json.loads((folder / "evaluation.json").read_text())
        evaluation["policies"] += [policy("warm start, greedy", 0.02, 1)] * (seed > 1)
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    seeds = lakes.training_results()["natural_slippery"]
    [row] = lakes.warm_start_rows(seeds)
    assert row[:3] == ["*warm start, greedy, slippery*", 2, "**0.0200** (0.0200, 0.0200)"]
    assert lakes.warm_start_rows(seeds[:1]) == []


def test_a_thought_that_looks_at_nothing_has_empty_cells(results):
    folder = results / "maps_never_seen/thought_place_dry/seed-1"
    write_seed(folder, 0.5)
    assert maps.thoughts_section(maps.of_maps(lakes.training_results())["thoughts"]).splitlines()[2:] == [
        "| [thought_place_dry](results/maps_never_seen/thought_place_dry) | place, slippery | 39 "
        f"| **50.0** (50.0) |  |  | 9.0 of 11.0 |  |  |  |  |  | 2 | 30 | 4 | {WHEN} |"
    ]


@pytest.mark.parametrize(
    ("grid", "letters", "expected"),
    [
        ("SFF|FHF|FFG", "DDDDRRRR.", ""),
        ("SHF|FFF|FFG", "RRDDDDRR.", "hole 1 of 1"),
        ("SFF|FHF|FHG", "DDDD.DD..", "dead end 1 of 1"),
        ("SFF|FFF|FFG", "RLDDDDRR.", "detour 1 of 1"),
        ("SFF|FHF|FHG", "ULDDDDRR.", "edge 1 of 1"),
    ],
)  # fmt: skip
def test_first_wrong_step_of_a_map_that_is_lost(grid, letters, expected):
    seed = {"is_slippery": False, "maps": [grid], "policies": {"trained, greedy": {"actions": [letters]}}}
    assert maps._first_wrong_steps([seed]) == expected


def test_speed_section(results):
    (results / "speed/step_time").mkdir(parents=True)
    parts = {"sampling": 2.0, "training_pass": 3.0, "rest": 0.5, "tokens": 100.0}
    rounds = {"stock TRL": (40.0, 42.0), "packed": (10.0, 7.0)}
    content = {
        "device": "2 CPU threads",
        "processor": "a processor",
        "dtype": "float32",
        "commit": "b" * 40,
        "medians": {"stock TRL": {"seconds": 40.0, **parts}, "packed": {"seconds": 10.0, **parts}},
        "rounds": {name: [{"seconds": s} for s in steps] for name, steps in rounds.items()},
        "peak_memory_gb": {"stock TRL": 5.0, "packed": 4.0},
        "floor_of_sampling": 0.5,
        "floor_of_step": 2.5,
    }
    (results / "speed/step_time/one.json").write_text(json.dumps(content))
    (line,) = speed.speed_section().splitlines()[2:]
    assert line == (
        "| [one](results/speed/step_time/one.json) | **5.0** (4.0 to 6.0) | 40.0, 10.0 | 2.0, 2.0 | 3.0, 3.0 "
        f"| 100, 100 | 5.0, 4.0 | 4.0 | 16.0 | 2 CPU threads, a processor, float32 | {WHEN} |"
    )


def test_questions_section(results):
    for seed, after in ((1, [1.0, 1.0, 0.0, 1.0]), (2, [1.0, 0.0, 0.0, 1.0])):
        folder = results / f"questions/riddles/seed-{seed}"
        folder.mkdir(parents=True)
        rights = {
            "untrained, greedy": [0.0] * 4, "warm start, greedy": [1.0, 0.0, 0.0, 0.0], "trained, greedy": after,
            "trained, sampled": [0.5] * 4,
        }  # fmt: skip
        rows = [
            {"policy": name, "accuracy": sum(right) / 4, "right": right, "said": {"map": 3, "sea": 1}}
            for name, right in rights.items()
        ]
        content = {"baselines": {"best constant answer (map)": 0.25}, "policies": rows, "questions": [{}] * 4}
        (folder / "evaluation.json").write_text(json.dumps(content))
        (folder / "minutes.txt").write_text("9.6\n")
        (folder / "run.json").write_text(json.dumps({"commit": "b" * 40}))
    found = report.all_sections(lakes.training_results())["questions"]
    (line,) = found.splitlines()[2:]
    assert cells(line) == [
        "[riddles](results/questions/riddles)", "4, 4", "25, 25", "0.0 (0.0 [0 to 49], 0.0 [0 to 49])",
        "25.0 (25.0 [5 to 70], 25.0 [5 to 70])", "**62.5** (75.0 [30 to 95], 50.0 [15 to 85])",
        "50.0 (50.0 [15 to 85], 50.0 [15 to 85])", "2, 0 (p 0.5); 1, 0 (p 1)", "map 75%, sea 25%", "10, 10",
        WHEN,
    ]  # fmt: skip
    file = results / "questions/riddles/seed-1/evaluation.json"
    file.write_text(file.read_text().replace('{"best constant answer (map)": 0.25}', "{}"))
    with pytest.raises(InputError, match=r"^results/questions/riddles/seed-1: its files are damaged"):
        report.all_sections(lakes.training_results())


def write_arc(results, right_of: dict[str, int]) -> None:
    def answers(right: int) -> list[dict]:
        about = {"questions": 4, "standard_error": 0.25, "unreadable": 0.5, "letters": {"B": 1, "A": 1}}
        pairs = [(regime, prompt) for prompt in ("without", "with") for regime in ("letter", "answer tags")]
        return [{"regime": r, "system_prompt": p, "accuracy": right / 4, **about} for r, p in pairs]

    policies = {f"{name}, greedy": {"results": answers(right)} for name, right in right_of.items()}
    content = {"commit": "b" * 40, "baselines": {"random option": 0.25, "always B": 0.5}, "policies": policies}
    (results / "arc").mkdir()
    (results / "arc/evaluation.json").write_text(json.dumps(content))


def test_arc_has_a_row_for_all_seeds_of_a_task(results):
    write_arc(results, {"a/model": 2, "runs/piqa/seed-1": 1, "runs/piqa/seed-2": 2})
    lines = report.all_sections(lakes.training_results())["arc"].splitlines()
    rows = [cells(line) for line in lines[2:]]
    assert rows[0] == ["random option", "", "", "4", "25.0%", "", "", WHEN]
    assert rows[1] == ["always B", "", "", "4", "50.0%", "", "", WHEN]
    assert [row[:3] for row in rows[2:]] == [
        [name, regime, prompt]
        for regime in ("letter", "answer tags")
        for prompt in ("without", "with")
        for name in ("a/model", "runs/piqa")
    ]
    assert rows[2][3:] == ["4", "50.0% ± 25.0%", "50%", "A 1 B 1", WHEN]
    assert rows[3][3:] == ["4", "37.5% (25.0%, 50.0%)", "50%", "A 2 B 2", WHEN]


def test_a_damaged_table_of_arc_is_one_line(results):
    write_arc(results, {"a/model": 2})
    file = results / "arc/evaluation.json"
    file.write_text(file.read_text().replace('"accuracy": 0.5', '"accuracy": "half"', 1))
    with pytest.raises(InputError, match=r"^results/arc/evaluation.json: its files are damaged"):
        report.all_sections(lakes.training_results())


def test_probe_section(results):
    path = results / "probe.json"
    content = {
        "commit": "b" * 40,
        "percent_of_optimal": {"place": {"not slippery": [10.0, 20.0], "slippery": [5.0, 6.0]}},
    }
    path.write_text(json.dumps(content))
    assert maps.probe_section(path).splitlines() == [
        "| a small network reads | not slippery, percent of the optimum | slippery, percent of the optimum "
        "| date, commit |",
        "| --- | --- | --- | --- |",
        f"| place | **15.0** (10.0, 20.0) | **5.5** (5.0, 6.0) | {WHEN} |",
    ]


def test_search_section(results):
    (results / "canonical/canonical_slippery").rename(results / "canonical/natural_slippery")
    write_search(results / "policy_search/props_frozen_lake")
    lines = report.all_sections(lakes.training_results())["search"].splitlines()
    assert "props_frozen_lake" not in lakes.training_results()
    assert [line.split("|")[2].strip() for line in lines[2:]] == [
        "optimal", "random search", "hill climbing", "ProPS, model", "GRPO, this repository", "*PPO, published*",
    ]  # fmt: skip
    assert "| 2 | **0.2000** (0.3000, 0.1000) | 400, 400 | 2.5, 2.5 |" in lines[5]
    assert "**0.3000** (0.4000, 0.2000)" in lines[6]  # within the limit, greedy
    assert [cells(line)[-1] for line in lines[2:]] == ["2026-11-21, ccccccc"] * 4 + [WHEN, ""]


def test_others_rows_stand_once_below_all_searches_of_a_game(results):
    (results / "canonical/canonical_slippery").rename(results / "canonical/natural_slippery")
    for name in ("props_a", "props_c"):
        write_search(results / "policy_search" / name)
    write_search(folder := results / "policy_search/props_b")
    for file in folder.glob("*/evaluation.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"env_options": {"is_slippery": False}}))
    lines = report.all_sections(lakes.training_results())["search"].splitlines()
    searched = ["optimal", "random search", "hill climbing", "ProPS, model"]
    published = "*PPO, published*"
    assert [cells(line)[1] for line in lines[2:]] == [
        *searched, *searched, "GRPO, this repository", published, *searched, published,
    ]  # fmt: skip


def test_another_lake_has_a_row_of_its_own(results):
    write_search(folder := results / "policy_search/props_dry")
    for file in folder.glob("*/evaluation.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"env_options": {"is_slippery": False}}))
    lines = report.search_section(report.policy_searches(), {}).splitlines()
    assert {cells(line)[0] for line in lines[2:]} == {'FrozenLake-v1 {"is_slippery": false}, 100 steps'}


def test_a_search_that_found_no_policy_is_in_the_table(results):
    write_search(results / "policy_search/props_frozen_lake")
    file = results / "policy_search/props_frozen_lake/seed-2/evaluation.json"
    content = json.loads(file.read_text())
    content["policies"][-1]["value"] = None
    file.write_text(json.dumps(content))
    lines = report.all_sections(lakes.training_results())["search"].splitlines()
    assert "| 2 | 0.3000, none | 400, 400 |" in lines[5]


@pytest.mark.parametrize("changed", [{"env_options": {"is_slippery": False}}, {"horizon_steps": 50}])
def test_the_slippery_lakes_rows_stand_beside_no_other_lake(changed, results):
    (results / "canonical/canonical_slippery").rename(results / "canonical/natural_slippery")
    write_search(results / "policy_search/props_frozen_lake")
    for seed in (1, 2):
        file = results / f"policy_search/props_frozen_lake/seed-{seed}/evaluation.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    assert "GRPO, this repository" not in report.all_sections(lakes.training_results())["search"]


def test_a_damaged_file_is_named(results):
    (results / "canonical/dry/seed-1/evaluation.json").write_text('{"policies": [')
    with pytest.raises(InputError, match=r"^results/canonical/dry/seed-1/evaluation\.json: cannot be read as JSON"):
        lakes.training_results()


@pytest.mark.parametrize(("line", "words"), [("{", "is no JSON"), ('{"step": "x"}', "step 'x': Input should be")])
def test_a_damaged_line_has_its_number(line, words, results):
    file = results / "canonical/dry/seed-1/metrics.jsonl"
    file.write_text(f"{file.read_text().splitlines()[0]}\n{line}\n")
    with pytest.raises(InputError, match=rf"^results/canonical/dry/seed-1/metrics\.jsonl: line 2: {words}"):
        lakes.training_results()


@pytest.mark.parametrize("name", ["evaluation.json", "run.json", "metrics.jsonl", "minutes.txt"])
def test_a_seed_without_one_of_its_files_is_named(name, results):
    """It was left out of the tables without a word."""
    seed = results / "canonical/dry/seed-1"
    (seed / name).unlink()
    with pytest.raises(InputError, match=rf"^results/canonical/dry/seed-1/{name}: is gone; put it back, or delete"):
        lakes.training_results()


def test_a_result_of_another_task_is_no_damage(results):
    file = results / "canonical/dry/seed-1/run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task": "taxi"}))
    with pytest.raises(
        InputError,
        match=r"^results/canonical/dry/seed-1: is of --task taxi, and the study canonical is for --task frozen_lake; "
        "move dry to another one, other_games for instance$",
    ):
        lakes.training_results()


def test_a_row_that_stands_twice_is_named(results):
    file = results / "canonical/dry/seed-1/evaluation.json"
    evaluation = json.loads(file.read_text())
    file.write_text(json.dumps(evaluation | {"policies": [*evaluation["policies"], evaluation["policies"][0]]}))
    with pytest.raises(
        InputError, match=r"^results/canonical/dry/seed-1: its files are damaged .*two rows of one name"
    ):
        lakes.training_results()


def test_a_search_whose_seeds_name_the_optimum_otherwise(results):
    """An older version called the row otherwise: both stand there, each with its seeds."""
    write_search(folder := results / "policy_search/props_frozen_lake")
    file = folder / "seed-2/evaluation.json"
    file.write_text(file.read_text().replace('"optimal"', '"optimal without a limit"'))
    lines = report.search_section(report.policy_searches(), {}).splitlines()
    seeds = {row[1]: row[2] for row in map(cells, lines[2:])}
    assert (seeds["optimal"], seeds["optimal without a limit"], seeds["random search"]) == ("1", "1", "2")


DAMAGE = ["", "{}", "[]", "null", "3", '{"a": ', '[{"step": 1}]', "\x00"]
OF_A_SEED = ["evaluation.json", "run.json", "metrics.jsonl", "result.txt", "minutes.txt"]


@pytest.mark.parametrize("text", DAMAGE)
@pytest.mark.parametrize("name", OF_A_SEED)
def test_whatever_a_file_of_a_seed_holds_the_answer_is_one_line_or_a_report(name, text, results):
    (results / "canonical/dry/seed-1" / name).write_text(text)
    try:
        report.all_sections(lakes.training_results())
    except InputError as error:
        line = str(error)
    else:
        line = ""
        assert (name, text) in {("run.json", "{}"), ("minutes.txt", "3")} or name == "result.txt"
    assert "\n" not in line
    assert (name in line or "seed-1" in line) or text == "{}" or not line


def without(name: str) -> list[dict]:
    return [{key: value for key, value in policy("trained, greedy", 1.0, 9).items() if key != name}]


UNUSABLE = [
    # file of a seed, what it holds
    ("minutes.txt", "nan"),
    ("metrics.jsonl", ""),
    ("metrics.jsonl", json.dumps({"step": 1}) + "\n"),
    ("evaluation.json", {"is_slippery": True, "policies": [policy("optimal", 1.0, 9)]}),
    ("evaluation.json", {"is_slippery": True, "policies": without("success_probability")}),
    ("evaluation.json", {"is_slippery": True, "policies": [{**without("")[0], "optimal_success": "1"}]}),
    ("evaluation.json", {"is_slippery": True, "policies": [policy("trained, greedy", float("nan"), 9)]}),
    *((name, None) for name in OF_A_SEED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), UNUSABLE)
def test_what_no_table_can_show_is_one_line(name, content, results):
    """None: a pipe, which nobody writes."""
    file = results / "canonical/dry/seed-1" / name
    file.unlink()
    os.mkfifo(file) if content is None else file.write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    with pytest.raises(InputError, match=r"^results/canonical/dry/seed-1") as caught:
        lakes.training_results()
    assert "\n" not in str(caught.value)


def test_a_copy_beside_the_seeds_is_none(results):
    (results / "canonical/dry/seed-1").rename(results / "canonical/dry/seed-\xb2")
    assert "dry" not in lakes.training_results()


@pytest.mark.parametrize(("written", "damaged"), [("0.3", '"x"'), ('"published"', '"public"'), ('".16"', "[]")])
def test_a_damaged_search_is_one_line(results, written, damaged):
    write_search(results / "policy_search/props_frozen_lake")
    file = results / "policy_search/props_frozen_lake/seed-1/evaluation.json"
    file.write_text(file.read_text().replace(written, damaged))
    with pytest.raises(InputError, match=r"^results/policy_search/props_frozen_lake/seed-1: its files are damaged"):
        report.all_sections(lakes.training_results())


def test_a_damaged_speed_or_document_is_one_line(results):
    (results / "speed/step_time").mkdir(parents=True)
    (results / "speed/step_time/a.json").write_text("{}")
    with pytest.raises(InputError, match=r"^results/speed/step_time/a\.json: its files are damaged"):
        speed.speed_section()
    (results.parent / "README.md").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"^README\.md: cannot be read as UTF-8 text"):
        report.documents()


def test_curves_are_drawn(results, monkeypatch):
    drawn, draw = {}, lakes.curves_figure

    def curves_figure(curves, lines, *labels):
        drawn.update(curves=curves, lines=lines, labels=labels)
        return draw(curves, lines, *labels)

    monkeypatch.setattr(lakes, "curves_figure", curves_figure)
    ours = lakes.training_results()["canonical_slippery"]
    lakes.write_curves({"ours": ours}, "curves", "one lake")
    assert drawn["curves"] == {"ours (2 seeds)": [([1.0], [0.8]), ([1.0], [0.4])]}, "minutes, success"
    assert drawn["lines"] == {"optimal": 0.8235, "uniform random": 0.0139}
    assert drawn["labels"][0] == "minutes of GRPO, CPU"
    assert (results.parent / "docs/pictures/curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("labels", [["ours"], ["ours", "the original with this objective and learning rate"]])
def test_a_picture_has_one_legend_and_a_title_that_is_not_cut(labels):
    title = "Percent of the optimum on maps never seen in training, not slippery"
    curves = {label: [([1.0, 2.0], [0.0, 90.0])] for label in labels}
    figure = curves_figure(curves, {}, "minutes", "percent", title)
    FigureCanvasAgg(figure).draw()
    [legend] = figure.legends
    assert legend.get_title().get_text() == title
    boxes = [text.get_window_extent() for text in (legend.get_title(), *legend.get_texts())]
    assert all(0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes), "inside the picture"
    heights = [figure.bbox.y1, *(y for box in boxes for y in (box.y1, box.y0)), figure.axes[0].bbox.y1]
    assert heights == sorted(heights, reverse=True), "the title, then each label, then the curves: none on another"


def with_markers(*names: str) -> str:
    return "".join(
        f"before {name}\n{report.BEGIN.format(name=name)}\nold \\1\n{report.END.format(name=name)}\n" for name in names
    )


def test_a_section_is_replaced_and_nothing_else(tmp_path):
    begin, end = (marker.format(name="speed") for marker in (report.BEGIN, report.END))
    text = f"before\n{begin}\nold \\1\n{end}\nafter\n"
    file = files.ROOT / "README.md"
    new = report.with_section(text, "speed", "| new \\1 |", file)
    assert new == f"before\n{begin}\n| new \\1 |\n{end}\nafter\n"
    assert report.with_section(new, "speed", "| new \\1 |", file) == new
    with pytest.raises(InputError, match=r"README\.md: no line"):
        report.with_section("nothing", "speed", "", file)
    with pytest.raises(InputError, match=r"README\.md: no line '<!-- end of speed -->'"):
        report.with_section(f"{begin}\n", "speed", "", file)


def test_a_section_is_written_wherever_it_has_a_place_with_links_from_there(results):
    readme, docs = results.parent / "README.md", results.parent / "docs/results.md"
    texts = {readme: with_markers("summary", "results"), docs: with_markers("results")}
    sections = {"summary": "a table", "results": "| [x](results/canonical/x), `results/run.py` |"}
    written = report.with_sections(texts, sections)
    assert "| [x](results/canonical/x), `results/run.py` |" in written[readme]
    assert "| [x](../results/canonical/x), `results/run.py` |" in written[docs]
    assert "a table" in written[readme]
    assert "old" not in written[readme] + written[docs]


def test_a_section_without_a_place_and_a_place_without_a_section_are_named(results):
    readme = results.parent / "README.md"
    with pytest.raises(InputError, match=r"section 'speed': has no place; put the lines '<!-- speed: written"):
        report.with_sections({readme: with_markers("summary")}, {"summary": "", "speed": ""})
    with pytest.raises(InputError, match=r"^README\.md: section 'sumary': expected one of summary, results, "):
        report.with_sections({readme: with_markers("sumary")}, {})
    # what a page says of the markers is no place; a section whose results are not there stays as it is
    text = "Lines `<!-- NAME: written by report.py -->` are markers.\n" + with_markers("probe")
    assert report.with_sections({readme: text}, {}) == {readme: text}


def test_the_files_are_written_and_checked(results, capsys):
    (results / "canonical/canonical_slippery").rename(results / "canonical/natural_slippery")
    readme, docs = results.parent / "README.md", results.parent / "docs/results.md"
    docs.parent.mkdir()
    readme.write_text(with_markers("summary"))
    docs.write_text(with_markers("results"))
    (results / "my_study/mine").mkdir(parents=True)
    assert report.main(["--check"]) == 1
    out, err = capsys.readouterr()
    assert out == "out of date: README.md, docs/results.md; run python report.py\n"
    assert err == "results/my_study: no section shows this study\n"
    assert "old" in readme.read_text(), "a check changes nothing"
    assert report.main([]) == 0
    assert "](results/canonical/natural_slippery)" in readme.read_text()
    assert "](../results/canonical/natural_slippery)" in docs.read_text()
    assert (docs.parent / "pictures/learning_curves.png").exists()
    assert report.main(["--check"]) == 0


def test_without_results_one_line_says_what_makes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    with pytest.raises(InputError, match=r"results/: holds no finished seeds yet; results/run\.py makes them"):
        report.main([])


def test_the_documents_are_what_results_say(capsys):
    try:
        dates.history()
    except InputError as error:
        pytest.skip(f"the dates of results are not known here: {error}")
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_each_committed_result_has_a_date_and_a_commit():
    try:
        sections = report.all_sections(lakes.training_results())
    except InputError as error:
        pytest.skip(f"the dates of results are not known here: {error}")
    assert set(sections) == set(report.SECTIONS)
    for section in sections.values():
        for line in section.splitlines()[2:]:
            is_published = ", published*" in line
            assert is_published or re.search(
                r"\| 20\d\d-\d\d-\d\d(\.\.20\S+)?, [0-9a-f]{7}(\.\.[0-9a-f]{7})? \|$", line
            ), line


def test_no_label_of_a_line_stands_on_another():
    lines = {"optimal": 100.0, "uniform random": 2.5, "best constant action": 0.0}
    axes = curves_figure({"ours": [([1.0, 2.0], [0.0, 90.0])]}, lines, "minutes", "percent").axes[0]
    heights = {text.get_text().strip(): text.get_position()[1] for text in axes.texts}
    assert heights == pytest.approx({"best constant action": 0.0, "uniform random": 6.0, "optimal": 100.0})


LISTS = [
    (["1", "2", "3"], "1, 2, 3"),
    (["0.8235"] * 10, "0.8235 in all 10"),
    (["20", "30", "25", "25", "30", "9"], "9 to 30"),
    (["20", "never", "25", "25", "30", "25"], "20 to 30, never"),
]


@pytest.mark.parametrize(("texts", "expected"), LISTS)
def test_a_few_seeds_are_listed_and_many_summed_up(texts, expected):
    assert listed(texts) == expected


def test_the_most_that_a_value_can_be_stands_behind_it():
    assert listed(["11", "10"], " of 11") == "11, 10 of 11"
    assert listed(["11"] * 20, " of 11") == "11 of 11 in all 20"
    assert listed(["30"] * 5 + ["never"]) == "30, never"
    assert listed(["9", "10", "11", "9", "9", "10"], " of 11") == "9 to 11 of 11"
    assert listed(["1,024", "900", "50,176", "2,048", "3,072", "4,096"]) == "900 to 50,176"


def test_thoughts_stand_by_their_tokens_beside_what_the_prompt_says(results, monkeypatch):
    pictures = {}
    monkeypatch.setattr(maps, "write_curves", lambda *_: None)
    monkeypatch.setattr(maps, "curves_figure", lambda points, *_: points)
    monkeypatch.setattr(files, "save_picture", lambda points, name: pictures.update({name: points}))
    dry = [(name, False) for name in ("dry_maps", "observation_cells", "thought_search")]
    for name, is_slippery in [*dry, ("thought_search_wet", True), ("thought_search_wet_longer", True)]:
        write_seed(results / f"maps_never_seen/{name}/seed-1", 0.5, is_slippery)
    maps.write_map_curves(lakes.training_results())
    # On slippery ice one kind of thought alone: nothing to compare
    point = [([39.0], [50.0])]
    assert pictures == {"thought_tokens_dry": {"observation_cells (1 seed)": point, "thought_search (1 seed)": point}}


def test_curves_of_maps_stand_by_their_ice(results, monkeypatch):
    pictures = {}
    monkeypatch.setattr(maps, "write_curves", lambda found, name, title, *_: pictures.update({name: [title, *found]}))
    for name, is_slippery in (("wet", True), ("dry_maps", False), ("observation_cells", False)):
        write_seed(results / f"maps_never_seen/{name}/seed-1", 0.5, is_slippery)
    maps.write_map_curves(lakes.training_results())
    assert pictures == {
        "random_maps_dry": ["Maps never seen in training, not slippery", "dry_maps"],
        "random_maps_slippery": ["Maps never seen in training, slippery", "wet"],
    }
