"""Games without maps: CliffWalking and Taxi, taught by their exact Q-values."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, FiniteFloat

from llm_policy.report.cells import each, link, markdown, values
from llm_policy.report.dates import made_by
from llm_policy.report.studies import (
    OTHER_GAMES,
    REFERENCES,
    SAMPLED,
    TRAINED,
    UNTRAINED,
    WARM_START,
    evaluations,
    results_of,
    rows_by_name,
)


class GameEvaluation(BaseModel, strict=True):
    """What the tables take from evaluation.json beside its rows."""

    env_id: str


class GameRow(BaseModel, strict=True):
    """What the tables take from a row of evaluation.json."""

    policy: str
    return_at_horizon: FiniteFloat
    optimal_return: FiniteFloat
    optimal_states: FiniteFloat
    acting_states: FiniteFloat
    horizon_steps: FiniteFloat


def other_games() -> dict[str, list[dict]]:
    """Name -> finished seeds."""
    return results_of(OTHER_GAMES, games_of)


def games_of(folder: Path) -> list[dict]:
    """The evaluations of one result, their rows by name."""
    return evaluations(folder, GameEvaluation, lambda evaluation: rows_by_name(evaluation, GameRow, TRAINED))


def where(seed: dict) -> str:
    return f"{seed['env_id']}: return in {seed['policies'][TRAINED]['horizon_steps']:.0f} steps"


def other_games_section(games: Mapping[str, list[dict]]) -> str:
    """Each game: what looks at nothing, then the model before and after."""
    headers = ("game", "policy", "seeds", "return", "optimal states", "minutes", "date, commit")
    rows: list[list[object]] = []
    for name, seeds in games.items():
        game = where(seeds[0])
        for policy, row in seeds[0]["policies"].items():
            if policy.startswith(REFERENCES):
                states = f"{row['optimal_states']:.0f} of {row['acting_states']:.0f}"
                rows.append([game, policy, "", f"{row['return_at_horizon']:.1f}", states, "", made_by(seeds[:1])])
        for policy in (UNTRAINED, WARM_START, TRAINED, SAMPLED):
            found = [seed["policies"][policy] for seed in seeds if policy in seed["policies"]]
            if not found:
                continue
            is_result = policy == TRAINED
            rows.append(
                [
                    game,
                    link(policy, OTHER_GAMES, name) if is_result else policy,
                    len(found),
                    values(found, "return_at_horizon", 1),
                    each(found, lambda row: f"{row['optimal_states']:.0f}", f" of {found[0]['acting_states']:.0f}"),
                    each(seeds, lambda seed: f"{seed['minutes']:.0f}") if is_result else "",
                    made_by(seeds),
                ]
            )
    return markdown(headers, rows)


def summary_row(name: str, seeds: Sequence[dict]) -> list[object]:
    """The row of the summary in README.md."""
    trained = [seed["policies"][TRAINED] for seed in seeds]
    label, minutes = link("GRPO, this repository", OTHER_GAMES, name), np.mean([seed["minutes"] for seed in seeds])
    scores, optimum = values(trained, "return_at_horizon", 1), f"{trained[0]['optimal_return']:.1f}"
    return [label, where(seeds[0]), scores, optimum, len(seeds), f"{minutes:.0f}", made_by(seeds)]
