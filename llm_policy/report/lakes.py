"""Training on lakes: the seeds of all its studies, the table of results on one lake, learning curves."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, FiniteFloat, TypeAdapter

from llm_policy.environments.frozen_lake import grid_of
from llm_policy.environments.mdp import OPTIMAL_PERCENT
from llm_policy.errors import InputError
from llm_policy.plots import curves_figure
from llm_policy.reading import read_text
from llm_policy.report import files
from llm_policy.report.cells import each, link_to, markdown, values, with_seeds
from llm_policy.report.dates import made, made_by
from llm_policy.report.studies import (
    CANONICAL,
    MAPS,
    OPTIMAL,
    OTHER_GAMES,
    REFERENCES,
    SAMPLED,
    TRAINED,
    TRAINING,
    WARM_START,
    finished_seeds,
    read_minutes,
    results_of,
    rows_by_name,
)

LAKES = "frozen_lake"  # the task of these studies
USUAL_SIZE = 4  # rows and columns of a map
SUMMARY_LAKE = "natural_slippery"  # beside it stand searches and policy gradients
CURVES = {  # the lines of the first picture
    "natural_slippery": "this repository",
    "ablation_from_original_learning_rate": "the original with objective expected and our learning rate",
    "original_reproduced": "the original, reproduced",
}


class PolicyRow(BaseModel, strict=True):
    """What the tables and pictures take from a row of evaluation.json."""

    policy: str
    success_probability: FiniteFloat
    success_at_horizon: FiniteFloat
    optimal_success: FiniteFloat
    optimal_at_horizon: FiniteFloat
    percent_of_optimal: FiniteFloat
    optimal_states: FiniteFloat
    acting_states: FiniteFloat
    horizon_steps: FiniteFloat


class Followed(BaseModel, strict=True):
    """Behind a false thought; no shares where no state was asked."""

    states: int
    changed: FiniteFloat = 0.0
    thought: FiniteFloat = 0.0
    prompt: FiniteFloat = 0.0
    neither: FiniteFloat = 0.0


class Thoughts(BaseModel, strict=True):
    true_thoughts: FiniteFloat | None = None
    behind_false_thoughts: Followed | None = None


class Judged(BaseModel, strict=True):
    """The same of evaluation.json itself. Older ones hold no more than how many maps there are."""

    is_slippery: bool
    maps: int | list[str] | None = None
    thoughts: dict[str, Thoughts] = {}


class MetricsLine(BaseModel, strict=True):
    """The same of a line of metrics.jsonl."""

    step: int
    seconds: FiniteFloat
    learning_rate: FiniteFloat | None = None  # at least of the first


def training_results() -> dict[str, list[dict]]:
    """Name -> finished seeds, of all studies of training."""
    return {name: seeds for study in TRAINING for name, seeds in results_of(study, seeds_of).items()}


def of_studies(results: Mapping[str, list[dict]], *studies: str) -> dict[str, list[dict]]:
    return {name: seeds for name, seeds in results.items() if seeds[0]["study"] in studies}


def seeds_of(folder: Path) -> list[dict]:
    """The finished seeds of one training result: evaluation rows by name, metrics by step, verdict, minutes."""
    found = []
    for seed in finished_seeds(folder, ("result.txt", "metrics.jsonl", "evaluation.json", "run.json", "minutes.txt")):
        with files.whole(seed):
            evaluation, run = files.read_json(seed / "evaluation.json"), files.read_json(seed / "run.json")
            if (task := run.get("task", LAKES)) != LAKES:
                raise InputError(
                    f"{files.shown(seed)}: is of --task {task}, and the study {folder.parent.name} is for --task "
                    f"{LAKES}; move {folder.name} to another one, {OTHER_GAMES} for instance"
                )
            judged = Judged.model_validate(evaluation)
            metrics = files.read_lines(seed / "metrics.jsonl", MetricsLine)
            if metrics[0].get("learning_rate") is None:
                raise ValueError("metrics.jsonl: no first step with its learning rate")
            policies = rows_by_name(evaluation, PolicyRow, TRAINED, OPTIMAL)
            if folder.parent.name == MAPS:
                _check_maps(judged, policies[TRAINED], metrics)
            found.append(
                {
                    "study": folder.parent.name,
                    "is_slippery": judged.is_slippery,
                    "maps": judged.maps,
                    "command": shlex.split(read_text(folder / "command.txt")),
                    "observation": run.get("observation", ""),
                    "thought": run.get("thought", "place"),
                    "gpu": _gpu(run.get("device", "")),
                    "thoughts": evaluation.get("thoughts", {}),
                    "policies": policies,
                    "metrics": metrics,
                    "verdict": _verdict(seed / "result.txt"),
                    "minutes": read_minutes(seed),
                    "made": made(seed / "run.json"),
                }
            )
    return found


def _check_maps(judged: Judged, trained: Mapping, metrics: Sequence[Mapping]) -> None:
    """`ValueError` where something is missing that the tables of maps take."""
    TypeAdapter(int).validate_python(trained["maps"])
    for line in metrics:
        for name in ("step_time", "completions/mean_length"):
            TypeAdapter(FiniteFloat).validate_python(line[name])
    if "actions" in trained and not isinstance(judged.maps, list):
        raise ValueError("evaluation.json: actions, but no maps")
    if isinstance(judged.maps, list):
        if bare := [rows for rows in judged.maps if rows.count("S") != 1]:
            raise ValueError(f"evaluation.json: the map {bare[0]} has no start, or several")
        letters = trained.get("actions", [rows.replace("|", "") for rows in judged.maps])
        if [len(rows.replace("|", "")) for rows in judged.maps] != [*map(len, letters)] or not letters:
            raise ValueError("evaluation.json: maps and actions do not fit each other")


def _gpu(device: str) -> str:
    """Its name in run.json; empty for CPUs.

    >>> _gpu("NVIDIA H200"), _gpu("2 CPU threads, AMD EPYC")
    ('NVIDIA H200', '')
    """
    return "" if "CPU" in device else device


def on_gpu(seeds: Sequence[dict]) -> str:
    """Behind their minutes, where not all are a CPU's."""
    found = list(dict.fromkeys(seed["gpu"] or "CPU" for seed in seeds))
    return "" if found == ["CPU"] else f" ({', '.join(found)})"


def other_size(seed: dict) -> str:
    """Of the maps, where it is not the usual one. Older evaluations hold no more than how many there are."""
    if not isinstance(seed["maps"], list):
        return ""
    grid = grid_of(seed["maps"][0])
    return "" if len(grid) == len(grid[0]) == USUAL_SIZE else f", {len(grid)}x{len(grid[0])}"


def _verdict(file: Path) -> str:
    """The last line without its label, and without the counts of steps in brackets, which have a column."""
    line = read_text(file).strip().splitlines()[-1].removeprefix("verdict: ")
    return re.sub(r" \(warm start \d+ steps, GRPO \d+\)$", "", line)


def results_section(results: Mapping[str, list[dict]]) -> str:
    """One row per result, one value per seed: greedy success without and at the limit, sampled; the worst verdict."""
    headers = [
        "result", "seeds", "success, no step limit", "success within the step limit", "sampled, within the limit",
        "optimal states", "minutes per seed", "worst seed", "date, commit",
    ]  # fmt: skip
    rows = []
    for name, seeds in results.items():
        trained, states, worst = trained_greedy(seeds)
        sampled = [seed["policies"][SAMPLED] for seed in seeds if SAMPLED in seed["policies"]]
        optimum = seeds[0]["policies"][OPTIMAL]
        rows.append(
            [
                link_to(name, seeds),
                len(seeds),
                f"{values(trained, 'success_probability')} of {optimum['optimal_success']:.4f}",
                f"{values(trained, 'success_at_horizon')} of {optimum['optimal_at_horizon']:.4f}",
                values(sampled, "success_at_horizon") if sampled else "",
                states,
                each(seeds, lambda seed: f"{seed['minutes']:.1f}"),
                worst,
                made_by(seeds),
            ]
        )
    for is_slippery in (True, False):
        on_canonical_first = sorted(results.values(), key=lambda seeds: seeds[0]["study"] != CANONICAL)
        seeds = next((seeds for seeds in on_canonical_first if seeds[0]["is_slippery"] is is_slippery), None)
        rows += _baseline_rows(seeds[0]) if seeds else []
        of_this_ice = [seeds for seeds in results.values() if seeds[0]["is_slippery"] is is_slippery]
        rows += [row for seeds in of_this_ice for row in warm_start_rows(seeds)][:1]
    return markdown(headers, rows)


def trained_greedy(seeds: Sequence[dict]) -> tuple[list[dict], str, str]:
    """The trained greedy policy of each seed, their optimal states, and the verdict of the worst."""
    trained = [seed["policies"][TRAINED] for seed in seeds]
    states = each(trained, lambda row: format(row["optimal_states"], ".0f"), f" of {trained[0]['acting_states']:.0f}")
    worst = min(seeds, key=lambda seed: _rank(seed["policies"][TRAINED]))
    return trained, states, worst["verdict"]


def _rank(trained: dict) -> tuple[float, float]:
    return trained["success_probability"], trained["optimal_states"]


def _baseline_rows(seed: dict) -> list[list[object]]:
    """The policies beside which every result of the same lake stands. They are exact, and no seed changes them."""
    ice = "slippery" if seed["is_slippery"] else "not slippery"
    return [
        [
            f"*{name}, {ice}*",
            "none",
            f"{row['success_probability']:.4f}",
            f"{row['success_at_horizon']:.4f}",
            "",
            f"{row['optimal_states']:.0f} of {row['acting_states']:.0f}",
            "",
            "",
            made_by([seed]),
        ]
        for name, row in seed["policies"].items()
        if name.startswith((*REFERENCES, "untrained"))
    ]


def warm_start_rows(seeds: Sequence[dict]) -> list[list[object]]:
    """What the form alone comes to, before GRPO: which share of a result is the warm start's. A row, or none."""
    seeds = [seed for seed in seeds if WARM_START in seed["policies"]]
    if not seeds:
        return []
    rows = [seed["policies"][WARM_START] for seed in seeds]
    states = each(rows, lambda row: format(row["optimal_states"], ".0f"), f" of {rows[0]['acting_states']:.0f}")
    scores = [values(rows, name) for name in ("success_probability", "success_at_horizon")]
    ice = "slippery" if seeds[0]["is_slippery"] else "not slippery"
    return [[f"*{WARM_START}, {ice}*", len(seeds), *scores, "", states, "", "", made_by(seeds)]]


def last_step(seed: dict) -> int:
    return seed["metrics"][-1]["step"]


def first_optimum(metrics: list[dict]) -> int | str:
    return next((m["step"] for m in metrics if m.get("policy/percent_of_optimal", 0) >= OPTIMAL_PERCENT), "never")


def write_curves(
    results: Mapping[str, list[dict]], name: str, title: str, quantity: str = "success_probability",
    y_label: str = "exact success probability, no step limit", by_steps: bool = False,
) -> None:  # fmt: skip
    """The greedy policy against minutes of GRPO or steps, a line per seed; no picture where there are no results.

    `results` by their label in the picture. Horizontal lines are those references that are the same for all of them,
    within 1 % of the highest.
    """
    curves, lines = {}, {}
    for label, seeds in results.items():
        curves[with_seeds(label, seeds)] = found = []
        for seed in seeds:
            points = [m for m in seed["metrics"] if m.get(f"policy/{quantity}") is not None]
            found.append(
                (
                    [m["step"] if by_steps else m["seconds"] / 60 for m in points],
                    [m[f"policy/{quantity}"] for m in points],
                )
            )
            for policy, row in seed["policies"].items():
                if policy.startswith(REFERENCES):
                    lines.setdefault(policy, []).append(row[quantity])
    if curves:
        apart = 0.01 * max(max(found) for found in lines.values())
        same = {policy: found[0] for policy, found in lines.items() if np.ptp(found) <= apart}
        x_label = "steps" if by_steps else "minutes of GRPO, CPU"
        files.save_picture(curves_figure(curves, same, x_label, y_label, title), name)


def write_learning_curves(results: Mapping[str, list[dict]]) -> None:
    on_one_lake = {label: results[name] for name, label in CURVES.items() if name in results}
    write_curves(on_one_lake, "learning_curves", "Success on the canonical slippery lake while training")
