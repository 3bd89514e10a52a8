"""A Gymnasium environment by its name, and the rollout that everything here shares.

Judges, the expert's episodes and policy search play through `steps`, and so do the policies that look at nothing beside
policy gradients, which stable-baselines3 plays otherwise.
"""

import functools
import importlib
import inspect
import json
import math
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.spaces import Discrete
from gymnasium.wrappers import TimeLimit

from llm_policy.environments.frozen_lake import Grid, check_grid
from llm_policy.environments.mdp import MDP, MOST_STATES, mdp_from_env
from llm_policy.errors import InputError
from llm_policy.reading import parse_json

Actor = Callable[[Any], Any]
"""Any policy: observation -> action, as the environment has them."""

# Of a name without a version; run.json has the one that is taken
warnings.filterwarnings("ignore", message=".*WARN: Using the latest versioned environment")

DEFAULT_HORIZON_STEPS = 100
"""Where the environment has no limit: in CliffWalking the published -100 is a hundred steps of -1."""


@dataclass(frozen=True)
class GymEnvironment:
    """An environment with a step limit.

    Attributes:
        env_id: with its version, also where the user left it out.
        mdp: the environment as arrays where it has a transition table that says all (toy text): policies can then be
            judged exactly.
        options: what was given to `gymnasium.make` beside the id.
    """

    env_id: str
    env: gymnasium.Env
    horizon_steps: int
    mdp: MDP | None
    options: Mapping[str, Any]

    @property
    def threshold(self) -> float | None:
        """The mean return at which Gymnasium calls it solved; None where it does not say, or means another one."""
        return self.env.spec.reward_threshold if self.env.spec and self.is_usual else None

    @property
    def is_usual(self) -> bool:
        """Whether it is as Gymnasium makes it by its name alone: only then do published figures compare."""
        usual = gymnasium.spec(self.env_id).max_episode_steps or DEFAULT_HORIZON_STEPS
        return not self.options and self.horizon_steps == usual


def read_env_options(given: Mapping | str | None) -> tuple[str, dict]:
    """`--env_options` as JSON in one form and as a mapping; a YAML file may hold one. `InputError` for all else."""
    text = given if isinstance(given, str) else json.dumps(given or {})
    try:
        options = parse_json(text)
    except ValueError as error:
        raise InputError(f"--env_options {text!r}: is no JSON ({error})") from error
    if not isinstance(options, dict):
        raise InputError(f'--env_options {text!r}: expected a JSON object such as {{"map_name": "8x8"}}')
    return json.dumps(options), options


def make_gym_environment(
    env_id: str, options: Mapping[str, Any] | None = None, horizon_steps: int | None = None
) -> GymEnvironment:
    """Make the environment.

    Args:
        horizon_steps: step limit; None takes the environment's own, or `DEFAULT_HORIZON_STEPS` where it has none.

    `InputError` for an unknown environment, a missing package or an option that it does not take.
    """
    options = dict(options or {})
    if "max_episode_steps" in options:
        raise InputError(f"--env_options: max_episode_steps {options['max_episode_steps']}: is --horizon_steps here")
    mdp = None
    try:
        if find_spec("mujoco") and _is_of_mujoco(env_id):  # which else writes its warnings into a file here
            importlib.import_module("mujoco").set_mju_user_warning(_warn_once)
        env = gymnasium.make(env_id, max_episode_steps=horizon_steps, disable_env_checker=True, **options)
        if "mujoco" in sys.modules:  # of one's own module
            sys.modules["mujoco"].set_mju_user_warning(_warn_once)
        is_discrete = isinstance(env.observation_space, Discrete) and isinstance(env.action_space, Discrete)
        _check_options(env, options)
        if is_discrete and _has_table(env.unwrapped):
            mdp = mdp_from_env(env)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        module, _, own = env_id.rpartition(":")
        missing = getattr(error.__cause__ or error, "name", None)  # Gymnasium raises its own for a module
        if missing and f"{module}.".startswith(f"{missing}."):
            raise InputError(f"--env_id {env_id}: Python finds no module {missing} from here, for {own}") from error
        remedy = "pip install -r requirements-mujoco.txt" if "mujoco" in str(error).lower() else "install it"
        raise InputError(f"--env_id {env_id}: a package is missing ({_one_line(error)}); {remedy}") from error
    except gymnasium.error.NameNotFound as error:
        remedy = "" if "Did you mean" in str(error) else " One of your own is named MODULE:NAME"
        raise InputError(f"--env_id {env_id}: {_one_line(error)}{remedy}") from error
    except gymnasium.error.Error as error:
        raise InputError(f"--env_id {env_id}: {_one_line(error)}") from error
    except InputError:
        raise
    except Exception as error:  # an environment of another's making raises whatever its options lead to
        raise InputError(f"--env_id {env_id} with --env_options {options}: {_one_line(error)}") from error
    spec = env.spec
    assert spec is not None, "gymnasium.make always leaves one"
    horizon_steps = spec.max_episode_steps
    if horizon_steps is None:
        horizon_steps = DEFAULT_HORIZON_STEPS
        env = TimeLimit(env, horizon_steps)
    return GymEnvironment(spec.id, env, horizon_steps, mdp, options)


def _has_table(env: gymnasium.Env) -> bool:
    """Whether its table says all, and is small enough to be solved; else it is judged by episodes."""
    table = getattr(env, "P", None)
    is_fickle = getattr(env, "fickle_passenger", False)  # changes Taxi's goal on the way, which its table does not say
    is_table = isinstance(table, Mapping) and len(table) <= MOST_STATES
    return is_table and hasattr(env, "initial_state_distrib") and not is_fickle


def seed_of(seed: int, purpose: str, iteration: int = 0, attempt: int = 0) -> int:
    """One seed per purpose or random decision, however near the runs' seeds are to each other.

    A resumed run skips some of the decisions and makes the others as before.
    """
    entropy = [seed, zlib.crc32(purpose.encode()), iteration + 2**31, attempt]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def plain_name(env_id: str) -> str:
    """Without namespace and version.

    >>> plain_name("me/Key-Room-v0"), plain_name("CartPole")
    ('Key-Room', 'CartPole')
    """
    return unversioned(env_id.rpartition("/")[2])


def unversioned(env_id: str) -> str:
    """Without module and version.

    >>> unversioned("rooms:me/Key-Room-v0"), unversioned("CartPole")
    ('me/Key-Room', 'CartPole')
    """
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])


def folder_name(env_id: str) -> str:
    """As runs in it are called: without the module of an environment of one's own.

    >>> folder_name("rooms:me/Key-Room-v0")
    'me-Key-Room-v0'
    """
    return env_id.rpartition(":")[2].replace("/", "-")


def _is_of_mujoco(env_id: str) -> bool:
    name = plain_name(env_id)
    same = [spec for other, spec in gymnasium.registry.items() if plain_name(other) == name]
    return any("mujoco" in str(spec.entry_point) for spec in same)


@functools.cache
def _warn_once(text: str) -> None:
    """MuJoCo itself says what it does not like about a model again for every copy of the environment."""
    print(f"MuJoCo: {text}", file=sys.stderr)


def _check_options(env: gymnasium.Env, options: Mapping[str, Any]) -> None:
    """`InputError` for options that Gymnasium takes and that mean nothing.

    Any value counts as true or false, and a lake needs no goal.
    """
    defaults = inspect.signature(type(env.unwrapped)).parameters
    for name, value in options.items():
        if name in defaults and isinstance(defaults[name].default, bool) and not isinstance(value, bool):
            raise InputError(f"--env_options: {name} {json.dumps(value)}: expected true or false")
    if isinstance(env.unwrapped, FrozenLakeEnv):
        if options.get("desc") is None and options.get("map_name", "4x4") is None:
            raise InputError("--env_options: map_name null: draws another map at every start; name one, or give desc")
        check_grid(lake_grid(env), "--env_options: desc")


def lake_grid(env: gymnasium.Env) -> Grid:
    """The map of a lake that Gymnasium has made."""
    desc = getattr(env.unwrapped, "desc")  # noqa: B009  # mypy knows no such attribute
    return tuple("".join(letter.decode() for letter in row) for row in desc)


def _name(env: gymnasium.Env) -> str:
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())}".strip()


# Rollout -------------------------------------------------------------------------------------------------------


class Transition(NamedTuple):
    """One step of an episode.

    Attributes:
        episode: counted from 0.
        terminated: the environment ended the episode; nothing more can be earned from `next_observation`.
        truncated: the step limit cut it; a learner may bootstrap from `next_observation`.
    """

    episode: int
    observation: Any
    action: Any
    reward: float
    next_observation: Any
    terminated: bool
    truncated: bool


def steps(env: gymnasium.Env, actor: Actor, episodes: int, seed: int) -> Iterator[Transition]:
    """Every step of `episodes` episodes, each up to its end or the step limit. The same seed gives the same steps.

    `InputError` for an environment that raises, or returns what is no number.
    """
    is_whole_number = isinstance(env.observation_space, Discrete)  # which cannot be nan, and the check costs a fifth
    shape = env.observation_space.shape
    for episode in range(episodes):
        # The seed is given once: each reset with a seed would repeat the same episode.
        try:
            observation, _ = env.reset(seed=seed if episode == 0 else None)
            if not is_whole_number and not is_readable(observation, shape):
                raise ValueError(f"observation {observation}, expected numbers of shape {shape}")
        except Exception as error:  # whatever an environment of another's making raises
            raise InputError(f"environment {_name(env)}: its reset failed: {_one_line(error)}") from error
        has_ended = False
        while not has_ended:
            action = actor(observation)
            try:
                next_observation, reward, terminated, truncated, _ = env.step(action)
                if not math.isfinite(reward) or (not is_whole_number and not is_readable(next_observation, shape)):
                    raise ValueError(
                        f"reward {reward}, observation {next_observation}, expected numbers, those of an observation "
                        f"of shape {shape}"
                    )
            except Exception as error:
                raise InputError(f"environment {_name(env)}: its step failed: {_one_line(error)}") from error
            yield Transition(
                episode, observation, action, float(reward), next_observation, bool(terminated), bool(truncated)
            )
            observation, has_ended = next_observation, terminated or truncated


def is_readable(observation: Any, shape: tuple[int, ...] | None) -> bool:
    return np.shape(observation) == shape and bool(np.isfinite(observation).all())


def returns(env: gymnasium.Env, actor: Actor, episodes: int, seed: int) -> list[float]:
    """The undiscounted return of each episode of `steps`."""
    totals = [0.0] * episodes
    for step in steps(env, actor, episodes, seed):
        totals[step.episode] += step.reward
    return totals
