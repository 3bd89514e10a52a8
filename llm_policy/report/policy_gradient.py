"""Policy gradients: what each algorithm and actor reaches on each environment, and how fast."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from pydantic import BaseModel, FiniteFloat

from llm_policy.plots import curves_figure
from llm_policy.reading import read_yaml
from llm_policy.report import files
from llm_policy.report.cells import each, game, link, listed, markdown, values, with_seeds
from llm_policy.report.dates import made, made_by
from llm_policy.report.lakes import SUMMARY_LAKE, PolicyRow
from llm_policy.report.search import is_slippery_lake
from llm_policy.report.studies import (
    CANONICAL,
    OPTIMAL,
    POLICY_GRADIENT,
    REFERENCES,
    SAMPLED,
    SEARCH,
    TRAINED,
    UNTRAINED,
    finished_seeds,
    read_minutes,
    results_of,
    rows_by_name,
)

LINES_PER_POINT = 8  # of a curve
EXACT = ("return_at_horizon", "success_at_horizon")  # a game that pays no success has both


class EpisodeRow(BaseModel, strict=True):
    """What the table takes from a row of evaluation.json that comes from episodes."""

    policy: str
    mean_return: FiniteFloat


class EpisodeLine(BaseModel, strict=True):
    """What the table and the pictures take from a line of metrics.jsonl."""

    step: int
    episodes: int
    seconds: FiniteFloat
    mean_return_of_25_episodes: FiniteFloat | None = None  # none before the first episode has ended


def policy_gradients() -> dict[str, list[dict]]:
    """Name -> finished seeds of train_policy_gradient.py."""
    return results_of(POLICY_GRADIENT, played_by)


def played_by(folder: Path) -> list[dict]:
    """The finished seeds of one policy gradient: evaluation, metrics, minutes, and which actor learnt how."""
    found = []
    for seed in finished_seeds(
        folder, ("evaluation.json", "run.json", "resolved_config.yaml", "metrics.jsonl", "minutes.txt")
    ):
        with files.whole(seed):
            evaluation, run = files.read_json(seed / "evaluation.json"), files.read_json(seed / "run.json")
            config = read_yaml(seed / "resolved_config.yaml")
            first = evaluation["policies"][0]
            score = next((name for name in EXACT if name in first), "mean_return")
            kind = PolicyRow if score in EXACT else EpisodeRow
            references = [OPTIMAL] if score in EXACT else []
            rows = rows_by_name(evaluation, kind, UNTRAINED, TRAINED, SAMPLED, *references)
            found.append(
                {
                    **{name: run[name] for name in ("env_id", "algorithm", "actor", "horizon_steps")},
                    "env_options": evaluation["env_options"],
                    "score": score,
                    "is_centered": config.get("center", True),
                    "max_episodes": config.get("max_episodes"),
                    "policies": rows,
                    "metrics": files.read_lines(seed / "metrics.jsonl", EpisodeLine),
                    "minutes": read_minutes(seed),
                    "made": made(seed / "run.json"),
                }
            )
    return found


def policy_gradient_section(
    results: Mapping[str, list[dict]], trained: Mapping[str, list[dict]], searches: Mapping[str, list[dict]]
) -> str:
    """Each environment: what looks at nothing, each algorithm and actor, searches; on the lake GRPO as well."""
    headers = (
        "environment", "policy", "seeds", "trained, greedy", "trained, sampled", "untrained", "steps", "episodes",
        "minutes", "steps per second", "date, commit",
    )  # fmt: skip
    rows = []
    by_environment: dict[str, dict[str, list[dict]]] = {}
    for name, seeds in results.items():
        by_environment.setdefault(_where(seeds[0]), {})[name] = seeds
    for where, found in by_environment.items():
        first = next(iter(found.values()))
        score = first[0]["score"]
        decimals = 4 if score == "success_at_horizon" else 1
        for policy in first[0]["policies"]:
            if policy.startswith((*REFERENCES, "no action")):
                judged = [seed for seed in first if policy in seed["policies"]]
                scores = [seed["policies"][policy][score] for seed in judged]
                # Exact ones are the same in every seed, those of episodes are not
                shown = (
                    f"{scores[0]:.{decimals}f}"
                    if len({*scores}) == 1
                    else values([seed["policies"][policy] for seed in judged], score, decimals)
                )
                rows.append([where, policy, len(judged), shown, *[""] * 6, made_by(judged)])
        for name, seeds in found.items():
            label = _actor(seeds[0])
            last = [seed["metrics"][-1] for seed in seeds]
            rows.append(
                [
                    where,
                    link(label, POLICY_GRADIENT, name),
                    len(seeds),
                    *(
                        values([seed["policies"][kind] for seed in seeds], score, decimals)
                        for kind in (TRAINED, SAMPLED, UNTRAINED)
                    ),
                    listed([f"{line['step']:,}" for line in last]),
                    listed([f"{line['episodes']:,}" for line in last]),
                    each(seeds, lambda seed: f"{seed['minutes']:.1f}"),
                    listed([f"{line['step'] / line['seconds']:.0f}" for line in last]),
                    made_by(seeds),
                ]
            )
        for name, seeds in searches.items():
            if _played_in(seeds[0]) == _played_in(first[0]):
                own = [seed["policies"][seed["searched"]] for seed in seeds]
                minutes = each(seeds, lambda seed: f"{seed['minutes']:.1f}")
                played = listed([f"{row['episodes']:,}" for row in own])
                label, score_of_search = link(seeds[0]["searched"], SEARCH, name), values(own, "value", decimals)
                rows.append(
                    [where, label, len(seeds), score_of_search, "", "", "", played, minutes, "", made_by(seeds)]
                )
        if is_slippery_lake(first[0]) and SUMMARY_LAKE in trained:
            runs = trained[SUMMARY_LAKE]
            scores = [values([run["policies"][kind] for run in runs], score) for kind in (TRAINED, SAMPLED, UNTRAINED)]
            minutes = each(runs, lambda run: f"{run['minutes']:.1f}")
            label = link("GRPO, this repository", CANONICAL, SUMMARY_LAKE)
            rows.append([where, label, len(runs), *scores, "", "none: the expert's Q", minutes, "", made_by(runs)])
    return markdown(headers, rows)


def _actor(seed: dict) -> str:
    """Algorithm and actor, in words."""
    budget = f", {seed['max_episodes']:,} episodes" if seed["max_episodes"] else ""
    return f"{seed['algorithm'].upper()}, {seed['actor']}{'' if seed['is_centered'] else ', not centred'}{budget}"


def _played_in(seed: dict) -> tuple:
    """Environment, options and step limit of a run or a search."""
    return seed["env_id"], seed.get("env_options") or {}, seed["horizon_steps"]


def _where(seed: dict) -> str:
    what = "success" if seed["score"] == "success_at_horizon" else "return"
    return f"{game(seed)}: {what} in {seed['horizon_steps']} steps"


def write_episode_curves() -> None:
    """A policy gradient's return while it learns, against episodes, steps and minutes: a picture per environment."""
    by_environment: dict[str, dict[str, list[dict]]] = {}
    for result, seeds in policy_gradients().items():
        if not seeds[0]["max_episodes"]:  # those are beginnings of the others
            curves_of, label = by_environment.setdefault(game(seeds[0]), {}), _actor(seeds[0])
            curves_of[f"{label}, {result}" if label in curves_of else label] = seeds
    axes = {
        "episodes": ("episodes", lambda line: line["episodes"]),
        "steps": ("steps in the environment", lambda line: line["step"]),
        "minutes": ("minutes, CPU", lambda line: line["seconds"] / 60),
    }
    for played, results in by_environment.items():
        env_id, _, options = played.partition(" ")
        file = "_".join(["policy_gradient", env_id.partition("-")[0], *re.findall(r"\w+", options)])
        for name, (x_label, x_of) in axes.items():
            curves = {
                with_seeds(label, seeds): [_episode_curve(seed, x_of) for seed in seeds]
                for label, seeds in results.items()
            }
            figure = curves_figure(curves, {}, x_label, "mean return of 25 episodes, smoothed", played)
            files.save_picture(figure, f"{file}_{name}")


def _episode_curve(seed: dict, x_of: Callable[[dict], float]) -> tuple[list[float], list[float]]:
    """Means of `LINES_PER_POINT` neighbouring lines, the first of fewer: 25 episodes of 0 or 1 are mostly chance."""
    lines = [line for line in seed["metrics"] if "mean_return_of_25_episodes" in line]
    ends = range(len(lines), 0, -LINES_PER_POINT)
    groups = [lines[max(0, end - LINES_PER_POINT) : end] for end in reversed(ends)]
    means = [float(np.mean([line["mean_return_of_25_episodes"] for line in group])) for group in groups]
    return [x_of(group[-1]) for group in groups], means
