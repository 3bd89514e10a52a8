"""One change at a time, from this repository's configuration and from the original's."""

import shlex
from collections.abc import Mapping, Sequence

from llm_policy.report.cells import each, link, markdown, values
from llm_policy.report.dates import made_by
from llm_policy.report.lakes import first_optimum, last_step, of_studies, trained_greedy
from llm_policy.report.studies import ABLATIONS

# What ablations start from: a result, and the configuration that their command names (None: the default)
ABLATED = {"canonical_slippery": None, "original_reproduced": "configs/laptop_original.yaml"}
DEFAULT_CONFIG = "configs/laptop.yaml"
SAME_IN_ABLATIONS = ("--max_steps", "--stop_when", "--samples_per_state")


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
            trained, states, worst = trained_greedy(seeds)
            rows.append(
                [
                    label,
                    values(trained, "success_probability"),
                    states,
                    each(seeds, lambda seed: first_optimum(seed["metrics"])),
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
