"""What a language model reads of a state: one line of text.

>>> vector_text(("pole angle", "speed"), [0.031, -1.5])
'pole angle 0.03, speed -1.50'
>>> vector_text((), [0.031, -1.5])
'0.03 -1.50'
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.spaces import Discrete

from llm_policy.environments import frozen_lake
from llm_policy.environments.gym_env import GymEnvironment, lake_grid, plain_name, unversioned
from llm_policy.environments.toy_text import gym_tables
from llm_policy.errors import InputError

StateText = Callable[[np.ndarray], str]
"""Vector that the actor is given -> text."""

# What the numbers of an observation are called; environments that are not here have bare numbers
NAMES = {
    "CartPole": ("cart position", "cart velocity", "pole angle", "pole velocity"),
    "Acrobot": (
        "first joint cosine", "first joint sine", "second joint cosine", "second joint sine",
        "first joint velocity", "second joint velocity",
    ),
    "Pendulum": ("angle cosine", "angle sine", "velocity"),
}  # fmt: skip


def vector_text(names: Sequence[str], vector: Sequence[float] | np.ndarray) -> str:
    """Two decimals per number: 17 of them are 94 characters, at full precision 329."""
    numbers = [f"{number:z.2f}" for number in vector]  # z: no -0.00
    return ", ".join(map(" ".join, zip(names, numbers, strict=True))) if names else " ".join(numbers)


def text_of_states(environment: GymEnvironment) -> StateText:
    """How a state of this environment reads.

    The vector is a discrete state's one-hot row, or an observation with normalised components.
    """
    name = plain_name(environment.env_id)
    observations = environment.env.observation_space
    if isinstance(observations, Discrete):
        text_of_state: Callable[[int], str] = "state {}".format
        tables = gym_tables()
        any_version = {unversioned(env_id): table for env_id, table in tables.items()}
        if isinstance(environment.env.unwrapped, FrozenLakeEnv):
            text_of_state = partial(frozen_lake.state_text, lake_grid(environment.env))
        elif table := tables.get(environment.env_id) or any_version.get(unversioned(environment.env_id)):
            if (states := table().mdp.start_S.size) != observations.n:
                raise InputError(
                    f"--env_id {environment.env_id}: has {observations.n} states, and {table.__name__} knows how "
                    f"{states} read; register it under a name of its own"
                )
            text_of_state = table().state_text
        texts = [text_of_state(state) for state in range(int(observations.n))]
        return lambda one_hot: texts[int(np.argmax(one_hot))]
    names = NAMES.get(name, ())
    return partial(vector_text, names if (len(names),) == observations.shape else ())
