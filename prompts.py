"""The lake's words: state -> chat messages. What the model is told of a lake stands in this file.

The prompt names what the original left out: where the agent stands (rows and columns, not a colour code), how the ice
behaves, what the letters mean and what an answer looks like.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import cycle

from llm_policy.chat import Messages
from llm_policy.environments.frozen_lake import ACTIONS, MOVES, Cell, Grid, grid_text
from llm_policy.errors import InputError

SYSTEM_PROMPT = (
    "Cross the frozen lake to the goal. S start, F ice, H hole, G goal, A you. {dynamics} "
    "Reply <think>thought</think><answer>ACTION</answer>, ACTION is LEFT, DOWN, RIGHT or UP."
)
SLIPPERY = "Slippery: you move as chosen or to either side of it, each with probability 1/3."
NOT_SLIPPERY = "Not slippery: you always move as chosen."

# The faults of the original's prompt in words of our own: the agent's place is nothing but a colour code, the ice is
# not said to be slippery, and the three examples answer RIGHT, DOWN, DOWN where the expert goes LEFT, UP, LEFT
# (`--check` reports all of that). The published one has no chat template, writes its examples as spaced grids with the
# S moved to the agent (cells 0, 2, 10), and was cut to 512 tokens.
ORIGINAL_PROMPT = (
    "You are an agent on a frozen lake. S is the start, F frozen, H a hole, G the goal. Reach the goal without falling "
    "into a hole. Think in <think></think> tags, then give one of LEFT, DOWN, RIGHT, UP in <answer></answer> tags."
)
ORIGINAL_EXAMPLES = (
    (0, "The goal is to the right and below, I move right.", "RIGHT"),
    (1, "The goal is below, I move down.", "DOWN"),
    (4, "Below is frozen ice, I move down.", "DOWN"),
)
_LETTER_NAMES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}


# Parts of an observation: (grid, row-major index of the agent's cell) -> text --------------------------------------


def position(grid: Grid, state: int) -> str:
    """Row and column of the agent, both from 0."""
    row, column = _cell(grid, state)
    return f"You are at row {row}, column {column}."


def map_rows(grid: Grid, state: int, agent: str = "A", between: str = "") -> str:
    """The map with the agent's cell as `agent`."""
    agent_row, column = divmod(state, len(grid[0]))
    rows = [[*row[:column], agent, *row[column + 1 :]] if r == agent_row else row for r, row in enumerate(grid)]
    return "\n".join(between.join(row) for row in rows)


def spaced_rows(grid: Grid, state: int) -> str:
    """The map with a space between cells, so that each is one token.

    A tokenizer makes SF, HF of SFHF and H, FF, F of HFFF, which hides the columns.
    """
    return map_rows(grid, state, between=" ")


def coloured_rows(grid: Grid, state: int) -> str:
    """The map with the agent's cell marked by an ANSI colour, as Gymnasium's text rendering does it."""
    row, column = _cell(grid, state)
    return map_rows(grid, state, agent=f"\x1b[41m{grid[row][column]}\x1b[0m")


def neighbours(grid: Grid, state: int) -> str:
    """What lies one step away in each direction."""
    return _around(grid, state, lambda cell: _cell_name(grid, cell))


def neighbours_with_ways(grid: Grid, state: int) -> str:
    """The same, and behind each neighbour of ice on how many sides ice or the goal follows."""

    def name(cell: Cell) -> str:
        if _cell_name(grid, cell) != "ice":
            return _cell_name(grid, cell)
        _, count = _onward(grid, _cell(grid, state), cell)
        return f"ice with {count} {'way' if count == 1 else 'ways'} on"

    return _around(grid, state, name)


def _around(grid: Grid, state: int, name: Callable[[Cell], str]) -> str:
    beside = zip(ACTIONS, _beside(_cell(grid, state)), strict=True)
    return ", ".join(f"{action}: {name(cell)}" for action, cell in beside) + "."


def _onward(grid: Grid, here: Cell, cell: Cell) -> tuple[list[Cell], int]:
    """The cells around `cell` besides the one that the agent comes from, and how many are ice or the goal."""
    cells = [behind for behind in _beside(cell) if behind != here]
    return cells, sum(_cell_name(grid, behind) in ("ice", "goal") for behind in cells)


def _cell_name(grid: Grid, cell: Cell) -> str:
    return _LETTER_NAMES[grid[cell[0]][cell[1]]] if _is_on_map(grid, cell) else "edge"


def _is_on_map(grid: Grid, cell: Cell) -> bool:
    return 0 <= cell[0] < len(grid) and 0 <= cell[1] < len(grid[0])


CELL_NAMES = "0123456789abcdef"  # of rows and of columns, so that a cell's name is always two characters


def named_position(grid: Grid, state: int) -> str:
    """The agent's cell by its name."""
    return f"You are at {cell_name(grid, _cell(grid, state))}."


def named_cells(grid: Grid, state: int) -> str:
    """The map, every cell behind its name: what lies there can be looked up and copied, without counting."""
    rows = [
        [f"{cell_name(grid, (r, c))}:{'A' if (r, c) == _cell(grid, state) else letter}" for c, letter in enumerate(row)]
        for r, row in enumerate(grid)
    ]
    return "\n".join(map(" ".join, rows))


def cell_name(grid: Grid, cell: Cell) -> str:
    """Row and column, a character each. `InputError` for a map with more than 16 of either."""
    if max(len(grid), len(grid[0])) > len(CELL_NAMES):
        raise InputError(
            f"a map of {len(grid)} x {len(grid[0])} cells: names are for {len(CELL_NAMES)} rows and columns at most; "
            "use another --observation and --thought place, or smaller maps"
        )
    return CELL_NAMES[cell[0]] + CELL_NAMES[cell[1]]


def _cell(grid: Grid, state: int) -> Cell:
    return divmod(state, len(grid[0]))


# A new observation is one entry: its parts, each on lines of its own.
OBSERVATIONS = {
    "grid": (map_rows,),
    "coordinates": (position, map_rows),
    "neighbours": (position, map_rows, neighbours),
    "spaced": (position, spaced_rows, neighbours),
    "ways": (position, spaced_rows, neighbours_with_ways),
    "cells": (named_position, named_cells),
    "original": (coloured_rows,),
}


def observation_text(grid: Grid, state: int, observation: str = "coordinates") -> str:
    """What the agent sees of `grid` standing on cell `state` (row-major index): the parts of `observation`."""
    if observation not in OBSERVATIONS:
        raise InputError(f"--observation {observation!r}: expected one of {', '.join(OBSERVATIONS)}")
    return "\n".join(part(grid, state) for part in OBSERVATIONS[observation])


def policy_messages(grid: Grid, state: int, is_slippery: bool, observation: str = "coordinates") -> Messages:
    """The prompt of one state: a system turn (task, dynamics, answer form) and a user turn (the observation).

    With the observation `original` one user turn: task, three examples on the same map, observation.
    """
    if observation == "original":
        cells = "".join(grid)
        if any(cells[cell : cell + 1] not in ("S", "F") for cell, _, _ in ORIGINAL_EXAMPLES):
            raise InputError(
                f"--observation original: its examples stand on cells 0, 1 and 4, not all of which are ice on "
                f"{grid_text(grid)}; use another observation or the 4x4 map"
            )
        examples = [
            f"{observation_text(grid, cell, observation)}\n<think>{thought}</think><answer>{action}</answer>"
            for cell, thought, action in ORIGINAL_EXAMPLES
        ]
        text = "\n\n".join([ORIGINAL_PROMPT, *examples, observation_text(grid, state, observation)])
        return [{"role": "user", "content": text}]
    system = SYSTEM_PROMPT.format(dynamics=SLIPPERY if is_slippery else NOT_SLIPPERY)
    user = observation_text(grid, state, observation)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


# Thoughts: what the warm start teaches, (grid, row-major index of the agent's cell) -> text. All of it follows from the
# map and the dynamics, prefers no action, and needs no more than the words before it and a look at the map. In order
# they are 11, 26, 67 and 116 tokens in the mean of 300 maps of 4x4, and at most 11, 30, 107 and 271; the search on
# slippery ice 218 and 370 (100 maps).


def think_place(grid: Grid, state: int) -> str:
    """Where the agent stands."""
    row, column = _cell(grid, state)
    return f"I am at row {row}, column {column}."


def think_neighbours(grid: Grid, state: int) -> str:
    """What lies around it: each cell by its name, then what it is."""
    cells = zip(ACTIONS, _beside(_cell(grid, state)), strict=True)
    return ", ".join(f"{action} {_looked_up(grid, cell)}" for action, cell in cells) + "."


def think_ways(grid: Grid, state: int) -> str:
    """The same, and behind each neighbour of ice what follows on the three other sides, and how often ice or goal."""
    here, parts = _cell(grid, state), []
    for action, cell in zip(ACTIONS, _beside(here), strict=True):
        part = f"{action} {_looked_up(grid, cell)}"
        if _cell_name(grid, cell) == "ice":
            onward, count = _onward(grid, here, cell)
            part += f" ({', '.join(_looked_up(grid, behind) for behind in onward)}) {count} on"
        parts.append(part)
    return ". ".join(parts) + "."


TURNS = "ghijklmnopqrstuvwxyz"  # no letters of a cell's name or of a map; again from the beginning if need be


def think_search(grid: Grid, state: int, hole: str = "H") -> str:
    """A search from the goals that looks around each cell it passes, up to the agent's (`search_text`)."""
    return search_text(_goals(grid), _cell(grid, state), partial(_around_on_map, grid), partial(cell_name, grid), hole)


def think_slips(grid: Grid, state: int) -> str:
    """The same, and then where each action may slip to: for ice that is slippery.

    In the place of the agent's line each action has one: the cell that it would lead to without a slip, its mark
    (`+ . !`, or `=` where the edge keeps the agent on its own), and behind ice `>` and what lies around that cell, each
    with the number of holes so far; then once more the action, the mark, and the last such number (0 where there is
    none). Last is each action behind what was said of itself and of the two that it may slip to. Words come before what
    belongs to them, so that it is found again by the word.

    >>> print(think_slips(("SFFF", "FHFH", "FFFH", "HFFG"), 14))
    33>32A32 23H
    LEFT31.>30H1 32A1 21F1 LEFT.1
    DOWN32= DOWN=0
    RIGHT33+ RIGHT+0
    UP22.>21F0 32A0 23H1 12F1 UP.1
    UP.1LEFT.1DOWN=0>LEFT
    LEFT.1DOWN=0RIGHT+0>DOWN
    DOWN=0RIGHT+0UP.1>RIGHT
    RIGHT+0UP.1LEFT.1>UP
    """
    here, around, name = _cell(grid, state), partial(_around_on_map, grid), partial(cell_name, grid)
    lines, steps = _search(_goals(grid), here, around, name, "H")
    said = []  # of each action
    for action, cell in zip(ACTIONS, _beside(here), strict=True):
        end = cell if _is_on_map(grid, cell) else here
        mark = "=" if end == here else _mark(steps, here, end, grid[end[0]][end[1]], "H")
        line, holes = f"{action}{name(end)}{mark}", 0
        if end != here and _cell_name(grid, end) == "ice":
            seen = []
            for _, near, letter in around(end):
                holes += letter == "H"
                seen.append(f"{name(near)}{'A' if near == here else letter}{holes}")
            line += f">{' '.join(seen)}"
        said.append(f"{action}{mark}{holes}")
        lines.append(f"{line} {said[-1]}")
    for index, action in enumerate(ACTIONS):
        lines.append(f"{said[index - 1]}{said[index]}{said[(index + 1) % len(said)]}>{action}")
    return "\n".join(lines)


def _goals(grid: Grid) -> list[Cell]:
    return [_cell(grid, state) for state, letter in enumerate("".join(grid)) if letter == "G"]


def _around_on_map(grid: Grid, cell: Cell) -> list[tuple[str, Cell, str]]:
    """The cells beside one: action, cell, letter, in the order of the actions."""
    beside = zip(ACTIONS, _beside(cell), strict=True)
    return [(action, (r, c), grid[r][c]) for action, (r, c) in beside if _is_on_map(grid, (r, c))]


def search_text(
    goals: Sequence[Cell],
    here: Cell,
    around: Callable[[Cell], Sequence[tuple[str, Cell, str]]],
    name: Callable[[Cell], str],
    hole: str = "H",
) -> str:
    """Breadth first from `goals` until `here` is met: a line per cell, its name, `>`, and what lies around it.

    That is each cell beside it by its name, and `-` where the search has come by already, the hole's letter, or, where
    it goes on later, the next of `TURNS` (A for the agent) and the name again, which stand so once more when its turn
    has come. Last is the agent's own cell, with each cell beside it, a mark, and the action that leads there: `+` is on
    a shortest way, `!` a hole. So every word follows from what stands before it, or is looked up there or in the map.

    Args:
        around: cell -> the cells beside it: action, cell, letter, in the order of the actions.
        hole: a letter that is not entered.

    >>> row = "SFFFG"
    >>> def beside(cell):
    ...     sides = (("LEFT", cell[1] - 1), ("RIGHT", cell[1] + 1))
    ...     return [(action, (0, x), row[x]) for action, x in sides if 0 <= x < len(row)]
    >>> print(search_text([(0, 4)], (0, 1), beside, lambda cell: f"{cell[0]}{cell[1]}"))
    04>03g03
    g03>02h02 04-
    h02>01A01 03-
    A01> 00.LEFT 02+RIGHT
    """
    lines, steps = _search(goals, here, around, name, hole)
    # The mark directly before the action, and in no other line: a model that attends to what stood behind a `+` copies
    # it into the answer
    beside_agent = [
        f"{name(near)}{_mark(steps, here, near, letter, hole)}{action}" for action, near, letter in around(here)
    ]
    return "\n".join([*lines, f"A{name(here)}> {' '.join(beside_agent)}"])


def _search(
    goals: Sequence[Cell],
    here: Cell,
    around: Callable[[Cell], Sequence[tuple[str, Cell, str]]],
    name: Callable[[Cell], str],
    hole: str,
) -> tuple[list[str], dict[Cell, int]]:
    """The lines of `search_text` up to the agent's own, and steps from each cell to the nearest goal."""
    queue, turns = deque(("", goal) for goal in goals), cycle(TURNS)
    steps, lines = dict.fromkeys(goals, 0), []
    while queue and here not in steps:
        turn, cell = queue.popleft()
        marks = []
        for _, near, letter in around(cell):
            mark = "-" if near in steps else letter
            if mark not in ("-", hole):
                queue.append(("A" if near == here else next(turns), near))
                mark = queue[-1][0] + name(near)
            marks.append(name(near) + mark)
        for _, near in queue:
            steps.setdefault(near, steps[cell] + 1)
        lines.append(f"{turn}{name(cell)}>{' '.join(marks)}")
    return lines, steps


def _mark(steps: dict[Cell, int], here: Cell, near: Cell, letter: str, hole: str) -> str:
    """`+` for a cell on a shortest way from `here`, `!` for a hole, `.` for another."""
    is_nearer = here in steps and steps.get(near, steps[here]) < steps[here]
    return "+" if is_nearer else "!" if letter == hole else "."


def _beside(cell: Cell) -> list[Cell]:
    """The cells around one, in the order of the actions; those beyond the edge as well."""
    return [(cell[0] + down, cell[1] + right) for down, right in MOVES]


def _looked_up(grid: Grid, cell: Cell) -> str:
    """`12: ice`; what has no name lies outside."""
    what = _cell_name(grid, cell)
    return "out" if what == "edge" else f"{cell_name(grid, cell)}: {what}"


# A new thought is one entry
THOUGHTS = {"place": think_place, "neighbours": think_neighbours, "ways": think_ways, "search": think_search}
SLIPPERY_THOUGHTS = THOUGHTS | {"search": think_slips}  # what differs where the ice is slippery


@lru_cache(maxsize=16)  # a lesson asks for each action
def thought_text(grid: Grid, state: int, thought: str = "place", is_slippery: bool = False) -> str:
    """What is true of the agent's place, the map and the ice, in the words of `thought`."""
    if thought not in THOUGHTS:
        raise InputError(f"--thought {thought!r}: expected one of {', '.join(THOUGHTS)}")
    return (SLIPPERY_THOUGHTS if is_slippery else THOUGHTS)[thought](grid, state)


def format_example(grid: Grid, state: int, action: int, thought: str = "place", is_slippery: bool = False) -> str:
    """A well-formed reply for the warm start, whatever `action` is: it says what is so, and takes it."""
    return f"<think>{thought_text(grid, state, thought, is_slippery)}</think><answer>{ACTIONS[action]}</answer>"
