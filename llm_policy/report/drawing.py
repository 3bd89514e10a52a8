"""Drawing programs: two learners on each picture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter

from llm_policy.plots import curves_figure
from llm_policy.reading import read_text
from llm_policy.report import files
from llm_policy.report.cells import each, link, listed, markdown
from llm_policy.report.dates import made, made_by
from llm_policy.report.studies import DRAWING, SAMPLED, finished_seeds, read_minutes, results_of, rows_by_name

LEARNERS = {None: "GRPO", "hindsight": "hindsight replay"}  # by what run.json says


class DrawingRow(BaseModel, strict=True):
    """What the table and the pictures take from a row of evaluation.json."""

    policy: str
    mean: FiniteFloat
    programs: int
    perfect: int


class DrawingLine(BaseModel, strict=True):
    """The same of a line of metrics.jsonl, a batch of GRPO or an epoch of hindsight replay."""

    step: int
    seconds: FiniteFloat
    reward: FiniteFloat
    best: FiniteFloat = Field(alias="drawing/best")
    generations: FiniteFloat = Field(alias="drawing/generations")


def drawings() -> dict[str, list[dict]]:
    """Name -> finished seeds of the drawing task, of either learner."""
    return results_of(DRAWING, drawn_by)


def drawn_by(folder: Path) -> list[dict]:
    """The finished seeds of one learner and one picture: evaluation, metrics, and who learnt what."""
    found = []
    for seed in finished_seeds(folder, ("evaluation.json", "run.json", "metrics.jsonl", "minutes.txt")):
        with files.whole(seed):
            evaluation, run = files.read_json(seed / "evaluation.json"), files.read_json(seed / "run.json")
            lines = TypeAdapter(Annotated[list[DrawingLine], Field(min_length=1)])
            metrics = [json.loads(line) for line in read_text(seed / "metrics.jsonl").splitlines()]
            found.append(
                {
                    "target": run["target"],
                    "learner": LEARNERS[run.get("learner")],
                    "policies": rows_by_name(evaluation, DrawingRow, SAMPLED),
                    "baselines": TypeAdapter(dict[str, FiniteFloat]).validate_python(evaluation["baselines"]),
                    "metrics": lines.validate_python(metrics),
                    "minutes": read_minutes(seed),
                    "made": made(seed / "run.json"),
                }
            )
    return found


def drawing_section(drawn: Mapping[str, list[dict]]) -> str:
    """Each picture and learner: whether, and after how much, the first perfect program came."""
    headers = (
        "picture", "learner", "solved", "generations", "minutes of learning", "steps or epochs",
        "first batch: best, mean pixels", "last batch: best, mean pixels", "trained, sampled: mean, solve it",
        "minutes in all", "date, commit",
    )  # fmt: skip
    rows = []
    for name, seeds in sorted(drawn.items(), key=lambda entry: (entry[1][0]["target"], entry[0])):
        first, last = ([seed["metrics"][place] for seed in seeds] for place in (0, -1))
        sampled = [seed["policies"][SAMPLED] for seed in seeds]
        solved = sum(_is_solved(seed) for seed in seeds)
        rows.append(
            [
                seeds[0]["target"],
                link(seeds[0]["learner"], DRAWING, name),
                f"**{solved} of {len(seeds)}**",
                listed([f"{line.generations:,.0f}" for line in last]),
                listed([f"{line.seconds / 60:.1f}" for line in last]),
                listed([str(line.step) for line in last]),
                listed([f"{line.best:.2f} {line.reward:.2f}" for line in first]),
                listed([f"{line.best:.2f} {line.reward:.2f}" for line in last]),
                listed([f"{row['mean']:.2f} {row['perfect']}/{row['programs']}" for row in sampled]),
                each(seeds, lambda seed: f"{seed['minutes']:.1f}"),
                made_by(seeds),
            ]
        )
    return markdown(headers, rows)


def _is_solved(seed: dict) -> bool:
    return max(line.best for line in seed["metrics"]) == 1.0


def write_drawing_curves() -> None:
    """The best and the mean of each batch, of both learners: two pictures for each target."""
    by_target: dict[str, list[list[dict]]] = {}
    for seeds in drawings().values():
        by_target.setdefault(seeds[0]["target"], []).append(seeds)
    axes = {
        "generations": ("generations", lambda line: line.generations),
        "minutes": ("minutes of learning, CPU", lambda line: line.seconds / 60),
    }
    for target, results in by_target.items():
        lines = results[0][0]["baselines"]
        for name, (x_label, x_of) in axes.items():
            curves = {
                f"{seeds[0]['learner']}, {what} of each batch ({len(seeds)} seed{'s' * (len(seeds) > 1)})": [
                    ([x_of(line) for line in seed["metrics"]], [getattr(line, value) for line in seed["metrics"]])
                    for seed in seeds
                ]
                for seeds in results
                for what, value in (("best", "best"), ("mean", "reward"))
            }
            figure = curves_figure(curves, lines, x_label, "share of equal pixels", target)
            file = files.ROOT / "docs" / "pictures" / f"drawing_{target.replace('-', '_')}_{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=130)
