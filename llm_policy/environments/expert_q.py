"""The expert as a CSV: one row a step, with the four Q-values of the state. Writes it, reads it, checks it.

    python -m llm_policy.environments.expert_q --output expert_demos_batched_avg_q.csv --overwrite    the committed file, bit for bit
    python -m llm_policy.environments.expert_q --map 8x8 --output lake_8x8.csv
    python -m llm_policy.environments.expert_q --random_maps 2200 --rows states --output lakes.csv    many maps, each state once
    python -m llm_policy.environments.expert_q --method q_learning --output learned.csv               learned instead of computed

Columns: state,state_str,action,action_text,q_value_left,q_value_down,q_value_right,q_value_up,reward,next_state,done,
batch_idx. `state_str` shows the lake before the step, rows joined by "|", the agent as A. `done` is true where the
episode ended in a hole or at the goal, and false where only the step limit cut it.
"""

import argparse
import csv
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
from tqdm import tqdm

from llm_policy.errors import InputError, run_script
from llm_policy.environments.frozen_lake import (
    ACTIONS,
    Grid,
    acting_states,
    default_horizon,
    lake_mdp,
    parse_state_text,
    random_grids,
    read_grid,
    state_text,
)
from llm_policy.environments.mdp import greedy_policy, optimal_q, optimal_return, policy_return

Q_COLUMNS = tuple(f"q_value_{action.lower()}" for action in ACTIONS)
REQUIRED_COLUMNS = ("state_str", "action", *Q_COLUMNS)
COLUMNS = ("state", "state_str", "action", "action_text", *Q_COLUMNS, "reward", "next_state", "done", "batch_idx")
Q_DECIMALS = 10
# Q-values are written with ten decimals; closer together than this they count as equal.
TIE_TOLERANCE = 1e-8
# Step sizes 1 / (1 + n/100) at visit n: the rescaled linear ones of Wainwright (2019), 1 / (1 + (1-gamma) n), for gamma
# 0.99. They meet the conditions for convergence; 1/n, or n^-0.7, forgets the first guesses too slowly.
STEP_SIZE_VISITS = 100
RANDOM_BLOCK_STEPS = 1000


@dataclass(frozen=True)
class ExpertOptions:
    """What the CSV is made of. `horizon_steps=None` means 25 times the longer side: 100 on 4x4 and 200 on 8x8."""

    map: str = "4x4"
    random_maps: int = 0
    map_size: int = 4
    rows: str = "episodes"
    is_slippery: bool = True
    # Below 1, so that a shorter way is better and no action ties that waits for ever.
    gamma: float = 0.99
    method: str = "value_iteration"
    batches: int = 5
    episodes_per_batch: int = 16
    horizon_steps: int | None = None
    q_learning_steps: int = 500_000
    seed: int = 0
    output: str = "expert_demos_batched_avg_q.csv"
    overwrite: bool = False

    def __post_init__(self):
        for name in ("batches", "episodes_per_batch", "horizon_steps", "q_learning_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name} {value}: expected a whole number >= 1")
        for name in ("seed", "random_maps"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name} {getattr(self, name)}: expected a whole number >= 0")
        if not 0 <= self.gamma <= 1:
            raise InputError(f"--gamma {self.gamma}: expected a number from 0 to 1")


def learn_q(
    grid: Grid, is_slippery: bool, gamma: float, runs: int, steps: int, seed: int, progress: bool = False
) -> np.ndarray:
    """Tabular Q-learning (Watkins 1989), `runs` independent learners side by side: shape (runs, S, A).

    Each learner takes `steps` uniformly random actions; its episodes begin in a random acting state, for from the start
    of a slippery lake a random walk hardly ever sees the goal.
    """
    lake = lake_mdp(grid, is_slippery)
    outcomes = lake.next_states_SAK.shape[2]  # equally likely on a lake
    wins_S = np.array([letter == "G" for letter in "".join(grid)], dtype=float)
    starts = np.array(acting_states(grid))
    random = np.random.default_rng(seed)
    run_R = np.arange(runs)
    q_RSA = np.zeros((runs, *lake.rewards_SA.shape))
    visits_RSA = np.zeros(q_RSA.shape)
    state_R = random.choice(starts, runs)
    with tqdm(total=steps, desc=f"Q-learning, {runs} runs", unit="step", disable=not progress) as bar:
        for first in range(0, steps, RANDOM_BLOCK_STEPS):
            block = min(RANDOM_BLOCK_STEPS, steps - first)
            actions_TR = random.integers(len(ACTIONS), size=(block, runs))
            outcomes_TR = random.integers(outcomes, size=(block, runs))
            starts_TR = random.choice(starts, size=(block, runs))
            for action_R, outcome_R, start_R in zip(actions_TR, outcomes_TR, starts_TR, strict=True):
                next_R = lake.next_states_SAK[state_R, action_R, outcome_R]
                here = (run_R, state_R, action_R)
                visits_RSA[here] += 1
                # Holes and goals keep Q = 0, so the bootstrap vanishes there.
                target_R = wins_S[next_R] + gamma * q_RSA[run_R, next_R].max(axis=1)
                q_RSA[here] += (target_R - q_RSA[here]) / (1 + visits_RSA[here] / STEP_SIZE_VISITS)
                state_R = np.where(lake.terminal_S[next_R], start_R, next_R)
            bar.update(block)
    return q_RSA


def expert_q(grid: Grid, options: ExpertOptions, progress: bool = False) -> np.ndarray:
    """The expert's Q-values, shape (S, A): exact, or the average of `options.batches` independent learners."""
    if options.method == "value_iteration":
        return optimal_q(lake_mdp(grid, options.is_slippery), options.gamma)
    if options.method == "q_learning":
        learners = (options.batches, options.q_learning_steps, options.seed)
        return learn_q(grid, options.is_slippery, options.gamma, *learners, progress).mean(axis=0)
    raise InputError(f"--method {options.method}: expected value_iteration or q_learning")


def expert_rows(grid: Grid, q_SA: np.ndarray, options: ExpertOptions, progress: bool = False) -> list[tuple]:
    """Steps of the greedy policy in Gymnasium's own environment, one tuple in the order of COLUMNS each.

    `options.rows` says which: those of whole `episodes`, or one from each of the `states` in which an action is chosen
    (on ice that is not slippery the episodes see one path and no more).
    """
    action_S = greedy_policy(q_SA).argmax(axis=-1)
    env = gym.make(
        "FrozenLake-v1",
        desc=list(grid),
        is_slippery=options.is_slippery,
        max_episode_steps=options.horizon_steps or default_horizon(grid),
    )
    rows = []

    def step_from(state: int, batch: int) -> tuple[int, bool]:
        action = int(action_S[state])
        next_state, reward, terminated, truncated, _ = env.step(action)
        q_texts = (f"{q:.{Q_DECIMALS}f}" for q in q_SA[state])
        labels = (int(state), state_text(grid, int(state)), action, ACTIONS[action])
        rows.append((*labels, *q_texts, float(reward), int(next_state), bool(terminated), int(batch)))
        return int(next_state), terminated or truncated

    if options.rows == "states":
        for number, state in enumerate(acting_states(grid)):
            env.reset(seed=options.seed if number == 0 else None)
            env.unwrapped.s = state  # type: ignore[attr-defined]  # Gymnasium's name for it
            step_from(state, 0)
    else:
        batch_of_episode = np.repeat(np.arange(options.batches), options.episodes_per_batch)
        for episode, batch in enumerate(tqdm(batch_of_episode, desc="expert episodes", disable=not progress)):
            # The seed is given once: each reset with a seed would replay the same slips.
            state, _ = env.reset(seed=options.seed if episode == 0 else None)
            ended = False
            while not ended:
                state, ended = step_from(state, batch)
    env.close()
    return rows


def write_expert_csv(options: ExpertOptions, progress: bool = False) -> Path:
    """Make the CSV that the options describe; InputError before any work if the file may not be replaced."""
    path = Path(options.output)
    if path.is_dir() or (path.exists() and not options.overwrite):
        raise InputError(f"{path}: is there already and is left as it is; expected a new --output, or --overwrite")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}, expected an existing one in --output")
    if options.random_maps:
        grids = random_grids(options.random_maps, options.map_size, options.seed)
    else:
        grids = [read_grid(options.map)]
    progress_here = progress and len(grids) == 1
    rows, successes, ceilings = [], [], []
    for grid in tqdm(grids, desc="maps", disable=not progress or progress_here):
        q_SA = expert_q(grid, options, progress_here)
        rows.extend(expert_rows(grid, q_SA, options, progress_here))
        lake, horizon = lake_mdp(grid, options.is_slippery), options.horizon_steps or default_horizon(grid)
        successes.append(float(policy_return(lake, greedy_policy(q_SA), horizon_steps=horizon)))
        ceilings.append(float(optimal_return(lake, horizon)))
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error}); expected a writable folder with room") from None

    seen, acting = len({row[1] for row in rows}), sum(len(acting_states(grid)) for grid in grids)
    of_maps = f", {len(grids)} maps" if len(grids) > 1 else ""
    print(
        f"{path}: {len(rows)} rows{of_maps}, {seen} of {acting} states, expert's exact success in {horizon} steps "
        f"{np.mean(successes):.4f} (best possible {np.mean(ceilings):.4f})"
    )
    return path


def read_expert_csv(path: str | Path) -> pd.DataFrame:
    """The table of an expert CSV: one row for each distinct (grid, state), in the order of first appearance.

    Columns: `state_str` ("|" form, agent as A), `grid` (tuple of rows), `state` (int), `action` (int, the most frequent
    one), `q_values` (list of 4 floats in the order of ACTIONS, the mean of the merged rows), `count` (rows merged).
    The file needs `state_str`, `action` (0-3 or a name) and four `q_value_*`; a `state` must agree; others are ignored.
    `state_str` may be Gymnasium's ANSI rendering. Warns once if actions are not the best by their own Q-values.
    InputError, one line with file, line, column, value and what was expected, if anything is wrong.
    """
    columns, lines = _read_columns(path)

    def fail(row: int, column: str, problem: str) -> InputError:
        return InputError(f"{path}: line {lines[row]}, column {column}: {problem}")

    def convert(column: str, function: Callable) -> list:
        """Each distinct text is converted once; a ValueError or InputError gets its line."""
        results: dict = {}
        for row, text in enumerate(columns[column]):
            if text not in results:
                try:
                    results[text] = function(text)
                except (ValueError, InputError) as error:
                    raise fail(row, column, str(error)) from None
        return [results[text] for text in columns[column]]

    places = convert("state_str", _acting_place)
    actions_N = np.array(convert("action", _action_index))
    q_NA = np.stack([pd.to_numeric(pd.Series(columns[name]), errors="coerce") for name in Q_COLUMNS], axis=1)
    # 1e100: beyond it means and differences of Q-values overflow
    unusable_NA = ~(np.abs(q_NA) < 1e100)
    if unusable_NA.any():
        row, action = np.argwhere(unusable_NA)[0]
        raise fail(row, Q_COLUMNS[action], f"{columns[Q_COLUMNS[action]][row]!r}, expected a finite number")
    if "state" in columns:
        for row, (given, (_, state)) in enumerate(zip(convert("state", _whole_number), places, strict=True)):
            if given != state:
                raise fail(row, "state", f"{given} contradicts state_str, which shows the agent in state {state}")

    value_N = q_NA[np.arange(len(q_NA)), actions_N]
    worse_N = value_N < q_NA.max(axis=1) - TIE_TOLERANCE
    if worse_N.any():
        row = int(worse_N.argmax())
        best = ACTIONS[q_NA[row].argmax()]
        warnings.warn(
            f"{path}: in {worse_N.sum()} of {len(worse_N)} rows `action` is not the best by its own Q-values; "
            f"first in line {lines[row]}: {ACTIONS[actions_N[row]]}, where {best} is best",
            stacklevel=2,
        )

    index_of = {place: index for index, place in enumerate(dict.fromkeys(places))}
    index_N = np.array([index_of[place] for place in places])
    counts_P = np.bincount(index_N)
    q_PA = np.stack([np.bincount(index_N, weights) for weights in q_NA.T], axis=1) / counts_P[:, None]
    actions_PA = np.bincount(index_N * len(ACTIONS) + actions_N, minlength=q_PA.size).reshape(q_PA.shape)
    return pd.DataFrame(
        {
            "state_str": [state_text(grid, state) for grid, state in index_of],
            "grid": pd.Series([grid for grid, _ in index_of], dtype=object),
            "state": [state for _, state in index_of],
            "action": actions_PA.argmax(axis=1),
            "q_values": pd.Series(q_PA.tolist(), dtype=object),
            "count": counts_P,
        }
    )


def _read_columns(path: str | Path) -> tuple[dict[str, list[str]], list[int]]:
    """The texts of the columns that matter, and the line on which each row begins, as an editor counts."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            wanted = {name: header.index(name) for name in (*REQUIRED_COLUMNS, "state") if name in header}
            columns: dict[str, list[str]] = {name: [] for name in wanted}
            targets = [(columns[name].append, position) for name, position in wanted.items()]
            lines, next_line = [], reader.line_num + 1
            for row in reader:
                if row:
                    if len(row) != len(header):
                        raise InputError(f"{path}: line {next_line} has {len(row)} fields, expected {len(header)}")
                    lines.append(next_line)
                    for append, position in targets:
                        append(row[position])
                next_line = reader.line_num + 1
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `python -m llm_policy.environments.expert_q --output {path}` makes one") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, expected a CSV file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; expected a CSV file saved as UTF-8") from None
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: no CSV ({error}); expected comma-separated values") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected a CSV file") from None
    if not lines:
        raise InputError(f"{path}: has a header and no rows, expected one row a step")
    return columns, lines


def _check_header(path: str | Path, header: list[str]) -> None:
    if not any(header):
        raise InputError(f"{path}: is empty, expected a CSV with the columns {', '.join(REQUIRED_COLUMNS)}")
    for name in (*REQUIRED_COLUMNS, "state"):
        if header.count(name) > 1:
            raise InputError(f"{path}: line 1: column {name} is there {header.count(name)} times, expected once")
    missing = [name for name in REQUIRED_COLUMNS if name not in header]
    if missing:
        raise InputError(
            f"{path}: line 1: column {', '.join(missing)} is missing; expected {', '.join(REQUIRED_COLUMNS)} "
            f"separated by commas, found {', '.join(header)[:200]}"
        )


def _acting_place(text: str) -> tuple[Grid, int]:
    grid, state = parse_state_text(text)
    state_text(grid, state)  # `InputError` for what cannot be written as a state again
    letter = "".join(grid)[state]
    if letter in "HG":
        where = {"H": "in a hole", "G": "at the goal"}[letter]
        raise InputError(f"{text!r}: the agent stands {where}, expected a state in which an action is chosen")
    return grid, state


def _action_index(text: str) -> int:
    name = text.strip().upper()
    if name in ACTIONS:
        return ACTIONS.index(name)
    try:
        if float(name) in range(len(ACTIONS)):
            return int(float(name))
    except ValueError:
        pass
    raise InputError(f"{text!r} is no action, expected 0-3 or {', '.join(ACTIONS)}")


def _whole_number(text: str) -> int:
    try:
        number = float(text)
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise InputError(f"{text!r} is no state, expected the whole number row * columns + column")


def main(arguments: list[str] | None = None) -> None:
    defaults = ExpertOptions()
    help_texts = {
        "map": "4x4, 8x8 or a text file with one row a line over S F H G",
        "random_maps": "so many distinct solvable maps, drawn by --seed, in place of --map",
        "map_size": "rows and columns of the random maps",
        "rows": "expert episodes from the start, or one row for each state in which an action is chosen",
        "is_slippery": "true: the move goes aside with probability 2/3",
        "gamma": "discount factor of the Q-values; 1 ties all safe actions, also those that wait for ever",
        "method": "exact Q-values, or learned ones averaged over the batches",
        "batches": "groups of episodes; for q_learning also the number of independent learners",
        "episodes_per_batch": "expert episodes written in each batch",
        "horizon_steps": "step limit of an episode (default: 25 x the longer side, 100 on 4x4, 200 on 8x8)",
        "q_learning_steps": "steps of each learner",
        "seed": "of the slips, of the learners and of the random maps",
        "output": "the CSV to write",
        "overwrite": "replace --output if it is there",
    }
    kinds: dict[str, dict] = {
        "is_slippery": {"type": _true_or_false, "metavar": "true|false"},
        "rows": {"choices": ("episodes", "states")},
        "method": {"choices": ("value_iteration", "q_learning")},
        "horizon_steps": {"type": int},
        "overwrite": {"action": "store_true"},
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(ExpertOptions):
        default = getattr(defaults, field.name)
        shown = "" if field.name in ("horizon_steps", "overwrite") else f" (default: {default})"
        kind = kinds.get(field.name, {"type": type(default)})
        parser.add_argument(f"--{field.name}", default=default, help=help_texts[field.name] + shown, **kind)
    write_expert_csv(ExpertOptions(**vars(parser.parse_args(arguments))), progress=True)


def _true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected true or false")
    return text.lower() == "true"


if __name__ == "__main__":
    run_script(main)
