"""Cells of the tables, and labels of the curves."""

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from llm_policy.tables import counted

FEW = 5  # so many seeds are listed one by one


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [list(headers), ["---"] * len(headers), *map(list, rows)]
    assert all(len(line) == len(headers) for line in lines), "a row has as many cells as the header"
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def link(label: str, *parts: str) -> str:
    """A link into results/, as it is written in the root; `with_section` of report.py fits it to the file."""
    return f"[{label}]({'/'.join(('results', *parts))})"


def link_to(name: str, seeds: Sequence[dict]) -> str:
    return link(name, seeds[0]["study"], name)


def game(seed: Mapping) -> str:
    """The environment that a run or a search played, with its options."""
    options = f" {json.dumps(seed['env_options'])}" if seed.get("env_options") else ""
    return f"{seed['env_id']}{options}"


def with_seeds(label: str, seeds: Sequence[dict]) -> str:
    """A curve's label."""
    return f"{label} ({counted(len(seeds), 'seed')})"


def values(rows: Sequence[dict], key: str, decimals: int | None = None) -> str:
    """The mean in bold, and what the seeds gave behind it."""
    found = [row[key] for row in rows]
    if None in found:  # a search that found no policy has no value
        return listed(
            ["none" if value is None else f"{value:.{4 if decimals is None else decimals}f}" for value in found]
        )
    if decimals is None:
        decimals = 4 if max(map(abs, found)) < 10 else 1  # probabilities, or returns of long episodes
    return f"**{np.mean(found):.{decimals}f}** ({listed([f'{value:.{decimals}f}' for value in found])})"


def each(seeds: Iterable[dict], value, of: str = "") -> str:
    return listed([str(value(seed)) for seed in seeds], of)


def listed(texts: Sequence[str], of: str = "") -> str:
    """All of a few, else what they have in common or their range; every value is in the seeds' folders.

    Args:
        of: the most that a value can be, in words: " of 11".
    """
    if len(texts) <= FEW:
        return f"{', '.join(texts)}{of}"
    if len(set(texts)) == 1:
        return f"{texts[0]}{of} in all {len(texts)}"
    values = {text: text.replace(",", "") for text in texts}
    are_numbers = (text for text in texts if values[text].replace(".", "").lstrip("-").isdigit())
    numbers = sorted(are_numbers, key=lambda text: float(values[text]))
    others = [text for text in dict.fromkeys(texts) if text not in numbers]
    span = "" if not numbers else numbers[0] if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
    return ", ".join([span, *others]).strip(", ") + of
