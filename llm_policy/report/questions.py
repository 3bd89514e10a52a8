"""Questions: held-out accuracy before and after training on them, and answers to ARC.

Axes: P questions.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat

from llm_policy.report import files
from llm_policy.report.cells import each, link, listed, markdown
from llm_policy.report.dates import date_and_commit, made, made_by
from llm_policy.report.studies import (
    QUESTIONS,
    SAMPLED,
    TRAINED,
    UNTRAINED,
    WARM_START,
    evaluations,
    results_of,
    rows_by_name,
)
from llm_policy.statistics import mcnemar_p, wilson_interval


class QuestionEvaluation(BaseModel, strict=True):
    """What the table takes from evaluation.json beside its rows."""

    baselines: dict[str, FiniteFloat] = Field(min_length=1)
    questions: list[object]


class QuestionRow(BaseModel, strict=True):
    """What the table takes from a row of evaluation.json."""

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


def question_results() -> dict[str, list[dict]]:
    """Name -> finished seeds of training on questions."""
    return results_of(QUESTIONS, asked_of)


def asked_of(folder: Path) -> list[dict]:
    """`evaluation.json` of the finished seeds of one training on questions, and its minutes."""
    return evaluations(folder, QuestionEvaluation, _rows_of)


def _rows_of(evaluation: dict) -> dict[str, dict]:
    rows = rows_by_name(evaluation, QuestionRow, TRAINED)
    if any(len(row["right"]) != len(evaluation["questions"]) for row in rows.values()):
        raise ValueError("a row says of other questions than there are which are right")
    return rows


def questions_section(runs: Mapping[str, list[dict]]) -> str:
    """Training on questions: held-out accuracy before and after, beside chance, and what is answered."""
    headers = (
        "result", "held-out questions", "chance", "untrained", "warm start (form alone)", "trained", "trained, sampled",
        "right only after, only before the steps of GRPO", "answers, trained", "minutes", "date, commit",
    )  # fmt: skip
    rows = []
    for name, seeds in runs.items():
        policies = [seed["policies"] for seed in seeds]
        shares = [_percents([found.get(policy) for found in policies]) for policy in (UNTRAINED, WARM_START, SAMPLED)]
        chance = each(seeds, lambda seed: f"{100 * max(seed['baselines'].values()):.0f}")
        judged_before = [found for found in policies if WARM_START in found]
        changed = [_changed(found[WARM_START]["right"], found[TRAINED]["right"]) for found in judged_before]
        rows.append(
            [
                link(name, QUESTIONS, name),
                each(seeds, lambda seed: len(seed["questions"])),
                chance,
                *shares[:2],
                _percents([found[TRAINED] for found in policies], bold=True),
                shares[2],
                "; ".join(f"{after}, {before} (p {mcnemar_p(before, after):.2g})" for before, after in changed),
                _most_said([found[TRAINED]["said"] for found in policies]),
                each(seeds, lambda seed: f"{seed['minutes']:.0f}"),
                made_by(seeds),
            ]
        )
    return markdown(headers, rows)


def _percents(rows: Sequence[dict | None], bold: bool = False) -> str:
    """The mean over the seeds, and of each its accuracy with its 95 % interval.

    Answers of one model to questions that seeds share are no independent trials: they are not pooled.
    """
    found = [row for row in rows if row]
    if not found:
        return ""
    mean = f"{np.mean([100 * row['accuracy'] for row in found]):.1f}"
    seeds = []
    for row in found:
        low, high = wilson_interval(sum(row["right"]), len(row["right"]))
        seeds.append(f"{100 * row['accuracy']:.1f} [{100 * low:.0f} to {100 * high:.0f}]")
    return f"{f'**{mean}**' if bold else mean} ({listed(seeds)})"


def _changed(before: Sequence[float], after: Sequence[float]) -> tuple[int, int]:
    """How many questions are right only before, and only after."""
    pairs = [(one > 0.5, other > 0.5) for one, other in zip(before, after, strict=True)]
    return pairs.count((True, False)), pairs.count((False, True))


def _most_said(histograms: Sequence[Mapping[str, int]]) -> str:
    said = sum(map(Counter, histograms), Counter())
    return ", ".join(f"{answer} {count / said.total():.0%}" for answer, count in said.most_common(4))


def arc_section(folder: Path) -> str:
    """arc/evaluation.json: each regime, and in it each policy; the seeds of one task share a row."""
    headers = ("policy", "regime", "system prompt", "questions", "accuracy", "unreadable", "letters", "date, commit")
    with files.whole(folder / "evaluation.json"):
        content = files.read_json(folder / "evaluation.json")
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
