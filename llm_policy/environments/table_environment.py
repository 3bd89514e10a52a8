"""An environment whose transition table is known: what experts, judges, tasks and pictures ask of it.

The environments are in frozen_lake.py and toy_text.py; `toy_text.environment_kind` finds them. A new one subclasses
`gym_table.GymTable` and stands beside its task (docs/tasks.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import gymnasium

from llm_policy.environments.mdp import MDP


@dataclass(frozen=True)
class Drawing:
    """Where the states of one picture stand.

    Attributes:
        title: what tells this picture from the others of the same environment; "" for the only one.
        cells: rows of letters; those of `pictures.CELL_COLOURS` have their own colour, others that of ground.
        state_of: (row, column) -> state, for cells in which an action is chosen.
        labels: (row, column) -> what is written there in place of the cell's letter.
        walls: (row, column) of cells with a wall between them and their neighbour on the right.
    """

    title: str
    cells: tuple[str, ...]
    state_of: dict[tuple[int, int], int]
    labels: dict[tuple[int, int], str] = field(default_factory=dict)
    walls: frozenset[tuple[int, int]] = frozenset()


class TableEnvironment(Protocol):
    """One environment, or one map of a family of them, with everything about it known. Hashable and comparable.

    Attributes:
        env_id: Gymnasium's name.
        actions: names in the order of Gymnasium's action numbers; what a model answers and what `q_value_*` end in.
        arrows: action index -> (x, y) of its arrow in a picture, y downwards; actions without a direction are missing.
        mdp: the transition table as arrays, Gymnasium's rewards.
        success_mdp: the same transitions with reward 1 for reaching the goal and 0 else.
        pays_success: whether Gymnasium's return is the success itself, so that the two are one figure.
        acting_states: the states in which an agent can come to choose an action.
        horizon_steps: the usual step limit of an episode.
    """

    env_id: ClassVar[str]
    actions: ClassVar[tuple[str, ...]]
    arrows: ClassVar[dict[int, tuple[int, int]]]
    pays_success: ClassVar[bool]

    @property
    def mdp(self) -> MDP: ...
    @property
    def success_mdp(self) -> MDP: ...
    @property
    def acting_states(self) -> list[int]: ...
    @property
    def horizon_steps(self) -> int: ...

    def __hash__(self) -> int: ...

    def state_text(self, state: int) -> str:
        """One line for `state_str` of the expert's CSV."""

    @classmethod
    def read_state(cls, text: str, *arguments: Any, **options: Any) -> "tuple[TableEnvironment, int]":
        """The inverse of `state_text`: environment (made with `options`) and state; `InputError` for anything else."""

    def is_goal(self, state: int) -> bool:
        """Whether an episode that ends in this state has succeeded."""

    def make(self, horizon_steps: int | None = None) -> gymnasium.Env:
        """The Gymnasium environment, with its own step limit or another one."""

    def drawings(self) -> Sequence[Drawing]:
        """The pictures that show all acting states, or those worth looking at."""
