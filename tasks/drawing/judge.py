"""How close a model's programs come to the picture, beside what draws nothing of it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from llm_policy.chat import Reader
from llm_policy.errors import InputError
from llm_policy.grpo.diagnostics import Judgement
from llm_policy.plots import grids_figure
from llm_policy.reading import first_of, read_text
from llm_policy.run_files import save_judgement
from llm_policy.statistics import wilson_interval
from llm_policy.tables import new_table, show
from tasks import Comparison
from tasks.drawing.programs import share_of_equal_pixels
from tasks.drawing.sandbox import Grid, Outcome, Sandbox, code_of
from tasks.drawing.targets import Target
from tasks.drawing.words import messages, reply

PERFECT = 1.0


class Found(TypedDict):
    """A program that was the best of a training so far."""

    share: Annotated[float, Field(ge=0, le=PERFECT)]
    generation: Annotated[int, Field(ge=1)]
    code: str


FOUND, FOUND_LIST = TypeAdapter(Found), TypeAdapter(list[Found])


@dataclass(frozen=True)
class Score:
    """What came of one model's programs.

    Attributes:
        shares: of equal pixels, per program; 0 for one that failed.
        best_code, best_grid: the first of the programs that come closest, and what it drew.
        errors: kind of failure -> how many.
    """

    shares: Sequence[float]
    best_code: str
    best_grid: Grid | None
    errors: Counter

    @property
    def best(self) -> float:
        return max(self.shares)

    @property
    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)

    @property
    def perfect(self) -> int:
        return sum(share == PERFECT for share in self.shares)


def percent(share: float) -> str:
    """In whole percent; 100 for all pixels alone.

    >>> percent(1.0), percent(0.999)
    ('100%', '99%')
    """
    return f"{share if share == PERFECT else min(share, 0.99):.0%}"


def read_found(file: Path) -> list[Found]:
    """The programs of a training that were better than all before, the best one last; none where there is no file."""
    older = file.with_suffix(".json")  # a list, in runs from before 2026-11-29
    try:
        if not file.exists():
            return FOUND_LIST.validate_json(read_text(older), strict=True) if older.exists() else []
        return [FOUND.validate_json(line, strict=True) for line in read_text(file).splitlines()]
    except (OSError, ValueError) as error:
        reason = first_of(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
        raise InputError(f"{file}: is no record of programs ({reason}); delete it") from error


def scored(codes: Sequence[str], outcomes: Sequence[Outcome], wanted: Grid) -> Score:
    shares = [share_of_equal_pixels(outcome.grid, wanted) for outcome in outcomes]
    best = shares.index(max(shares))
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    return Score(shares, codes[best], outcomes[best].grid, errors)


def together(scores: Sequence[Score]) -> Score:
    """One score of the programs of all."""
    best = max(scores, key=lambda score: score.best)
    shares = [share for score in scores for share in score.shares]
    return Score(shares, best.best_code, best.best_grid, sum((score.errors for score in scores), Counter()))


@dataclass(frozen=True)
class DrawingJudge:
    """Asks a model for programs that draw the target (`tasks.Judge`).

    Attributes:
        show_functions: list the drawing functions in the prompt.
        found_file: what the training found, if there was one (`read_found`).
        settings: what run.json says of it.
    """

    target: Target
    reader: Reader
    sandbox: Sandbox
    show_functions: bool
    settings: dict
    found_file: Path | None = None

    @cached_property
    def prompt(self) -> list[dict[str, str]]:
        return messages(self.target.given, self.target.wanted, self.show_functions)

    def answers(self, model: PreTrainedModel, samples: int = 0) -> dict:
        """`texts`: the completions."""
        return {"texts": self.reader.completions(model, [self.prompt], samples)}

    def first_prompt(self) -> list[int]:
        return self.reader.prompt(self.prompt)

    def baseline_answers(self, name: str) -> dict:
        """`constant:COLOR`, the whole picture in one color; `InputError` for another name."""
        kind, _, color = name.partition(":")
        if kind != "constant" or not (len(color) == 1 and color.isascii() and color.isdigit()):
            raise InputError(f"--policies {name!r}: expected a run folder, a model or constant:COLOR (0 to 9)")
        return {"texts": [reply(f"def task(img):\n    return create_img(img.shape, {color})\n")]}

    def score(self, answers: Mapping) -> Score:
        codes = [code_of(text) for text in answers["texts"]]
        return scored(codes, self.sandbox.run_all(codes, self.target.given), self.target.wanted)

    def judgement(self, answers: Mapping) -> Judgement:
        score = self.score(answers)
        count = len(score.shares)
        now = f"{score.perfect} of {count} programs draw it, the best has {percent(score.best)} of the pixels"
        found = self.found()
        if found and found["share"] == PERFECT:
            verdict = f"{self.target.name} solved by program {found['generation']:,} of the training; now {now}"
        else:
            verdict = f"{self.target.name} {'' if score.perfect else 'not '}solved: {now}"
        metrics = {
            "best": score.best,
            "mean": score.mean,
            "solved": score.perfect / count,
            "failed": sum(score.errors.values()) / count,
        }
        pictures = {"target": self.target.wanted, f"best of {count}": score.best_grid}
        return Judgement(metrics, verdict, score.perfect == count, lambda title: grids_figure(pictures, title))

    def baselines(self) -> dict[str, float]:
        """Share of equal pixels of what draws nothing, and of the best single color."""
        wanted = self.target.wanted
        pixels = Counter(color for row in wanted for color in row)
        color, count = pixels.most_common(1)[0]
        return {
            "nothing drawn": share_of_equal_pixels(self.target.given, wanted),
            f"one color ({color})": count / sum(pixels.values()),
        }

    def found(self) -> Found | None:
        """The best program of the training, if there was any."""
        found = read_found(self.found_file) if self.found_file else []
        return found[-1] if found else None

    def compare(self, answers_of: Mapping[str, Mapping]) -> Comparison:
        scores = {name: self.score(answers) for name, answers in answers_of.items()}
        height, width = len(self.target.wanted), len(self.target.wanted[0])
        title = f"{self.target.name}, {height} x {width}: share of equal pixels"
        columns = ("best", "mean", "programs", "solve it", "95 % interval", "fail", "most often")
        table = new_table(title, "policy", columns)
        baselines = self.baselines()
        for name, share in baselines.items():
            table.add_row(name, f"{share:.0%}", "", "", "", "", "", "")
        for name, score in scores.items():
            count = len(score.shares)
            low, high = wilson_interval(score.perfect, count)
            failed = sum(score.errors.values()) / count
            table.add_row(
                name, percent(score.best), f"{score.mean:.0%}", str(count), f"{score.perfect / count:.0%}",
                f"{low:.0%} to {high:.0%}", f"{failed:.0%}", ", ".join(kind for kind, _ in score.errors.most_common(1)),
            )  # fmt: skip
        lines = []
        if found := self.found():
            solved = (
                "the first perfect program" if found["share"] == PERFECT else f"the best, {percent(found['share'])},"
            )
            lines.append(f"While training {solved} was number {found['generation']:,}.")
        return Comparison(show(table, *lines), partial(self._save, scores, baselines, found))

    def _save(self, scores: Mapping[str, Score], baselines: Mapping, found: Found | None, folder: Path) -> None:
        rows = [
            {
                "policy": name,
                "best": score.best,
                "mean": score.mean,
                "programs": len(score.shares),
                "perfect": score.perfect,
                "errors": dict(score.errors),
                "best_program": score.best_code,
            }
            for name, score in scores.items()
        ]
        content = {"settings": self.settings, "baselines": baselines, "found": found, "policies": rows}
        pictures: dict[str, Grid | None] = {"target": self.target.wanted}
        if found:
            outcome = self.sandbox.run_all([found["code"]], self.target.given)[0]
            pictures[f"found, {percent(found['share'])}"] = outcome.grid
        pictures |= {f"{name}, {percent(score.best)}": score.best_grid for name, score in scores.items()}
        figure = grids_figure(pictures, self.target.name)
        save_judgement(folder, json.dumps(content, indent=1) + "\n", figure)
