"""Environments by name, with a step limit, and the one rollout."""

import subprocess
import sys
from itertools import pairwise

import gymnasium
import numpy as np
import pytest

from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, lake_mdp
from llm_policy.environments.gym_env import make_gym_environment, returns, steps
from llm_policy.environments.mdp import optimal_policy, policy_return
from llm_policy.errors import InputError
from llm_policy.run_files import ROOT

DOWN, RIGHT = 1, 2


def play(env_id: str, actor, episodes: int = 1, seed: int = 0, **options) -> list:
    return list(steps(make_gym_environment(env_id, **options).env, actor, episodes, seed))


# Rollout -------------------------------------------------------------------------------------------------------


def test_a_walk_by_hand():
    """On the dry 4x4 lake DOWN, DOWN, RIGHT, DOWN, RIGHT, RIGHT leads over 4, 8, 9, 13, 14 to the goal, 15."""
    next_action = {0: DOWN, 4: DOWN, 8: RIGHT, 9: DOWN, 13: RIGHT, 14: RIGHT}
    walk = play("FrozenLake-v1", next_action.get, episodes=2, options={"is_slippery": False})
    first, second = walk[:6], walk[6:]
    assert [(t.observation, t.action, t.next_observation) for t in first] == [
        (0, DOWN, 4), (4, DOWN, 8), (8, RIGHT, 9), (9, DOWN, 13), (13, RIGHT, 14), (14, RIGHT, 15),
    ]  # fmt: skip
    assert [t.reward for t in walk] == [0, 0, 0, 0, 0, 1] * 2
    assert [t.terminated for t in walk] == [False] * 5 + [True] + [False] * 5 + [True]
    assert not any(t.truncated for t in walk)
    assert [t.episode for t in walk] == [0] * 6 + [1] * 6
    assert [t[1:] for t in second] == [t[1:] for t in first]


def test_the_step_limit_truncates_and_does_not_terminate():
    walk = play("CliffWalking-v1", lambda _: 0, horizon_steps=3)
    assert [(t.terminated, t.truncated) for t in walk] == [(False, False), (False, False), (False, True)]
    assert returns(make_gym_environment("CliffWalking-v1", None, 3).env, lambda _: 0, 2, 0) == [-3.0, -3.0]


def test_steps_follow_their_seed_and_episodes_differ():
    pole = make_gym_environment("CartPole-v1").env
    first, again, other = (returns(pole, lambda _: 0, 5, seed) for seed in (0, 0, 1))
    assert first == again != other
    starts = [t.observation.tolist() for seed in (0, 1) for t in steps(pole, lambda _: 0, 3, seed)]
    assert len(set(map(str, starts))) == len(starts)


def test_a_transition_keeps_its_own_observations():
    """A record must not change when the environment moves on."""
    walk = play("CartPole-v1", lambda vector: int(vector[2] > 0))
    for here, there in pairwise(walk):
        assert np.array_equal(here.next_observation, there.observation)
        assert not np.array_equal(here.observation, here.next_observation)


def test_steps_are_played_when_they_are_asked_for():
    """A learner that stops early pays for no further step."""
    asked = []

    def actor(state):
        asked.append(state)
        return DOWN

    walk = steps(make_gym_environment("FrozenLake-v1").env, actor, 100, 0)
    assert not asked
    next(walk)
    assert len(asked) == 1


def test_no_episodes():
    assert returns(make_gym_environment("FrozenLake-v1").env, lambda _: 0, 0, 0) == []


def test_returns_agree_with_the_exact_value():
    lake = make_gym_environment("FrozenLake-v1")
    policy_SA = optimal_policy(lake_mdp(CANONICAL_GRIDS["4x4"]))
    found = returns(lake.env, lambda state: int(policy_SA[state].argmax()), 1000, seed=0)
    exact = policy_return(lake.mdp, policy_SA, horizon_steps=100)
    assert exact == pytest.approx(0.7402, abs=1e-4)
    assert abs(np.mean(found) - exact) < 4 * np.sqrt(exact * (1 - exact) / 1000)


# Environments --------------------------------------------------------------------------------------------------

ENVIRONMENTS = [
    # name, options, step limit asked for -> id, step limit, has a transition table
    ("FrozenLake-v1", {}, None, "FrozenLake-v1", 100, True),
    ("FrozenLake", {"map_name": "8x8"}, None, "FrozenLake-v1", 100, True),
    ("FrozenLake-v1", {}, 7, "FrozenLake-v1", 7, True),
    ("CliffWalking-v1", {}, None, "CliffWalking-v1", 100, True),  # has no limit of its own
    ("MountainCarContinuous-v0", {}, None, "MountainCarContinuous-v0", 999, False),
    ("Taxi-v4", {}, None, "Taxi-v4", 200, True),
    ("Taxi-v4", {"fickle_passenger": True}, None, "Taxi-v4", 200, False),  # of which the table knows nothing
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "asked", "env_id", "horizon_steps", "has_table"), ENVIRONMENTS)
def test_environments(name, options, asked, env_id, horizon_steps, has_table):
    made = make_gym_environment(name, options, asked)
    assert (made.env_id, made.horizon_steps, made.mdp is not None) == (env_id, horizon_steps, has_table)
    assert made.options == options


def test_missing_mujoco_is_named(monkeypatch):
    def missing(*_, **__):
        raise gymnasium.error.DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`')

    monkeypatch.setattr(gymnasium, "make", missing)
    with pytest.raises(InputError, match=r"--env_id Swimmer-v5: .*pip install -r requirements-mujoco.txt"):
        make_gym_environment("Swimmer-v5")


def test_mujoco_does_not_warn_for_every_copy(capfd):
    pytest.importorskip("mujoco", reason="requirements-mujoco.txt")
    for _ in range(4):
        make_gym_environment("HalfCheetah-v5")
    assert capfd.readouterr().err.count("settotalmass") <= 2


BAD_ENVIRONMENTS = [
    ("FrozenLakee-v1", {}, r"--env_id FrozenLakee-v1: .*Did you mean: `FrozenLake`"),
    ("KeyRoom-v0", {}, r"--env_id KeyRoom-v0: .*doesn't exist\. One of your own is named MODULE:NAME"),
    ("FrozenLake-v9", {}, "--env_id FrozenLake-v9: "),
    ("ALE/Pong-v5", {}, "--env_id ALE/Pong-v5: "),
    ("frozen lake", {}, "--env_id frozen lake: "),
    ("", {}, "--env_id : "),
    ("nowhere:Lake-v1", {}, "--env_id nowhere:Lake-v1: Python finds no module nowhere from here, for Lake"),
    ("FrozenLake-v1", {"colour": "blue"}, r"--env_options \{'colour': 'blue'\}: .*colour"),
    ("FrozenLake-v1", {"map_name": "3x3"}, r"--env_options .*3x3"),
    ("FrozenLake-v1", {"desc": ["SF", "G"]}, r"--env_options "),
    ("FrozenLake-v1", {"desc": ["FF", "FG"]}, "--env_options: desc: 'FF.FG' has no start"),
    ("FrozenLake-v1", {"desc": 3}, r"--env_options "),
    ("FrozenLake-v1", {"map_name": None}, "--env_options: map_name null: draws another map at every start"),
    (
        "FrozenLake-v1",
        {"desc": ["S" + "F" * 69] + ["F" * 70] * 68 + ["F" * 69 + "G"]},
        "4900 cells, expected at most 4096",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("env_id", "options", "message"), BAD_ENVIRONMENTS)
def test_bad_environments(env_id, options, message):
    with pytest.raises(InputError, match=message) as error:
        make_gym_environment(env_id, options)
    assert "\n" not in str(error.value)


class Broken(gymnasium.Env):
    """Goes wrong in the call and in the way that `how` names."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

    def __init__(self, how: str) -> None:
        self.how = how

    def reset(self, *, seed=None, options=None):
        if self.how == "reset raises":
            raise RuntimeError("no\nroad")
        return np.full(2, np.nan if self.how == "nan reset" else 0.0), {}

    def step(self, action):
        if self.how == "step raises":
            raise ZeroDivisionError
        reward = {"nan reward": np.nan, "inf reward": -np.inf, "no reward": None}.get(self.how, 0.0)
        observations = {
            "no observation": None, "long observation": np.zeros(3), "nan observation": np.full(2, np.nan),
            "inf observation": np.full(2, np.inf),
        }  # fmt: skip
        return observations.get(self.how, np.zeros(2)), reward, False, False, {}


HOW = [
    "reset raises", "nan reset", "step raises", "nan reward", "inf reward", "no reward", "nan observation",
    "inf observation", "no observation", "long observation",
]  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_an_environment_that_goes_wrong_is_one_line(how):
    with pytest.raises(InputError, match=r"^environment Broken: its (reset|step) failed: ") as error:
        list(steps(Broken(how), lambda _: 0, 1, 0))
    assert "\n" not in str(error.value)


def test_no_language_model_is_loaded():
    code = "import sys, llm_policy.environments.gym_env; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
