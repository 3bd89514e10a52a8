"""A Gymnasium environment -> the policies that a search may propose for it: parameters, as text and as behaviour.

There are two kinds (arXiv 2511.21928). Discrete states have a table with one action per state. A vector observation s
has W s + b: a discrete action is its largest component, a continuous one is clipped to its bounds.

Axes: S states, A actions.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from llm_policy.environments.gym_env import Actor, GymEnvironment, make_gym_environment, returns
from llm_policy.errors import InputError

Parameters = tuple[float, ...]
"""Values on the grid of a `PolicySpace`: integers for a table; W row by row and then b for a linear policy."""

LINEAR_BOUND = 6.0

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
PARAMETER_LINE = re.compile(r"^[ \t]*parameters[ \t]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_SHOWN_CHARACTERS = 30


class AnswerError(ValueError):
    """An answer that names no policy. The message is one line; the model is told it."""


@dataclass(frozen=True)
class PolicySpace:
    """All policies of one environment: `count` values from `lowest` to `highest` with `decimals` decimals.

    Attributes:
        is_tabular: a table of actions; else W s + b.
        inputs: discrete states, or the length of the observation vector.
        outputs: discrete actions, or the length of the action vector.
        action_bounds: (lowest, highest) of each component of a continuous action; None for discrete ones.
        first_input, first_action: what Gymnasium calls the first state and action, almost always 0.
    """

    is_tabular: bool
    inputs: int
    outputs: int
    action_bounds: tuple[np.ndarray, np.ndarray] | None = None
    first_input: int = 0
    first_action: int = 0

    @property
    def count(self) -> int:
        return self.inputs if self.is_tabular else self.outputs * self.inputs + self.outputs

    @property
    def lowest(self) -> float:
        return 0 if self.is_tabular else -LINEAR_BOUND

    @property
    def highest(self) -> float:
        return self.outputs - 1 if self.is_tabular else LINEAR_BOUND

    @property
    def decimals(self) -> int:
        return 0 if self.is_tabular else 1

    @property
    def _grid(self) -> np.ndarray:
        steps_per_unit = 10**self.decimals
        return np.arange(round(self.lowest * steps_per_unit), round(self.highest * steps_per_unit) + 1) / steps_per_unit

    def draw(self, generator: np.random.Generator) -> Parameters:
        """Parameters drawn uniformly from the grid."""
        return self._parameters(generator.choice(self._grid, self.count))

    def neighbour(self, parameters: Parameters, generator: np.random.Generator) -> Parameters:
        """`parameters` with one value, drawn uniformly, changed to another one, drawn uniformly."""
        changed = list(parameters)
        index = int(generator.integers(self.count))
        others = self._grid[self._grid != changed[index]]
        if len(others):
            changed[index] = generator.choice(others)
        return self._parameters(changed)

    def _parameters(self, values: Iterable[float]) -> Parameters:
        if self.is_tabular:
            return tuple(int(value) for value in values)
        return tuple(float(value) + 0.0 for value in values)  # + 0.0 makes -0.0 the 0.0 that it is

    def text(self, parameters: Parameters) -> str:
        """As the history shows parameters, and as an answer must write them: "0, 3, 1" or "-0.5, 2.0"."""
        return ", ".join(f"{value:.{self.decimals}f}" for value in parameters)

    def can_begin(self, text: str) -> bool:
        """Whether `text` can become the list of values of a well-formed answer, " v, v, ...".

        >>> space = PolicySpace(is_tabular=True, inputs=3, outputs=4)
        >>> space.can_begin(" 0, 3,"), space.can_begin(" 0, 4"), space.can_begin(" 0, 3, 1, 2")
        (True, False, False)
        """
        *whole, last = text.split(",")
        if len(whole) >= self.count or not all(word in self._words for word in whole):
            return False
        return any(word.startswith(last) for word in self._words)

    def is_whole(self, text: str) -> bool:
        """Whether `text` is " v, v, ..." with all its values."""
        words = text.split(",")
        return len(words) == self.count and all(word in self._words for word in words)

    @cached_property
    def _words(self) -> frozenset[str]:
        """Every value as it stands in a list, with the space before it."""
        return frozenset(f" {self.text((value,))}" for value in self._parameters(self._grid))

    def read_answer(self, text: str) -> Parameters:
        """The parameters that an answer names. This is the only parser of the search.

        An answer has exactly one line `parameters: v, v, ...` with `count` numbers, in range and on the grid. Anything
        else raises `AnswerError`. The text is matched against numbers and never evaluated.

        >>> PolicySpace(is_tabular=True, inputs=3, outputs=4).read_answer("parameters: 0, 3, 1\\nreason: near the best")
        (0, 3, 1)
        """
        if not text.strip():
            raise AnswerError("the answer is empty")
        lines = PARAMETER_LINE.findall(text)
        if len(lines) != 1:
            raise AnswerError(f"{len(lines) or 'no'} lines begin with `parameters:`, expected one")
        words = [word.strip() for word in lines[0].strip().strip("[]()").split(",")]
        for number, word in enumerate(words, start=1):
            if not _NUMBER.fullmatch(word):
                raise AnswerError(f"value {number} is {_shortened(word)}, expected a number")
        if len(words) != self.count:
            raise AnswerError(f"{len(words)} values, expected {self.count}")
        for number, word in enumerate(words, start=1):
            if not self.lowest <= float(word) <= self.highest:
                raise AnswerError(f"value {number} is {_shortened(word)}, expected {self.lowest:g} to {self.highest:g}")
            if len(word.partition(".")[2].rstrip("0")) > self.decimals:
                wanted = "an integer" if self.is_tabular else "one decimal"
                raise AnswerError(f"value {number} is {_shortened(word)}, expected {wanted}")
        return self._parameters(map(float, words))

    def actor(self, parameters: Parameters) -> Actor:
        """The policy itself: observation -> action, as the environment has them."""
        if self.is_tabular:
            actions_S = [int(value) + self.first_action for value in parameters]
            return lambda state: actions_S[int(state) - self.first_input]
        values = np.array(parameters)
        weights = values[: self.outputs * self.inputs].reshape(self.outputs, self.inputs)
        bias = values[self.outputs * self.inputs :]
        if self.action_bounds is None:
            return lambda vector: int(np.argmax(weights @ vector + bias)) + self.first_action
        low, high = self.action_bounds
        return lambda vector: np.clip(weights @ vector + bias, low, high).astype(low.dtype)

    def policy_table(self, parameters: Parameters) -> np.ndarray:
        """One-hot `policy_SA` of a tabular policy."""
        return np.eye(self.outputs)[np.array(parameters, dtype=int)]


def _shortened(word: str) -> str:
    return repr(word if len(word) <= _SHOWN_CHARACTERS else word[:_SHOWN_CHARACTERS] + "...")


@dataclass(frozen=True)
class SearchProblem:
    """What a search works on: an environment, and the policies that may be proposed for it."""

    environment: GymEnvironment
    space: PolicySpace

    def returns(self, parameters: Parameters, episodes: int, seed: int) -> list[float]:
        """The undiscounted return of each of `episodes` episodes; the same seed gives the same episodes."""
        return returns(self.environment.env, self.space.actor(parameters), episodes, seed)


def search_problem(
    env_id: str, options: Mapping[str, Any] | None = None, horizon_steps: int | None = None
) -> SearchProblem:
    """Make the environment, as `make_gym_environment` does, and find out what its policies look like."""
    environment = make_gym_environment(env_id, options, horizon_steps)
    return SearchProblem(environment, policy_space(environment.env, env_id))


def policy_space(env: gymnasium.Env, env_id: str) -> PolicySpace:
    """Tabular for discrete observations, linear for vectors; `InputError` for any other space."""
    observations, actions = env.observation_space, env.action_space
    if isinstance(observations, Discrete) and isinstance(actions, Discrete):
        sizes = int(observations.n), int(actions.n)
        return PolicySpace(True, *sizes, first_input=int(observations.start), first_action=int(actions.start))
    if isinstance(observations, Box) and len(observations.shape) == 1:
        inputs = observations.shape[0]
        if isinstance(actions, Discrete):
            return PolicySpace(False, inputs, int(actions.n), first_action=int(actions.start))
        if isinstance(actions, Box) and len(actions.shape) == 1:
            return PolicySpace(False, inputs, actions.shape[0], (actions.low, actions.high))
    raise InputError(
        f"--env_id {env_id}: observations {observations} with actions {actions}; expected discrete ones with discrete "
        "actions, or a vector with discrete actions or a vector of them"
    )
