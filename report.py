"""results/*/ -> the README's tables and curve. Reads nothing else, trains nothing.

python report.py            # rewrites the parts of README.md between the markers, and results/*.png
python report.py --check    # exit code 1 where the README is not what results/ says
"""

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from llm_policy.environments.frozen_lake import ACTIONS, Grid, acting_states, lake_mdp, leads_to_goal
from llm_policy.environments.mdp import AGREEMENT_GAMMA, OPTIMAL_PERCENT, optimal_actions, optimal_q
from llm_policy.plots import curves_figure

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
MARKERS = "<!-- {name}: written by report.py -->", "<!-- end of {name} -->"
BASELINES = ("optimal", "uniform random", "best constant action")
ABLATION = "ablation_"  # folders of runs that change one thing
# What they start from: a result, and the configuration that their command names (None: the default)
ABLATED = {"canonical_slippery": None, "original_reproduced": "configs/laptop_original.yaml"}
DEFAULT_CONFIG = "configs/laptop.yaml"
SAME_IN_ABLATIONS = ("--max_steps", "--stop_when", "--samples_per_state")
CURVES = {  # what the first figure shows
    "canonical_slippery": "this repository",
    "ablation_from_original_learning_rate": "the original with this objective and learning rate",
    "original_reproduced": "the original, reproduced",
}
MAPS = "random_maps"  # folders of runs on many maps, judged on maps never seen
MAP_CURVES = {False: "random_maps_dry.png", True: "random_maps_slippery.png"}  # their figures, by is_slippery
OBSERVATIONS, OBSERVED = "observation_", "random_maps_dry"  # folders with another observation, and what they change


def seed_folders(folder: Path) -> list[Path]:
    """`seed-N` of one result, by number."""
    return sorted(folder.glob("seed-*"), key=lambda seed: int(seed.name.removeprefix("seed-")))


def seeds_of(folder: Path) -> list[dict]:
    """The finished seeds of one training result: evaluation rows by name, metrics by step, verdict, minutes."""
    found = []
    for seed in seed_folders(folder):
        if (seed / "result.txt").exists() and (seed / "metrics.jsonl").exists():
            evaluation = json.loads((seed / "evaluation.json").read_text())
            found.append(
                {
                    "seed": seed.name.removeprefix("seed-"),
                    "is_slippery": evaluation["is_slippery"],
                    "maps": evaluation.get("maps"),
                    "command": shlex.split((folder / "command.txt").read_text()),
                    "observation": json.loads((seed / "run.json").read_text())["observation"],
                    "policies": {policy["policy"]: policy for policy in evaluation["policies"]},
                    "metrics": [json.loads(line) for line in (seed / "metrics.jsonl").read_text().splitlines()],
                    "verdict": _verdict(seed / "result.txt"),
                    "minutes": float((seed / "minutes.txt").read_text()),
                }
            )
    return found


def _verdict(file: Path) -> str:
    """The last line without its label, and without the counts of steps in brackets, which have a column."""
    line = file.read_text().strip().splitlines()[-1].removeprefix("verdict: ")
    return re.sub(r" \(warm start \d+ steps, GRPO \d+\)$", "", line)


def training_results() -> dict[str, list[dict]]:
    results = {folder.name: seeds_of(folder) for folder in sorted(RESULTS.iterdir()) if folder.is_dir()}
    return {name: seeds for name, seeds in results.items() if seeds}


def training_table(results: dict[str, list[dict]]) -> str:
    """One row a result, one value a seed: greedy success without and at the limit, sampled; the worst verdict."""
    lines = [
        "| result | seeds | success, no step limit | within the limit | sampled, within the limit | optimal states "
        "| minutes in all | worst seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, seeds in results.items():
        trained, states, worst = _greedy(seeds)
        sampled = [s["policies"]["trained, sampled"] for s in seeds if "trained, sampled" in s["policies"]]
        optimum = seeds[0]["policies"]["optimal"]
        minutes = ", ".join(f"{s['minutes']:.1f}" for s in seeds)
        lines.append(
            f"| [{name}](results/{name}) | {len(seeds)} "
            f"| {_values(trained, 'success_probability')} of {optimum['optimal_success']:.4f} "
            f"| {_values(trained, 'success_at_horizon')} of {optimum['optimal_at_horizon']:.4f} "
            f"| {_values(sampled, 'success_at_horizon') if sampled else ''} "
            f"| {states} | {minutes} | {worst} |"
        )
    for is_slippery in (True, False):
        named = sorted(results, key=lambda name: not name.startswith("canonical"))  # other maps have other baselines
        seeds = next((results[name] for name in named if results[name][0]["is_slippery"] is is_slippery), None)
        for name, row in (seeds[0]["policies"] if seeds else {}).items():
            if name.startswith((*BASELINES, "untrained")):
                lines.append(
                    f"| *{name}, {'slippery' if is_slippery else 'not slippery'}* | exact "
                    f"| {row['success_probability']:.4f} | {row['success_at_horizon']:.4f} | "
                    f"| {row['optimal_states']:.0f} of {row['acting_states']:.0f} | | |"
                )
    return "\n".join(lines)


def _greedy(seeds: list[dict]) -> tuple[list[dict], str, str]:
    """The trained greedy policy of each seed, their optimal states, and the verdict of the worst."""
    trained = [s["policies"]["trained, greedy"] for s in seeds]
    states = ", ".join(f"{t['optimal_states']:.0f}" for t in trained)
    worst = min(seeds, key=lambda s: _rank(s["policies"]["trained, greedy"]))
    return trained, f"{states} of {trained[0]['acting_states']:.0f}", worst["verdict"]


def _rank(trained: dict) -> tuple[float, float]:
    return trained["success_probability"], trained["optimal_states"]


def ablation_table(results: dict[str, list[dict]]) -> str:
    """What one change does, from this repository's configuration and from the original's: one value a seed."""
    lines = [
        "| change | success, no step limit | optimal states | first at the optimum, step | steps | minutes "
        "| worst seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for base, config in ABLATED.items():
        rows = {f"*{base}, unchanged*": results[base]} if base in results else {}
        for name, seeds in results.items():
            if name.startswith(ABLATION) and _config(seeds[0]["command"]) == config:
                rows[f"[`{_change(seeds[0]['command'])}`](results/{name})"] = seeds
        for label, seeds in rows.items():
            trained, states, worst = _greedy(seeds)
            first = ", ".join(str(_first_optimum(s["metrics"])) for s in seeds)
            steps = ", ".join(str(s["metrics"][-1]["step"]) for s in seeds)
            minutes = ", ".join(f"{s['minutes']:.0f}" for s in seeds)
            lines.append(
                f"| {label} | {_values(trained, 'success_probability')} | {states} | {first} | {steps} | {minutes} "
                f"| {worst} |"
            )
    return "\n".join(lines)


def maps_table(results: dict[str, list[dict]]) -> str:
    """One row a result: policies on maps never seen in training, in percent of the optimum of the same maps."""
    others = ("untrained, greedy", "shortest path", "best constant action", "uniform random")
    lines = [
        f"| result | observation | trained, percent of optimal | {' | '.join(others)} | success of the optimum "
        f"| optimal states a map | of those where only {', '.join(ACTIONS)} is best "
        "| first wrong step of the maps lost | steps | minutes |",
        "|" + "---|" * (9 + len(others)),
    ]
    for name, seeds in results.items():
        trained = [s["policies"]["trained, greedy"] for s in seeds]
        percents = [f"{_percent_of_optimal(seeds, policy):.1f}" for policy in others]
        states = ", ".join(f"{row['optimal_states']:.1f}" for row in trained)
        steps = ", ".join(str(s["metrics"][-1]["step"]) for s in seeds)
        minutes = ", ".join(f"{s['minutes']:.0f}" for s in seeds)
        lines.append(
            f"| [{name}](results/{name}) | {seeds[0]['observation']} | {_values(trained, 'percent_of_optimal', 1)} "
            f"| {' | '.join(percents)} "
            f"| {np.mean([row['optimal_success'] for row in trained]):.4f} "
            f"| {states} of {trained[0]['acting_states']:.1f} | {_right_by_action(seeds)} "
            f"| {_first_wrong_steps(seeds)} | {steps} | {minutes} |"
        )
    return "\n".join(lines)


def _right_by_action(seeds: list[dict]) -> str:
    """Percent of the states with one optimal action, by that action, in which the trained policy takes it."""
    found, right = Counter(), Counter()
    for seed in seeds:
        actions = seed["policies"]["trained, greedy"].get("actions")
        if actions is None:  # older evaluations kept no actions
            return ""
        for rows, letters in zip(seed["maps"], actions, strict=True):
            grid = tuple(rows.split("|"))
            best_SA = optimal_actions(optimal_q(lake_mdp(grid, seed["is_slippery"]), AGREEMENT_GAMMA))
            for state in acting_states(grid):
                if best_SA[state].sum() == 1:
                    best = ACTIONS[best_SA[state].argmax()]
                    found[best] += 1
                    right[best] += letters[state] == best[0]
    return ", ".join(f"{100 * right[a] / found[a]:.0f} %" if found[a] else "none" for a in ACTIONS)


def _first_wrong_steps(seeds: list[dict]) -> str:
    """How many maps are lost, by what the first step that is not optimal leads into. On ice that is not slippery.

    `edge`: the agent stays where it is; `dead end`: it cannot reach the goal without coming back; `detour`: it can.
    """
    lost = Counter()
    for seed in seeds:
        actions = seed["policies"]["trained, greedy"].get("actions")
        if actions is None or seed["is_slippery"]:  # older evaluations kept no actions; with slip there is no one way
            return ""
        for rows, letters in zip(seed["maps"], actions, strict=True):
            grid = tuple(rows.split("|"))
            lake, cells = lake_mdp(grid, is_slippery=False), "".join(grid)
            next_SA = lake.next_states_SAK[:, :, 0]
            best_SA = optimal_actions(optimal_q(lake, AGREEMENT_GAMMA))
            state, way, wrong = cells.index("S"), set(), None
            while cells[state] not in "HG" and state not in way:
                way.add(state)
                action = next((a for a, name in enumerate(ACTIONS) if name[0] == letters[state]), None)
                if action is None:
                    wrong = wrong or "no answer"
                    break
                reached = int(next_SA[state, action])
                if wrong is None and not best_SA[state, action]:
                    wrong = _leads_into(grid, state, reached)
                state = reached
            if cells[state] != "G":
                lost[wrong] += 1
    return ", ".join(f"{kind} {count}" for kind, count in lost.most_common())


def _leads_into(grid: Grid, left: int, reached: int) -> str:
    row, column = divmod(reached, len(grid[0]))
    if reached == left:
        return "edge"
    if grid[row][column] == "H":
        return "hole"
    return "detour" if leads_to_goal(grid, (row, column), without=divmod(left, len(grid[0]))) else "dead end"


def _percent_of_optimal(seeds: list[dict], beginning: str) -> float:
    """Mean over seeds. By the beginning of the name, for behind it stands which constant action, if maps share it."""
    return np.mean(
        [row["percent_of_optimal"] for s in seeds for name, row in s["policies"].items() if name.startswith(beginning)]
    )


def _config(command: list[str]) -> str | None:
    config = command[command.index("--config") + 1] if "--config" in command else None
    return None if config == DEFAULT_CONFIG else config


def _change(command: list[str]) -> str:
    """What the command changes: its --expert, and the flags behind `--` but for those that all ablations share."""
    expert = ["--expert", command[command.index("--expert") + 1]] if "--expert" in command else []
    flags = command[command.index("--") + 1 :] if "--" in command else []
    kept = [f for i, f in enumerate(flags) if f not in SAME_IN_ABLATIONS and flags[i - 1] not in SAME_IN_ABLATIONS]
    return shlex.join([*expert, *kept])


def _first_optimum(metrics: list[dict]) -> int | str:
    return next((m["step"] for m in metrics if m.get("policy/percent_of_optimal", 0) >= OPTIMAL_PERCENT), "never")


def _values(rows: list[dict], key: str, decimals: int | None = None) -> str:
    values = [row[key] for row in rows]
    if decimals is None:
        decimals = 4 if max(map(abs, values)) < 10 else 1  # probabilities, or returns of long episodes
    return f"**{np.mean(values):.{decimals}f}** ({', '.join(f'{v:.{decimals}f}' for v in values)})"


def searches_of(folder: Path) -> list[dict]:
    """`evaluation.json` of the finished seeds of one policy search."""
    return [
        json.loads((seed / "evaluation.json").read_text()) | {"minutes": float((seed / "minutes.txt").read_text())}
        for seed in seed_folders(folder)
        if (seed / "evaluation.json").exists()
    ]


def search_table(trained: dict[str, list[dict]]) -> str:
    """In-context policy search beside its baselines at equal episodes, and beside GRPO on the same lake."""
    lines = [
        "| environment | policy | seeds | return within the limit | episodes | minutes | |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in sorted(RESULTS.glob("props_*")):
        seeds = searches_of(folder)
        if not seeds:
            continue
        env_id, searched = seeds[0]["env_id"], seeds[0]["searched"]
        for name in (row["policy"] for row in seeds[0]["policies"]):
            rows = [next(row for row in seed["policies"] if row["policy"] == name) for seed in seeds]
            episodes = ", ".join(str(row["episodes"]) for row in rows if row["episodes"] is not None)
            is_searched = name == searched
            minutes = ", ".join(f"{seed['minutes']:.1f}" for seed in seeds) if is_searched else ""
            note = f"[{folder.name}](results/{folder.name})" if is_searched else ""
            lines.append(
                f"| {env_id} | {name} | {len(seeds)} | {_values(rows, 'value')} | {episodes} | {minutes} | {note} |"
            )
        if env_id == "FrozenLake-v1" and "canonical_slippery" in trained:
            runs = trained["canonical_slippery"]
            greedy = [run["policies"]["trained, greedy"] for run in runs]
            minutes = ", ".join(f"{run['minutes']:.1f}" for run in runs)
            lines.append(
                f"| {env_id} | GRPO, objective expected | {len(runs)} | {_values(greedy, 'success_at_horizon')} "
                f"| none: the expert's Q | {minutes} | [canonical_slippery](results/canonical_slippery) |"
            )
        for name, value in seeds[0]["published"].items():
            who = "GPT-4o, " if name.startswith("ProPS") else ""
            lines.append(f"| {env_id} | *{name}, published* | 10 | *{value}* | 8,000 | | {who}arXiv 2511.21928 |")
    return "\n".join(lines)


def speed_table() -> str:
    """results/step_time/*.json, one row a benchmark: seconds a step of TRL's path and of this one, parts, ratio."""
    lines = [
        "| benchmark | path | s a step | sampling | training pass | rest | tokens computed | peak GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((RESULTS / "step_time").glob("*.json")):
        content = json.loads(path.read_text())
        for name, m in content["medians"].items():
            lines.append(
                f"| [{path.stem}](results/step_time/{path.name}) | {name} | {m['seconds']:.1f} | {m['sampling']:.1f} "
                f"| {m['training_pass']:.1f} | {m['rest']:.1f} | {m['tokens']:.0f} "
                f"| {content['peak_memory_gb'][name]:.2f} |"
            )
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(*content["rounds"].values(), strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
        lines.append(f"| | **stock / packed: {np.median(ratios):.2f}** ({spread}), {content['device']} | | | | | | |")
    return "\n".join(lines)


def probe_table(path: Path) -> str:
    """What a small network reaches that reads these parts of an observation."""
    found = json.loads(path.read_text())["percent_of_optimal"]
    dynamics = list(next(iter(found.values())))
    lines = [f"| a small network reads | {', percent of optimal | '.join(dynamics)}, percent of optimal |"]
    lines.append("|" + "---|" * (1 + len(dynamics)))
    for label, percents in found.items():
        values = [_values([{"percent": value} for value in percents[name]], "percent", 1) for name in dynamics]
        lines.append(f"| {label} | {' | '.join(values)} |")
    return "\n".join(lines)


def write_curves(
    results: dict[str, list[dict]], path: Path, quantity: str = "success_probability",
    y_label: str = "exact success probability, no step limit",
) -> None:  # fmt: skip
    """A figure of the greedy policy against minutes of GRPO, one line a seed; nothing where there are no results.

    `results` by the label that they are to have.

    Horizontal lines are those baselines that are the same for all of them, but for 1 % of the highest.
    """
    curves, lines = {}, {}
    for label, seeds in results.items():
        curves[f"{label} ({len(seeds)} seed{'s' * (len(seeds) > 1)})"] = found = []
        for seed in seeds:
            points = [m for m in seed["metrics"] if m.get(f"policy/{quantity}") is not None]
            found.append(([m["seconds"] / 60 for m in points], [m[f"policy/{quantity}"] for m in points]))
            for policy, row in seed["policies"].items():
                if policy.startswith(BASELINES):
                    lines.setdefault(policy, []).append(row[quantity])
    if curves:
        apart = 0.01 * max(max(values) for values in lines.values())
        same = {policy: values[0] for policy, values in lines.items() if np.ptp(values) <= apart}
        curves_figure(curves, same, "minutes of GRPO, CPU", y_label).savefig(path, dpi=130)


def with_section(text: str, name: str, table: str) -> str:
    """`text` with `table` between the markers of section `name`."""
    begin, end = (marker.format(name=name) for marker in MARKERS)
    if begin not in text or end not in text:
        raise SystemExit(f"error: README.md: no line {begin!r} followed by {end!r}; put both where the table goes")
    return re.sub(f"(?s){re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{table}\n{end}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 where README.md is out of date"
    )
    arguments = parser.parse_args()
    results = training_results()
    if not results:
        print("results/: no folder with finished seeds yet; results/run.py makes one", file=sys.stderr)
        return 2
    ablations = {name: seeds for name, seeds in results.items() if name.startswith(ABLATION)}
    maps = {name: seeds for name, seeds in results.items() if name.startswith(MAPS)}
    observations = {name: seeds for name, seeds in results.items() if name.startswith(OBSERVATIONS)}
    reported = {name: seeds for name, seeds in results.items() if name not in (*ablations, *maps, *observations)}
    sections = {"results": training_table(reported), "speed": speed_table(), "search": search_table(results)}
    probe = RESULTS / "observation_probe" / "observation_probe.json"
    if probe.exists():
        sections["probe"] = probe_table(probe)
    if ablations:
        sections["ablations"] = ablation_table(results)
    if maps:
        sections["maps"] = maps_table(maps)
    if observations:
        unchanged = {name: seeds for name, seeds in maps.items() if name == OBSERVED}
        sections["observations"] = maps_table(unchanged | observations)
    readme = ROOT / "README.md"
    text = new = readme.read_text()
    for name, table in sections.items():
        new = with_section(new, name, table)
    if arguments.check:
        print("README.md is what results/ says" if new == text else "README.md is out of date: python report.py")
        return int(new != text)
    readme.write_text(new)
    shown = {label: results[name] for name, label in CURVES.items() if name in results}
    write_curves(shown, RESULTS / "learning_curves.png")
    for is_slippery, file in MAP_CURVES.items():
        shown = {n.replace("_", " "): seeds for n, seeds in maps.items() if seeds[0]["is_slippery"] == is_slippery}
        write_curves(shown, RESULTS / file, "percent_of_optimal", "percent of optimal")
    print(f"README.md written from {len(results)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
