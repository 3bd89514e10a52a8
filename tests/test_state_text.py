"""What a language model reads of a state."""

import gymnasium
import numpy as np
import pytest

from llm_policy.environments.gym_env import make_gym_environment
from llm_policy.errors import InputError
from llm_policy.policy_gradient.state_text import NAMES, text_of_states, vector_text


def test_a_negative_zero_is_no_other_state():
    assert vector_text((), [-0.001, 0.001]) == "0.00 0.00"


def test_seventeen_numbers_are_short():
    vector = np.full(17, -3.14159265358979)
    assert len(" ".join(map(str, vector.tolist()))) > 300  # as the original writes them
    assert len(vector_text((), vector)) < 110


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1"])
def test_every_number_of_a_known_environment_has_a_name(env_id):
    environment = make_gym_environment(env_id)
    numbers = environment.env.observation_space.shape[0]
    assert len(NAMES[env_id.partition("-")[0]]) == numbers
    text = text_of_states(environment)(np.arange(numbers))
    assert all(name in text for name in NAMES[env_id.partition("-")[0]])


def test_a_lake_is_its_grid_with_the_agent():
    text_of = text_of_states(make_gym_environment("FrozenLake-v1", {"desc": ["SF", "HG"]}))
    assert [text_of(row) for row in np.eye(4)] == ["AF|HG", "SA|HG", "SF|AG", "SF|HA"]


def test_the_large_lake_under_its_own_id_is_a_grid_too():
    text = text_of_states(make_gym_environment("FrozenLake8x8-v1"))(np.eye(64)[12])
    assert text.startswith("SFFFFFFF|FFFFAFFF|")


def test_another_environment_of_a_known_name_has_bare_numbers():
    class Six(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (6,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

    gymnasium.register("mine/CartPole-v0", Six, max_episode_steps=10)
    assert text_of_states(make_gym_environment("mine/CartPole-v0"))(np.zeros(6)) == " ".join(["0.00"] * 6)


class Cells(gymnasium.Env):
    """A game of somebody's own with 24 cells."""

    observation_space, action_space = gymnasium.spaces.Discrete(24), gymnasium.spaces.Discrete(4)


def test_another_game_of_a_known_name_has_bare_numbers():
    gymnasium.register("mine/CliffWalking-v0", Cells, max_episode_steps=10)
    assert text_of_states(make_gym_environment("mine/CliffWalking-v0"))(np.eye(24)[23]) == "state 23"


def test_another_table_under_a_known_name_is_refused():
    gymnasium.register("CliffWalking-v7", Cells, max_episode_steps=10)
    try:
        with pytest.raises(
            InputError, match=r"^--env_id CliffWalking-v7: has 24 states, and CliffWalking knows how 48"
        ):
            text_of_states(make_gym_environment("CliffWalking-v7"))
    finally:
        del gymnasium.registry["CliffWalking-v7"]


def test_other_tables_have_the_text_of_their_task():
    taxi = text_of_states(make_gym_environment("Taxi-v4"))
    assert taxi(np.eye(500)[0]) == "taxi 0,0 passenger R destination R"
    assert "A" in text_of_states(make_gym_environment("CliffWalking-v1"))(np.eye(48)[36])
