"""In-context policy search beside its baselines at equal episodes."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, FiniteFloat

from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, default_horizon
from llm_policy.report.cells import each, game, link, link_to, markdown, values
from llm_policy.report.dates import made_by
from llm_policy.report.lakes import SUMMARY_LAKE
from llm_policy.report.studies import SEARCH, TRAINED, evaluations, results_of, rows_by_name


class SearchEvaluation(BaseModel, strict=True):
    """What the table takes from evaluation.json beside its rows."""

    env_id: str
    env_options: dict[str, object] = {}
    horizon_steps: int
    searched: str
    published: dict[str, str]


class SearchRow(BaseModel, strict=True):
    """What the table takes from a row of evaluation.json."""

    policy: str
    value: FiniteFloat | None  # None: no policy was found
    episodes: int | None


def policy_searches() -> dict[str, list[dict]]:
    """Name -> finished seeds of search_policy.py."""
    return results_of(SEARCH, searches_of)


def searches_of(folder: Path) -> list[dict]:
    """`evaluation.json` of the finished seeds of one policy search, and its minutes."""
    return evaluations(
        folder, SearchEvaluation, lambda evaluation: rows_by_name(evaluation, SearchRow, evaluation["searched"])
    )


def is_slippery_lake(seed: Mapping) -> bool:
    """Whether a run played on the canonical slippery lake, as Gymnasium makes it."""
    usual_steps = default_horizon(CANONICAL_GRIDS["4x4"])
    return seed["env_id"] == "FrozenLake-v1" and not seed.get("env_options") and seed["horizon_steps"] == usual_steps


def search_section(searches: Mapping[str, list[dict]], trained: Mapping[str, list[dict]]) -> str:
    """In-context policy search beside its baselines at equal episodes, and beside GRPO on the same lake."""
    headers = (
        "environment", "policy", "seeds", "return within the limit", "episodes", "minutes", "result or source",
        "date, commit",
    )  # fmt: skip
    rows = []
    last_of = {game(seeds[0]): name for name, seeds in searches.items()}  # others' results stand once, below it
    for name, seeds in sorted(searches.items(), key=lambda entry: list(last_of).index(game(entry[1][0]))):
        where, is_usual_lake = f"{game(seeds[0])}, {seeds[0]['horizon_steps']} steps", is_slippery_lake(seeds[0])
        for policy in dict.fromkeys(policy for seed in seeds for policy in seed["policies"]):
            found = [seed["policies"][policy] for seed in seeds if policy in seed["policies"]]
            episodes = ", ".join(str(row["episodes"]) for row in found if row["episodes"] is not None)
            is_searched = policy == seeds[0]["searched"]
            minutes = each(seeds, lambda seed: f"{seed['minutes']:.1f}") if is_searched else ""
            source = link(name, SEARCH, name) if is_searched else ""
            score = values(found, "value")
            rows.append([where, policy, len(found), score, episodes, minutes, source, made_by(seeds)])
        if last_of[game(seeds[0])] != name:
            continue
        if is_usual_lake and SUMMARY_LAKE in trained:
            runs = trained[SUMMARY_LAKE]
            score = values([run["policies"][TRAINED] for run in runs], "success_at_horizon")
            minutes = each(runs, lambda run: f"{run['minutes']:.1f}")
            source = link_to(SUMMARY_LAKE, runs)
            row = [where, "GRPO, this repository", len(runs), score, "none: the expert's Q", minutes, source]
            rows.append([*row, made_by(runs)])
        for policy, value in seeds[0]["published"].items():
            who = "GPT-4o, " if policy.startswith("ProPS") else ""
            source = f"{who}arXiv 2511.21928"
            rows.append([where, f"*{policy}, published*", 10, f"*{value}*", "8,000", "", source, ""])
    return markdown(headers, rows)
