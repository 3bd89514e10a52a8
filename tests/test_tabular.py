"""What tasks with a table share: maps held out, states drawn so that each action is the best one equally often."""

import warnings

import numpy as np
import pytest
from tiny_models import tiny_tokenizer
from trl import GRPOConfig

import tasks.frozen_lake
import tasks.tabular
from llm_policy.environments.expert_q import ExpertOptions, read_expert_csv, write_expert_csv
from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, FrozenLake
from llm_policy.environments.mdp import AGREEMENT_GAMMA, optimal_actions, optimal_q
from llm_policy.environments.toy_text import CliffWalking, Taxi
from llm_policy.errors import InputError
from llm_policy.run_files import ROOT
from tasks.frozen_lake import exchanged, lake_words
from tasks.tabular import (
    ExpertArguments,
    balancing_weights,
    exact_expert,
    held_out,
    logging_truth,
    read_expert,
)
from tasks.tabular_judge import MAPS_JUDGED

CSV = ROOT / "expert_demos_batched_avg_q.csv"


def lakes_csv(folder, maps: int, **options) -> str:
    path = str(folder / "lakes.csv")
    write_expert_csv(ExpertOptions(random_maps=maps, rows="states", output=path, **options))
    return path


# Maps held out -----------------------------------------------------------------------------------------------------


def test_a_warning_of_the_reader_is_one_line(tmp_path, capsys):
    """It was Python's own, with a line of source below it."""
    csv = tmp_path / "expert.csv"
    columns = ",".join(f"q_value_{name.lower()}" for name in ACTIONS)
    csv.write_text(f"state_str,action,{columns}\nAFFF|FHFH|FFFH|HFFG,3,0.4,0.3,0.2,0.1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_expert(ExpertArguments(expert_csv=str(csv)), FrozenLake)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"warning: {csv}: in 1 of 1 rows `action` is not the best by its own Q-values")
    assert second == f"{csv}: 1 rows, 1 states, 1 map"


def test_maps_held_out_are_not_trained_on(tmp_path):
    expert = read_expert_csv(lakes_csv(tmp_path, 20), FrozenLake)
    for seed in (1, 2):
        rows, tested = held_out(expert, 6, seed)
        assert len(set(tested)) == 6
        assert set(rows["environment"]) == set(expert["environment"]) - set(tested)
        assert list(rows.index) == list(range(len(rows)))
        assert tested == held_out(expert, 6, seed)[1]
    assert tested != held_out(expert, 6, 1)[1]


def test_without_test_maps_the_first_ones_are_judged_and_all_are_trained_on(tmp_path, capsys):
    expert = read_expert_csv(lakes_csv(tmp_path, MAPS_JUDGED + 5), FrozenLake)
    rows, judged = held_out(expert, 0, 1)
    assert rows is expert
    assert judged == list(dict.fromkeys(expert["environment"]))[:MAPS_JUDGED]
    assert "the first 20 of 25 maps are judged; --test_maps N holds N out" in capsys.readouterr().out


def test_one_map_must_be_left_to_train_on(tmp_path):
    expert = read_expert_csv(lakes_csv(tmp_path, 3), FrozenLake)
    assert len(held_out(expert, 2, 1)[1]) == 2
    with pytest.raises(InputError, match=r"^--test_maps 3: lakes.csv has 3 maps, and one must be left to train on"):
        held_out(expert, 3, 1, "lakes.csv")


# Thoughts with a false word ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_slippery", [True, False])
def test_the_exchanged_lake_differs_in_one_cell_and_in_its_best_actions(is_slippery):
    lake = FrozenLake(CANONICAL_GRIDS["4x4"], is_slippery)
    others = {state: exchanged(lake, state) for state in lake.acting_states}
    assert sum(other is not None for other in others.values()) >= 5
    for state, other in others.items():
        if other is not None:
            changed = [i for i, pair in enumerate(zip("".join(lake.grid), "".join(other.grid), strict=True))
                       if len(set(pair)) == 2]  # fmt: skip
            assert len(changed) == 1
            assert abs(changed[0] % 4 - state % 4) + abs(changed[0] // 4 - state // 4) == 1
            assert state in other.acting_states
            best, best_there = (optimal_actions(optimal_q(e.mdp, AGREEMENT_GAMMA))[state] for e in (lake, other))
            assert not (best & best_there).any()


def test_training_logs_how_true_sampled_thoughts_are():
    logged = {}
    true = ["<think>LEFT out.</think>", "<think>LEFT 00: ice.</think>"]
    reward = logging_truth(lambda completions, **_: [1.0] * len(completions), true.__getitem__)
    completions = [[{"role": "assistant", "content": text}] for text in (true[1], true[0], true[1], "?")]
    assert reward(completions, row=[1, 0, 0, 0], log_metric=logged.__setitem__) == [1.0] * 4
    assert logged == {"sampled/true_thoughts": 0.5, "sampled/true_words": pytest.approx((1 + 1 + 0.5 + 0) / 4)}
    assert reward(completions, row=[1, 0, 0, 0]) == [1.0] * 4


def test_a_thought_without_the_map_has_no_false_word():
    assert lake_words("coordinates", "place").exchanged is None


# Balanced states ---------------------------------------------------------------------------------------------------


def test_balancing_weights():
    left, up, left_or_up = [1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.0, 0.5]
    assert balancing_weights(np.array([left] * 3 + [up])) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert balancing_weights(np.array([left, up, left_or_up])) == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert balancing_weights(np.array([left, up, [0.5] * 4])) == pytest.approx([1 / 2, 1 / 2, 0.0])
    assert balancing_weights(np.array([[0.5] * 4] * 2)) == pytest.approx([1 / 2, 1 / 2])


def rows_of(csv, folder, *, seed: int = 0, balanced_share: float = 0.0, max_steps: int = 2, **options) -> list[dict]:
    """The task's rows: two prompts per step."""
    arguments = tasks.frozen_lake.Arguments(expert_csv=str(csv), balance_actions=balanced_share, **options)
    training = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, seed=seed, max_steps=max_steps, report_to="none",
        per_device_train_batch_size=8, num_generations=4,
    )  # fmt: skip
    return tasks.frozen_lake.make_task(arguments, training, tiny_tokenizer("llama", 384, False)).rows


def column(rows: list[dict], name: str) -> list:
    return [row[name] for row in rows]


def test_balanced_rows_show_each_best_action_equally_often(tmp_path):
    csv = lakes_csv(tmp_path, 200, is_slippery=False)
    expert = read_expert_csv(csv, FrozenLake, is_slippery=False)

    def rows(seed: int, balanced_share: float) -> list[dict]:
        return rows_of(csv, tmp_path, seed=seed, balanced_share=balanced_share, is_slippery=False)

    def share_A(drawn: list[dict]) -> np.ndarray:
        best_PA = optimal_actions(np.array(column(drawn, "q_values")))
        return (best_PA / best_PA.sum(axis=1, keepdims=True)).mean(axis=0)

    as_they_are, balanced = rows(0, 0), rows(0, 1)
    assert share_A(as_they_are).min() < 0.1  # on dry ice the way leads down and right
    assert share_A(balanced) == pytest.approx([0.25] * 4, abs=0.03)
    assert share_A(rows(0, 0.5)) == pytest.approx((share_A(as_they_are) + share_A(balanced)) / 2, abs=0.03)
    assert not optimal_actions(np.array(column(balanced, "q_values"))).all(axis=1).any()
    words = tasks.frozen_lake.lake_words("coordinates")
    for row in balanced[:20]:
        of_table = expert.iloc[row["row"]]
        assert (row["state"], row["q_values"]) == (of_table["state"], list(of_table["q_values"]))
        assert row["map"] == str(of_table["environment"])
        assert row["prompt"] == words.messages(of_table["environment"], of_table["state"])
    assert column(balanced, "prompt") == column(rows(0, 1), "prompt")  # a resumed run sees the same rows
    assert column(balanced, "prompt") != column(rows(1, 1), "prompt")


def test_of_a_short_table_as_many_rows_are_drawn_as_the_run_reads(tmp_path):
    rows = rows_of(CSV, tmp_path, balanced_share=1.0, max_steps=300)
    assert len(rows) == 300 * 2  # two prompts per step
    assert set(column(rows, "state")) == set(read_expert_csv(CSV, FrozenLake)["state"])


def test_without_a_balanced_share_each_state_stands_once(tmp_path):
    rows = rows_of(CSV, tmp_path, max_steps=300)
    assert column(rows, "row") == list(range(11))
    assert column(rows, "state") == list(read_expert_csv(CSV, FrozenLake)["state"])


@pytest.mark.parametrize("thought", ["place", "search"])
def test_a_thought_that_looks_has_to_be_true(thought, tmp_path):
    """Under `place` the form is enough, as ever."""
    training = GRPOConfig(output_dir=str(tmp_path), bf16=False, fp16=False)
    arguments = tasks.frozen_lake.Arguments(expert_csv=str(CSV), observation="cells", thought=thought)
    task = tasks.frozen_lake.make_task(arguments, training, tiny_tokenizer("llama", 384, False))
    (prompt, replies), (_, others) = task.lessons[:2]
    if thought == "place":
        assert all(task.is_reply(prompt, text) for text in [*replies, *others])
        assert not task.is_reply(prompt, replies[0].replace("<answer>", "<answer>NORTH"))
    else:
        assert task.is_reply is None
    assert ("thought" in task.judge.settings) == (thought == "search")
    assert (">LEFT\n" in replies[0]) == (thought == "search"), "on slippery ice a line for each action"


# The exact expert --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["frozen_lake", "taxi"])
def test_a_run_is_resumed_where_exact_q_values_are_rounded_otherwise(name, tmp_path, monkeypatch):
    """One thread and two of the same processor differ in the last digits: "the data changed", it said."""
    module = tasks.task_module(name)
    arguments = module.Arguments(**({"random_maps": 3, "test_maps": 1} if name == "frozen_lake" else {}))
    training = GRPOConfig(output_dir=str(tmp_path), bf16=False, fp16=False)
    begun = module.make_task(arguments, training, tiny_tokenizer("llama", 384, False))
    monkeypatch.setattr(tasks.tabular, "optimal_q", lambda *arguments: optimal_q(*arguments) * (1 + 1e-13))
    resumed = module.make_task(arguments, training, tiny_tokenizer("llama", 384, False))
    assert resumed.rows != begun.rows
    assert resumed.source == begun.source
    # What a CSV says counts to the last digit
    arguments = tasks.frozen_lake.Arguments(expert_csv=str(CSV))
    lake = tasks.frozen_lake.make_task(arguments, training, tiny_tokenizer("llama", 384, False))
    assert lake.source == lake.rows


def test_random_maps_are_those_of_a_csv(tmp_path, capsys):
    csv = lakes_csv(tmp_path, 7, map_size=5, is_slippery=False)
    training = GRPOConfig(output_dir=str(tmp_path), bf16=False, fp16=False)

    def task(**options):
        arguments = tasks.frozen_lake.Arguments(is_slippery=False, test_maps=3, **options)
        return tasks.frozen_lake.make_task(arguments, training, tiny_tokenizer("llama", 384, False))

    drawn, read = task(random_maps=7, map_size=5), task(expert_csv=csv)
    assert "--random_maps 7: exact Q-values of" in capsys.readouterr().out
    assert drawn.judge.settings == read.judge.settings
    for name in ("state", "map", "prompt"):
        assert column(drawn.rows, name) == column(read.rows, name)
    np.testing.assert_allclose(column(drawn.rows, "q_values"), column(read.rows, "q_values"), atol=1e-9)
    # A CSV that is named stands above a number of maps, as a configuration may have it
    assert task(random_maps=5, expert_csv=csv).judge.settings == read.judge.settings
    assert "--random_maps 5: not used, because --expert_csv is given" in capsys.readouterr().out
    with pytest.raises(InputError, match="--map_size 5: is of maps that are drawn"):
        task(expert_csv=csv, map_size=5)
    with pytest.raises(InputError, match="--test_map_seed 5: is of maps that are held out"):
        tasks.frozen_lake.Arguments(test_map_seed=5)


@pytest.mark.parametrize("environment", [FrozenLake(CANONICAL_GRIDS["4x4"], True), CliffWalking(), Taxi()], ids=str)
def test_the_exact_expert_is_what_a_csv_of_it_holds(environment, tmp_path):
    csv = write_expert_csv(ExpertOptions(env_id=environment.env_id, rows="states", output=str(tmp_path / "e.csv")))
    read, computed = read_expert_csv(csv, type(environment)), exact_expert(environment)
    assert list(computed.columns) == list(read.columns)
    assert computed["q_values"].tolist() == [pytest.approx(q_values, abs=1e-6) for q_values in read["q_values"]]
    for name in ("state_str", "environment", "state", "action", "count"):
        assert list(computed[name]) == list(read[name]), name
