"""Policies as numbers: the one parser, what the numbers do in an environment, and which environments there are."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary

from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, lake_mdp
from llm_policy.environments.gym_env import returns
from llm_policy.environments.mdp import optimal_policy, policy_return
from llm_policy.errors import InputError
from llm_policy.policy_search.parameters import AnswerError, PolicySpace, policy_space, search_problem

TABLE = PolicySpace(is_tabular=True, inputs=3, outputs=4)
LINEAR = PolicySpace(is_tabular=False, inputs=2, outputs=1, action_bounds=(np.float32([-1]), np.float32([1])))
OPTIMAL_16 = tuple(optimal_policy(lake_mdp(CANONICAL_GRIDS["4x4"])).argmax(axis=1).tolist())

READABLE = [
    # space, answer, parameters
    (TABLE, "parameters: 0, 3, 1", (0, 3, 1)),
    (TABLE, "parameters: 0, 3, 1\nreason: close to the best, 3 and 4 look good", (0, 3, 1)),
    (TABLE, "I think.\n  Parameters : [0,3,1]  \n", (0, 3, 1)),
    (TABLE, "parameters: 0.0, 3, 1", (0, 3, 1)),
    (LINEAR, "parameters: -6.0, 6, +0.5", (-6.0, 6.0, 0.5)),
    (LINEAR, "parameters: (1.50, -0.0, 2)", (1.5, 0.0, 2.0)),
]


@pytest.mark.parametrize(("space", "text", "parameters"), READABLE)
def test_answers_that_can_be_read(space, text, parameters):
    read = space.read_answer(text)
    assert read == parameters
    assert all(type(value) is (int if space.is_tabular else float) for value in read)
    assert str(read) == str(parameters), "no -0.0"


UNREADABLE = [
    # space, answer, what the model is told
    (TABLE, "", "the answer is empty"),
    (TABLE, " \n\t", "the answer is empty"),
    (TABLE, "0, 3, 1", "no lines begin with `parameters:`, expected one"),
    (TABLE, "my parameters: 0, 3, 1", "no lines begin"),
    (TABLE, "parameters: 0, 3, 1\nparameters: 0, 3, 1", "2 lines begin with `parameters:`, expected one"),
    (TABLE, "parameters: 0, 3", "2 values, expected 3"),
    (TABLE, "parameters: 0, 3, 1, 2", "4 values, expected 3"),
    (TABLE, "parameters:", "value 1 is '', expected a number"),
    (TABLE, "parameters: 0, 3, 1,", "value 4 is '', expected a number"),
    (TABLE, "parameters: 0, 3, 4", "value 3 is '4', expected 0 to 3"),
    (TABLE, "parameters: 0, -1, 1", "value 2 is '-1', expected 0 to 3"),
    (TABLE, "parameters: 0, 0.5, 1", "value 2 is '0.5', expected an integer"),
    (TABLE, "parameters: 0, LEFT, 1", "value 2 is 'LEFT', expected a number"),
    (TABLE, "parameters: 0, 3, 1 | return 0.5", "value 3 is '1 | return 0.5', expected a number"),
    # Numbers for Python's eval and float, not for us
    (TABLE, "parameters: 0, 1+1, 1", "value 2 is '1+1', expected a number"),
    (TABLE, "parameters: 0, __import__('os').getcwd(), 1", "value 2 is"),
    (TABLE, "parameters: 0, 1e0, 1", "value 2 is '1e0', expected a number"),
    (TABLE, "parameters: 0, 1_0, 1", "value 2 is '1_0', expected a number"),
    (LINEAR, "parameters: nan, 0, 0", "value 1 is 'nan', expected a number"),
    (LINEAR, "parameters: inf, 0, 0", "value 1 is 'inf', expected a number"),
    (LINEAR, "parameters: 6.1, 0, 0", "value 1 is '6.1', expected -6 to 6"),
    (LINEAR, "parameters: 0.25, 0, 0", "value 1 is '0.25', expected one decimal"),
    (LINEAR, "parameters: 9" + 5000 * "9" + ", 0, 0", "value 1 is '" + 30 * "9" + "...', expected -6 to 6"),
]


@pytest.mark.parametrize(("space", "text", "message"), UNREADABLE, ids=[text[:40] for _, text, _ in UNREADABLE])
def test_answers_that_cannot(space, text, message):
    with pytest.raises(AnswerError) as error:
        space.read_answer(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 120


@pytest.mark.parametrize("space", [TABLE, LINEAR, PolicySpace(False, 4, 2)], ids=str)
def test_drawn_parameters_cover_the_grid_and_read_back(space):
    generator = np.random.default_rng(0)
    drawn = [space.draw(generator) for _ in range(300)]
    values = {value for parameters in drawn for value in parameters}
    assert (min(values), max(values)) == (space.lowest, space.highest)
    assert len(values) == (4 if space.is_tabular else 121)
    for parameters in drawn:
        assert space.read_answer(f"parameters: {space.text(parameters)}") == parameters


@pytest.mark.parametrize("space", [TABLE, LINEAR], ids=str)
def test_a_neighbour_differs_in_one_value(space):
    generator = np.random.default_rng(0)
    here = space.draw(generator)
    positions = set()
    for _ in range(100):
        there = space.neighbour(here, generator)
        changed = [i for i in range(space.count) if here[i] != there[i]]
        assert len(changed) == 1
        assert space.read_answer(f"parameters: {space.text(there)}") == there
        positions.update(changed)
    assert positions == set(range(space.count))


# Behaviour -----------------------------------------------------------------------------------------------------


def test_linear_policies_by_hand():
    act = LINEAR.actor((0.5, -0.5, 0.1))
    assert act(np.array([1.0, 0.4])) == pytest.approx([0.4])  # 0.5 * 1 - 0.5 * 0.4 + 0.1
    assert act(np.array([9.0, 0.0])).tolist() == [1.0]  # clipped
    assert act(np.array([-9.0, 0.0])).dtype == np.float32
    # W = ((1, 0), (0, 1)), b = (0, 0.5): the second action once its component plus 0.5 is larger
    choose = PolicySpace(False, 2, 2, first_action=1).actor((1.0, 0.0, 0.0, 1.0, 0.0, 0.5))
    assert [choose(np.array(s)) for s in ([1.0, 0.0], [0.4, 0.0], [0.0, 3.0])] == [1, 2, 2]


def test_tables_by_hand():
    space = PolicySpace(True, 3, 4, first_input=5, first_action=1)
    assert [space.actor((0, 3, 1))(state) for state in (5, 6, 7)] == [1, 4, 2]
    assert space.policy_table((0, 3, 1)).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]


def test_returns_agree_with_the_exact_value():
    lake = search_problem("FrozenLake-v1")
    found = lake.returns(OPTIMAL_16, 1000, seed=0)
    exact = policy_return(lake.environment.mdp, lake.space.policy_table(OPTIMAL_16), horizon_steps=100)
    assert exact == pytest.approx(0.7402, abs=1e-4)
    assert abs(np.mean(found) - exact) < 4 * np.sqrt(exact * (1 - exact) / 1000)


def test_returns_follow_their_seed():
    pole = search_problem("CartPole-v1")
    parameters = (0.0,) * 10
    first, again, other = (pole.returns(parameters, 5, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(first)) > 1, "the episodes differ"


def test_a_balancing_policy_is_found_good():
    """Push to the side to which the pole leans and turns: every episode lasts 500 steps."""
    push_right = (0.1, 0.5, 5.0, 2.0)
    parameters = (0.0, 0.0, 0.0, 0.0, *push_right, 0.0, 0.0)
    assert search_problem("CartPole-v1").returns(parameters, 3, seed=0) == [500.0] * 3


def test_step_limits():
    cliff = search_problem("CliffWalking-v1").environment
    assert (cliff.horizon_steps, returns(cliff.env, lambda _: 0, 2, 0)) == (100, [-100.0, -100.0])
    assert returns(search_problem("CliffWalking-v1", None, 7).environment.env, lambda _: 0, 1, 0) == [-7.0]
    assert search_problem("FrozenLake-v1", {"map_name": "8x8"}).environment.horizon_steps == 100
    assert search_problem("MountainCarContinuous-v0").environment.horizon_steps == 999


# Environments --------------------------------------------------------------------------------------------------

SPACES = [
    # environment, tabular, parameters, can be judged exactly
    ("FrozenLake-v1", True, 16, True),
    ("CliffWalking-v1", True, 48, True),
    ("Taxi-v4", True, 500, True),
    ("CartPole-v1", False, 2 * 4 + 2, False),
    ("MountainCar-v0", False, 3 * 2 + 3, False),
    ("MountainCarContinuous-v0", False, 2 + 1, False),
    ("Acrobot-v1", False, 3 * 6 + 3, False),
    ("Pendulum-v1", False, 3 + 1, False),
    # Without a version
    ("FrozenLake", True, 16, True),
]


@pytest.mark.parametrize(("env_id", "is_tabular", "count", "is_exact"), SPACES)
def test_spaces(env_id, is_tabular, count, is_exact):
    problem = search_problem(env_id, horizon_steps=5)
    environment, space = problem.environment, problem.space
    assert (space.is_tabular, space.count, environment.mdp is not None) == (is_tabular, count, is_exact)
    assert len(problem.returns(space.draw(np.random.default_rng(0)), 2, seed=0)) == 2
    assert environment.env_id.startswith(env_id)


@pytest.mark.parametrize(("env_id", "count"), [("InvertedPendulum-v5", 5), ("Swimmer-v5", 18), ("Hopper-v5", 36)])
def test_mujoco(env_id, count):
    pytest.importorskip("mujoco", reason="requirements-mujoco.txt")
    problem = search_problem(env_id, horizon_steps=5)
    assert problem.space.count == count
    assert all(map(np.isfinite, problem.returns(problem.space.draw(np.random.default_rng(0)), 2, seed=0)))


def test_observations_of_several_parts_are_refused():
    """What Gymnasium itself refuses is in test_gym_env.py."""
    with pytest.raises(InputError, match="--env_id Blackjack-v1: observations Tuple") as error:
        search_problem("Blackjack-v1")
    assert "\n" not in str(error.value)


BAD_SPACES = [
    # observations, actions
    (Box(0, 255, (4, 4)), Discrete(2)),
    (Box(0, 1, (4,)), MultiBinary(2)),
    (Discrete(4), Box(0, 1, (1,))),
]


@pytest.mark.parametrize(("observations", "actions"), BAD_SPACES, ids=str)
def test_bad_spaces(observations, actions):
    env = gymnasium.Env()
    env.observation_space, env.action_space = observations, actions
    with pytest.raises(InputError, match="expected discrete ones with discrete actions, or a vector"):
        policy_space(env, "Mine-v0")
