"""CliffWalking and Taxi as `TableEnvironment`s, and all such environments by their names.

Both are Gymnasium's with its default dynamics, in which only Taxi's start is random. Taxi is version 4: Gymnasium no
longer makes version 3, whose table is the same.
"""

import importlib
from typing import ClassVar

import numpy as np
from gymnasium.envs.toy_text.taxi import MAP as TAXI_MAP

from llm_policy.environments import frozen_lake
from llm_policy.environments.frozen_lake import Arrows, Cell, FrozenLake
from llm_policy.environments.gym_table import GymTable
from llm_policy.environments.table_environment import Drawing
from llm_policy.errors import InputError

TAXI_SIZE = 5
# Between two cells of Gymnasium's map stands a wall, "|", or none, ":".
TAXI_CELLS = {(row, column): TAXI_MAP[1 + row][1 + 2 * column] for row, column in np.ndindex(TAXI_SIZE, TAXI_SIZE)}
TAXI_PLACES = {letter: cell for letter in "RGYB" for cell in TAXI_CELLS if TAXI_CELLS[cell] == letter}
TAXI_WALLS = frozenset(
    (row, column) for row, column in np.ndindex(TAXI_SIZE, TAXI_SIZE - 1) if TAXI_MAP[1 + row][2 + 2 * column] == "|"
)


class CliffWalking(GymTable):
    """From the lower left corner to the lower right one, past a cliff that leads back to the start.

    Example 6.6 of Sutton and Barto (2018): -1 per step, -100 for the cliff.
    """

    grid: ClassVar[tuple[str, ...]] = ("............", "............", "............", "SCCCCCCCCCCG")

    env_id: ClassVar[str] = "CliffWalking-v1"
    task: ClassVar[str] = "cliff_walking"
    actions: ClassVar[tuple[str, ...]] = ("UP", "RIGHT", "DOWN", "LEFT")
    arrows: ClassVar[Arrows] = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}
    state_form: ClassVar[str] = f"{frozen_lake.grid_text(grid)} with A in place of the S or of one point"

    def cell(self, state: int) -> Cell:
        """Row and column, both from 0, the row from the top."""
        row, column = divmod(state, len(self.grid[0]))
        return row, column

    def state_text(self, state: int) -> str:
        """The map with the agent as A, rows joined by "|"."""
        return frozen_lake.state_text(self.grid, state)

    def drawings(self) -> list[Drawing]:
        return [Drawing("", self.grid, {self.cell(state): state for state in self.acting_states})]


class Taxi(GymTable):
    """Fetch a passenger at one of four places and bring them to another one, in a room with walls.

    Dietterich (2000): -1 per step, -10 for a pickup or dropoff that is not possible, 20 for the delivery.
    """

    places: ClassVar[dict[str, Cell]] = TAXI_PLACES  # in Gymnasium's order
    walls: ClassVar[frozenset[Cell]] = TAXI_WALLS  # cells with a wall between them and their neighbour in the east
    in_taxi: ClassVar[str] = "in taxi"

    env_id: ClassVar[str] = "Taxi-v4"
    task: ClassVar[str] = "taxi"
    actions: ClassVar[tuple[str, ...]] = ("SOUTH", "NORTH", "EAST", "WEST", "PICKUP", "DROPOFF")
    arrows: ClassVar[Arrows] = {0: (0, 1), 1: (0, -1), 2: (1, 0), 3: (-1, 0)}
    state_form: ClassVar[str] = (
        "'taxi ROW,COLUMN passenger PLACE destination PLACE' with rows and columns from 0 to 4 and two different "
        "places of R, G, Y, B, or 'in taxi' for the passenger"
    )

    def parts(self, state: int) -> tuple[int, int, str, str]:
        """Row and column of the taxi, the passenger's place ("R", "G", "Y", "B" or "in taxi"), the destination."""
        row, column, passenger, destination = np.unravel_index(state, (TAXI_SIZE, TAXI_SIZE, 5, 4))
        return int(row), int(column), (*self.places, self.in_taxi)[passenger], tuple(self.places)[destination]

    def state(self, row: int, column: int, passenger: str, destination: str) -> int:
        """The inverse of `parts`."""
        indices = (*self.places, self.in_taxi).index(passenger), tuple(self.places).index(destination)
        return int(np.ravel_multi_index((row, column, *indices), (TAXI_SIZE, TAXI_SIZE, 5, 4)))

    def state_text(self, state: int) -> str:
        """For example "taxi 2,3 passenger R destination G"."""
        row, column, passenger, destination = self.parts(state)
        return f"taxi {row},{column} passenger {passenger} destination {destination}"

    def drawings(self) -> list[Drawing]:
        """The passenger at each place, bound for the next one, and in the taxi, bound for each place: 200 states."""
        places = tuple(self.places)
        waiting = zip(places, places[1:] + places[:1], strict=True)
        return [self._drawing(*journey) for journey in (*waiting, *((self.in_taxi, place) for place in places))]

    def _drawing(self, passenger: str, destination: str) -> Drawing:
        """The room for one passenger and destination, which have the colours of start and goal."""
        colours = {self.places.get(passenger): "S", self.places[destination]: "G"}
        rows = [[colours.get((row, column), ".") for column in range(TAXI_SIZE)] for row in range(TAXI_SIZE)]
        where = passenger if passenger == self.in_taxi else f"at {passenger}"
        return Drawing(
            f"passenger {where}, to {destination}",
            tuple("".join(row) for row in rows),
            {cell: self.state(*cell, passenger, destination) for cell in TAXI_CELLS},
            labels={cell: letter for letter, cell in self.places.items()},
            walls=self.walls,
        )


def gym_tables() -> dict[str, type[GymTable]]:
    """By `env_id`: CliffWalking and Taxi, which are made known here, and those of modules that have been imported."""
    return GymTable.known


def environment_kind(env_id: str) -> type[FrozenLake] | type[GymTable]:
    """A table environment's class by its name; `MODULE:NAME` imports the module first. `InputError` for others."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"--env_id {env_id}: {error}") from error
    kinds: dict[str, type[FrozenLake] | type[GymTable]] = {FrozenLake.env_id: FrozenLake, **gym_tables()}
    if name not in kinds:
        raise InputError(
            f"--env_id {env_id!r}: expected one of {', '.join(kinds)}, or MODULE:NAME of a game of your own"
        )
    return kinds[name]
