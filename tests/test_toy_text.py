"""CliffWalking and Taxi against Gymnasium stepped by hand, published returns, and their own texts read back."""

import gymnasium
import numpy as np
import pytest

from llm_policy.environments.frozen_lake import FrozenLake
from llm_policy.environments.mdp import greedy_policy, optimal_policy, optimal_q, optimal_return, policy_return
from llm_policy.environments.toy_text import CliffWalking, Taxi, environment_kind
from llm_policy.errors import InputError

BOTH = [CliffWalking(), Taxi()]
CLIFF, TAXI = BOTH


def uniform_policy(environment) -> np.ndarray:
    states, actions = environment.mdp.rewards_SA.shape
    return np.full((states, actions), 1 / actions)


def test_environments():
    names = "FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"
    assert [environment_kind(name) for name in names] == [FrozenLake, CliffWalking, Taxi]
    assert CliffWalking() == CliffWalking() != Taxi()
    assert {CliffWalking(): 1, Taxi(): 2}[Taxi()] == 2
    assert [str(environment) for environment in BOTH] == ["CliffWalking-v1", "Taxi-v4"]
    assert not CLIFF.pays_success
    assert not TAXI.pays_success


# The table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", BOTH, ids=str)
def test_steps_of_gymnasium(environment):
    """Every action in every acting state: next state, reward and end of the episode are those of the arrays."""
    env = environment.make()
    for state in environment.acting_states:
        for action in range(len(environment.actions)):
            env.reset()
            env.unwrapped.s = state
            next_state, reward, terminated, truncated, _ = env.step(action)
            assert not truncated
            assert environment.mdp.rewards_SA[state, action] == reward
            assert environment.mdp.next_states_SAK[state, action].tolist() == [next_state]
            assert environment.mdp.probabilities_SAK[state, action].tolist() == [not terminated]
            assert environment.success_mdp.rewards_SA[state, action] == terminated
            assert terminated or next_state in environment.acting_states


@pytest.mark.parametrize("environment", BOTH, ids=str)
def test_directions(environment):
    """An arrow points where the action leads, wherever it leads anywhere else than back to the start."""
    place = environment.cell if environment == CLIFF else lambda state: environment.parts(state)[:2]
    seen = set()
    for state in environment.acting_states:
        row, column = place(state)
        for action, (x, y) in environment.arrows.items():
            next_row, next_column = place(int(environment.mdp.next_states_SAK[state, action, 0]))
            if environment.mdp.rewards_SA[state, action] == -1 and (next_row, next_column) != (row, column):
                assert (next_column - column, next_row - row) == (x, y)
                seen.add(environment.actions[action])
    assert seen == {environment.actions[action] for action in environment.arrows}


@pytest.mark.parametrize("environment", BOTH, ids=str)
def test_episodes_end_at_the_goal_and_nowhere_else(environment):
    """`success_mdp` calls every end of an episode a success. An end elsewhere would make that wrong."""
    env = gymnasium.make(environment.env_id).unwrapped
    ends = [
        (next_state, reward)
        for by_action in env.P.values()
        for outcomes in by_action.values()
        for _, next_state, reward, done in outcomes
        if done
    ]
    assert ends
    for next_state, reward in ends:
        if environment == CLIFF:
            assert next_state == 47
        else:
            row, column, passenger, destination = environment.parts(next_state)
            assert (row, column) == environment.places[destination]
            assert passenger == destination
            assert reward == 20


@pytest.mark.parametrize(("environment", "count"), [(CLIFF, 37), (TAXI, 400)], ids=str)
def test_acting_states(environment, count):
    states = environment.acting_states
    assert len(states) == len(set(states)) == count
    assert set(np.flatnonzero(environment.mdp.start_S)) <= set(states)
    assert all(type(state) is int for state in states)


def test_acting_states_by_hand():
    assert CLIFF.acting_states == list(range(37))  # the upper three rows and the start; not the cliff, not the goal
    passengers = {TAXI.parts(state)[2:] for state in TAXI.acting_states}
    waiting = {(place, destination) for place in "RGYB" for destination in "RGYB" if place != destination}
    assert passengers == waiting | {("in taxi", destination) for destination in "RGYB"}


def test_step_limits():
    assert [environment.horizon_steps for environment in BOTH] == [100, 200]
    assert gymnasium.spec("Taxi-v4").max_episode_steps == TAXI.horizon_steps
    for environment, steps, limit in [(CLIFF, None, 100), (TAXI, None, 200), (CLIFF, 7, 7), (TAXI, 7, 7)]:
        env = environment.make(steps)
        env.reset(seed=0)
        # UP and SOUTH: after some steps these bump into the edge for ever
        truncated = [env.step(0)[3] for _ in range(limit)]
        assert truncated == [False] * (limit - 1) + [True]


# Returns -------------------------------------------------------------------------------------------------------


def test_optimal_returns():
    """-13: up, eleven times right, down (Sutton and Barto, example 6.6). 7.93: the mean over Taxi's 300 starts."""
    assert optimal_return(CLIFF.mdp) == -13
    assert optimal_return(TAXI.mdp) == pytest.approx(7.93, abs=1e-9)
    for environment in BOTH:
        best_SA = optimal_policy(environment.mdp)
        best = pytest.approx(optimal_return(environment.mdp))
        assert policy_return(environment.mdp, best_SA) == best
        assert policy_return(environment.mdp, best_SA, horizon_steps=environment.horizon_steps) == best
        assert policy_return(environment.mdp, greedy_policy(optimal_q(environment.mdp, 0.99))) == best
        assert policy_return(environment.success_mdp, best_SA, horizon_steps=environment.horizon_steps) == 1.0
        assert optimal_return(environment.success_mdp) == pytest.approx(1.0)


def simulated_returns(environment, episodes: int) -> list[float]:
    env, generator, returns = environment.make(), np.random.default_rng(0), []
    env.reset(seed=0)
    for _ in range(episodes):
        total, ended = 0.0, False
        env.reset()
        while not ended:
            _, reward, terminated, truncated, _ = env.step(int(generator.integers(len(environment.actions))))
            total, ended = total + reward, terminated or truncated
        returns.append(total)
    return returns


# -771 is what random agents are reported to earn in Taxi; the cliff takes most of the -1083.
UNIFORM_RANDOM = [
    # environment, return and success within the step limit
    (CLIFF, -1083.00, 0.0081),
    (TAXI, -771.09, 0.0467),
]


@pytest.mark.parametrize(("environment", "exact_return", "success"), UNIFORM_RANDOM, ids=["cliff", "taxi"])
def test_uniform_random_policy(environment, exact_return, success):
    horizon = environment.horizon_steps
    random_SA = uniform_policy(environment)
    assert policy_return(environment.mdp, random_SA, horizon_steps=horizon) == pytest.approx(exact_return, abs=0.01)
    assert policy_return(environment.success_mdp, random_SA, horizon_steps=horizon) == pytest.approx(success, abs=5e-5)
    assert policy_return(environment.success_mdp, random_SA) == pytest.approx(1.0), "given time it arrives"
    returns = simulated_returns(environment, 200)
    assert abs(np.mean(returns) - exact_return) < 4 * np.std(returns) / np.sqrt(len(returns))


def test_constant_policies():
    """UP, DOWN and LEFT never fall; RIGHT falls in every step. A pickup or dropoff that is not possible costs 10."""
    returns = {}
    for environment in BOTH:
        states, actions = environment.mdp.rewards_SA.shape
        for action, name in enumerate(environment.actions):
            constant_SA = np.eye(actions)[np.full(states, action)]
            returns[name] = policy_return(environment.mdp, constant_SA, horizon_steps=environment.horizon_steps)
    cliff = {"UP": -100, "RIGHT": -10_000, "DOWN": -100, "LEFT": -100}
    moves = dict.fromkeys(("SOUTH", "NORTH", "EAST", "WEST"), -200)
    # The first pickup is possible where the taxi starts at the passenger: one start of 25
    assert returns == pytest.approx(cliff | moves | {"PICKUP": -2000 + 9 / 25, "DROPOFF": -2000})


# Texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", BOTH, ids=str)
def test_texts_are_read_back(environment):
    texts = [environment.state_text(state) for state in environment.acting_states]
    assert len(set(texts)) == len(texts)
    assert not any("\n" in text for text in texts)
    read = [type(environment).read_state(text) for text in texts]
    assert read == [(environment, state) for state in environment.acting_states]
    assert type(environment).read_state(f" {texts[0]} \n") == read[0]


def test_texts_by_hand():
    assert CLIFF.state_text(36) == "............|............|............|ACCCCCCCCCCG"
    assert CLIFF.state_text(13) == "............|.A..........|............|SCCCCCCCCCCG"
    # ((row * 5 + column) * 5 + passenger) * 4 + destination, of Gymnasium's documentation
    assert TAXI.state_text(((2 * 5 + 3) * 5 + 0) * 4 + 1) == "taxi 2,3 passenger R destination G"
    assert TAXI.state_text(((4 * 5 + 0) * 5 + 4) * 4 + 3) == "taxi 4,0 passenger in taxi destination B"


@pytest.mark.parametrize("state", [0, 1, 2, 3, 19, 137, 498, 499])
def test_parts_of_a_taxi_state(state):
    env = gymnasium.make("Taxi-v4").unwrapped
    row, column, passenger, destination = env.decode(state)
    assert TAXI.parts(state) == (row, column, ["R", "G", "Y", "B", "in taxi"][passenger], "RGYB"[destination])
    assert TAXI.state(*TAXI.parts(state)) == state
    assert list(TAXI.places.values()) == env.locs


BAD_TEXTS = [
    (CliffWalking, ""),
    (CliffWalking, "AFFF|FHFH|FFFH|HFFG"),  # a lake
    (CliffWalking, "............|............|............|SCCCCCCCCCCG"),  # no agent
    (CliffWalking, "A...........|............|............|ACCCCCCCCCCG"),  # two
    (CliffWalking, "............|............|............|SACCCCCCCCCG"),  # on the cliff
    (CliffWalking, "............|............|............|SCCCCCCCCCCA"),  # at the goal
    (CliffWalking, "A...........|............|............|SCCCCCCCCCC."),  # no goal
    (CliffWalking, "A..........|...........|...........|SCCCCCCCCCG"),  # a narrower map
    (Taxi, "taxi 5,0 passenger R destination G"),  # outside
    (Taxi, "taxi 2,3 passenger G destination G"),  # there already
    (Taxi, "taxi 2,3 passenger R destination in taxi"),
    (Taxi, "taxi 2, 3 passenger R destination G"),
    (Taxi, "taxi 2,3 passenger r destination g"),
    (Taxi, "taxi 2,3 passenger R destination G " + "x" * 1000),
]


@pytest.mark.parametrize(("environment", "text"), BAD_TEXTS)
def test_other_texts_are_refused(environment, text):
    with pytest.raises(InputError) as error:
        environment.read_state(text)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300
    assert message.startswith(repr(text)[:90])
    assert f" is no state of {environment.env_id}, expected " in message


# Drawings ------------------------------------------------------------------------------------------------------


def test_drawing_of_the_cliff():
    (drawing,) = CLIFF.drawings()
    assert drawing.title == ""
    assert drawing.cells == CLIFF.grid
    assert sorted(drawing.state_of.values()) == CLIFF.acting_states
    assert all(drawing.cells[row][column] in ".S" for row, column in drawing.state_of)
    assert drawing.state_of[3, 0] == 36


def test_drawings_of_the_taxi():
    drawings = TAXI.drawings()
    assert [drawing.title for drawing in drawings] == [
        "passenger at R, to G",
        "passenger at G, to Y",
        "passenger at Y, to B",
        "passenger at B, to R",
        *(f"passenger in taxi, to {place}" for place in "RGYB"),
    ]
    for drawing in drawings:
        assert drawing.labels == {(0, 0): "R", (0, 4): "G", (4, 0): "Y", (4, 3): "B"}
        assert len(drawing.state_of) == 25
        assert {TAXI.parts(state)[:2] for state in drawing.state_of.values()} == set(drawing.state_of)
        assert set(drawing.state_of.values()) <= set(TAXI.acting_states)
    assert drawings[0].cells == ("S...G", ".....", ".....", ".....", ".....")
    assert drawings[6].cells == (".....", ".....", ".....", ".....", "G....")


def test_walls_of_the_taxi_stop_east_and_west():
    east, west = TAXI.actions.index("EAST"), TAXI.actions.index("WEST")
    for (row, column), state in TAXI.drawings()[0].state_of.items():
        stays = TAXI.mdp.next_states_SAK[state, :, 0] == state
        assert stays[east] == (column == 4 or (row, column) in TAXI.walls)
        assert stays[west] == (column == 0 or (row, column - 1) in TAXI.walls)
    assert len(TAXI.walls) == 6
