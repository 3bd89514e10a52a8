"""The studies: their folders in results/, their finished seeds, and the policies that their evaluations name."""

from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, FiniteFloat, TypeAdapter

from llm_policy.errors import InputError
from llm_policy.reading import read_text
from llm_policy.report import files
from llm_policy.report.dates import made

# Folders of results/. Those of training hold seeds that were trained on lakes
(
    CANONICAL, ORIGINAL, ABLATIONS, SUPERVISION, MAPS, OTHER_GAMES, SEARCH, POLICY_GRADIENT, QUESTIONS, ARC, DRAWING,
    SPEED,
) = (
    "canonical", "original", "ablations", "supervision", "maps_never_seen", "other_games", "policy_search",
    "policy_gradient", "questions", "arc", "drawing", "speed",
)  # fmt: skip
TRAINING = (CANONICAL, ORIGINAL, ABLATIONS, SUPERVISION, MAPS)
STUDIES = (*TRAINING, OTHER_GAMES, SEARCH, POLICY_GRADIENT, QUESTIONS, ARC, DRAWING, SPEED)

# Rows of every evaluation.json, by the beginning of their names: which constant action is best stands behind it
OPTIMAL = "optimal"
REFERENCES = (OPTIMAL, "uniform random", "best constant action")
UNTRAINED, WARM_START, TRAINED, SAMPLED = (
    "untrained, greedy", "warm start, greedy", "trained, greedy", "trained, sampled",
)  # fmt: skip


def results_of(study: str, seeds_of: Callable[[Path], list[dict]]) -> dict[str, list[dict]]:
    """Name -> finished seeds, of one study."""
    folders = sorted(folder for folder in (files.RESULTS / study).glob("*") if folder.is_dir())
    return {folder.name: seeds for folder in folders if (seeds := seeds_of(folder))}


def finished_seeds(folder: Path, names: Iterable[str]) -> list[Path]:
    """The folders `seed-N` of one result that hold files, by number.

    `InputError` where one of them lacks one of `names`: its seed would be gone from the tables without a word.
    """
    seeds = [seed for seed in folder.glob("seed-*") if seed.name.removeprefix("seed-").isdecimal()]
    finished = [seed for seed in seeds if seed.is_dir() and any(seed.iterdir())]
    for seed in finished:
        for name in names:
            if not (seed / name).exists():
                raise InputError(f"{files.shown(seed / name)}: is gone; put it back, or delete the seed's folder")
    return sorted(finished, key=lambda seed: int(seed.name.removeprefix("seed-")))


def evaluations(folder: Path, kind: type[BaseModel], rows_of: Callable[[dict], dict[str, dict]]) -> list[dict]:
    """`evaluation.json` of the finished seeds of one result, of that kind, its `policies` by name, and its minutes."""
    found = []
    for seed in finished_seeds(folder, ("evaluation.json", "run.json", "minutes.txt")):
        with files.whole(seed):
            evaluation, minutes = files.read_json(seed / "evaluation.json"), read_minutes(seed)
            kind.model_validate(evaluation)
            own = {"policies": rows_of(evaluation), "minutes": minutes, "made": made(seed / "run.json")}
            found.append(evaluation | own)
    return found


def rows_by_name(evaluation: dict, kind: type[BaseModel], *needed: str) -> dict[str, dict]:
    """The rows of an evaluation; `ValueError` where one is of another kind, stands there twice, or is missing."""
    rows = TypeAdapter(list[dict]).validate_python(evaluation["policies"])
    for row in rows:
        kind.model_validate(row)
    found = {row["policy"]: row for row in rows}
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"no row {missing[0]!r}")
    if len(found) != len(rows):
        raise ValueError("two rows of one name")
    return found


def read_minutes(seed: Path) -> float:
    return TypeAdapter(FiniteFloat).validate_python(read_text(seed / "minutes.txt").strip())
