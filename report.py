"""Write what results/ holds into the tables of README.md and docs/, and into the curves of docs/pictures/.

    python report.py            # writes every section between its two marker lines, and the pictures
    python report.py --check    # changes nothing; exit code 1 where a section is out of date

A section stands between `<!-- NAME: written by report.py -->` and `<!-- end of NAME -->`, in any of these files.
Only results/ and the dates of commits are read, and nothing is trained.

Axes: S states, A actions.
"""

from llm_policy.startup import announce

announce(__name__, "NumPy and matplotlib")

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter

from llm_policy.command_line import EXIT_CODES, parse_arguments
from llm_policy.environments.frozen_lake import ACTIONS, Grid, acting_states, grid_of, lake_mdp, leads_to_goal
from llm_policy.environments.mdp import AGREEMENT_GAMMA, OPTIMAL_PERCENT, optimal_actions, optimal_q
from llm_policy.errors import InputError, run_script
from llm_policy.plots import curves_figure
from llm_policy.reading import read_text
from llm_policy.run_files import ROOT
from llm_policy.statistics import mcnemar_p, wilson_interval

RESULTS = ROOT / "results"
BEGIN, END = "<!-- {name}: written by report.py -->", "<!-- end of {name} -->"
SECTIONS = (
    "summary", "results", "ablations", "supervision", "supervision_flaws", "supervision_maps", "maps", "observations",
    "probe", "search", "policy_gradient", "questions", "arc", "drawing", "speed",
)  # fmt: skip

# The studies: folders of results/. Those of training hold seeds that were trained on lakes.
CANONICAL, ORIGINAL, ABLATIONS, SUPERVISION, MAPS, SEARCH, POLICY_GRADIENT, QUESTIONS, ARC, DRAWING, SPEED = (
    "canonical", "original", "ablations", "supervision", "maps_never_seen", "policy_search", "policy_gradient",
    "questions", "arc", "drawing", "speed",
)  # fmt: skip
TRAINING = (CANONICAL, ORIGINAL, ABLATIONS, SUPERVISION, MAPS)
# What ablations start from: a result, and the configuration that their command names (None: the default)
ABLATED = {"canonical_slippery": None, "original_reproduced": "configs/laptop_original.yaml"}
DEFAULT_CONFIG = "configs/laptop.yaml"
SAME_IN_ABLATIONS = ("--max_steps", "--stop_when", "--samples_per_state")
FEW = 5  # so many seeds are listed one by one
OBSERVATION, OBSERVED = "observation_", "random_maps_dry"  # results with another observation, and what they change

# Rows of every evaluation.json, by the beginning of their names: which constant action is best stands behind it
REFERENCES = ("optimal", "uniform random", "best constant action")
UNTRAINED, WARM_START, TRAINED, SAMPLED = (
    "untrained, greedy", "warm start, greedy", "trained, greedy", "trained, sampled",
)  # fmt: skip
# The summary's rows of training: what it is called there, and the score
SUMMARY = {
    "natural_slippery": ("GRPO, this repository", "success_probability"),
    "original_reproduced": ("the original, reproduced", "success_probability"),
    "cloning_slippery": ("supervision: cloning of the best action", "success_probability"),
    "natural_deterministic": ("GRPO, this repository", "success_probability"),
    "random_maps_dry_ways_250": ("GRPO, this repository", "percent_of_optimal"),
    "random_maps_slippery_ways_250": ("GRPO, this repository", "percent_of_optimal"),
}
LEARNERS = {None: "GRPO", "hindsight": "hindsight replay"}  # of the drawing task, by what run.json says
LINES_PER_POINT = 8  # of a policy gradient's curve
SUMMARY_LAKE, SUMMARY_SEARCH = "natural_slippery", "props_frozen_lake"
SUMMARY_POLICY_GRADIENTS = {  # the same, within the step limit
    "frozen_lake_ppo_mlp": "PPO, a network that reads the state's number",
    "frozen_lake_ppo_frozen": "PPO, behind SmolLM2-135M-Instruct that reads the grid",
}
CURVES = {  # the lines of the first picture
    "natural_slippery": "this repository",
    "ablation_from_original_learning_rate": "the original with objective expected and our learning rate",
    "original_reproduced": "the original, reproduced",
}
# Ways of teaching on the canonical slippery lake, reinforcement first: name of the result -> label
WAYS_OF_TEACHING = {
    "natural_slippery": "natural",
    "canonical_slippery": "expected",
    "ablation_objective_grpo_kl": "GRPO, eight completions, KL .3",
    "cloning_slippery": "cloning",
    "distillation_slippery": "distillation",
}
# Experts with flaws: end of the result's name -> label. Its beginning is the way of teaching
FLAWS = {
    "labels_only": "labels without Q-values",
    "wrong_tenth": "best and worst exchanged in a tenth of the states",
    "noise_tenth": "noise of a tenth of the largest Q-value",
    "few_episodes": "Q-learning stopped after 3,000 steps",
}
TAUGHT = ("natural", "cloning", "distillation")

# Reading ----------------------------------------------------------------------------------------------------------


class PolicyRow(BaseModel, strict=True):
    """What the tables and pictures take from a row of a training's evaluation.json."""

    policy: str
    success_probability: FiniteFloat
    success_at_horizon: FiniteFloat
    optimal_success: FiniteFloat
    optimal_at_horizon: FiniteFloat
    percent_of_optimal: FiniteFloat
    optimal_states: FiniteFloat
    acting_states: FiniteFloat


class SearchRow(BaseModel, strict=True):
    """The same of a search."""

    policy: str
    value: FiniteFloat
    episodes: int | None


class EpisodeRow(BaseModel, strict=True):
    """The same of a policy gradient that is judged by episodes."""

    policy: str
    mean_return: FiniteFloat


class EpisodeLine(BaseModel, strict=True):
    """The same of a line of a policy gradient's metrics.jsonl."""

    step: int
    episodes: int
    seconds: FiniteFloat
    mean_return_of_25_episodes: FiniteFloat | None = None  # none before the first episode has ended


class QuestionRow(BaseModel, strict=True):
    """The same of questions."""

    policy: str
    accuracy: FiniteFloat
    right: list[FiniteFloat]
    said: dict[str, int]


class ArcRow(BaseModel, strict=True):
    """The same of one regime of ARC, with or without the system prompt."""

    regime: str
    system_prompt: str
    questions: int
    accuracy: FiniteFloat
    standard_error: FiniteFloat
    unreadable: FiniteFloat
    letters: dict[str, int]


class DrawingRow(BaseModel, strict=True):
    """The same of a drawing task."""

    policy: str
    mean: FiniteFloat
    programs: int
    perfect: int


class DrawingLine(BaseModel, strict=True):
    """The same of a line of its metrics.jsonl, a batch of GRPO or an epoch of hindsight replay."""

    step: int
    seconds: FiniteFloat
    reward: FiniteFloat
    best: FiniteFloat = Field(alias="drawing/best")
    generations: FiniteFloat = Field(alias="drawing/generations")


class MetricsLine(BaseModel, strict=True):
    """The same of a line of metrics.jsonl."""

    step: int
    seconds: FiniteFloat
    learning_rate: FiniteFloat | None = None  # at least of the first


def rows_by_name(evaluation: dict, kind: type[BaseModel], needed: str) -> dict[str, dict]:
    """The rows of an evaluation; `ValueError` where one is not of this kind, or none is called `needed`."""
    rows = TypeAdapter(list[dict]).validate_python(evaluation["policies"])
    for row in rows:
        kind.model_validate(row)
    found = {row["policy"]: row for row in rows}
    if needed not in found:
        raise ValueError(f"no row {needed!r}")
    return found


def read_minutes(seed: Path) -> float:
    return TypeAdapter(FiniteFloat).validate_python(read_text(seed / "minutes.txt").strip())


def read_json(file: Path) -> dict:
    try:
        return TypeAdapter(dict).validate_python(json.loads(read_text(file)))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{shown(file)}: cannot be read as JSON ({reason}); run it again or delete it") from error


def read_json_lines(file: Path) -> list[dict]:
    try:
        lines = [json.loads(line) for line in read_text(file).splitlines()]
        TypeAdapter(list[MetricsLine]).validate_python(lines)
        if not lines or lines[0].get("learning_rate") is None:
            raise ValueError("no first step with its learning rate")
        return lines
    except (OSError, ValueError) as error:
        raise InputError(f"{shown(file)}: cannot be read as JSON lines ({error}); run it again or delete it") from error


def shown(path: Path) -> str:
    """A path below the repository's root without that root."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def finished_seeds(folder: Path, files: Iterable[str]) -> list[Path]:
    """The folders `seed-N` of one result that hold all of `files`, by number."""
    seeds = [seed for seed in folder.glob("seed-*") if seed.name.removeprefix("seed-").isdecimal()]
    whole = [seed for seed in seeds if all((seed / name).exists() for name in files)]
    return sorted(whole, key=lambda seed: int(seed.name.removeprefix("seed-")))


def seeds_of(folder: Path) -> list[dict]:
    """The finished seeds of one training result: evaluation rows by name, metrics by step, verdict, minutes."""
    found = []
    for seed in finished_seeds(folder, ("result.txt", "metrics.jsonl", "evaluation.json", "run.json", "minutes.txt")):
        with whole(seed):
            evaluation = read_json(seed / "evaluation.json")
            run = read_json(seed / "run.json")
            found.append(
                {
                    "study": folder.parent.name,
                    "seed": seed.name.removeprefix("seed-"),
                    "is_slippery": evaluation["is_slippery"],
                    "maps": evaluation.get("maps"),
                    "command": shlex.split(read_text(folder / "command.txt")),
                    "observation": run.get("observation", ""),
                    "policies": rows_by_name(evaluation, PolicyRow, TRAINED),
                    "metrics": read_json_lines(seed / "metrics.jsonl"),
                    "verdict": _verdict(seed / "result.txt"),
                    "minutes": read_minutes(seed),
                    "made": made(seed / "run.json"),
                }
            )
    return found


@contextmanager
def whole(seed: Path) -> Iterator[None]:
    """One line where the files of a seed are not what the scripts write."""
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{shown(seed)}: its files are damaged ({error!r}); run it again or delete it") from error


def _verdict(file: Path) -> str:
    """The last line without its label, and without the counts of steps in brackets, which have a column."""
    line = read_text(file).strip().splitlines()[-1].removeprefix("verdict: ")
    return re.sub(r" \(warm start \d+ steps, GRPO \d+\)$", "", line)


def training_results() -> dict[str, list[dict]]:
    """Name -> finished seeds, of all studies of training."""
    folders = [folder for study in TRAINING for folder in sorted((RESULTS / study).glob("*")) if folder.is_dir()]
    return {folder.name: seeds for folder in folders if (seeds := seeds_of(folder))}


def of_studies(results: Mapping[str, list[dict]], *studies: str) -> dict[str, list[dict]]:
    return {name: seeds for name, seeds in results.items() if seeds[0]["study"] in studies}


def searches_of(folder: Path) -> list[dict]:
    """`evaluation.json` of the finished seeds of one policy search, and its minutes."""
    return _evaluations(folder, lambda evaluation: rows_by_name(evaluation, SearchRow, evaluation["searched"]))


def played_by(folder: Path) -> list[dict]:
    """The same of a policy gradient, with its run.json and its metrics."""
    found = []
    for seed in finished_seeds(folder, ("evaluation.json", "run.json", "metrics.jsonl", "minutes.txt")):
        with whole(seed):
            evaluation, run = read_json(seed / "evaluation.json"), read_json(seed / "run.json")
            command = read_text(folder / "command.txt")
            budget = re.search(r"--max_episodes[ =](\d+)", command)
            is_exact = "success_at_horizon" in evaluation["policies"][0]
            rows = rows_by_name(evaluation, PolicyRow if is_exact else EpisodeRow, TRAINED)
            lines = [json.loads(line) for line in read_text(seed / "metrics.jsonl").splitlines()]
            TypeAdapter(Annotated[list[EpisodeLine], Field(min_length=1)]).validate_python(lines)
            found.append(
                {
                    **{name: run[name] for name in ("env_id", "algorithm", "actor", "horizon_steps")},
                    "options": evaluation["env_options"],
                    "score": "success_at_horizon" if is_exact else "mean_return",
                    "is_centered": not re.search(r"--center[ =]false", command),
                    "max_episodes": int(budget[1]) if budget else None,
                    "policies": rows,
                    "metrics": lines,
                    "minutes": read_minutes(seed),
                    "made": made(seed / "run.json"),
                }
            )
    return found


def asked_of(folder: Path) -> list[dict]:
    """The same of training on questions."""
    return _evaluations(folder, lambda evaluation: rows_by_name(evaluation, QuestionRow, TRAINED))


def drawn_by(folder: Path) -> list[dict]:
    """The finished seeds of one learner and one picture: evaluation, metrics, and who learnt what."""
    found = []
    for seed in finished_seeds(folder, ("evaluation.json", "run.json", "metrics.jsonl", "minutes.txt")):
        with whole(seed):
            evaluation, run = read_json(seed / "evaluation.json"), read_json(seed / "run.json")
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


def _evaluations(folder: Path, check: Callable[[dict], object]) -> list[dict]:
    found = []
    for seed in finished_seeds(folder, ("evaluation.json", "run.json", "minutes.txt")):
        with whole(seed):
            minutes = read_minutes(seed)
            evaluation = read_json(seed / "evaluation.json")
            check(evaluation)
            found.append(evaluation | {"minutes": minutes, "made": made(seed / "run.json")})
    return found


# Dates and commits ------------------------------------------------------------------------------------------------

Made = list[tuple[str, int, str]]  # when a file's content came about: date, Unix time of the commit, commit


def git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = " ".join((getattr(error, "stderr", "") or str(error)).split())
        raise InputError(f"git {arguments[0]}: {reason}; the dates of results need git and a full clone") from error


@cache
def history() -> dict[str, tuple[int, str]]:
    """Commit -> Unix time and date. One call of git for the whole history, because there are many runs."""
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        raise InputError("git: a shallow clone lacks the dates of results; run `git fetch --unshallow`")
    lines = (line.split() for line in git("log", "--format=%H %ct %cs").splitlines())
    return {commit: (int(seconds), date) for commit, seconds, date in lines}


def made(file: Path) -> Made:
    """When and by which code a result was made, by its run.json or by what a benchmark wrote: one entry per part.

    The date is that of the file, else that of the commit. Where the file names no known commit, both are of the first
    commit that holds this content, whatever its path was then.
    """
    content = read_json(file)
    entries = []
    for part in (content, *content.get("resumed", [])):
        commit, date = part.get("commit", "").replace("unknown", ""), part.get("date", "")[:10]
        seconds, commit_date = history().get(commit, (0, ""))
        if date or commit_date:
            entries.append((date or commit_date, seconds, commit))
    return entries or first_committed(file)


def first_committed(file: Path) -> Made:
    """The first commit with this content of the file; [] where none has it yet."""
    known = history()
    blob = git("hash-object", str(file)).strip()
    commits = git("log", "--reverse", "--format=%H", f"--find-object={blob}").split()
    return [(known[commit][1], known[commit][0], commit) for commit in commits[:1]]


def date_and_commit(entries: Made) -> str:
    """The first and the last, or one where they are the same: `2026-11-21..2026-11-22, da26d60..8286edd`."""
    if not entries:
        return "not committed yet"
    ordered = sorted(entries)
    spans = ([date for date, _, _ in ordered], [commit[:7] for _, _, commit in ordered if commit])
    return ", ".join(found[0] if found[0] == found[-1] else f"{found[0]}..{found[-1]}" for found in spans if found)


def made_by(seeds: Sequence[dict]) -> str:
    return date_and_commit([entry for seed in seeds for entry in seed["made"]])


# Cells of the tables ----------------------------------------------------------------------------------------------


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [list(headers), ["---"] * len(headers), *map(list, rows)]
    assert all(len(line) == len(headers) for line in lines), "a row has as many cells as the header"
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def link(label: str, *parts: str) -> str:
    """A link into results/, as it is written in the root; `write_sections` fits it to the file."""
    return f"[{label}]({'/'.join(('results', *parts))})"


def link_to(name: str, seeds: Sequence[dict]) -> str:
    return link(name, seeds[0]["study"], name)


def values(rows: Sequence[dict], key: str, decimals: int | None = None) -> str:
    """The mean in bold, and what the seeds gave behind it."""
    found = [row[key] for row in rows]
    if decimals is None:
        decimals = 4 if max(map(abs, found)) < 10 else 1  # probabilities, or returns of long episodes
    return f"**{np.mean(found):.{decimals}f}** ({listed([f'{value:.{decimals}f}' for value in found])})"


def each(seeds: Iterable[dict], value) -> str:
    return listed([str(value(seed)) for seed in seeds])


def listed(texts: Sequence[str]) -> str:
    """All of a few, else what they have in common or their range; every value is in the seeds' folders."""
    if len(texts) <= FEW:
        return ", ".join(texts)
    if len(set(texts)) == 1:
        return f"{texts[0]} in all {len(texts)}"
    numbers = sorted((text for text in texts if text.replace(".", "").lstrip("-").isdigit()), key=float)
    others = [text for text in dict.fromkeys(texts) if text not in numbers]
    return ", ".join([f"{numbers[0]} to {numbers[-1]}" if numbers else "", *others]).strip(", ")


def last_step(seed: dict) -> int:
    return seed["metrics"][-1]["step"]


def _greedy(seeds: Sequence[dict]) -> tuple[list[dict], str, str]:
    """The trained greedy policy of each seed, their optimal states, and the verdict of the worst."""
    trained = [seed["policies"][TRAINED] for seed in seeds]
    states = f"{each(trained, lambda row: format(row['optimal_states'], '.0f'))} of {trained[0]['acting_states']:.0f}"
    worst = min(seeds, key=lambda seed: _rank(seed["policies"][TRAINED]))
    return trained, states, worst["verdict"]


def _rank(trained: dict) -> tuple[float, float]:
    return trained["success_probability"], trained["optimal_states"]


# Sections ---------------------------------------------------------------------------------------------------------


def summary_section(
    results: Mapping[str, list[dict]], searches: Mapping[str, list[dict]], played: Mapping[str, list[dict]]
) -> str:
    """The table of README.md: each system beside its optimum and its baselines."""
    rows = [_summary_row(name, results[name]) for name in SUMMARY if name in results]
    if SUMMARY_LAKE in results:
        rows[1:1] = _summary_baselines(results[SUMMARY_LAKE][0])
    if SUMMARY_SEARCH in searches:
        rows += _summary_searches(searches[SUMMARY_SEARCH])
    for name, label in SUMMARY_POLICY_GRADIENTS.items():
        if name in played:
            rows.append(_summary_policy_gradient(name, label, played[name]))
    headers = ("system", "environment", "score: mean (each seed)", "optimum", "seeds", "minutes per seed")
    return markdown((*headers, "date, commit"), rows)


def _summary_row(name: str, seeds: Sequence[dict]) -> list[object]:
    system, score = SUMMARY[name]
    trained = [seed["policies"][TRAINED] for seed in seeds]
    if score == "percent_of_optimal":
        ice = "slippery" if seeds[0]["is_slippery"] else "not slippery"
        where = f"{trained[0]['maps']} maps never seen, {ice}: percent of the optimum"
        scores, optimum = values(trained, score, 1), "100"
    else:
        where = f"{'slippery lake' if seeds[0]['is_slippery'] else 'lake without slip'}: success"
        scores, optimum = values(trained, score), f"{trained[0]['optimal_success']:.4f}"
        if len(trained) > FEW:
            at_optimum = sum(row["percent_of_optimal"] >= OPTIMAL_PERCENT for row in trained)
            mean = np.mean([row[score] for row in trained])
            scores = f"**{mean:.4f}** (the optimum in {at_optimum} of {len(trained)})"
    minutes = f"{np.mean([seed['minutes'] for seed in seeds]):.0f}"
    label = link(system, seeds[0]["study"], name)
    return [label, where, scores, optimum, len(seeds), minutes, made_by(seeds)]


def _summary_baselines(seed: dict) -> list[list[object]]:
    """The untrained model, the best constant action and uniform random choice, on the slippery lake."""
    rows = []
    for beginning in (UNTRAINED, "best constant action", "uniform random"):
        for name, row in seed["policies"].items():
            if name.startswith(beginning):
                label = {UNTRAINED: "untrained model", "uniform random": "uniformly random policy"}.get(name, name)
                success, optimum = f"{row['success_probability']:.4f}", f"{row['optimal_success']:.4f}"
                rows.append([label, "slippery lake: success", success, optimum, "exact", "", made_by([seed])])
    return rows


def _summary_searches(seeds: Sequence[dict]) -> list[list[object]]:
    """Policy search in context and hill climbing: success within the step limit, because their episodes have one."""
    where = f"slippery lake: success within {seeds[0]['horizon_steps']} steps"
    optimum = next(row["value"] for row in seeds[0]["policies"] if row["policy"] == "optimal")
    rows = []
    for name in (seeds[0]["searched"], "hill climbing"):
        found = [row for seed in seeds for row in seed["policies"] if row["policy"] == name]
        is_searched = name == seeds[0]["searched"]
        label = link(name, SEARCH, SUMMARY_SEARCH) if is_searched else name
        minutes = f"{np.mean([seed['minutes'] for seed in seeds]):.0f}" if is_searched else ""
        rows.append([label, where, values(found, "value"), f"{optimum:.4f}", len(found), minutes, made_by(seeds)])
    return rows


def _summary_policy_gradient(name: str, label: str, seeds: Sequence[dict]) -> list[object]:
    where = f"slippery lake: success within {seeds[0]['horizon_steps']} steps"
    scores = values([seed["policies"][TRAINED] for seed in seeds], "success_at_horizon")
    optimum = f"{seeds[0]['policies']['optimal']['success_at_horizon']:.4f}"
    minutes = f"{np.mean([seed['minutes'] for seed in seeds]):.1f}"
    return [link(label, POLICY_GRADIENT, name), where, scores, optimum, len(seeds), minutes, made_by(seeds)]


def results_section(results: Mapping[str, list[dict]]) -> str:
    """One row per result, one value per seed: greedy success without and at the limit, sampled; the worst verdict."""
    headers = [
        "result", "seeds", "success, no step limit", "success within the step limit", "sampled, within the limit",
        "optimal states", "minutes per seed", "worst seed", "date, commit",
    ]  # fmt: skip
    rows = []
    for name, seeds in results.items():
        trained, states, worst = _greedy(seeds)
        sampled = [seed["policies"][SAMPLED] for seed in seeds if SAMPLED in seed["policies"]]
        optimum = seeds[0]["policies"]["optimal"]
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
        rows += [_warm_start_row(seeds) for seeds in of_this_ice if WARM_START in seeds[0]["policies"]][:1]
    return markdown(headers, rows)


def _baseline_rows(seed: dict) -> list[list[object]]:
    """The policies beside which every result of the same lake stands. They are exact, and no seed changes them."""
    ice = "slippery" if seed["is_slippery"] else "not slippery"
    return [
        [
            f"*{name}, {ice}*",
            "exact",
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


def _warm_start_row(seeds: Sequence[dict]) -> list[object]:
    """What the form alone comes to, before GRPO: which share of a result is the warm start's."""
    rows = [seed["policies"][WARM_START] for seed in seeds]
    states = f"{each(rows, lambda row: format(row['optimal_states'], '.0f'))} of {rows[0]['acting_states']:.0f}"
    scores = [values(rows, name) for name in ("success_probability", "success_at_horizon")]
    ice = "slippery" if seeds[0]["is_slippery"] else "not slippery"
    return [f"*{WARM_START}, {ice}*", len(seeds), *scores, "", states, "", "", made_by(seeds)]


def supervision_section(results: Mapping[str, list[dict]]) -> str:
    """The ways of teaching beside each other: what they reach, in how many steps and minutes."""
    headers = (
        "way of teaching", "seeds", "learning rate", "success, no step limit", "sampled, within the limit",
        "optimal states", "optimum first reached at step", "steps", "minutes", "date, commit",
    )  # fmt: skip
    rows = []
    for name, label in WAYS_OF_TEACHING.items():
        if name not in results:
            continue
        seeds = results[name]
        trained, states, _ = _greedy(seeds)
        sampled = [seed["policies"][SAMPLED] for seed in seeds if SAMPLED in seed["policies"]]
        rows.append(
            [
                link(label, seeds[0]["study"], name),
                len(seeds),
                f"{seeds[0]['metrics'][0]['learning_rate']:g}",  # constant in all of them
                values(trained, "success_probability"),
                values(sampled, "success_at_horizon") if sampled else "",
                states,
                each(seeds, lambda seed: _first_optimum(seed["metrics"])),
                each(seeds, last_step),
                each(seeds, lambda seed: f"{seed['minutes']:.1f}"),
                made_by(seeds),
            ]
        )
    name, seeds, success, _, _, states, *_, made_in = _warm_start_row(results["cloning_slippery"])
    return markdown(headers, [*rows, [name, seeds, "", success, "", states, "", "", "", made_in]])


def flaws_section(results: Mapping[str, list[dict]]) -> str:
    """Each flawed expert, and what each way of teaching makes of it: success of the greedy policy, each seed's."""
    headers = (
        "expert",
        *(f"{way}: success, no step limit" for way in TAUGHT),
        "optimal states",
        "steps",
        "date, commit",
    )
    rows = []
    for flaw, label in FLAWS.items():
        found = [results[name] for way in TAUGHT if (name := f"{way}_{flaw}") in results]
        if len(found) < len(TAUGHT):
            continue
        greedy = [[seed["policies"][TRAINED] for seed in seeds] for seeds in found]
        cells = [values(trained, "success_probability") for trained in greedy]
        states = listed([f"{row['optimal_states']:.0f}" for trained in greedy for row in trained])
        steps = listed(list(dict.fromkeys(str(last_step(seed)) for seeds in found for seed in seeds)))
        together = [seed for seeds in found for seed in seeds]
        of_all = f"{states} of {greedy[0][0]['acting_states']:.0f}"
        rows.append([link(label, SUPERVISION, f"{TAUGHT[0]}_{flaw}"), *cells, of_all, steps, made_by(together)])
    return markdown(headers, rows)


def ablations_section(results: Mapping[str, list[dict]]) -> str:
    """What one change does, from this repository's configuration and from the original's: one value per seed."""
    headers = [
        "change", "success, no step limit", "optimal states", "optimum first reached at step", "steps",
        "minutes", "worst seed", "date, commit",
    ]  # fmt: skip
    ablations = of_studies(results, ABLATIONS)
    configs = dict.fromkeys([*ABLATED.values(), *(_config(seeds) for seeds in ablations.values())])
    rows = []
    for config in configs:
        unchanged = [name for name, base in ABLATED.items() if base == config and name in results]
        labels = {f"*{name}, unchanged*": results[name] for name in unchanged}
        shared = _options(results[unchanged[0]][0]["command"]) if unchanged else {}
        for name, seeds in ablations.items():
            if _config(seeds) == config:
                labels[link(f"`{_change(seeds[0]['command'], shared)}`", ABLATIONS, name)] = seeds
        for label, seeds in labels.items():
            trained, states, worst = _greedy(seeds)
            rows.append(
                [
                    label,
                    values(trained, "success_probability"),
                    states,
                    each(seeds, lambda seed: _first_optimum(seed["metrics"])),
                    each(seeds, last_step),
                    each(seeds, lambda seed: f"{seed['minutes']:.0f}"),
                    worst,
                    made_by(seeds),
                ]
            )
    return markdown(headers, rows)


def _config(seeds: Sequence[dict]) -> str | None:
    command = seeds[0]["command"]
    config = command[command.index("--config") + 1] if "--config" in command else None
    return None if config == DEFAULT_CONFIG else config


def _change(command: list[str], shared: Mapping[str, list[str]]) -> str:
    """What the command changes: its --expert, and the options behind `--` but for those that all ablations share.

    Args:
        shared: the options of the unchanged command.
    """
    words = ["--expert", command[command.index("--expert") + 1]] if "--expert" in command else []
    for name, given in _options(command).items():
        if name not in SAME_IN_ABLATIONS and shared.get(name) != given:
            words += [name, *given]
    return shlex.join(words)


def _options(command: list[str]) -> dict[str, list[str]]:
    """The options behind `--`, each with its values."""
    options: dict[str, list[str]] = {}
    for word in command[command.index("--") + 1 :] if "--" in command else []:
        if word.startswith("--"):
            options[word] = []
        else:
            options[list(options)[-1]].append(word)
    return options


def _first_optimum(metrics: list[dict]) -> int | str:
    return next((m["step"] for m in metrics if m.get("policy/percent_of_optimal", 0) >= OPTIMAL_PERCENT), "never")


def maps_section(results: Mapping[str, list[dict]]) -> str:
    """One row per result: policies on maps never seen in training, in percent of the optimum of the same maps."""
    others = ("untrained", "warm start", "shortest path", "best constant action", "uniform random")
    headers = [
        "result", "observation", "trained, percent of the optimum", *others, "success of the optimum",
        "optimal states per map", f"right where only {', '.join(ACTIONS)} is optimal",
        "maps lost, by their first wrong step", "steps", "minutes", "date, commit",
    ]  # fmt: skip
    rows = []
    for name, seeds in results.items():
        trained = [seed["policies"][TRAINED] for seed in seeds]
        states = each(trained, lambda row: f"{row['optimal_states']:.1f}")
        rows.append(
            [
                link_to(name, seeds),
                seeds[0]["observation"],
                values(trained, "percent_of_optimal", 1),
                *(_percent_of_optimal(seeds, policy) for policy in others),
                f"{np.mean([row['optimal_success'] for row in trained]):.4f}",
                f"{states} of {trained[0]['acting_states']:.1f}",
                _right_by_action(seeds),
                _first_wrong_steps(seeds),
                each(seeds, last_step),
                each(seeds, lambda seed: f"{seed['minutes']:.0f}"),
                made_by(seeds),
            ]
        )
    return markdown(headers, rows)


def _percent_of_optimal(seeds: Sequence[dict], beginning: str) -> str:
    """The mean over those seeds that judged this policy, which need not be all."""
    rows = [row for seed in seeds for name, row in seed["policies"].items() if name.startswith(beginning)]
    return f"{np.mean([row['percent_of_optimal'] for row in rows]):.1f}" if rows else ""


def _judged_maps(seed: dict) -> list[tuple[Grid, str]] | None:
    """Each map and the trained greedy policy's action on it, one letter per state. None in older evaluations."""
    letters = seed["policies"][TRAINED].get("actions")
    if letters is None:
        return None
    return [(grid_of(rows), chosen) for rows, chosen in zip(seed["maps"], letters, strict=True)]


@cache
def _optimal_actions(grid: Grid, is_slippery: bool) -> np.ndarray:
    """Kept, because all results on maps never seen share their maps."""
    return optimal_actions(optimal_q(lake_mdp(grid, is_slippery), AGREEMENT_GAMMA))


def _right_by_action(seeds: Sequence[dict]) -> str:
    """Percent of the states with one optimal action, by that action, in which the trained policy takes it."""
    found, right = Counter(), Counter()
    for seed in seeds:
        judged = _judged_maps(seed)
        if judged is None:
            return ""
        for grid, chosen in judged:
            best_SA = _optimal_actions(grid, seed["is_slippery"])
            for state in acting_states(grid):
                if best_SA[state].sum() == 1:
                    best = ACTIONS[best_SA[state].argmax()]
                    found[best] += 1
                    right[best] += chosen[state] == best[0]
    return each(ACTIONS, lambda action: f"{100 * right[action] / found[action]:.0f} %" if found[action] else "none")


def _first_wrong_steps(seeds: Sequence[dict]) -> str:
    """How many maps are lost, by what the first step that is not optimal leads into. On ice that is not slippery."""
    lost = Counter()
    for seed in seeds:
        judged = _judged_maps(seed)
        if judged is None or seed["is_slippery"]:  # with slip a policy takes no single way
            return ""
        reasons = (_reason_of_loss(grid, chosen) for grid, chosen in judged)
        lost.update(reason for reason in reasons if reason)
    return ", ".join(f"{kind} {count}" for kind, count in lost.most_common())


def _reason_of_loss(grid: Grid, chosen: str) -> str | None:
    """What the first step that is not optimal leads into; None where the goal is reached."""
    lake, letters = lake_mdp(grid, is_slippery=False), "".join(grid)
    best_SA = _optimal_actions(grid, is_slippery=False)
    state, visited, reason = letters.index("S"), set(), None
    while letters[state] not in "HG" and state not in visited:
        visited.add(state)
        action = next((a for a, name in enumerate(ACTIONS) if name[0] == chosen[state]), None)
        if action is None:
            return reason or "no answer"
        reached = int(lake.next_states_SAK[state, action, 0])
        if reason is None and not best_SA[state, action]:
            reason = _leads_into(grid, state, reached)
        state = reached
    return None if letters[state] == "G" else reason


def _leads_into(grid: Grid, left: int, reached: int) -> str:
    """`edge`: the agent stays where it is; `dead end`: the goal is out of reach without a step back; `detour`: not."""
    row, column = divmod(reached, len(grid[0]))
    if reached == left:
        return "edge"
    if grid[row][column] == "H":
        return "hole"
    return "detour" if leads_to_goal(grid, (row, column), without=divmod(left, len(grid[0]))) else "dead end"


def probe_section(file: Path) -> str:
    """What a small network reaches that reads these parts of an observation."""
    found = read_json(file)["percent_of_optimal"]
    dynamics = list(next(iter(found.values())))
    headers = ["a small network reads", *(f"{name}, percent of the optimum" for name in dynamics), "date, commit"]
    rows = []
    for label, percents in found.items():
        scores = [values([{"percent": value} for value in percents[name]], "percent", 1) for name in dynamics]
        rows.append([label, *scores, date_and_commit(made(file))])
    return markdown(headers, rows)


def search_section(searches: Mapping[str, list[dict]], trained: Mapping[str, list[dict]]) -> str:
    """In-context policy search beside its baselines at equal episodes, and beside GRPO on the same lake."""
    headers = (
        "environment", "policy", "seeds", "return within the limit", "episodes", "minutes", "result or source",
        "date, commit",
    )  # fmt: skip
    rows = []
    for name, seeds in searches.items():
        env_id = seeds[0]["env_id"]
        for policy in (row["policy"] for row in seeds[0]["policies"]):
            found = [next(row for row in seed["policies"] if row["policy"] == policy) for seed in seeds]
            episodes = ", ".join(str(row["episodes"]) for row in found if row["episodes"] is not None)
            is_searched = policy == seeds[0]["searched"]
            minutes = each(seeds, lambda seed: f"{seed['minutes']:.1f}") if is_searched else ""
            source = link(name, SEARCH, name) if is_searched else ""
            score = values(found, "value")
            rows.append([env_id, policy, len(seeds), score, episodes, minutes, source, made_by(seeds)])
        if env_id == "FrozenLake-v1" and SUMMARY_LAKE in trained:
            runs = trained[SUMMARY_LAKE]
            score = values([run["policies"][TRAINED] for run in runs], "success_at_horizon")
            minutes = each(runs, lambda run: f"{run['minutes']:.1f}")
            source = link_to(SUMMARY_LAKE, runs)
            row = [env_id, "GRPO, this repository", len(runs), score, "none: the expert's Q", minutes, source]
            rows.append([*row, made_by(runs)])
        for policy, value in seeds[0]["published"].items():
            who = "GPT-4o, " if policy.startswith("ProPS") else ""
            source = f"{who}arXiv 2511.21928"
            rows.append([env_id, f"*{policy}, published*", 10, f"*{value}*", "8,000", "", source, ""])
    return markdown(headers, rows)


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
        for policy, row in first[0]["policies"].items():
            if policy.startswith((*REFERENCES, "no action")):
                rows.append([where, policy, "", f"{row[score]:.{decimals}f}", *[""] * 6, made_by(first[:1])])
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
            if seeds[0]["env_id"] == first[0]["env_id"]:
                own = [next(row for row in seed["policies"] if row["policy"] == seed["searched"]) for seed in seeds]
                minutes = each(seeds, lambda seed: f"{seed['minutes']:.1f}")
                played = listed([f"{row['episodes']:,}" for row in own])
                label, score_of_search = link(seeds[0]["searched"], SEARCH, name), values(own, "value", decimals)
                rows.append(
                    [where, label, len(seeds), score_of_search, "", "", "", played, minutes, "", made_by(seeds)]
                )
        if first[0]["env_id"] == "FrozenLake-v1" and SUMMARY_LAKE in trained:
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


def _where(seed: dict) -> str:
    options = f" {json.dumps(seed['options'])}" if seed["options"] else ""
    what = f"success in {seed['horizon_steps']} steps" if seed["score"] == "success_at_horizon" else "return"
    return f"{seed['env_id']}{options}: {what}"


def questions_section(runs: Mapping[str, list[dict]]) -> str:
    """Training on questions: held-out accuracy before and after, beside chance, and what is answered."""
    headers = (
        "result", "held-out questions", "chance", "untrained", "warm start (form alone)", "trained", "trained, sampled",
        "right only after, only before the steps of GRPO", "answers, trained", "minutes", "date, commit",
    )  # fmt: skip
    rows = []
    for name, seeds in runs.items():
        policies = [{row["policy"]: row for row in seed["policies"]} for seed in seeds]
        shares = [_percents([found.get(policy) for found in policies]) for policy in (UNTRAINED, WARM_START, SAMPLED)]
        chance = each(seeds, lambda seed: f"{100 * max(seed['baselines'].values()):.0f}")
        pairs = [(found.get(WARM_START, found[UNTRAINED])["right"], found[TRAINED]["right"]) for found in policies]
        changed = [
            (one > 0.5, other > 0.5) for before, after in pairs for one, other in zip(before, after, strict=True)
        ]
        before, after = changed.count((True, False)), changed.count((False, True))
        rows.append(
            [
                link(name, QUESTIONS, name),
                each(seeds, lambda seed: len(seed["questions"])),
                chance,
                *shares[:2],
                _percents([found[TRAINED] for found in policies], bold=True),
                shares[2],
                f"{after}, {before} (p {mcnemar_p(before, after):.2g})",
                _most_said([found[TRAINED]["said"] for found in policies]),
                each(seeds, lambda seed: f"{seed['minutes']:.0f}"),
                made_by(seeds),
            ]
        )
    return markdown(headers, rows)


def _percents(rows: Sequence[dict | None], bold: bool = False) -> str:
    """The accuracy of all seeds' questions together with its 95 % interval, and each seed's."""
    found = [row for row in rows if row]
    if not found:
        return ""
    right_P = [right for row in found for right in row["right"]]
    low, high = wilson_interval(sum(right_P), len(right_P))
    mean = f"{100 * np.mean(right_P):.1f}"
    seeds = listed([f"{100 * row['accuracy']:.1f}" for row in found])
    return f"{f'**{mean}**' if bold else mean} ({100 * low:.0f} to {100 * high:.0f}; {seeds})"


def _most_said(histograms: Sequence[Mapping[str, int]]) -> str:
    said = sum(map(Counter, histograms), Counter())
    return ", ".join(f"{answer} {count / said.total():.0%}" for answer, count in said.most_common(4))


def arc_section(folder: Path) -> str:
    """arc/evaluation.json: each regime, and in it each policy; the seeds of one task share a row."""
    headers = ("policy", "regime", "system prompt", "questions", "accuracy", "unreadable", "letters", "date, commit")
    with whole(folder / "evaluation.json"):
        content = read_json(folder / "evaluation.json")
        policies: dict[str, list[list[ArcRow]]] = {}
        for name, answers in content["policies"].items():
            label = re.sub("/seed-[0-9]+$", "", name.removesuffix(", greedy"))
            policies.setdefault(label, []).append([ArcRow(**row) for row in answers["results"]])
        asked = policies[next(iter(policies))][0]
        when = date_and_commit(made(folder / "evaluation.json"))
        rows: list[list[object]] = [
            [name, "", "", asked[0].questions, f"{share:.1%}", "", "", when]
            for name, share in content["baselines"].items()
        ]
        regimes = [row.regime for row in asked]
        for i in sorted(range(len(asked)), key=lambda i: regimes.index(regimes[i])):  # a regime's prompts side by side
            for label, seeds in policies.items():
                found = [seed[i] for seed in seeds]
                letters = sum((Counter(row.letters) for row in found), Counter())
                accuracy = f"{np.mean([row.accuracy for row in found]):.1%}"
                spread = listed([f"{row.accuracy:.1%}" for row in found])
                accuracy += f" ({spread})" if len(found) > 1 else f" ± {found[0].standard_error:.1%}"
                rows.append(
                    [
                        label, asked[i].regime, asked[i].system_prompt, asked[i].questions, accuracy,
                        f"{np.mean([row.unreadable for row in found]):.0%}",
                        " ".join(f"{letter} {letters[letter]}" for letter in sorted(letters)), when,
                    ]
                )  # fmt: skip
    return markdown(headers, rows)


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


def speed_section() -> str:
    """speed/step_time/*.json: a step on TRL's path and on this one, with its parts, and the ratio."""
    headers = (
        "benchmark", "TRL / here", "seconds per step", "sampling", "training pass", "tokens computed",
        "peak memory, GB", "sampling, times its floor", "processor", "date, commit",
    )  # fmt: skip
    rows = []
    for file in sorted((RESULTS / SPEED / "step_time").glob("*.json")):
        with whole(file):
            content = read_json(file)
            stock, packed = (content["medians"][path] for path in ("stock TRL", "packed"))
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(*content["rounds"].values(), strict=True)]
            parts = [f"{stock[part]:.1f}, {packed[part]:.1f}" for part in ("seconds", "sampling", "training_pass")]
            rows.append(
                [
                    link(file.stem, SPEED, "step_time", file.name),
                    f"**{np.median(ratios):.1f}** ({min(ratios):.1f} to {max(ratios):.1f})",
                    *parts,
                    f"{stock['tokens']:.0f}, {packed['tokens']:.0f}",
                    ", ".join(f"{content['peak_memory_gb'][path]:.1f}" for path in ("stock TRL", "packed")),
                    f"{packed['sampling'] / content['floor_of_sampling']:.1f}",
                    ", ".join(content[key] for key in ("device", "processor") if key in content),
                    date_and_commit(made(file)),
                ]
            )
    return markdown(headers, rows)


def policy_gradients() -> dict[str, list[dict]]:
    """Name -> finished seeds of train_policy_gradient.py."""
    folders = sorted(folder for folder in (RESULTS / POLICY_GRADIENT).glob("*") if folder.is_dir())
    return {folder.name: seeds for folder in folders if (seeds := played_by(folder))}


def drawings() -> dict[str, list[dict]]:
    """Name -> finished seeds of the drawing task, of either learner."""
    folders = sorted(folder for folder in (RESULTS / DRAWING).glob("*") if folder.is_dir())
    return {folder.name: seeds for folder in folders if (seeds := drawn_by(folder))}


def all_sections(results: Mapping[str, list[dict]]) -> dict[str, str]:
    """Section -> its table. Sections without results are left out."""
    folders = sorted(folder for folder in (RESULTS / SEARCH).glob("*") if folder.is_dir())
    searches = {folder.name: seeds for folder in folders if (seeds := searches_of(folder))}
    on_maps = of_studies(results, MAPS)
    observations = {name: seeds for name, seeds in on_maps.items() if name.startswith(OBSERVATION)}
    maps = {name: seeds for name, seeds in on_maps.items() if name not in observations}
    unchanged = {name: seeds for name, seeds in maps.items() if name == OBSERVED}
    taught = {name: seeds for name, seeds in of_studies(results, SUPERVISION).items() if "_maps_" in name}
    on_one_lake = of_studies(results, CANONICAL, ORIGINAL)
    played = policy_gradients()
    sections = {
        "summary": summary_section(results, searches, played) if on_one_lake else None,
        "results": results_section(on_one_lake) if on_one_lake else None,
        "ablations": ablations_section(results) if of_studies(results, ABLATIONS) else None,
        "supervision": supervision_section(results) if "cloning_slippery" in results else None,
        "supervision_flaws": flaws_section(results) if "natural_wrong_tenth" in results else None,
        "supervision_maps": maps_section(taught) if taught else None,
        "maps": maps_section(maps) if maps else None,
        "observations": maps_section(unchanged | observations) if observations else None,
        "search": search_section(searches, results) if searches else None,
    }
    if played:
        sections["policy_gradient"] = policy_gradient_section(played, results, searches)
    folders = [folder for folder in sorted((RESULTS / QUESTIONS).glob("*")) if folder.is_dir()]
    if questions := {folder.name: seeds for folder in folders if (seeds := asked_of(folder))}:
        sections["questions"] = questions_section(questions)
    if (RESULTS / ARC / "evaluation.json").exists():
        sections["arc"] = arc_section(RESULTS / ARC)
    if drawn := drawings():
        sections["drawing"] = drawing_section(drawn)
    probe = RESULTS / MAPS / "observation_probe" / "observation_probe.json"
    if probe.exists():
        sections["probe"] = probe_section(probe)
    if (RESULTS / SPEED / "step_time").exists():
        sections["speed"] = speed_section()
    return {name: section for name, section in sections.items() if section is not None}


# Writing ----------------------------------------------------------------------------------------------------------


def documents() -> dict[Path, str]:
    """README.md and docs/*.md, with their texts."""
    files = [file for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if file.exists()]
    texts = {}
    for file in files:
        try:
            texts[file] = read_text(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{shown(file)}: cannot be read as UTF-8 text ({error})") from error
    return texts


def marked(text: str) -> list[str]:
    """The sections that have a place in a text."""
    return re.findall("^" + BEGIN.format(name=r"(\w+)") + "$", text, re.MULTILINE)


def with_section(text: str, name: str, section: str, file: Path) -> str:
    """`text` with `section` between the markers of `name`, and its links as they go from the folder of `file`."""
    begin, end = (marker.format(name=name) for marker in (BEGIN, END))
    if not re.search(f"(?s){re.escape(begin)}.*?{re.escape(end)}", text):
        raise InputError(f"{shown(file)}: no line {end!r} behind {begin!r}; put it where the section ends")
    to_root = os.path.relpath(ROOT, file.parent)
    linked = section if to_root == "." else section.replace("](results/", f"]({to_root}/results/")
    return re.sub(f"(?s){re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{linked}\n{end}", text)


def with_sections(texts: Mapping[Path, str], sections: Mapping[str, str]) -> dict[Path, str]:
    """The texts with every section written wherever it has a place.

    `InputError` for a section without a place, and for a place whose section is unknown.
    """
    written = dict(texts)
    for file, text in texts.items():
        for name in marked(text):
            if name not in SECTIONS:
                raise InputError(f"{shown(file)}: section {name!r}: expected one of {', '.join(SECTIONS)}")
            if name in sections:
                written[file] = with_section(written[file], name, sections[name], file)
    homeless = [name for name in sections if not any(name in marked(text) for text in texts.values())]
    if homeless:
        begin, end = (marker.format(name=homeless[0]) for marker in (BEGIN, END))
        raise InputError(
            f"section {homeless[0]!r}: has no place; put the lines {begin!r} and {end!r} into README.md or docs/*.md"
        )
    return written


def write_curves(
    results: Mapping[str, list[dict]], file: Path, title: str, quantity: str = "success_probability",
    y_label: str = "exact success probability, no step limit", by_steps: bool = False,
) -> None:  # fmt: skip
    """The greedy policy against minutes of GRPO or steps, a line per seed; no picture where there are no results.

    `results` by their label in the picture. Horizontal lines are those references that are the same for all of them,
    within 1 % of the highest.
    """
    curves, lines = {}, {}
    for label, seeds in results.items():
        curves[f"{label} ({len(seeds)} seed{'s' * (len(seeds) > 1)})"] = found = []
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
        figure = curves_figure(curves, same, x_label, y_label, title)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)


def write_pictures(results: Mapping[str, list[dict]]) -> None:
    pictures = ROOT / "docs" / "pictures"
    on_one_lake = {label: results[name] for name, label in CURVES.items() if name in results}
    write_curves(on_one_lake, pictures / "learning_curves.png", "Success on the canonical slippery lake while training")
    ways = {label: results[name] for name, label in WAYS_OF_TEACHING.items() if name in results}
    title = "Ways of teaching the canonical slippery lake"
    write_curves(ways, pictures / "supervision.png", title, "optimal_states", "optimal states, of 11", by_steps=True)
    for is_slippery, name in ((False, "random_maps_dry"), (True, "random_maps_slippery")):
        on_maps = {
            name: seeds
            for name, seeds in of_studies(results, MAPS).items()
            if not name.startswith(OBSERVATION) and seeds[0]["is_slippery"] == is_slippery
        }
        title = f"Maps never seen in training, {'slippery' if is_slippery else 'not slippery'}"
        write_curves(on_maps, pictures / f"{name}.png", title, "percent_of_optimal", "percent of the optimum")


def write_episode_curves() -> None:
    """A policy gradient's return while it learns, against episodes, steps and minutes: a picture per environment."""
    by_environment: dict[str, dict[str, list[dict]]] = {}
    for seeds in policy_gradients().values():
        if not seeds[0]["max_episodes"]:  # those are beginnings of the others
            by_environment.setdefault(seeds[0]["env_id"], {})[_actor(seeds[0])] = seeds
    axes = {
        "episodes": ("episodes", lambda line: line["episodes"]),
        "steps": ("steps in the environment", lambda line: line["step"]),
        "minutes": ("minutes, CPU", lambda line: line["seconds"] / 60),
    }
    for env_id, results in by_environment.items():
        for name, (x_label, x_of) in axes.items():
            curves = {
                f"{label} ({len(seeds)} seed{'s' * (len(seeds) > 1)})": [_episode_curve(seed, x_of) for seed in seeds]
                for label, seeds in results.items()
            }
            figure = curves_figure(curves, {}, x_label, "mean return of 25 episodes, smoothed", env_id)
            file = ROOT / "docs" / "pictures" / f"policy_gradient_{env_id.partition('-')[0]}_{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=130)


def _episode_curve(seed: dict, x_of: Callable[[dict], float]) -> tuple[list[float], list[float]]:
    """Means of `LINES_PER_POINT` neighbouring lines: 25 episodes of 0 or 1 alone are mostly chance."""
    lines = [line for line in seed["metrics"] if "mean_return_of_25_episodes" in line]
    groups = [lines[i : i + LINES_PER_POINT] for i in range(0, len(lines), LINES_PER_POINT)]
    means = [float(np.mean([line["mean_return_of_25_episodes"] for line in group])) for group in groups]
    return [x_of(group[-1]) for group in groups], means


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
            file = ROOT / "docs" / "pictures" / f"drawing_{target.replace('-', '_')}_{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=130)


@dataclass
class ReportArguments:
    """What to do with the documents."""

    check: bool = field(default=False, metadata={"help": "Change nothing; exit code 1 where a section is out of date."})


def main(argv: Sequence[str] | None = None) -> int:
    (arguments,), _ = parse_arguments(
        argv,
        (ReportArguments,),
        description=__doc__,
        exit_codes={0: "done", 1: "out of date (--check)", 2: EXIT_CODES[2]},
    )
    results = training_results()
    if not results:
        raise InputError("results/: holds no finished seeds yet; results/run.py makes them")
    for study in sorted(folder.name for folder in RESULTS.iterdir() if folder.is_dir() and folder.name[0] != "_"):
        if study not in (*TRAINING, SEARCH, POLICY_GRADIENT, QUESTIONS, ARC, DRAWING, SPEED):
            print(f"results/{study}: no section shows this study", file=sys.stderr)
    texts = documents()
    written = with_sections(texts, all_sections(results))
    changed = [shown(file) for file in texts if written[file] != texts[file]]
    if arguments.check:
        print(f"out of date: {', '.join(changed)}; run python report.py" if changed else "up to date with results/")
        return int(bool(changed))
    for file, text in written.items():
        file.write_text(text, encoding="utf-8")
    print(f"written from {len(results)} results: {', '.join(changed) or 'no change'}; now the pictures", flush=True)
    write_pictures(results)
    write_episode_curves()
    write_drawing_curves()
    return 0


if __name__ == "__main__":
    run_script(main)
