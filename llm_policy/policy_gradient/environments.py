"""A Gymnasium environment -> the vector environment that the algorithms train on, and its state on disk and back.

From the inside out: Gymnasium's environment with its step limit, a discrete state as a one-hot row, a check of every
number, stable-baselines3's Monitor, `Replayable`, and `VecNormalize` around all copies of it.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FlattenObservation
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from llm_policy.environments.gym_env import GymEnvironment, make_gym_environment
from llm_policy.errors import InputError

CLIPPED_AT = 10.0  # standard deviations


@dataclass(frozen=True)
class EnvironmentSpec:
    """What `make_gym_environment` takes."""

    env_id: str
    options: Mapping[str, Any]
    horizon_steps: int | None

    def make(self) -> GymEnvironment:
        """`InputError` also for observations and actions that the algorithms cannot take."""
        environment = make_gym_environment(self.env_id, self.options, self.horizon_steps)
        check_spaces(environment.env, self.env_id)
        return environment


def check_spaces(env: gymnasium.Env, env_id: str) -> None:
    """`InputError` unless observations are discrete or a vector, and actions discrete or a bounded vector."""
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, Discrete) and not (isinstance(observations, Box) and len(observations.shape) == 1):
        raise InputError(f"--env_id {env_id}: observations {observations}; expected discrete ones or a vector")
    if isinstance(actions, Discrete):
        if actions.start != 0:
            raise InputError(f"--env_id {env_id}: its actions begin at {actions.start}; expected 0")
    elif not isinstance(actions, Box) or len(actions.shape) != 1:
        raise InputError(f"--env_id {env_id}: actions {actions}; expected discrete ones or a vector")
    elif not (np.isfinite(actions.low).all() and np.isfinite(actions.high).all()):
        raise InputError(f"--env_id {env_id}: actions {actions}; expected a vector with bounds")


class Checked(gymnasium.Wrapper):
    """`InputError` for a state or a reward that is no number, and for an environment that raises."""

    def __init__(self, env: gymnasium.Env, env_id: str) -> None:
        super().__init__(env)
        self.env_id = env_id

    def reset(self, **options):
        observation, info = self._of_environment("reset", super().reset, **options)
        self._check(observation, 0.0)
        return observation, info

    def step(self, action):
        observation, reward, terminated, truncated, info = self._of_environment("step", super().step, action)
        self._check(observation, reward)
        return observation, reward, terminated, truncated, info

    def _of_environment(self, what: str, call: Callable, *arguments, **options):
        try:
            return call(*arguments, **options)
        except Exception as error:  # whatever an environment of another's making raises
            words = " ".join(str(error).split())
            raise InputError(f"--env_id {self.env_id}: its {what} failed: {type(error).__name__} {words}") from error

    def _check(self, observation: Any, reward: Any) -> None:
        shape = self.observation_space.shape
        try:
            is_right = np.shape(observation) == shape and np.isfinite(observation).all() and math.isfinite(reward)
        except (TypeError, ValueError):  # no numbers at all
            is_right = False
        if not is_right:
            said = " ".join(f"observation {observation}, reward {reward}".split())[:200]
            raise InputError(
                f"--env_id {self.env_id}: {said}: expected an observation of shape {shape} and a reward, all of them "
                "numbers (no nan, no inf)"
            )


class Replayable(gymnasium.Wrapper):
    """Remembers how its episode began and every action since, so that the episode can be brought back.

    That works for any environment whose chance comes from its own generator, as Gymnasium asks for. It costs one
    episode's steps. Most environments cannot be copied: MuJoCo's begin anew.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._began: dict = {}
        self._actions: list = []

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        generator = deepcopy(self.unwrapped.np_random.bit_generator.state) if seed is None else None
        self._began, self._actions = {"seed": seed, "generator": generator}, []
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._actions.append(np.asarray(action).tolist())
        return super().step(action)

    def state(self) -> dict:
        """Fit for JSON."""
        return {**self._began, "actions": self._actions}

    def restore(self, state: Mapping) -> None:
        """Play the episode of `state` again up to where it was."""
        if state["seed"] is None:
            self.unwrapped.np_random.bit_generator.state = state["generator"]
        super().reset(seed=state["seed"])
        is_discrete = isinstance(self.action_space, Discrete)
        for action in state["actions"]:
            super().step(action if is_discrete else np.array(action, self.action_space.dtype))
        self._began = {"seed": state["seed"], "generator": state["generator"]}
        self._actions = list(state["actions"])


def make_vec_env(
    spec: EnvironmentSpec, count: int, *, normalizes_observations: bool, normalizes_rewards: bool, gamma: float
) -> VecNormalize:
    """`count` copies of the environment, played in turn in this process.

    A discrete state is a one-hot row and never normalised.
    """
    is_discrete = isinstance(spec.make().env.observation_space, Discrete)
    return VecNormalize(
        DummyVecEnv([partial(_single, spec)] * count),
        norm_obs=normalizes_observations and not is_discrete,
        norm_reward=normalizes_rewards,
        clip_obs=CLIPPED_AT,
        gamma=gamma,
    )


def _single(spec: EnvironmentSpec) -> gymnasium.Env:
    env = spec.make().env
    if isinstance(env.observation_space, Discrete):
        env = FlattenObservation(env)
    return Replayable(Monitor(Checked(env, spec.env_id)))


# On disk -------------------------------------------------------------------------------------------------------

STATISTICS = ("obs_rms", "ret_rms")


def statistics_of(env: VecNormalize) -> dict[str, dict]:
    """What normalises observations and rewards, fit for JSON."""
    found = {name: getattr(env, name, None) for name in STATISTICS}
    return {
        name: {"mean": np.asarray(s.mean).tolist(), "var": np.asarray(s.var).tolist(), "count": float(s.count)}
        for name, s in found.items()
        if s is not None
    }


def set_statistics(env: VecNormalize, statistics: Mapping[str, Mapping]) -> None:
    """The inverse of `statistics_of`; `ValueError` for those of another environment."""
    for name in STATISTICS:
        own: RunningMeanStd | None = getattr(env, name, None)
        if own is None:
            continue
        mean, var = (np.array(statistics[name][key], dtype=float) for key in ("mean", "var"))
        if mean.shape != np.shape(own.mean) or var.shape != np.shape(own.var):
            raise ValueError(f"{name}: {mean.shape} numbers, expected {np.shape(own.mean)}")
        if not (np.isfinite(mean).all() and np.isfinite(var).all() and (var >= 0).all()):
            raise ValueError(f"{name}: expected numbers, and no variance below 0")
        own.mean, own.var, own.count = mean, var, float(statistics[name]["count"])
