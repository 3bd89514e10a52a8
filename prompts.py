"""State -> chat messages. Every word that the model is told stands in this file.

The prompt names what the original left out: where the agent stands (rows and columns, not a colour code), how the ice
behaves, what the letters mean and what an answer looks like.
"""

from collections.abc import Callable

from llm_policy.chat import Messages
from llm_policy.environments.frozen_lake import ACTIONS, MOVES, Cell, Grid, grid_text
from llm_policy.errors import InputError

SYSTEM_PROMPT = (
    "Cross the frozen lake to the goal. S start, F ice, H hole, G goal, A you. {dynamics} "
    "Reply <think>thought</think><answer>ACTION</answer>, ACTION is LEFT, DOWN, RIGHT or UP."
)
SLIPPERY = "Slippery: you move as chosen or to either side of it, each with probability 1/3."
NOT_SLIPPERY = "Not slippery: you always move as chosen."

# Warm start and nothing else: what a well-formed reply looks like. It repeats the observation and names no action.
THOUGHT = "I am at row {row}, column {column}."

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
    row, column = divmod(state, len(grid[0]))
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
    row, column = divmod(state, len(grid[0]))
    return map_rows(grid, state, agent=f"\x1b[41m{grid[row][column]}\x1b[0m")


def neighbours(grid: Grid, state: int) -> str:
    """What lies one step away in each direction."""
    return _around(grid, state, lambda cell, move: _cell_name(grid, cell))


def neighbours_with_ways(grid: Grid, state: int) -> str:
    """The same, and behind each neighbour of ice on how many sides ice or the goal follows."""

    def name(cell: Cell, move: Cell) -> str:
        if _cell_name(grid, cell) != "ice":
            return _cell_name(grid, cell)
        onward = [(down, right) for down, right in MOVES if (down, right) != (-move[0], -move[1])]
        behind = [_cell_name(grid, (cell[0] + down, cell[1] + right)) for down, right in onward]
        count = behind.count("ice") + behind.count("goal")
        return f"ice with {count} {'way' if count == 1 else 'ways'} on"

    return _around(grid, state, name)


def _around(grid: Grid, state: int, name: Callable[[Cell, Cell], str]) -> str:
    row, column = divmod(state, len(grid[0]))
    cells = [name((row + down, column + right), (down, right)) for down, right in MOVES]
    return ", ".join(f"{action}: {cell}" for action, cell in zip(ACTIONS, cells, strict=True)) + "."


def _cell_name(grid: Grid, cell: Cell) -> str:
    row, column = cell
    inside = 0 <= row < len(grid) and 0 <= column < len(grid[0])
    return _LETTER_NAMES[grid[row][column]] if inside else "edge"


# A new observation is one entry: its parts, each on lines of its own.
OBSERVATIONS = {
    "grid": (map_rows,),
    "coordinates": (position, map_rows),
    "neighbours": (position, map_rows, neighbours),
    "spaced": (position, spaced_rows, neighbours),
    "ways": (position, spaced_rows, neighbours_with_ways),
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


def format_example(grid: Grid, state: int, action: int) -> str:
    """A well-formed reply for the warm start, whatever `action` is: it says where we are and takes it."""
    row, column = divmod(state, len(grid[0]))
    return f"<think>{THOUGHT.format(row=row, column=column)}</think><answer>{ACTIONS[action]}</answer>"
