"""Any Gymnasium environment with a table `P`, as a `TableEnvironment`: a subclass says how its states read and look.

docs/tasks.md has an example from the table to the trained policy. CliffWalking and Taxi are in toy_text.py.

Axes: S states, A actions, K outcomes of an action.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import ClassVar, Self

import gymnasium
import numpy as np

from llm_policy.environments.gym_env import DEFAULT_HORIZON_STEPS
from llm_policy.environments.mdp import MDP, mdp_from_env
from llm_policy.environments.table_environment import Drawing
from llm_policy.errors import InputError


@dataclass(frozen=True)
class GymTable:
    """One table, made by Gymnasium. A subclass has `env_id`, `task`, `actions` and `state_text`, the rest as it likes.

    Attributes:
        known: all subclasses by their `env_id`.
        task: the name in `tasks.TASKS` under which it is trained and judged.
        state_form: what `read_state` expects, in words.
    """

    known: ClassVar[dict[str, type["GymTable"]]] = {}

    env_id: ClassVar[str]
    task: ClassVar[str]
    actions: ClassVar[tuple[str, ...]]
    arrows: ClassVar[dict[int, tuple[int, int]]] = {}
    state_form: ClassVar[str] = "the text of a state in which an action is chosen"
    pays_success: ClassVar[bool] = False  # each step costs something

    def __init_subclass__(cls, **keywords) -> None:
        super().__init_subclass__(**keywords)
        if "env_id" in vars(cls):  # else it looks at its parent's environment in another way
            GymTable.known[cls.env_id] = cls

    def __str__(self) -> str:
        return self.env_id

    @property
    def horizon_steps(self) -> int:
        return gymnasium.spec(self.env_id).max_episode_steps or DEFAULT_HORIZON_STEPS

    @property
    def mdp(self) -> MDP:
        return _mdp(self.env_id)

    @property
    def success_mdp(self) -> MDP:
        return _success_mdp(self)

    @property
    def acting_states(self) -> list[int]:
        return list(_acting_states(self.env_id))

    def state_text(self, state: int) -> str:
        raise NotImplementedError

    def is_goal(self, state: int) -> bool:
        """Whether an episode that ends in this state has succeeded. To be said where episodes end badly, too."""
        return True

    @classmethod
    def read_state(cls, text: str) -> "tuple[Self, int]":
        """`InputError` for anything that is not the text of an acting state."""
        environment = cls()
        state = _states_by_text(environment).get(text.strip())
        if state is None:
            shown = repr(text if len(text) <= 100 else text[:97] + "...")
            raise InputError(f"{shown} is no state of {cls.env_id}, expected {cls.state_form}")
        return environment, state

    def make(self, horizon_steps: int | None = None) -> gymnasium.Env:
        return gymnasium.make(self.env_id, max_episode_steps=horizon_steps or self.horizon_steps)

    def drawings(self) -> Sequence[Drawing]:
        """One cell per acting state with its number, in the order of the numbers."""
        states = self.acting_states
        columns = ceil(len(states) ** 0.5)
        cell_of = {state: divmod(place, columns) for place, state in enumerate(states)}
        rows = ("." * columns,) * ceil(len(states) / columns)
        labels = {cell: str(state) for state, cell in cell_of.items()}
        return [Drawing("", rows, {cell: state for state, cell in cell_of.items()}, labels)]


@cache
def _mdp(env_id: str) -> MDP:
    env = gymnasium.make(env_id)
    mdp = mdp_from_env(env)
    env.close()
    return mdp


@cache
def _success_mdp(environment: GymTable) -> MDP:
    env = gymnasium.make(environment.env_id)
    table = env.get_wrapper_attr("P")
    rewards_SA = np.zeros_like(environment.mdp.rewards_SA)
    pay, acting = set(), set(environment.acting_states)
    for state, action in np.ndindex(*rewards_SA.shape):
        for probability, next_state, reward, done in table[state][action]:
            rewards_SA[state, action] += probability * (done and environment.is_goal(next_state))
            pay |= {reward} if done and state in acting else set()
    env.close()
    if len(pay) > 1 and type(environment).is_goal is GymTable.is_goal:
        raise InputError(
            f"{environment}: the last step pays {min(pay):g} or {max(pay):g}; say in {type(environment).__name__}."
            "is_goal which end is a success"
        )
    return replace(environment.mdp, rewards_SA=rewards_SA)


@cache
def _acting_states(env_id: str) -> tuple[int, ...]:
    """The states that some policy can come to from a start, without those that end the episode."""
    mdp = _mdp(env_id)
    reached_S = mdp.start_S > 0
    while True:
        next_S = reached_S.copy()
        next_S[mdp.next_states_SAK[reached_S[:, None, None] & (mdp.probabilities_SAK > 0)]] = True
        if (next_S == reached_S).all():
            return tuple(np.flatnonzero(reached_S).tolist())
        reached_S = next_S


@cache
def _states_by_text(environment: GymTable) -> dict[str, int]:
    return {environment.state_text(state): state for state in environment.acting_states}
