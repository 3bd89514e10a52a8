"""Adapter, model or baseline -> policy table -> exact success beside the optimum, a table, JSON and a picture.

    python evaluate_policy.py --policies runs/laptop                    # a run's adapter, on the run's own map or maps
    python evaluate_policy.py --policies random constant:LEFT expert q-learning
    python evaluate_policy.py --policies google/gemma-2b-it --map 8x8 --samples_per_state 16

Optimum, uniform random and the best constant action always stand in the table. Success probabilities are exact
(dynamic programming over the policy table); simulated episodes stand beside them as a check, with their 95 % interval.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser, PreTrainedModel, set_seed

from llm_policy.errors import InputError, check_at_least, run_script
from llm_policy.environments.expert_q import learn_q
from llm_policy.environments.frozen_lake import (
    ACTIONS,
    Grid,
    acting_states,
    default_horizon,
    lake_mdp,
    read_grid,
    shortest_path_policy,
)
from llm_policy.environments.mdp import AGREEMENT_GAMMA, greedy_policy, optimal_actions, optimal_q
from llm_policy.models import load_model, load_tokenizer
from llm_policy.plots import policy_figure
from llm_policy.environments.policy_table import (
    PolicyReader,
    PolicyScore,
    action_letters,
    best_constant_action,
    constant_policy,
    score_policy,
    uniform_policy,
)
from llm_policy.run_files import EVALUATION_FILE, RUN_FILE, write_whole
from prompts import check_prompt

BASELINES = ("random", "constant:ACTION", "expert", "q-learning", "shortest-path")
Q_LEARNING_RUNS, Q_LEARNING_STEPS = 5, 100_000


@dataclass
class EvaluatedPolicy:
    """A policy on one or several maps: `tables[m]` and `scores[m]` belong to map m."""

    name: str
    tables: list[np.ndarray]
    scores: list[PolicyScore]
    simulated_successes: int
    simulated_episodes: int

    def mean(self, attribute: str) -> float:
        return float(np.mean([getattr(score, attribute) for score in self.scores]))

    @property
    def format_validity(self) -> float | None:
        return self.scores[0].format_validity

    @property
    def simulated_interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the simulated success probability."""
        n, z = self.simulated_episodes, 1.96
        p = self.simulated_successes / n
        centre, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))

    def as_dict(self) -> dict:
        """Means over the maps, and of each map what it takes to see where the policy errs."""
        numbers = [k for k, v in self.scores[0].as_dict().items() if v is not None]
        low, high = self.simulated_interval
        if len(self.tables) == 1:
            details = {"policy_SA": self.tables[0].round(6).tolist()}
        else:
            details = {
                "percents_of_optimal": [round(score.percent_of_optimal, 2) for score in self.scores],
                "actions": [action_letters(table_SA) for table_SA in self.tables],
            }
        return {
            "policy": self.name,
            "maps": len(self.scores),
            **{k: self.mean(k) for k in numbers},
            "simulated_success": self.simulated_successes / self.simulated_episodes,
            "simulated_interval": [low, high],
            "simulated_episodes": self.simulated_episodes,
            **details,
        }


def evaluate_policies(
    named_tables: dict[str, list[np.ndarray]],
    grids: Sequence[Grid],
    is_slippery: bool,
    *,
    validities: dict[str, float] | None = None,
    horizon_steps: int | None = None,
    episodes: int = 1000,
    seed: int = 0,
) -> list[EvaluatedPolicy]:
    """Judge each policy on every map, with optimum, random and the best constant action in front.

    Args:
        named_tables: name -> one `policy_SA` a map.
        validities: name -> share of readable completions, for policies that a model gave.
        horizon_steps: step limit; None takes Gymnasium's for each map's size.
        episodes: simulated per policy, over all maps together.
    """
    horizons = [horizon_steps or default_horizon(grid) for grid in grids]
    constants = [best_constant_action(lake_mdp(g, is_slippery), h) for g, h in zip(grids, horizons, strict=True)]
    best_constant = "best constant action" + (f" ({ACTIONS[constants[0]]})" if len(set(constants)) == 1 else "")
    rows = {
        "optimal": [baseline_table("expert", grid, is_slippery) for grid in grids],
        "uniform random": [baseline_table("random", grid, is_slippery) for grid in grids],
        best_constant: [constant_policy(len(g) * len(g[0]), a) for g, a in zip(grids, constants, strict=True)],
        **named_tables,
    }
    per_map = -(-episodes // len(grids))
    evaluated = []
    for name, tables in rows.items():
        validity = (validities or {}).get(name)
        on_maps = list(zip(grids, tables, horizons, strict=True))
        scores = [score_policy(grid, is_slippery, table_SA, h, validity) for grid, table_SA, h in on_maps]
        successes = sum(
            simulate(grid, is_slippery, table_SA, h, per_map, seed + m) for m, (grid, table_SA, h) in enumerate(on_maps)
        )
        evaluated.append(EvaluatedPolicy(name, tables, scores, successes, per_map * len(grids)))
    return evaluated


def model_policies(
    model: PreTrainedModel, reader: PolicyReader, grids: Sequence[Grid], name: str, samples: int
) -> tuple[dict[str, list[np.ndarray]], dict[str, float]]:
    """Greedy policy of a model and, with `samples` > 0, its sampled distribution: named tables and validities."""
    asked = {f"{name}, greedy": reader.policies(model, grids)}
    if samples:
        asked[f"{name}, sampled"] = reader.policies(model, grids, samples)
    return {k: p.tables for k, p in asked.items()}, {k: p.format_validity for k, p in asked.items()}


def baseline_table(name: str, grid: Grid, is_slippery: bool, seed: int = 0) -> np.ndarray:
    """Policy table of a baseline by name (see `BASELINES`); `InputError` for an unknown one."""
    states = len(grid) * len(grid[0])
    kind, _, action = name.partition(":")
    if name == "random":
        return uniform_policy(states)
    if kind == "constant" and action.upper() in ACTIONS:
        return constant_policy(states, ACTIONS.index(action.upper()))
    if name == "expert":
        return greedy_policy(optimal_q(lake_mdp(grid, is_slippery), AGREEMENT_GAMMA))
    if name == "q-learning":
        learners_RSA = learn_q(grid, is_slippery, AGREEMENT_GAMMA, Q_LEARNING_RUNS, Q_LEARNING_STEPS, seed)
        return greedy_policy(learners_RSA.mean(axis=0))
    if name == "shortest-path":
        return shortest_path_policy(grid)
    raise InputError(f"--policies {name!r}: expected a run folder, a model or one of {', '.join(BASELINES)}")


def is_baseline(name: str) -> bool:
    return name.partition(":")[0] in {baseline.partition(":")[0] for baseline in BASELINES}


def simulate(grid: Grid, is_slippery: bool, policy_SA: np.ndarray, horizon_steps: int, episodes: int, seed: int) -> int:
    """Successes in `episodes` episodes of the Gymnasium environment itself, sampling actions from the table."""
    env = gymnasium.make("FrozenLake-v1", desc=list(grid), is_slippery=is_slippery, max_episode_steps=horizon_steps)
    generator = np.random.default_rng(seed)
    cumulative_SA = policy_SA.cumsum(axis=1)
    successes = 0
    for episode in range(episodes):
        state, _ = env.reset(seed=seed if episode == 0 else None)
        ended = False
        while not ended:
            action = int((cumulative_SA[state] < generator.random()).sum())
            state, reward, terminated, truncated, _ = env.step(min(action, len(ACTIONS) - 1))
            ended = terminated or truncated
        successes += reward > 0
    return int(successes)


def print_table(evaluated: Sequence[EvaluatedPolicy], title: str) -> str:
    """Print the comparison on the terminal; returns what was printed."""
    horizons = sorted({score.horizon_steps for score in evaluated[0].scores})
    limit = f"{' or '.join(map(str, horizons))} steps"
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for column in (
        "success",
        f"in {limit}",
        "% of optimal",
        "regret",
        "optimal states",
        "in form",
        "simulated",
    ):
        table.add_column(column, justify="right")
    for policy in evaluated:
        low, high = policy.simulated_interval
        states = sum(s.optimal_states for s in policy.scores), sum(s.acting_states for s in policy.scores)
        table.add_row(
            policy.name,
            f"{policy.mean('success_probability'):.4f}",
            f"{policy.mean('success_at_horizon'):.4f}",
            f"{policy.mean('percent_of_optimal'):.1f}",
            f"{policy.mean('regret'):.4f}",
            f"{states[0]}/{states[1]}",
            "" if policy.format_validity is None else f"{100 * policy.format_validity:.0f} %",
            f"{low:.3f}-{high:.3f}",
        )
    console = Console(width=120, record=True)
    console.print(table)
    ceiling = evaluated[0].mean("optimal_at_horizon")
    console.print(f"The best policy that may count its steps reaches {ceiling:.4f} in {limit}.")
    return console.export_text()


def save_evaluation(
    evaluated: Sequence[EvaluatedPolicy], grids: Sequence[Grid], is_slippery: bool, folder: Path
) -> None:
    """`evaluation.json` and `policy.png`.

    The picture of one map shows the optimum and up to four policies. That of several shows one policy, the last greedy
    one of a model, on five of them, from its worst map to its best.
    """
    content = {"maps": ["|".join(grid) for grid in grids], "is_slippery": is_slippery}
    rows = ",\n".join(json.dumps(policy.as_dict()) for policy in evaluated)  # one policy a line: maps may be hundreds
    text = f'{json.dumps(content)[:-1]}, "policies": [\n{rows}\n]}}\n'
    if len(grids) == 1:
        shown = [(p, 0, f"{p.name}\nsuccess {p.scores[0].success_probability:.3f}") for p in evaluated]
        shown = [shown[0], *shown[3:]][:5]
    else:
        policy = next((p for p in reversed(evaluated) if p.name.endswith(", greedy")), evaluated[-1])
        percents = [score.percent_of_optimal for score in policy.scores]
        picked = np.argsort(percents, kind="stable")[np.linspace(0, len(grids) - 1, min(5, len(grids))).astype(int)]
        shown = [(policy, m, f"{policy.name}\n{percents[m]:.0f} % of optimal") for m in picked]
    panels = []
    for policy, m, title in shown:
        optimal_SA = optimal_actions(optimal_q(lake_mdp(grids[m], is_slippery), AGREEMENT_GAMMA))
        panels.append((title, grids[m], policy.tables[m], optimal_SA))
    figure = policy_figure(panels)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "policy.png", dpi=120)
        write_whole(folder / EVALUATION_FILE, text)
    except OSError as error:
        raise InputError(
            f"--output_dir {folder}: cannot be written ({error}); make room, or name another folder"
        ) from error


@dataclass
class EvaluationArguments:
    """What to judge, and where."""

    policies: list[str] = field(
        metadata={"help": f"Run folders, model names or paths, GGUF files, or baselines: {', '.join(BASELINES)}."}
    )
    map: str | None = field(
        default=None,
        metadata={"help": "4x4, 8x8 or a text file. Default: the run's maps, else 4x4."},
    )
    is_slippery: bool | None = field(default=None, metadata={"help": "Slippery ice? Default: the run's, else true."})
    observation: str | None = field(default=None, metadata={"help": "As in training. Default: the run's."})
    horizon_steps: int | None = field(default=None, metadata={"help": "Step limit. Default: 100, above 4x4 200."})
    samples_per_state: int = field(default=16, metadata={"help": "Completions per state; 0: greedy only."})
    episodes: int = field(default=1000, metadata={"help": "Simulated episodes beside the exact figures."})
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Tokens a completion may have. Default: the run's, else 64."}
    )
    dtype: str | None = field(
        default=None, metadata={"help": "Weights: bfloat16, float16 or float32. Default: the run's, else bfloat16."}
    )
    seed: int = field(default=0, metadata={"help": "Of sampling, simulation and Q-learning."})
    output_dir: str | None = field(default=None, metadata={"help": "Where evaluation.json and policy.png go."})

    def __post_init__(self) -> None:
        check_at_least(
            self, {"samples_per_state": 0, "episodes": 1, "max_completion_length": 1, "horizon_steps": 1, "seed": 0}
        )


class Parser(HfArgumentParser):
    """One line for what is wrong on the command line, without the list of all options."""

    def error(self, message: str):
        raise InputError(f"{message}; see --help")


def run_settings(name: str | Path) -> dict:
    """`maps`, `is_slippery`, `observation` and the like of a run folder; nothing for what is none."""
    path = Path(name) / RUN_FILE
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: is no JSON ({error}); judge another folder, or train again") from error


def shared_settings(runs: dict[str, dict], arguments: EvaluationArguments) -> dict:
    """Maps and dynamics that all runs among the policies were judged on; `InputError` where they differ."""
    known = {name: settings for name, settings in runs.items() if settings}
    shared: dict = {}
    for key, option, given in (("maps", "map", arguments.map), ("is_slippery", "is_slippery", arguments.is_slippery)):
        if given is not None or not known:
            continue
        for name, settings in known.items():
            if key not in settings:
                raise InputError(f"--policies {name}: run.json names no {option}; give --{option}")
            if settings[key] != shared.setdefault(key, settings[key]):
                others = ", ".join(known)
                raise InputError(
                    f"--policies {others}: of runs with other {key}; judge them one by one or give --{option}"
                )
    return shared


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(EvaluationArguments)
    arguments, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    set_seed(arguments.seed)
    runs = {name: run_settings(name) for name in arguments.policies if not is_baseline(name)}
    shared = shared_settings(runs, arguments)
    grids = [tuple(rows.split("|")) for rows in shared.get("maps", [])] or [read_grid(arguments.map or "4x4")]
    is_slippery = shared.get("is_slippery", True) if arguments.is_slippery is None else arguments.is_slippery
    tables: dict[str, list[np.ndarray]] = {}
    validities: dict[str, float] = {}
    for name in arguments.policies:
        if is_baseline(name):
            tables[name] = [baseline_table(name, grid, is_slippery, arguments.seed) for grid in grids]
            continue
        folder, settings = Path(name).expanduser().resolve().parent, runs[name]
        if not settings and ((folder / "warm_start").is_dir() or run_settings(folder).get("on_adapter")):
            raise InputError(f"--policies {name}: trained on top of an adapter; judge the run's folder, {folder}")
        tokenizer = load_tokenizer(name)
        observation = arguments.observation or settings.get("observation", "coordinates")
        completion_tokens = arguments.max_completion_length or settings.get("max_completion_length", 64)
        reader = PolicyReader(tokenizer, is_slippery, observation, completion_tokens)
        model = load_model(name, dtype=arguments.dtype or settings.get("dtype", "bfloat16")).to(
            "cuda" if torch.cuda.is_available() else "cpu"
        )
        context_tokens = model.config.get_text_config().max_position_embeddings
        first_prompt = reader.prompt(grids[0], acting_states(grids[0])[0])
        check_prompt(first_prompt, tokenizer, context_tokens, completion_tokens)
        found, valid = model_policies(model, reader, grids, name, arguments.samples_per_state)
        tables.update(found)
        validities.update(valid)
    evaluated = evaluate_policies(
        tables, grids, is_slippery, validities=validities, horizon_steps=arguments.horizon_steps,
        episodes=arguments.episodes, seed=arguments.seed,
    )  # fmt: skip
    where = "|".join(grids[0]) if len(grids) == 1 else f"{len(grids)} maps"
    print_table(evaluated, f"FrozenLake {where}, {'slippery' if is_slippery else 'not slippery'}")
    if arguments.output_dir:
        save_evaluation(evaluated, grids, is_slippery, Path(arguments.output_dir))
        print(f"saved {arguments.output_dir}/evaluation.json and policy.png")
    return 0


if __name__ == "__main__":
    run_script(main)
