"""Drawing programs: two learners on each picture, with the model that they begin with."""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter

from llm_policy.plots import curves_figure
from llm_policy.reading import read_yaml
from llm_policy.report import files
from llm_policy.report.cells import each, link, listed, markdown, with_seeds
from llm_policy.report.dates import made, made_by
from llm_policy.report.studies import DRAWING, SAMPLED, TRAINED, finished_seeds, read_minutes, results_of, rows_by_name

LEARNERS = {None: "GRPO", "hindsight": "hindsight replay", "none": "sampling alone"}  # by what run.json says


class DrawingRow(BaseModel, strict=True):
    """What the table and the pictures take from a row of evaluation.json."""

    policy: str
    mean: FiniteFloat
    programs: int
    perfect: int


class BestProgram(BaseModel, strict=True):
    """The same of `found` in evaluation.json, the best program of the training."""

    share: FiniteFloat
    generation: int


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
    for seed in finished_seeds(
        folder, ("evaluation.json", "run.json", "resolved_config.yaml", "metrics.jsonl", "minutes.txt")
    ):
        with files.whole(seed):
            evaluation, run = files.read_json(seed / "evaluation.json"), files.read_json(seed / "run.json")
            config = read_yaml(seed / "resolved_config.yaml")
            found.append(
                {
                    "target": run["target"],
                    "model": Path(config["model_name_or_path"]).name.removesuffix(".gguf"),
                    "learner": LEARNERS[run.get("learner")],
                    "policies": rows_by_name(evaluation, DrawingRow, TRAINED),
                    "baselines": TypeAdapter(dict[str, FiniteFloat]).validate_python(evaluation["baselines"]),
                    "found": BestProgram.model_validate(evaluation["found"]),
                    "metrics": files.read_lines(seed / "metrics.jsonl", DrawingLine),
                    "minutes": read_minutes(seed),
                    "made": made(seed / "run.json"),
                }
            )
    return found


def drawing_section(drawn: Mapping[str, list[dict]]) -> str:
    """Each picture and learner: whether, and after how much, the first perfect program came."""
    headers = (
        "picture", "model", "learner", "solved", "first perfect program", "programs", "minutes of learning",
        "steps or epochs", "first batch: best, mean pixels", "last batch: best, mean pixels",
        "trained, sampled: mean, solve it", "minutes in all", "date, commit",
    )  # fmt: skip
    rows = []
    for name, seeds in sorted(drawn.items(), key=lambda entry: (_setting(entry[1]), entry[0])):
        first, last = ([seed["metrics"][place] for seed in seeds] for place in (0, -1))
        sampled = [seed["policies"].get(SAMPLED) for seed in seeds]
        solved = [seed["found"].share == 1.0 for seed in seeds]
        perfect = [
            f"{seed['found'].generation:,}" if is_solved else "none"
            for seed, is_solved in zip(seeds, solved, strict=True)
        ]
        rows.append(
            [
                *_setting(seeds),
                link(seeds[0]["learner"], DRAWING, name),
                f"**{sum(solved)} of {len(seeds)}**",
                listed(perfect),
                listed([f"{line['drawing/generations']:,.0f}" for line in last]),
                listed([f"{line['seconds'] / 60:.1f}" for line in last]),
                listed([str(line["step"]) for line in last]),
                *(
                    listed([f"{line['drawing/best']:.2f} {line['reward']:.2f}" for line in lines])
                    for lines in (first, last)
                ),
                listed([f"{row['mean']:.2f} {row['perfect']}/{row['programs']}" if row else "" for row in sampled]),
                each(seeds, lambda seed: f"{seed['minutes']:.1f}"),
                made_by(seeds),
            ]
        )
    return markdown(headers, rows)


def _setting(seeds: list[dict]) -> tuple[str, str]:
    """The picture, and the model that draws it."""
    target, model = ({seed[name] for seed in seeds} for name in ("target", "model"))
    return ", ".join(sorted(target)), ", ".join(sorted(model))


def write_drawing_curves() -> None:
    """The best and the mean of each batch, of both learners: two pictures for each target and model."""
    by_setting: dict[tuple[str, str], list[list[dict]]] = {}
    for seeds in drawings().values():
        by_setting.setdefault(_setting(seeds), []).append(seeds)
    axes = {
        "generations": ("generations", lambda line: line["drawing/generations"]),
        "minutes": ("minutes of learning, CPU", lambda line: line["seconds"] / 60),
    }
    for (target, model), results in by_setting.items():
        lines = results[0][0]["baselines"]
        of_setting = "_".join(re.findall(r"\w+", f"{target} {model}".lower()))
        for name, (x_label, x_of) in axes.items():
            curves = {
                with_seeds(f"{seeds[0]['learner']}, {what} of each batch", seeds): [
                    ([x_of(line) for line in seed["metrics"]], [line[value] for line in seed["metrics"]])
                    for seed in seeds
                ]
                for seeds in results
                for what, value in (("best", "drawing/best"), ("mean", "reward"))
            }
            figure = curves_figure(curves, lines, x_label, "share of equal pixels", f"{target}, {model}")
            files.save_picture(figure, f"drawing_{of_setting}_{name}")
