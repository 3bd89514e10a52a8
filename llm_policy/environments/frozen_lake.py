"""FrozenLake maps: the canonical ones, random ones, files; states as text and back; many lakes as one stacked MDP.

A grid is a tuple of row strings over S (start), F (frozen), H (hole) and G (goal). A state is row * columns + column.

Axes: M maps, S states, A actions, K outcomes of an action.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import MAPS, generate_random_map

from llm_policy.environments.mdp import MDP, MOST_STATES
from llm_policy.environments.table_environment import Drawing
from llm_policy.errors import InputError
from llm_policy.reading import read_text

ACTIONS = ("LEFT", "DOWN", "RIGHT", "UP")
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) steps in the order of ACTIONS
CANONICAL_GRIDS = {name: tuple(rows) for name, rows in MAPS.items()}
Grid = tuple[str, ...]
Cell = tuple[int, int]  # row, column
Arrows = dict[int, tuple[int, int]]

AGENT = "A"
ANSI_AGENT = re.compile(r"\x1b\[41m(.)\x1b\[0m")
ANSI_HEADER = re.compile(r"\A\s*\((?:Left|Down|Right|Up)\)\s*[\n|]", re.IGNORECASE)


def grid_text(grid: Sequence[str]) -> str:
    """The grid in one line, rows joined by "|"."""
    return "|".join(grid)


def grid_of(text: str) -> Grid:
    """The inverse of `grid_text`, unchecked."""
    return tuple(text.split("|"))


def check_grid(grid: Sequence[str], where: str = "map") -> Grid:
    """The grid as a tuple of rows.

    InputError, beginning with `where`: fewer than 2 cells or more than `MOST_STATES`, ragged rows, an unknown letter,
    no start, no goal, no way from a start to a goal.
    """
    rows = tuple(grid)
    if not rows or sum(map(len, rows)) < 2:
        raise InputError(f"{where}: {grid_text(rows)!r} is too small, expected at least 2 cells")
    if (cells := sum(map(len, rows))) > MOST_STATES:
        raise InputError(f"{where}: {cells} cells, expected at most {MOST_STATES}: exact solutions take their square")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise InputError(f"{where}: row {number} {row!r} has {len(row)} cells, expected {len(rows[0])} as in row 1")
        unknown = set(row) - set("SFHG")
        if unknown:
            letter = min(unknown)
            raise InputError(
                f"{where}: row {number}, column {row.index(letter) + 1} has the unknown letter {letter!r}, "
                "expected S, F, H or G"
            )
    for letter, name in (("S", "start"), ("G", "goal")):
        if not any(letter in row for row in rows):
            raise InputError(f"{where}: {grid_text(rows)!r} has no {name}, expected at least one {letter}")
    starts = [(r, c) for r, row in enumerate(rows) for c, letter in enumerate(row) if letter == "S"]
    if not any(leads_to_goal(rows, start) for start in starts):
        raise InputError(f"{where}: {grid_text(rows)!r} has no way from S to G around the holes; open one")
    return rows


def leads_to_goal(grid: Grid, cell: Cell, without: Cell | None = None) -> bool:
    """Whether a way around the holes leads from `cell` to a goal, and not through the cell `without`."""
    return bool(np.isfinite(goal_distances(grid, without)[cell[0] * len(grid[0]) + cell[1]]))


def read_grid(name_or_path: str | Path) -> Grid:
    """A canonical grid by its name ("4x4", "8x8"), or a text file with one row per line."""
    if str(name_or_path) in CANONICAL_GRIDS:
        return CANONICAL_GRIDS[str(name_or_path)]
    try:
        text = read_text(name_or_path, encoding="utf-8-sig")
    except FileNotFoundError:
        names = ", ".join(CANONICAL_GRIDS)
        raise InputError(f"map {name_or_path}: no such file, expected {names} or the path of a text file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"map {name_or_path}: cannot be read as UTF-8 text ({error})") from None
    return check_grid([row.strip() for row in text.strip().splitlines()], where=f"map {name_or_path}")


def random_grids(count: int, size: int = 4, seed: int = 0) -> list[Grid]:
    """`count` distinct solvable square grids by Gymnasium's generator, in the order of its seeds seed*2^32, +1, ...

    Equal arguments give equal grids; a larger count begins with those of a smaller one. Being distinct, they can be
    split into training and test maps. InputError if there are hardly so many distinct maps of this size.
    """
    if count < 0 or size < 2 or seed < 0:
        raise InputError(
            f"random maps: count {count}, size {size}, seed {seed}; expected count >= 0, size >= 2 and seed >= 0"
        )
    grids: dict[Grid, None] = {}
    first_seed = seed << 32
    draws = 0
    # A map met long after the last new one says that the rest is too rare to wait for.
    last_new_draw = 0
    while len(grids) < count:
        grid = tuple(generate_random_map(size, seed=first_seed + draws))
        draws += 1
        if grid not in grids:
            grids[grid] = None
            last_new_draw = draws
        elif draws - last_new_draw > 1000:
            raise InputError(
                f"random maps: only {len(grids)} distinct {size}x{size} maps found, {count} wanted; ask for fewer or "
                "larger ones"
            )
    return list(grids)


def state_text(grid: Grid, state: int) -> str:
    """The grid with the agent's cell as A, rows joined by "|": "AFFF|FHFH|FFFH|HFFG" is state 0 of the 4x4 map.

    `InputError` for a grid of several starts: what stands under the agent could not be told.
    """
    if "".join(grid).count("S") > 1:
        raise InputError(f"map {grid_text(grid)}: has several starts; as a table of states it may have one S")
    row, column = divmod(state, len(grid[0]))
    rows = list(grid)
    rows[row] = rows[row][:column] + AGENT + rows[row][column + 1 :]
    return grid_text(rows)


def parse_state_text(text: str) -> tuple[Grid, int]:
    """The inverse of `state_text`: (grid, state). Rows may also be lines, and Gymnasium's ANSI rendering is understood.

    The letter under an A is taken to be S if the grid has no other S, else F; ANSI text keeps it.
    InputError, one line, if the text is no grid with one agent.
    """
    rows = [row.strip() for row in re.split(r"[|\n]", ANSI_HEADER.sub("", text.replace("\r", "")).strip("|\n "))]
    plain = grid_text(rows)
    shown = repr(text if len(text) <= 100 else text[:97] + "...")
    agents = len(ANSI_AGENT.findall(plain)) + ANSI_AGENT.sub("", plain).count(AGENT)
    if agents != 1:
        raise InputError(f"{shown} shows {agents or 'no'} agents, expected one cell with the letter A")
    ansi = ANSI_AGENT.search(plain)
    if ansi:
        under, plain = ansi.group(1), ANSI_AGENT.sub(AGENT, plain)
    else:
        under = "F" if "S" in plain else "S"
    state = plain.replace("|", "").index(AGENT)
    return check_grid(grid_of(plain.replace(AGENT, under)), where=shown), state


def default_horizon(grid: Grid) -> int:
    """Gymnasium's step limits, 100 on 4x4 and 200 on 8x8, in proportion for other sizes."""
    return 25 * max(len(grid), len(grid[0]))


def acting_states(grid: Grid) -> list[int]:
    """The states in which an action is chosen: neither hole nor goal."""
    return [state for state, letter in enumerate("".join(grid)) if letter in "SF"]


def lake_mdp(grids: Grid | Sequence[Grid], is_slippery: bool = True) -> MDP:
    """The MDP of one grid, or of a list of equally sized grids stacked along axis M. Equal to Gymnasium's `P`.

    Slippery: the intended direction and the two beside it, 1/3 each (K=3, in the order a-1, a, a+1); else K=1.
    Reward 1 for entering the goal; holes and the goal end the episode.
    """
    single = isinstance(grids[0], str)
    stack: list = [grids] if single else list(grids)
    sizes = {(len(grid), len(grid[0])) for grid in stack}
    if len(sizes) != 1:
        raise InputError(f"maps: {len(sizes)} different sizes in one stack, expected maps of one size")
    (rows, columns) = sizes.pop()
    cells_MS = np.array([list("".join(grid)) for grid in stack])
    maps, states = cells_MS.shape
    terminal_MS = (cells_MS == "H") | (cells_MS == "G")

    row_S, column_S = np.divmod(np.arange(states), columns)
    neighbours_SA = np.stack(
        [(row_S + down).clip(0, rows - 1) * columns + (column_S + right).clip(0, columns - 1) for down, right in MOVES],
        axis=1,
    )
    turns_K = np.array([-1, 0, 1]) if is_slippery else np.array([0])
    next_states_SAK = neighbours_SA[:, (np.arange(len(ACTIONS))[:, None] + turns_K) % len(ACTIONS)]
    next_states_MSAK = np.where(
        terminal_MS[:, :, None, None],
        np.arange(states)[:, None, None],
        np.broadcast_to(next_states_SAK, (maps, *next_states_SAK.shape)),
    )
    # Gymnasium computes the side steps as (1 - 1/3) / 2: the same last bit here makes the comparison exact.
    chance_K = np.array([(1 - 1 / 3) / 2, 1 / 3, (1 - 1 / 3) / 2]) if is_slippery else np.array([1.0])
    acting_MS11 = ~terminal_MS[:, :, None, None]
    goes_on_MSAK = acting_MS11 & ~terminal_MS[:, next_states_SAK]
    wins_MSAK = acting_MS11 & (cells_MS == "G")[:, next_states_SAK]
    start_MS = (cells_MS == "S").astype(np.float64)
    arrays = (
        next_states_MSAK,
        goes_on_MSAK * chance_K,
        (wins_MSAK * chance_K).sum(axis=-1),
        start_MS / start_MS.sum(axis=1, keepdims=True),
        terminal_MS,
    )
    return MDP(*(array[0] for array in arrays)) if single else MDP(*arrays)


def shortest_path_policy(grid: Grid) -> np.ndarray:
    """One-hot policy (S, A) of the shortest path to a goal around the holes, as if the ice were not slippery.

    Ties go to the first action in the order of ACTIONS; cells without a path (and holes, goals) take LEFT.
    """
    next_states_SA = lake_mdp(grid, is_slippery=False).next_states_SAK[:, :, 0]
    return np.eye(len(ACTIONS))[goal_distances(grid)[next_states_SA].argmin(axis=1)]


@lru_cache(maxsize=4096)
def goal_distances(grid: Grid, without: Cell | None = None) -> np.ndarray:
    """Steps to the nearest goal around the holes, as if the ice were not slippery, (S,); inf where there is no way.

    With `without` no way leads through that cell.
    """
    columns = len(grid[0])
    cells = {(r, c): letter for r, row in enumerate(grid) for c, letter in enumerate(row)}
    open_cells = {cell for cell, letter in cells.items() if letter != "H" and cell != without}
    queue = deque(cell for cell in open_cells if cells[cell] == "G")
    steps = dict.fromkeys(queue, 0)
    while queue:
        row, column = queue.popleft()
        for near in ({(row + down, column + right) for down, right in MOVES} & open_cells) - steps.keys():
            steps[near] = steps[row, column] + 1
            queue.append(near)
    distance_S = np.full(len(cells), np.inf)
    for (row, column), count in steps.items():
        distance_S[row * columns + column] = count
    return distance_S


@dataclass(frozen=True)
class FrozenLake:
    """One lake: a `TableEnvironment`."""

    grid: Grid
    is_slippery: bool = True

    env_id: ClassVar[str] = "FrozenLake-v1"
    actions: ClassVar[tuple[str, ...]] = ACTIONS
    arrows: ClassVar[Arrows] = {action: (right, down) for action, (down, right) in enumerate(MOVES)}
    pays_success: ClassVar[bool] = True  # the goal earns 1 and nothing else earns anything

    def __str__(self) -> str:
        return grid_text(self.grid)

    @cached_property
    def mdp(self) -> MDP:
        return lake_mdp(self.grid, self.is_slippery)

    @property
    def success_mdp(self) -> MDP:
        return self.mdp

    @property
    def acting_states(self) -> list[int]:
        return acting_states(self.grid)

    @property
    def horizon_steps(self) -> int:
        return default_horizon(self.grid)

    def state_text(self, state: int) -> str:
        return state_text(self.grid, state)

    @classmethod
    def read_state(cls, text: str, is_slippery: bool = True) -> "tuple[FrozenLake, int]":
        """`InputError` also for an agent in a hole or at the goal, where no action is chosen."""
        grid, state = parse_state_text(text)
        state_text(grid, state)  # `InputError` for what cannot be written as a state again
        letter = "".join(grid)[state]
        if letter in "HG":
            where = {"H": "in a hole", "G": "at the goal"}[letter]
            raise InputError(f"{text!r}: the agent stands {where}, expected a state in which an action is chosen")
        return cls(grid, is_slippery), state

    def is_goal(self, state: int) -> bool:
        return "".join(self.grid)[state] == "G"

    def make(self, horizon_steps: int | None = None) -> gymnasium.Env:
        steps = horizon_steps or self.horizon_steps
        return gymnasium.make(self.env_id, desc=list(self.grid), is_slippery=self.is_slippery, max_episode_steps=steps)

    def drawings(self) -> list[Drawing]:
        columns = len(self.grid[0])
        return [Drawing("", self.grid, {divmod(state, columns): state for state in self.acting_states})]
