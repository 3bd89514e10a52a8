"""The contract: a task is one file and one entry; it trains, resumes and is judged; what it lacks is one line."""

import importlib
import json
import re
import sys

import arithmetic_task
import gymnasium
import numpy as np
import pytest
import torch
from conftest import interrupted_at_step
from safetensors.torch import load_file
from test_train_script import metrics_of, small_run

import evaluate_policy
import tasks
import train_script
from llm_policy.environments import expert_q, judge
from llm_policy.environments.gym_env import make_gym_environment
from llm_policy.environments.gym_table import GymTable
from llm_policy.environments.judge import baseline_policy, evaluate_policies, simulated_successes
from llm_policy.environments.mdp import optimal_q
from llm_policy.environments.policy_table import constant_policy, score_policy, uniform_policy
from llm_policy.errors import InputError, run_script

NO_PICTURES = ("--report_to", "none")


@pytest.fixture
def arithmetic(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "arithmetic", arithmetic_task.__name__)
    return ("--task", "arithmetic", "--objective", "grpo", *NO_PICTURES)


@pytest.fixture(autouse=True)
def no_lake_options(monkeypatch, tmp_path):
    """configs/laptop.yaml names options of the lake's rewards, which another task does not have."""
    lines = (train_script.run_files.ROOT / "configs/laptop.yaml").read_text().splitlines()
    own = ("cap_bonus", "optimal_bonus", "observation")
    (tmp_path / "any_task.yaml").write_text("\n".join(line for line in lines if not line.startswith(own)))


def arguments_of(model, tmp_path, name: str, *more) -> list[str]:
    arguments = small_run(model, tmp_path / name, *more)
    place = arguments.index("--episodes")
    del arguments[place : place + 2]  # an option of tasks with episodes
    arguments[arguments.index("--config") + 1] = str(tmp_path / "any_task.yaml")
    return arguments


def test_another_task_trains_and_is_judged(arithmetic, answering_llama, tmp_path, capsys):
    more = (*arithmetic, "--right_reward", "2", "--reward_weights", "1", "0.5")
    assert train_script.main(arguments_of(answering_llama, tmp_path, "out", *more)) == 0
    out = tmp_path / "out"
    assert json.loads((out / "run.json").read_text())["task"] == "arithmetic"
    lines = metrics_of(out)
    assert [line["step"] for line in lines] == [1, 2]
    assert all("rewards/sum_reward/mean" in line and "policy/accuracy" in line for line in lines)
    assert not any("success" in name or "optimal_states" in name for line in lines for name in line)
    result = (out / "result.txt").read_text()
    for name in ("untrained, greedy", "warm start, greedy", "trained, greedy", "trained, sampled"):
        assert f"{name}: " in result
    assert "sums are right (warm start 2 steps, GRPO 2)" in result.splitlines()[-1]
    assert "accuracy" in capsys.readouterr().out


def test_another_task_resumes_to_the_same_adapter(arithmetic, answering_llama, tmp_path):
    whole = arguments_of(answering_llama, tmp_path, "whole", *arithmetic)
    assert train_script.main(whole) == 0
    parts = arguments_of(answering_llama, tmp_path, "parts", *arithmetic)

    interrupted_at_step(4, lambda: train_script.main(parts))  # two steps of the warm start, one of GRPO
    assert train_script.main([*parts, "--resume_from_checkpoint", "auto"]) == 0
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "parts/result.txt").read_text() == (tmp_path / "whole/result.txt").read_text()


BAD_INPUT = [
    (
        ("--task", "nonsense"),
        "--task nonsense: expected one of frozen_lake, cliff_walking, taxi, riddles, piqa, drawing, arc, arithmetic",
    ),
    (("--objective", "expected"), "--objective expected: --task arithmetic knows no reward for every legal answer"),
    (("--reward_weights", "0", "0"), "--reward_weights [0.0, 0.0]: every reward would be 0; expected one above 0"),
    (("--reward_weights", "1", "1", "1"), "--reward_weights [1.0, 1.0, 1.0]: expected one for each of sum_reward, "),
    (("--is_slippery", "false"), "unknown arguments: --is_slippery"),
]


@pytest.mark.parametrize(("more", "message"), BAD_INPUT, ids=[more[0] for more, _ in BAD_INPUT])
def test_what_a_task_lacks_is_one_line(more, message, arithmetic, answering_llama, tmp_path, monkeypatch, capsys):
    arguments = arguments_of(answering_llama, tmp_path, "out", *arithmetic, *more)
    monkeypatch.setattr(sys, "argv", ["train_script.py", *arguments])
    with pytest.raises(SystemExit) as leaving:
        run_script(train_script.main)
    assert leaving.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_task_without_a_configuration_asks_for_one(arithmetic):
    with pytest.raises(InputError, match=r"--task arithmetic: has no configs/arithmetic\.yaml; name a configuration"):
        train_script.main([*arithmetic])


def test_without_a_configuration_of_the_task_the_named_one_counts(arithmetic, tmp_path):
    with pytest.raises(InputError, match=r"typo\.yaml: no such file"):
        train_script.main([*arithmetic, "--config", "typo.yaml"])
    (tmp_path / "mine.yaml").write_text("use_peft: true\nuse_cpu: true\n")
    with pytest.raises(InputError, match="--model_name_or_path"):
        train_script.main([*arithmetic, "--config", str(tmp_path / "mine.yaml")])


def test_a_warm_start_needs_replies_to_teach(arithmetic, answering_llama, tmp_path, monkeypatch):
    make_task = arithmetic_task.make_task

    def without_lessons(*arguments):
        task = make_task(*arguments)
        return tasks.Task(task.rows, task.reward_functions, task.judge, task.is_reply)

    monkeypatch.setattr(arithmetic_task, "make_task", without_lessons)
    with pytest.raises(InputError, match="--warm_start always: --task arithmetic has no replies to teach"):
        train_script.main(arguments_of(answering_llama, tmp_path, "out", *arithmetic))
    more = (*arithmetic, "--warm_start", "auto", "--max_steps", 1)
    assert train_script.main(arguments_of(answering_llama, tmp_path, "out", *more)) == 0


@pytest.mark.parametrize("name", ["cliff_walking", "taxi"])
def test_environments_without_maps_train_and_are_judged(name, taught, tmp_path):
    config = train_script.run_files.ROOT / f"configs/{name}.yaml"
    arguments = small_run(taught("llama"), tmp_path / "out", *NO_PICTURES, "--task", name, "--episodes", "5")
    arguments += ["--max_completion_length", "64"]  # the tiny tokenizer needs more than the real one
    arguments[arguments.index("--config") + 1] = str(config)
    assert train_script.main([*arguments, "--max_steps", "1", "--samples_per_state", "0"]) == 0
    policies = json.loads((tmp_path / "out/evaluation.json").read_text())["policies"]
    judged = {policy["policy"].partition(" (")[0]: policy for policy in policies}
    assert judged["optimal"]["percent_of_optimal"] == pytest.approx(100.0)
    (constant,) = [row for name, row in judged.items() if name.startswith("best constant action")]
    assert constant["percent_of_optimal"] == pytest.approx(0.0)
    assert judged["optimal"]["return_at_horizon"] == pytest.approx({"cliff_walking": -13, "taxi": 7.93}[name])
    assert "trained, greedy" in judged
    assert (tmp_path / "out/policy.png").stat().st_size > 1000


# The game of docs/tasks.md -----------------------------------------------------------------------------------------


@pytest.fixture
def key_room(monkeypatch, tmp_path):
    """The module that the page shows, as it stands there."""
    text = (train_script.run_files.ROOT / "docs/tasks.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class KeyRoom(" in code]
    (tmp_path / "key_room.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tasks.TASKS, "key_room", "key_room")
    monkeypatch.setattr(GymTable, "known", dict(GymTable.known))
    yield importlib.import_module("key_room")
    del sys.modules["key_room"]
    for env_id in ("KeyRoom-v0", "PitRoom-v0", "WindyRoom-v0", "EndlessRoom-v0"):
        gymnasium.registry.pop(env_id, None)


def test_a_game_of_ones_own_trains_and_is_judged(key_room, taught, tmp_path):
    out = tmp_path / "out"
    arguments = small_run(taught("llama"), out, *NO_PICTURES, "--task", "key_room", "--episodes", "5")
    arguments += ["--max_completion_length", "64"]
    arguments[arguments.index("--config") + 1] = str(train_script.run_files.ROOT / "configs/cliff_walking.yaml")
    assert train_script.main([*arguments, "--max_steps", "1", "--samples_per_state", "0"]) == 0
    judged = {row["policy"]: row for row in json.loads((out / "evaluation.json").read_text())["policies"]}
    assert judged["optimal"]["return_at_horizon"] == pytest.approx(6)  # four steps to the key at -1 each, the door
    assert judged["optimal"]["success_probability"] == pytest.approx(1)
    assert "trained, greedy" in judged
    assert (out / "policy.png").stat().st_size > 1000
    assert evaluate_policy.main(["--policies", str(out), "random", "expert", "--episodes", "5"]) == 0
    csv = tmp_path / "expert.csv"
    expert_q.main(["--env_id", "key_room:KeyRoom-v0", "--rows", "states", "--output", str(csv)])
    assert len(expert_q.read_expert_csv(csv, key_room.KeyRoom)) == 18  # nobody opens the door without the key


def test_within_so_few_steps_that_nothing_can_be_done_every_policy_is_optimal(key_room):
    score = score_policy(key_room.KeyRoom(), uniform_policy(20, 4), horizon_steps=3)
    assert (score.percent_of_optimal, score.regret) == (100.0, 0.0)


def test_a_game_of_ones_own_is_played_by_ppo_and_judged_exactly(key_room, tmp_path):
    pytest.importorskip("stable_baselines3")
    train = importlib.import_module("train_policy_gradient").main
    options = ("--timesteps", "128", "--n_envs", "2", "--n_steps", "32", "--batch_size", "32")
    out = tmp_path / "out"
    assert train(["--env_id", "key_room:KeyRoom-v0", *options, "--output_dir", str(out)]) == 0
    assert json.loads((out / "run.json").read_text())["task"] == "key_room"
    rows = json.loads((out / "evaluation.json").read_text())["policies"]
    assert rows[0]["policy"] == "optimal"
    assert rows[0]["return_at_horizon"] == pytest.approx(6)
    assert evaluate_policy.main(["--policies", str(out), "expert", "--episodes", "5"]) == 0


def test_a_game_that_ends_badly_has_to_say_so(key_room):
    class Pit(key_room.KeyRoomEnv):
        def outcome(self, state, action):
            """A pit below the start."""
            probability, next_state, reward, done = super().outcome(state, action)
            return (probability, next_state, -10.0, True) if next_state % 10 == 5 else (1.0, next_state, reward, done)

    gymnasium.register("PitRoom-v0", Pit)
    unsaid = type("PitRoom", (key_room.KeyRoom,), {"env_id": "PitRoom-v0"})()
    with pytest.raises(InputError, match=r"PitRoom-v0: the last step pays -10 or 10; say in PitRoom\.is_goal which"):
        _ = unsaid.success_mdp
    said = type("Said", (key_room.KeyRoom,), {"env_id": "PitRoom-v0", "is_goal": lambda self, state: state == 19})()
    down, right = said.actions.index("DOWN"), said.actions.index("RIGHT")
    assert said.success_mdp.rewards_SA[0, down] == 0
    assert said.success_mdp.rewards_SA[18, right] == said.success_mdp.rewards_SA[14, down] == 1
    assert said.success_mdp.rewards_SA.sum() == 2 + 2  # from the last cell itself, where nobody comes
    # Who falls into the pit ends the episode, and has not succeeded
    assert simulated_successes(said, constant_policy(20, down, 4), None, 3, seed=0) == 0


def test_a_game_that_time_alone_ends_is_judged_without_an_optimum(key_room, monkeypatch, tmp_path):
    """Its rewards never end, so that no policy is the best one without a limit."""

    class Endless(key_room.KeyRoomEnv):
        def outcome(self, state, action):
            probability, next_state, reward, _ = super().outcome(state, action)
            return probability, next_state, reward, False

    gymnasium.register("EndlessRoom-v0", Endless, max_episode_steps=30)
    endless = type("EndlessRoom", (key_room.KeyRoom,), {"env_id": "EndlessRoom-v0"})()
    judged = evaluate_policies({"mine": [constant_policy(20, 0, 4)]}, [endless], episodes=2)
    assert [one.name for one in judged] == ["uniform random", judged[1].name, "mine"]
    assert [one.is_reference for one in judged] == [True, True, False]
    assert judged[0].mean("optimal_return") > judged[0].mean("return_at_horizon")
    shown = []
    draw = judge.policy_figure
    monkeypatch.setattr(judge, "policy_figure", lambda rows: shown.extend(row[0] for row in rows) or draw(rows))
    judge.save_evaluation(judged, [endless], {}, tmp_path)
    assert [title.splitlines()[0] for title in shown] == ["mine"]


def test_a_game_with_chance_has_no_learner_from_samples(key_room):
    class Windy(key_room.KeyRoomEnv):
        def __init__(self):
            super().__init__()
            for state, actions in self.P.items():
                for outcomes in actions.values():
                    outcomes[:] = [(0.9, *outcomes[0][1:]), (0.1, state, -1.0, False)]

    gymnasium.register("WindyRoom-v0", Windy)
    windy = type("WindyRoom", (key_room.KeyRoom,), {"env_id": "WindyRoom-v0"})()
    with pytest.raises(InputError, match="WindyRoom-v0: Q-learning is for lakes and games without chance"):
        baseline_policy("q-learning", windy)


@pytest.fixture
def corridor(key_room):
    """Three cells; LEAVE ends the episode where it is, and pays 10 in the last one."""

    class Corridor(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2)

        def __init__(self, start=0, size=3):
            pays = dict(enumerate([-5.0, -5.0, 10.0]))
            self.P = {n: {0: [(1.0, min(n + 1, 2), 0.0, False)], 1: [(1.0, n, pays[n], True)]} for n in range(3)}
            if size != 3:
                self.P = {n: self.P[min(n, 2)] for n in range(size)}
            self.initial_state_distrib = np.eye(size)[start]
            self.where = start

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.where = int(self.initial_state_distrib.argmax())
            return self.where, {}

        def step(self, action):
            ((_, self.where, reward, done),) = self.P[self.where][int(action)]
            return self.where, reward, done, False, {}

    gymnasium.register("Corridor-v0", Corridor, max_episode_steps=30)
    own = {"env_id": "Corridor-v0", "actions": ("ON", "LEAVE"), "arrows": {}, "task": "key_room"}
    said = {"state_text": lambda self, state: f"cell {state}", "is_goal": lambda self, state: state == 2}
    yield type("Corridor", (GymTable,), own | said)()
    gymnasium.registry.pop("Corridor-v0", None)


def test_a_cell_in_which_an_episode_may_end_is_not_its_end(corridor):
    exact = optimal_q(corridor.mdp, 0.99)
    np.testing.assert_allclose(expert_q.learn_q(corridor, 0.99, 1, 20_000, 0)[0], exact, atol=0.05)


def test_a_game_has_the_step_limit_that_it_is_registered_with(corridor, key_room):
    assert (corridor.horizon_steps, key_room.KeyRoom().horizon_steps) == (30, 100)


def test_a_game_with_options_of_its_own_is_no_table_of_the_usual_one(corridor):
    pytest.importorskip("stable_baselines3")
    table_of = importlib.import_module("llm_policy.policy_gradient.judge").table_of
    assert table_of(make_gym_environment("Corridor-v0")) == corridor
    assert table_of(make_gym_environment("Corridor-v0", {"start": 1})) is None
    assert table_of(make_gym_environment("Corridor-v0", {"size": 5})) is None


def test_rows_of_states_need_an_environment_that_can_be_put_into_them(corridor, tmp_path):
    with pytest.raises(InputError, match="Corridor-v0: its environment does not call its state `s`"):
        expert_q.main(["--env_id", "Corridor-v0", "--rows", "states", "--output", str(tmp_path / "e.csv")])


def test_simulated_actions_are_not_drawn_with_the_numbers_of_the_environment(corridor, monkeypatch):
    """A game that wins where its own draw is below a half, as a policy with the same numbers would choose."""

    class Coin(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

        def step(self, action):
            wins = action == 0 and self.np_random.random() < 0.5
            return int(wins), float(wins), True, False, {}

    monkeypatch.setattr(type(corridor), "make", lambda self, horizon_steps=None: Coin())
    monkeypatch.setattr(type(corridor), "is_goal", lambda self, state: state == 1)
    assert abs(simulated_successes(corridor, uniform_policy(2, 2), None, 2000, seed=0) / 2000 - 0.25) < 0.04


def test_actions_may_be_written_in_lower_case(key_room, tmp_path):
    small = type("Small", (key_room.KeyRoom,), {"actions": tuple(map(str.lower, key_room.KeyRoom.actions))})
    assert baseline_policy("constant:DOWN", small()).argmax(1).tolist() == [small.actions.index("down")] * 20
    csv = tmp_path / "expert.csv"
    columns = ",".join(f"q_value_{name}" for name in small.actions)
    csv.write_text(f'state_str,action,{columns}\n"{small().state_text(0)}",{small.actions[1]},0,1,0,0\n')
    assert expert_q.read_expert_csv(csv, small)["action"].tolist() == [1]
