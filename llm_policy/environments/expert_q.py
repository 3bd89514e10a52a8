"""The expert as a CSV: one row per step, with the Q-values of the state's actions. Writes it, reads it, checks it.

    python -m llm_policy.environments.expert_q --overwrite true          # the committed file, bit for bit
    python -m llm_policy.environments.expert_q --map 8x8 --output runs/lake_8x8.csv
    python -m llm_policy.environments.expert_q --random_maps 2200 --rows states --output runs/lakes.csv
    python -m llm_policy.environments.expert_q --method q_learning --output runs/learned.csv    # learned, not computed
    python -m llm_policy.environments.expert_q --wrong_states 0.1 --rows states --output runs/flawed.csv
    python -m llm_policy.environments.expert_q --env_id Taxi-v4 --rows states --output runs/taxi.csv

Columns: state,state_str,action,action_text,q_value_<action>,reward,next_state,done,batch_idx. On the lake `state_str`
shows the map before the step, rows joined by "|", the agent as A. `done` is true where the environment ended the
episode, and false where only the step limit cut it.

Axes: N rows of the file, P distinct states, S states, A actions, R learners, T steps.
"""

from llm_policy.startup import announce

announce(__name__, "NumPy, Gymnasium and the command line")

import csv
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from llm_policy.command_line import parse_arguments
from llm_policy.environments.frozen_lake import FrozenLake, random_grids, read_grid
from llm_policy.environments.gym_env import Transition, steps
from llm_policy.environments.mdp import (
    LARGEST_REWARD,
    greedy_policy,
    optimal_actions,
    optimal_q,
    optimal_return,
    policy_return,
)
from llm_policy.environments.table_environment import TableEnvironment
from llm_policy.environments.toy_text import environment_kind, gym_tables
from llm_policy.errors import InputError, check_choices, run_script, writing
from llm_policy.reading import check_regular

Q_DECIMALS = 10
# Step sizes 1 / (1 + n/100) at visit n: the rescaled linear ones of Wainwright (2019), 1 / (1 + (1-gamma) n), for gamma
# 0.99. They meet the conditions for convergence; 1/n, or n^-0.7, forgets the first guesses too slowly.
STEP_SIZE_VISITS = 100
RANDOM_BLOCK_STEPS = 1000


@dataclass(frozen=True)
class ExpertOptions:
    """What the CSV is made of."""

    env_id: str = field(
        default=FrozenLake.env_id,
        metadata={"help": f"Or {', '.join(gym_tables())}, or MODULE:NAME of a game of your own."},
    )
    map: str = field(default="4x4", metadata={"help": "Lake: 4x4, 8x8 or a text file, a row per line over S F H G."})
    random_maps: int = field(default=0, metadata={"help": "Lake: so many distinct solvable maps instead of --map."})
    map_size: int = field(default=4, metadata={"help": "Lake: rows and columns of the random maps."})
    is_slippery: bool | None = field(
        default=None, metadata={"help": "Lake: two moves in three go aside. Default: true."}
    )
    rows: str = field(
        default="episodes", metadata={"help": "episodes: the expert's, from the start; states: each acting state once."}
    )
    # Below 1, so that a shorter way is better and no action ties that waits for ever.
    gamma: float = field(default=0.99, metadata={"help": "Discount factor of the Q-values."})
    method: str = field(
        default="value_iteration",
        metadata={"help": "value_iteration: exact; q_learning: learned, averaged over the batches."},
    )
    batches: int = field(default=5, metadata={"help": "Groups of episodes; for q_learning also learners."})
    episodes_per_batch: int = field(default=16, metadata={"help": "Expert episodes in each batch."})
    horizon_steps: int | None = field(
        default=None, metadata={"help": "Step limit of an episode. Default: the environment's (lake 4x4: 100)."}
    )
    q_learning_steps: int = field(default=500_000, metadata={"help": "Steps of each learner."})
    noise: float = field(
        default=0.0, metadata={"help": "Standard deviation of noise on Q-values, in units of the largest |Q|."}
    )
    wrong_states: float = field(
        default=0.0,
        metadata={
            "help": "Share of states in which the best and the worst Q-value change places; a tied best one stays."
        },
    )
    labels_only: bool = field(
        default=False,
        metadata={"help": "1 for the best action, 0 for the others, as if only labels were known."},
    )
    seed: int = field(default=0, metadata={"help": "Of slips, learners, random maps and flaws."})
    output: str = field(default="expert_demos_batched_avg_q.csv", metadata={"help": "The CSV to write."})
    overwrite: bool = field(default=False, metadata={"help": "Replace --output if it is there."})

    def __post_init__(self) -> None:
        choices = {
            "rows": ("episodes", "states"),
            "method": ("value_iteration", "q_learning"),
        }
        check_choices(self, choices)
        of_lakes = {name: getattr(self, name) for name in ("map", "random_maps", "map_size", "is_slippery")}
        given = [name for name, value in of_lakes.items() if value != type(self).__dataclass_fields__[name].default]
        if not issubclass(environment_kind(self.env_id), FrozenLake) and given:
            raise InputError(f"--{given[0]} {of_lakes[given[0]]}: is for lakes; {self.env_id} has no such choice")
        if "map" in given and self.random_maps:
            raise InputError(f"--map {self.map} with --random_maps {self.random_maps}: give one of the two")
        for option, value, is_read, of in (
            ("q_learning_steps", self.q_learning_steps, self.method == "q_learning", "--method q_learning"),
            ("batches", self.batches, "episodes" in self.rows or self.method == "q_learning", "--rows episodes"),
            ("episodes_per_batch", self.episodes_per_batch, self.rows == "episodes", "--rows episodes"),
        ):
            if value != type(self).__dataclass_fields__[option].default and not is_read:
                raise InputError(f"--{option} {value}: is for {of}; give that, or leave it out")
        if "map_size" in given and not self.random_maps:
            raise InputError(
                f"--map_size {self.map_size}: is of random maps; give --random_maps, or a --map of that size"
            )


def q_columns(actions: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"q_value_{action.lower()}" for action in actions)


def required_columns(actions: Sequence[str]) -> tuple[str, ...]:
    return ("state_str", "action", *q_columns(actions))


def all_columns(actions: Sequence[str]) -> tuple[str, ...]:
    columns = ("state", "state_str", "action", "action_text", *q_columns(actions))
    return (*columns, "reward", "next_state", "done", "batch_idx")


def learn_q(
    environment: TableEnvironment, gamma: float, runs: int, learner_steps: int, seed: int, progress: bool = False
) -> np.ndarray:
    """Tabular Q-learning (Watkins 1989), `runs` independent learners side by side: shape (runs, S, A).

    Each learner takes `learner_steps` uniformly random actions; its episodes begin in a random acting state, because
    from the start of a slippery lake a random walk hardly ever sees the goal.
    """
    mdp = environment.mdp
    outcomes, actions = mdp.next_states_SAK.shape[2], mdp.rewards_SA.shape[1]  # outcomes are equally likely
    wins_S = None
    if outcomes > 1:
        if not isinstance(environment, FrozenLake):
            raise InputError(f"{environment}: Q-learning is for lakes and games without chance; take the exact expert")
        wins_S = np.array([environment.is_goal(state) for state in range(len(mdp.rewards_SA))], dtype=float)
    starts = np.array(environment.acting_states)
    random = np.random.default_rng(seed)
    run_R = np.arange(runs)
    q_RSA = np.zeros((runs, *mdp.rewards_SA.shape))
    visits_RSA = np.zeros(q_RSA.shape)
    state_R = random.choice(starts, runs)
    with tqdm(total=learner_steps, desc=f"Q-learning, {runs} runs", unit="step", disable=not progress) as bar:
        for first in range(0, learner_steps, RANDOM_BLOCK_STEPS):
            block = min(RANDOM_BLOCK_STEPS, learner_steps - first)
            actions_TR = random.integers(actions, size=(block, runs))
            outcomes_TR = random.integers(outcomes, size=(block, runs))
            starts_TR = random.choice(starts, size=(block, runs))
            for action_R, outcome_R, start_R in zip(actions_TR, outcomes_TR, starts_TR, strict=True):
                next_R = mdp.next_states_SAK[state_R, action_R, outcome_R]
                # Of a single outcome the expected reward is the reward; with several it is paid for reaching the goal
                reward_R = mdp.rewards_SA[state_R, action_R] if wins_S is None else wins_S[next_R]
                here = (run_R, state_R, action_R)
                visits_RSA[here] += 1
                ended_R = mdp.probabilities_SAK[state_R, action_R, outcome_R] == 0
                target_R = reward_R + gamma * np.where(ended_R, 0.0, q_RSA[run_R, next_R].max(axis=1))
                q_RSA[here] += (target_R - q_RSA[here]) / (1 + visits_RSA[here] / STEP_SIZE_VISITS)
                state_R = np.where(ended_R, start_R, next_R)
            bar.update(block)
    return q_RSA


def expert_q(environment: TableEnvironment, options: ExpertOptions, progress: bool = False) -> np.ndarray:
    """The expert's Q-values, shape (S, A): exact, or the average of `options.batches` independent learners."""
    if options.method == "value_iteration":
        return optimal_q(environment.mdp, options.gamma)
    learners = (options.batches, options.q_learning_steps, options.seed)
    return learn_q(environment, options.gamma, *learners, progress).mean(axis=0)


def flawed_q(
    environment: TableEnvironment, q_SA: np.ndarray, options: ExpertOptions, random: np.random.Generator, wrong: int
) -> np.ndarray:
    """The Q-values of an expert with the flaws that the options ask for; the same values where they ask for none.

    Args:
        random: one generator for all maps.
        wrong: in how many states the best and the worst change places.
    """
    q_SA, states = q_SA.copy(), np.array(environment.acting_states)
    if options.noise:
        q_SA[states] += options.noise * np.abs(q_SA).max() * random.standard_normal(q_SA[states].shape)
    is_wrong_P = random.permutation(len(states)) < wrong
    for state in states[is_wrong_P]:
        best, worst = q_SA[state].argmax(), q_SA[state].argmin()
        q_SA[state, [best, worst]] = q_SA[state, [worst, best]]
    return greedy_policy(q_SA) if options.labels_only else q_SA


def expert_rows(
    environment: TableEnvironment, q_SA: np.ndarray, options: ExpertOptions, progress: bool = False
) -> Iterator[tuple]:
    """Steps of the greedy policy in Gymnasium's own environment, one tuple in the order of `all_columns` each.

    `options.rows` says which: those of whole `episodes`, or one from each of the `states` in which an action is chosen
    (on ice that is not slippery the episodes see one path and no more).
    """
    action_S = greedy_policy(q_SA).argmax(axis=-1)

    def row(step: Transition, batch: int) -> tuple:
        state, action = int(step.observation), int(step.action)
        labels = (state, environment.state_text(state), action, environment.actions[action])
        q_texts = (f"{q:.{Q_DECIMALS}f}" for q in q_SA[state])
        return (*labels, *q_texts, step.reward, int(step.next_observation), step.terminated, batch)

    env = environment.make(options.horizon_steps)
    if options.rows == "states":
        for number, state in enumerate(environment.acting_states):
            env.reset(seed=options.seed if number == 0 else None)
            if not hasattr(env.unwrapped, "s"):
                raise InputError(f"{environment}: its environment does not call its state `s`; use --rows episodes")
            env.unwrapped.s = state  # type: ignore[attr-defined]  # Gymnasium's name for it
            action = int(action_S[state])
            next_state, reward, terminated, truncated, _ = env.step(action)
            yield row(Transition(0, state, action, float(reward), next_state, terminated, truncated), 0)
    else:
        count = options.batches * options.episodes_per_batch
        with tqdm(total=count, desc="expert episodes", disable=not progress) as bar:
            for step in steps(env, lambda state: int(action_S[state]), count, options.seed):
                yield row(step, step.episode // options.episodes_per_batch)
                bar.update(step.terminated or step.truncated)
    env.close()


def write_expert_csv(options: ExpertOptions, progress: bool = False, config: str = "") -> Path:
    """Make the CSV that the options describe; InputError before any work if the file may not be replaced."""
    path = Path(options.output)
    for what, read in (("map", options.map), ("configuration", config)):
        if path.exists() and read and Path(read).exists() and path.samefile(read):
            raise InputError(f"--output {path}: is the {what} itself; name another file")
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise InputError(f"--output {path}: is no regular file and is left as it is; name a file, not a link to one")
    if path.exists() and not options.overwrite:
        raise InputError(f"{path}: is there already and is left as it is; expected a new --output, or --overwrite true")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}, expected an existing one in --output")
    environments = expert_environments(options)
    actions = environments[0].actions
    progress_here = progress and len(environments) == 1
    rows: list[tuple] = []
    successes, ceilings = [], []
    random = np.random.default_rng(options.seed)
    seen_states = wrong_so_far = 0
    for environment in tqdm(environments, desc="maps", disable=not progress or progress_here):
        seen_states += len(environment.acting_states)
        wrong = round(options.wrong_states * seen_states) - wrong_so_far  # what one rounds off the next makes up for
        wrong_so_far += wrong
        q_SA = flawed_q(environment, expert_q(environment, options, progress_here), options, random, wrong)
        rows.extend(expert_rows(environment, q_SA, options, progress_here))
        horizon = options.horizon_steps or environment.horizon_steps
        successes.append(float(policy_return(environment.mdp, greedy_policy(q_SA), horizon_steps=horizon)))
        ceilings.append(float(optimal_return(environment.mdp, horizon)))
    unfinished = path.with_name(f".expert_q-{os.getpid()}.unfinished")
    with (
        writing(path, "expected a writable folder with room"),
        unfinished.open("x", encoding="utf-8", newline="") as file,
    ):
        try:  # from here on it is our own: "x" takes no file that is there
            csv.writer(file, lineterminator="\n").writerows([all_columns(actions), *rows])
            file.close()
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    seen, acting = len({row[1] for row in rows}), sum(len(environment.acting_states) for environment in environments)
    of_maps = f", {len(environments)} maps" if len(environments) > 1 else ""
    earned = "success" if environments[0].pays_success else "return"
    print(
        f"{path}: {len(rows)} rows{of_maps}, {seen} of {acting} states, expert's exact {earned} in {horizon} steps "
        f"{np.mean(successes):.4f} (best possible {np.mean(ceilings):.4f})"
    )
    return path


def expert_environments(options: ExpertOptions) -> list[TableEnvironment]:
    """The environments that the options name: one, or many lakes."""
    kind = environment_kind(options.env_id)
    if not issubclass(kind, FrozenLake):
        return [kind()]
    if options.random_maps:
        grids = random_grids(options.random_maps, options.map_size, options.seed)
    else:
        grids = [read_grid(options.map)]
    return [FrozenLake(grid, options.is_slippery is not False) for grid in grids]


def read_expert_csv(path: str | Path, kind: type[TableEnvironment] = FrozenLake, **options) -> pd.DataFrame:
    """An expert's CSV as a table: one row for each distinct (environment, state), in the order of first appearance.

    Columns: `state_str`, `environment` (a `TableEnvironment`), `state` (int), `action` (int, the most frequent one),
    `q_values` (list of A floats in the order of the actions, the mean of the merged rows), `count` (rows merged).
    The file needs `state_str`, `action` (a number or a name) and a `q_value_*` per action; a `state` must agree; others
    are ignored. A lake's `state_str` may be Gymnasium's ANSI rendering. Warns once if actions are not the best by their
    own Q-values, and once if rows of one state disagree on the best action.
    InputError, one line with file, line, column, value and what was expected, if anything is wrong.

    Args:
        kind: class of the environments; `options` go to its `read_state`, as `is_slippery` does for a lake.
    """
    actions = kind.actions
    columns, lines = _read_columns(path, required_columns(actions), kind.env_id)

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

    states = convert("state_str", lambda text: kind.read_state(text, **options))
    actions_N = np.array(convert("action", lambda text: _action_index(text, actions)))
    names = q_columns(actions)
    q_NA = np.stack([pd.to_numeric(pd.Series(columns[name]), errors="coerce") for name in names], axis=1)
    unusable_NA = ~(np.abs(q_NA) < LARGEST_REWARD)
    if unusable_NA.any():
        row, action = np.argwhere(unusable_NA)[0]
        given = columns[names[action]][row]
        raise fail(row, names[action], f"{given!r}, expected a finite number of less than {LARGEST_REWARD:g}")
    if "state" in columns:
        for row, (given, (_, state)) in enumerate(zip(convert("state", _whole_number), states, strict=True)):
            if given != state:
                raise fail(row, "state", f"{given} contradicts state_str, which shows the agent in state {state}")

    best_NA = optimal_actions(q_NA)
    worse_N = ~best_NA[np.arange(len(q_NA)), actions_N]
    if worse_N.any():
        row = int(worse_N.argmax())
        best = actions[q_NA[row].argmax()]
        warnings.warn(
            f"{path}: in {worse_N.sum()} of {len(worse_N)} rows `action` is not the best by its own Q-values; "
            f"first in line {lines[row]}: {actions[actions_N[row]]}, where {best} is best",
            stacklevel=2,
        )

    index_of = {state: index for index, state in enumerate(dict.fromkeys(states))}
    index_N = np.array([index_of[state] for state in states])
    counts_P = np.bincount(index_N)
    always_best_PA = np.stack([np.bincount(index_N, best_A) for best_A in best_NA.T], axis=1) == counts_P[:, None]
    torn_P = ~always_best_PA.any(axis=1)
    if torn_P.any():
        first, *rest = np.flatnonzero(index_N == torn_P.argmax())
        other = next(row for row in rest if not (best_NA[row] & best_NA[first]).any() or row == rest[-1])
        shown = " and ".join(f"{lines[row]} ({actions[q_NA[row].argmax()]})" for row in (first, other))
        warnings.warn(
            f"{path}: rows disagree on the best action of {torn_P.sum()} of {len(torn_P)} states, and the mean of "
            f"their Q-values counts; first in lines {shown}",
            stacklevel=2,
        )
    q_PA = np.stack([np.bincount(index_N, weights) for weights in q_NA.T], axis=1) / counts_P[:, None]
    actions_PA = np.bincount(index_N * len(actions) + actions_N, minlength=q_PA.size).reshape(q_PA.shape)
    return pd.DataFrame(
        {
            "state_str": [environment.state_text(state) for environment, state in index_of],
            "environment": pd.Series([environment for environment, _ in index_of], dtype=object),
            "state": [state for _, state in index_of],
            "action": actions_PA.argmax(axis=1),
            "q_values": pd.Series(q_PA.tolist(), dtype=object),
            "count": counts_P,
        }
    )


def _read_columns(path: str | Path, required: Sequence[str], env_id: str) -> tuple[dict[str, list[str]], list[int]]:
    """The texts of the columns that matter, and the line on which each row begins, as an editor counts."""
    try:
        check_regular(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, required)
            wanted = {name: header.index(name) for name in (*required, "state") if name in header}
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
        raise InputError(
            f"{path}: no such file; "
            f"`python -m llm_policy.environments.expert_q --env_id {env_id} --output {path}` makes one"
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, expected a CSV file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; expected a CSV file saved as UTF-8") from None
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: no CSV ({error}); expected comma-separated values") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}); expected a CSV file") from None
    if not lines:
        raise InputError(f"{path}: has a header and no rows, expected one row per step")
    return columns, lines


def _check_header(path: str | Path, header: list[str], required: Sequence[str]) -> None:
    if not any(header):
        raise InputError(f"{path}: is empty, expected a CSV with the columns {', '.join(required)}")
    for name in (*required, "state"):
        if header.count(name) > 1:
            raise InputError(f"{path}: line 1: column {name} is there {header.count(name)} times, expected once")
    missing = [name for name in required if name not in header]
    if missing:
        raise InputError(
            f"{path}: line 1: column {', '.join(missing)} is missing; expected {', '.join(required)} "
            f"separated by commas, found {', '.join(header)[:200]}"
        )


def _action_index(text: str, actions: Sequence[str]) -> int:
    name, names = text.strip().upper(), [action.upper() for action in actions]
    if name in names:
        return names.index(name)
    try:
        if float(name) in range(len(actions)):
            return int(float(name))
    except ValueError:
        pass
    raise InputError(f"{text!r} is no action, expected 0-{len(actions) - 1} or {', '.join(actions)}")


def _whole_number(text: str) -> int:
    try:
        number = float(text)
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise InputError(f"{text!r} is no state, expected its whole number; the column may be left out")


def main(argv: Sequence[str] | None = None) -> None:
    (options,), config = parse_arguments(argv, (ExpertOptions,), description=__doc__)
    write_expert_csv(options, progress=True, config=config)


if __name__ == "__main__":
    run_script(main)
