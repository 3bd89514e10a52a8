"""llm_policy/environments/judge.py: state-blindness, verdicts, baselines, simulation, policies beside each other."""

import json
import math
import random

import numpy as np
import pytest
from PIL import Image

from llm_policy.environments import judge
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, FrozenLake, lake_mdp, random_grids
from llm_policy.environments.judge import (
    EvaluatedPolicy,
    baseline_policy,
    evaluate_policies,
    evaluation_table,
    is_baseline,
    mutual_information,
    policy_verdict,
    save_evaluation,
    simulated_successes,
)
from llm_policy.environments.mdp import AGREEMENT_GAMMA, greedy_policy, optimal_policy, optimal_q
from llm_policy.environments.policy_table import constant_policy, score_policy, uniform_policy
from llm_policy.environments.toy_text import CliffWalking, Taxi
from llm_policy.errors import InputError
from llm_policy.tables import show

GRID = CANONICAL_GRIDS["4x4"]
LAKE, DRY_LAKE = FrozenLake(GRID), FrozenLake(GRID, is_slippery=False)
FOUR_STATES, TWO_STATES = FrozenLake(("SFFFG",)), FrozenLake(("SFG",))
LEFT, DOWN, RIGHT, UP = range(4)
EXPERT = greedy_policy(optimal_q(lake_mdp(GRID), AGREEMENT_GAMMA))


def with_rows(lake: FrozenLake, rows_PA) -> np.ndarray:
    policy_SA = uniform_policy(len("".join(lake.grid)), 4)
    policy_SA[lake.acting_states] = rows_PA
    return policy_SA


# State-blindness -------------------------------------------------------------------------------------------------

INFORMATION = [
    # State-blind, whatever the distribution: none
    (constant_policy(16, 1, 4), LAKE, 0.0),
    (uniform_policy(16, 4), LAKE, 0.0),
    (np.full((16, 4), [0.7, 0.1, 0.1, 0.1]), LAKE, 0.0),
    # Four states, four actions: all there is
    (with_rows(FOUR_STATES, np.eye(4)), FOUR_STATES, math.log(4)),
    # Two states each for two actions
    (with_rows(FOUR_STATES, np.eye(4)[[0, 0, 2, 2]]), FOUR_STATES, math.log(2)),
    # The expert, one-hot: the entropy of its actions, 4 x LEFT, 2 x DOWN, 1 x RIGHT, 4 x UP
    (EXPERT, LAKE, -sum(n / 11 * math.log(n / 11) for n in (4, 2, 1, 4))),
    # What could not be read says nothing about the states
    (with_rows(LAKE, [*np.full((5, 4), 0.25), *np.eye(4)[[0] * 6]]), LAKE, 0.0),
    # One state differs a little: a little
    (with_rows(TWO_STATES, [[0.5, 0.5, 0, 0], [1, 0, 0, 0]]), TWO_STATES, 0.2157615),
]  # fmt: skip


@pytest.mark.parametrize(("policy_SA", "lake", "nats"), INFORMATION)
def test_mutual_information(policy_SA, lake, nats):
    assert mutual_information([policy_SA], [lake]) == pytest.approx(nats, abs=1e-6)
    # Twice the same map tells nothing new
    assert mutual_information([policy_SA] * 2, [lake] * 2) == pytest.approx(nats, abs=1e-6)


def test_mutual_information_is_taken_over_all_maps_together():
    policies_SA = [constant_policy(2, action, 4) for action in (0, 2)]
    assert mutual_information(policies_SA, [FrozenLake(("SG",))] * 2) == pytest.approx(math.log(2))


def test_mutual_information_of_six_actions():
    """At most ln 6, and only over the states in which the taxi acts."""
    taxi = Taxi()
    policy_SA = uniform_policy(500, 6)
    policy_SA[taxi.acting_states[:396]] = np.eye(6)[np.arange(396) % 6]
    assert mutual_information([policy_SA], [taxi]) == pytest.approx(math.log(6))
    assert mutual_information([constant_policy(500, 4, 6)], [taxi]) == 0.0


# Verdicts --------------------------------------------------------------------------------------------------------

VERDICTS = [
    (EXPERT, "learned: 11/11 states, 100 % of optimal"),
    (constant_policy(16, 1, 4), "state-blind: always DOWN (2/11 states, 6 % of optimal)"),
    # The same most probable action everywhere is state-blind, too, if less sure of itself
    (np.full((16, 4), [0.1, 0.1, 0.7, 0.1]), "state-blind: always RIGHT (2/11 states, 3 % of optimal)"),
    # One state apart from the habit does not make a policy that reads its state
    (with_rows(LAKE, np.eye(4)[[1] * 10 + [2]]), "nearly state-blind: DOWN in 10 of 11 states (1/11 states"),
    (uniform_policy(16, 4), "uniformly random in every state (0/11 states, 2 % of optimal)"),
    # A uniform row is an answer that could not be read, and no LEFT
    (with_rows(LAKE, [*np.full((10, 4), 0.25), [0, 1, 0, 0]]), "not learned: 1/11 states, 2 % of optimal, 10 "),
    (with_rows(LAKE, [*np.full((2, 4), 0.25), *np.eye(4)[[0] * 9]]), "state-blind: always LEFT (3/11 states, 0 % of "),
    (with_rows(LAKE, [*np.full((5, 4), 0.25), *np.eye(4)[[0] * 5 + [1]]]), "nearly state-blind: LEFT in 5 of 6 states"),
    # The expert but for the last two states before the goal
    (with_rows(LAKE, [*EXPERT[LAKE.acting_states][:9], *np.eye(4)[[3, 3]]]), "partly learned: 9/11"),
]  # fmt: skip


@pytest.mark.parametrize(("policy_SA", "verdict"), VERDICTS)
def test_verdict(policy_SA, verdict):
    scores = [score_policy(LAKE, policy_SA, 100)]
    assert policy_verdict([policy_SA], [LAKE], scores).startswith(verdict)


def test_a_model_that_lost_the_form_is_told_apart_from_a_random_policy():
    policy_SA = uniform_policy(16, 4)  # what a model's policy is when no completion can be read
    verdict = policy_verdict([policy_SA], [LAKE], [score_policy(LAKE, policy_SA, 100, format_validity=0.0)])
    assert verdict.startswith("no readable answer (0/11 states, 2 % of optimal): lower --learning_rate, or teach")


def test_a_little_less_than_the_optimum_is_not_all_of_it():
    policies_SA = [EXPERT] * 199 + [constant_policy(16, 1, 4)]
    scores = [score_policy(LAKE, EXPERT, 100)] * 199 + [score_policy(LAKE, policies_SA[-1], 100)]
    verdict = policy_verdict(policies_SA, [LAKE] * 200, scores)
    assert verdict == "partly learned: 2191/2200 states, 99 % of optimal"


def test_where_one_action_is_optimal_everywhere_it_is_learned():
    policy_SA, lake = constant_policy(4, 2, 4), FrozenLake(("SFFG",), is_slippery=False)
    assert policy_verdict([policy_SA], [lake], [score_policy(lake, policy_SA, 10)]).startswith("learned: 3/3")


def test_one_state_cannot_be_state_blind():
    policy_SA, lake = constant_policy(2, 2, 4), FrozenLake(("SG",), is_slippery=False)
    assert policy_verdict([policy_SA], [lake], [score_policy(lake, policy_SA, 10)]).startswith("learned: 1/1")


def test_verdicts_name_the_environments_own_actions():
    cliff = CliffWalking()
    up_SA = constant_policy(48, cliff.actions.index("UP"), 4)
    verdict = policy_verdict([up_SA], [cliff], [score_policy(cliff, up_SA)])
    assert verdict.startswith("state-blind: always UP (")
    assert verdict.endswith("/37 states, 0 % of optimal)")
    expert_SA = baseline_policy("expert", cliff)
    verdict = policy_verdict([expert_SA], [cliff], [score_policy(cliff, expert_SA)])
    assert verdict == "learned: 37/37 states, 100 % of optimal"


# Baselines -------------------------------------------------------------------------------------------------------


def success(name: str, is_slippery: bool = True, grid=GRID) -> float:
    lake = FrozenLake(grid, is_slippery)
    *_, judged = evaluate_policies({name: [baseline_policy(name, lake)]}, [lake], episodes=10)
    return judged.mean("success_probability")


BASELINE_SCORES = [
    # name, slippery, success without a step limit
    ("random", True, 0.0139),
    ("constant:LEFT", True, 0.0),
    ("constant:DOWN", True, 0.0495),
    ("constant:right", True, 0.032),
    ("expert", True, 14 / 17),
    ("expert", False, 1.0),
    ("shortest-path", False, 1.0),
    # Learned from 100,000 steps and five learners, and still the optimum
    ("q-learning", True, 14 / 17),
]


@pytest.mark.parametrize(("name", "is_slippery", "value"), BASELINE_SCORES)
def test_baselines(name, is_slippery, value):
    assert is_baseline(name)
    assert success(name, is_slippery) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("name", ["constant:NORTH", "constant", "constant:", "expert:now", "random:1", "oracle", ""])
def test_unknown_baselines(name):
    """tests/test_tabular_judge.py has the error that a user sees."""
    assert baseline_policy(name, LAKE) is None


def test_a_model_is_no_baseline():
    assert not any(is_baseline(name) for name in ("google/gemma-2b-it", "runs/laptop", "randomly"))


def test_baselines_of_another_environment():
    taxi = Taxi()
    assert baseline_policy("constant:pickup", taxi).argmax(1).tolist() == [4] * 500
    assert baseline_policy("random", taxi).shape == (500, 6)
    assert baseline_policy("constant:LEFT", taxi) is None
    assert baseline_policy("shortest-path", taxi) is None, "for lakes"


# Simulation ------------------------------------------------------------------------------------------------------

SIMULATED = [
    # policy, slippery, exact success within 100 steps
    (optimal_policy(lake_mdp(GRID)), True, 0.7402),
    (constant_policy(16, DOWN, 4), True, 0.0495),
    (uniform_policy(16, 4), True, 0.0139),
    (optimal_policy(lake_mdp(GRID, False)), False, 1.0),
]


@pytest.mark.parametrize(("policy_SA", "is_slippery", "exact"), SIMULATED)
def test_simulation_agrees_with_the_exact_value(policy_SA, is_slippery, exact):
    episodes = 2000
    successes = simulated_successes(FrozenLake(GRID, is_slippery), policy_SA, 100, episodes, seed=0)
    assert abs(successes / episodes - exact) <= 4 * np.sqrt(exact * (1 - exact) / episodes)


def test_simulation_stops_at_the_horizon():
    policy_SA = optimal_policy(lake_mdp(GRID, False))
    assert [simulated_successes(DRY_LAKE, policy_SA, steps, 3, seed=0) for steps in (5, 6)] == [0, 3]


def test_simulation_follows_its_seed():
    policy_SA = optimal_policy(lake_mdp(GRID))
    counts = [simulated_successes(LAKE, policy_SA, 100, 300, seed) for seed in (0, 0, 1, 2)]
    assert counts[0] == counts[1]
    assert len(set(counts)) > 1


def test_simulated_success_of_the_cliff_is_arriving():
    """Each of its rewards is negative, also that of the step to the goal."""
    cliff = CliffWalking()
    expert_SA = baseline_policy("expert", cliff)
    assert [simulated_successes(cliff, expert_SA, steps, 3, seed=0) for steps in (None, 13, 12)] == [3, 3, 0]
    assert simulated_successes(cliff, constant_policy(48, 1, 4), None, 3, seed=0) == 0, "over the cliff, step by step"


INTERVALS = [
    # successes, episodes, Wilson's 95 % interval (statsmodels.stats.proportion.proportion_confint)
    (0, 10, 0.0, 0.2775),
    (10, 10, 0.7225, 1.0),
    (5, 10, 0.2366, 0.7634),
    (740, 1000, 0.7119, 0.7662),
    (1, 1000, 0.00018, 0.00565),
]


@pytest.mark.parametrize(("successes", "episodes", "low", "high"), INTERVALS)
def test_wilson_interval(successes, episodes, low, high):
    interval = EvaluatedPolicy("a policy", [], [], successes, episodes, LAKE.actions).simulated_interval
    assert interval == pytest.approx((low, high), abs=1e-4)


# The comparison --------------------------------------------------------------------------------------------------


def test_optimum_random_and_the_best_constant_action_stand_in_front():
    named = {"mine": [constant_policy(16, UP, 4)]}
    judged = evaluate_policies(named, [LAKE], validities={"mine": 0.5}, episodes=10)
    assert [p.name for p in judged] == ["optimal", "uniform random", "best constant action (DOWN)", "mine"]
    assert [p.format_validity for p in judged] == [None, None, None, 0.5]
    text = show(*evaluation_table(judged, "FrozenLake"))
    for shown in ("0.8235", "0.7402", "0.0139", "0.0495", "11/11", "50 %", "0.7442"):
        assert shown in text


@pytest.mark.parametrize("is_slippery", [True, False])
def test_the_row_optimal_is_the_optimum_on_every_map(is_slippery):
    """The policy of a discount, `expert`, is not: it loses a chance where a detour would be safe but long.

    The maps are the test maps of configs/random_maps.yaml.
    """
    grids = random.Random(1).sample(random_grids(2200), 200)
    lakes = [FrozenLake(grid, is_slippery) for grid in grids]
    expert = {"expert": [baseline_policy("expert", lake) for lake in lakes]}
    optimal, *_, discounted = evaluate_policies(expert, lakes, episodes=200)
    assert (optimal.name, len(optimal.scores)) == ("optimal", 200)
    percents = [score.percent_of_optimal for score in optimal.scores]
    assert min(percents) == pytest.approx(100.0, abs=1e-6)
    assert max(percents) == pytest.approx(100.0, abs=1e-6)
    table, _ = evaluation_table([optimal], "200 maps")
    (column,) = (column for column in table.columns if column.header == "% of optimal")
    assert list(column.cells) == ["100.0"]
    if is_slippery:
        assert discounted.mean("percent_of_optimal") == pytest.approx(99.76, abs=0.005)
        assert min(score.percent_of_optimal for score in discounted.scores) < 99
    else:
        assert discounted.mean("percent_of_optimal") == pytest.approx(100.0, abs=1e-6)


def test_several_maps_are_averaged():
    lakes = [FrozenLake(grid, is_slippery=False) for grid in (("SFFG",), ("SFHG",))]
    judged = evaluate_policies({"right": [constant_policy(4, RIGHT, 4)] * 2}, lakes, episodes=3)
    assert judged[-1].mean("success_probability") == 0.5
    assert judged[-1].simulated_episodes == 4
    assert judged[-1].simulated_successes == 2
    # LEFT is as good as anything on a map that cannot be crossed, so no single best action can be named
    assert judged[2].name == "best constant action"


def test_each_map_has_the_step_limit_of_its_size():
    judged = evaluate_policies({}, [LAKE, FrozenLake(CANONICAL_GRIDS["8x8"])], episodes=2)
    assert [score.horizon_steps for score in judged[0].scores] == [100, 200]
    assert "in 100 or 200 steps" in " ".join(show(*evaluation_table(judged, "two lakes")).split())


def test_returns_stand_in_the_table_where_they_are_not_the_success():
    cliff = CliffWalking()
    policies = {name: [baseline_policy(name, cliff)] for name in ("expert", "random")}
    judged = evaluate_policies(policies, [cliff], episodes=5)
    assert [p.name for p in judged[:3]] == ["optimal", "uniform random", "best constant action (UP)"]
    assert [p.mean("percent_of_optimal") for p in judged[3:]] == pytest.approx([100.0, -1129.89], abs=0.01)
    assert [p.mean("return_at_horizon") for p in judged[3:]] == pytest.approx([-13.0, -1083.0], abs=5e-3)
    table, note = evaluation_table(judged, "CliffWalking-v1")
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["return in 100 steps"] == ["-13.0", "-1083.0", "-100.0", "-13.0", "-1083.0"]
    assert cells["% of optimal"] == ["100.0", "-1129.9", "0.0", "100.0", "-1129.9"]
    assert cells["optimal states"][0] == "37/37"
    assert note == "The best policy that may count its steps earns -13.0 in 100 steps."
    assert judged[0].as_dict()["return_at_horizon"] == -13.0
    # A lake has no such column: its return is the success
    lake = evaluate_policies({}, [LAKE], episodes=2)
    assert not any("return" in str(column.header) for column in evaluation_table(lake, "a lake")[0].columns)
    assert not any("return" in key for key in lake[0].as_dict())


# Files -----------------------------------------------------------------------------------------------------------


def test_evaluation_of_several_maps_names_every_action(tmp_path):
    lakes = [FrozenLake(g) for g in (("SFF", "FHF", "FFG"), ("SHF", "FFF", "FHG"), ("SFF", "HHF", "FFG"))]
    policies_SA = [baseline_policy("shortest-path", lake) for lake in lakes]
    about = {"maps": [str(lake) for lake in lakes], "is_slippery": True}
    save_evaluation(evaluate_policies({"a model, greedy": policies_SA}, lakes, episodes=3), lakes, about, tmp_path)
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["maps"] == ["SFF|FHF|FFG", "SHF|FFF|FHG", "SFF|HHF|FFG"]
    judged = {policy["policy"]: policy for policy in content["policies"]}
    assert set(judged["uniform random"]["actions"]) == {"." * 9}
    policy = judged["a model, greedy"]
    assert all(row != "." * 9 for row in policy["actions"])
    for rows, letters, percent in zip(content["maps"], policy["actions"], policy["percents_of_optimal"], strict=True):
        named = [np.full(4, 0.25) if letter == "." else np.eye(4)["LDRU".index(letter)] for letter in letters]
        score = score_policy(FrozenLake(tuple(rows.split("|"))), np.array(named), 100)
        assert percent == pytest.approx(score.percent_of_optimal, abs=0.01)
    with Image.open(tmp_path / "policy.png") as picture:
        assert picture.size == (3 * 3.0 * 120, 3.7 * 120)


def test_the_picture_of_many_maps_shows_the_last_greedy_policy_from_worst_to_best(tmp_path, monkeypatch):
    lakes = [FrozenLake(("S" + "F" * n + "G",), is_slippery=False) for n in range(1, 7)]
    states = [len(lake.grid[0]) for lake in lakes]
    named = {
        "untrained, greedy": [constant_policy(n, LEFT, 4) for n in states],
        "trained, greedy": [constant_policy(n, UP if i else RIGHT, 4) for i, n in enumerate(states)],
    }
    titles, draw = [], judge.policy_figure
    monkeypatch.setattr(judge, "policy_figure", lambda panels: titles.extend(p[0] for p in panels) or draw(panels))
    save_evaluation(evaluate_policies(named, lakes, episodes=6), lakes, {}, tmp_path)
    assert titles == ["trained, greedy\n0 % of optimal"] * 4 + ["trained, greedy\n100 % of optimal"]


def test_each_map_is_simulated_with_chance_of_its_own():
    policy_SA = optimal_policy(LAKE.mdp)
    judged = evaluate_policies({"x": [policy_SA] * 2}, [LAKE] * 2, episodes=200)[-1]
    assert judged.simulated_successes == sum(simulated_successes(LAKE, policy_SA, None, 100, seed) for seed in (0, 1))


def test_evaluation_of_the_cliff(tmp_path):
    cliff = CliffWalking()
    judged = evaluate_policies({"expert": [baseline_policy("expert", cliff)]}, [cliff], episodes=3)
    save_evaluation(judged, [cliff], {"env_id": "CliffWalking-v1"}, tmp_path / "new")
    content = json.loads((tmp_path / "new" / "evaluation.json").read_text())
    assert (content["env_id"], list(content)) == ("CliffWalking-v1", ["env_id", "policies"])
    expert = content["policies"][-1]
    assert (expert["return_at_horizon"], expert["optimal_return"]) == (-13.0, -13.0)
    assert np.shape(expert["policy_SA"]) == (48, 4)
    assert (tmp_path / "new" / "policy.png").stat().st_size > 1000


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    judged = evaluate_policies({}, [LAKE], episodes=1)
    with pytest.raises(InputError, match=r"^--output_dir .*file: cannot be written .*; make room, or name another"):
        save_evaluation(judged, [LAKE], {}, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
