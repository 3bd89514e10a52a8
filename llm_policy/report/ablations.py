"""One change at a time, from this repository's configuration and from the original's."""

import shlex
from collections.abc import Mapping

from llm_policy.report.cells import each, link, markdown, values
from llm_policy.report.dates import made_by
from llm_policy.report.lakes import first_optimum, last_step, of_studies, trained_greedy
from llm_policy.report.studies import ABLATIONS

# What ablations start from: the configuration's own objective, `expected` by name, and the original
ABLATED = ("natural_slippery", "canonical_slippery", "original_reproduced")
DEFAULT_CONFIG, ORIGINAL_CONFIG = "configs/laptop.yaml", "configs/laptop_original.yaml"
OLDER_DEFAULTS = {"--objective", "--form_coef", "--lora_dropout"}  # named by whoever starts from canonical_slippery
SAME_IN_ABLATIONS = ("--max_steps", "--stop_when", "--samples_per_state")


def ablations_section(results: Mapping[str, list[dict]]) -> str:
    """What one change does, from this repository's configuration and from the original's: one value per seed."""
    headers = [
        "change", "success, no step limit", "optimal states", "optimum first reached at step", "steps",
        "minutes", "worst seed", "date, commit",
    ]  # fmt: skip
    ablations = of_studies(results, ABLATIONS)
    starts = {name: _start(seeds[0]["command"]) for name, seeds in ablations.items()}
    rows = []
    for start in sorted(dict.fromkeys(starts.values()), key=[*ABLATED, *starts.values()].index):
        labels = {f"*{start}, unchanged*": results[start]} if start in results else {}
        shared = _options(results[start][0]["command"]) if start in results else {}
        for name, seeds in ablations.items():
            if starts[name] == start:
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


def _start(command: list[str]) -> str:
    """The result that a command changes something of; its configuration, where that is another one."""
    config = command[command.index("--config") + 1] if "--config" in command else DEFAULT_CONFIG
    if config == DEFAULT_CONFIG:
        return "canonical_slippery" if set(_options(command)) >= OLDER_DEFAULTS else "natural_slippery"
    return "original_reproduced" if config == ORIGINAL_CONFIG else config


def _change(command: list[str], shared: Mapping[str, list[str]]) -> str:
    """What the command changes: its --expert, and the options behind `--` but for those that all ablations share.

    Args:
        shared: the options of the unchanged command.
    """
    words = ["--expert", command[command.index("--expert") + 1]] if "--expert" in command else []
    words += [word for word in command if word.startswith("--expert=")]
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
