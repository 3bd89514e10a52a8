"""results/*/ -> the README's table and curve. Reads nothing else, trains nothing.

python report.py            # rewrites the part of README.md between the markers, and results/learning_curves.png
python report.py --check    # exit code 1 where the README is not what results/ says
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from llm_policy.plots import curves_figure

ROOT = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: written by report.py -->", "<!-- end of results -->"
BASELINES = ("optimal", "uniform random", "best constant action")
CURVES = ("canonical_slippery", "original_reproduced")  # what the figure shows


def seeds_of(folder: Path) -> list[dict]:
    """The finished seeds of one result: evaluation rows by name, metrics by step, verdict."""
    found = []
    for seed in sorted(folder.glob("seed-*")):
        if (seed / "evaluation.json").exists():
            found.append(
                {
                    "policies": {
                        p["policy"]: p for p in json.loads((seed / "evaluation.json").read_text())["policies"]
                    },
                    "metrics": [json.loads(line) for line in (seed / "metrics.jsonl").read_text().splitlines()],
                    "verdict": (seed / "result.txt").read_text().strip().splitlines()[-1].removeprefix("verdict: "),
                }
            )
    return found


def all_results() -> dict[str, list[dict]]:
    results = {folder.name: seeds_of(folder) for folder in sorted((ROOT / "results").iterdir()) if folder.is_dir()}
    return {name: seeds for name, seeds in results.items() if seeds}


def table(results: dict[str, list[dict]]) -> str:
    """One row a result: success without a limit and at the limit, one value a seed; the verdict of the worst seed."""
    lines = [
        "| result | seeds | success, no step limit | within the limit | optimal states | GRPO minutes | worst seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seeds in results.items():
        trained = [s["policies"]["trained, greedy"] for s in seeds]
        worst = min(seeds, key=lambda s: s["policies"]["trained, greedy"]["success_probability"])
        optimum = seeds[0]["policies"]["optimal"]
        states = ", ".join(f"{t['optimal_states']:.0f}" for t in trained)
        minutes = ", ".join(f"{s['metrics'][-1]['seconds'] / 60:.1f}" for s in seeds)
        lines.append(
            f"| [{name}](results/{name}) | {len(seeds)} "
            f"| {_values(trained, 'success_probability')} of {optimum['optimal_success']:.4f} "
            f"| {_values(trained, 'success_at_horizon')} of {optimum['optimal_at_horizon']:.4f} "
            f"| {states} of {trained[0]['acting_states']:.0f} | {minutes} | {worst['verdict']} |"
        )
    policies = next(iter(results.values()))[0]["policies"]
    for name, row in policies.items():
        if name.startswith(BASELINES):
            lines.append(
                f"| *{name}* | exact | {row['success_probability']:.4f} | {row['success_at_horizon']:.4f} "
                f"| {row['optimal_states']:.0f} of {row['acting_states']:.0f} | | |"
            )
    return "\n".join(lines)


def _values(rows: list[dict], key: str) -> str:
    values = [row[key] for row in rows]
    return f"**{np.mean(values):.4f}** ({', '.join(f'{v:.4f}' for v in values)})"


def write_curves(results: dict[str, list[dict]], path: Path) -> None:
    """Exact success of the greedy policy against minutes of GRPO, one line a seed."""
    curves, lines = {}, {}
    for name in CURVES:
        for i, seed in enumerate(results.get(name, []), start=1):
            points = [m for m in seed["metrics"] if m.get("policy/success_probability") is not None]
            curves[f"{name.replace('_', ' ')}, seed {i}"] = (
                [m["seconds"] / 60 for m in points],
                [m["policy/success_probability"] for m in points],
            )
            for policy, row in seed["policies"].items():
                if policy.startswith(BASELINES):
                    lines[policy] = row["success_probability"]
    if curves:
        figure = curves_figure(
            curves, lines, "minutes of GRPO on two CPU cores", "exact success probability, no step limit"
        )
        figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 where README.md is out of date"
    )
    arguments = parser.parse_args()
    results = all_results()
    if not results:
        print("results/: no folder with finished seeds yet; results/run.py makes one", file=sys.stderr)
        return 2
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{table(results)}\n{END}{after}"
    if arguments.check:
        print("README.md is what results/ says" if new == text else "README.md is out of date: python report.py")
        return int(new != text)
    readme.write_text(new)
    write_curves(results, ROOT / "results" / "learning_curves.png")
    print(f"README.md written from {len(results)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
