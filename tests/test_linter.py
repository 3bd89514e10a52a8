import numpy as np
import pandas as pd
import pytest
from tiny_models import build_tiny_model

from llm_policy.environments.expert_q import ExpertOptions, read_expert_csv, write_expert_csv
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, acting_states, lake_mdp, random_grids, state_text
from llm_policy.environments.mdp import optimal_q
from llm_policy.models import load_tokenizer
from prompts import fit_to_template, policy_messages
from rewards import ORIGINAL_REWARD, AdvantageReward
from tasks.linter import bellman_residual, lint

GRID = CANONICAL_GRIDS["4x4"]
LOUD = AdvantageReward("minmax", 1.0, cap_bonus=False)


def table_of(grids=(GRID,), is_slippery=True, gamma=0.99) -> pd.DataFrame:
    """What `read_expert_csv` gives for the exact Q-values of all acting states."""
    rows = []
    for grid in grids:
        q_SA = optimal_q(lake_mdp(grid, is_slippery), gamma)
        rows += [
            {"state_str": state_text(grid, s), "grid": grid, "state": s, "q_values": q_SA[s].tolist()}
            for s in acting_states(grid)
        ]
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        name: load_tokenizer(str(build_tiny_model(tmp_path_factory.mktemp(name), name))) for name in ("llama", "gemma")
    }


def findings_of(
    tokenizer, table=None, *, observation="coordinates", is_slippery=True, scale=LOUD, prompts=None, **more
):
    table = table_of() if table is None else table
    if prompts is None:
        places = zip(table["grid"], table["state"], strict=True)
        prompts = [fit_to_template(policy_messages(g, s, is_slippery, observation), tokenizer) for g, s in places]
    limits = {"context_tokens": 2048, "max_completion_tokens": 32} | more
    return lint(table, prompts, tokenizer, is_slippery, scale, **limits)


def rules_of(*args, **options) -> dict[str, bool]:
    return {finding.rule: finding.is_error for finding in findings_of(*args, **options)}


@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.parametrize("observation", ["grid", "coordinates", "neighbours", "spaced", "ways"])
def test_the_committed_expert_and_prompts_are_clean(tokenizers, model, observation):
    assert findings_of(tokenizers[model], observation=observation) == []


def test_the_original_prompt_has_every_fault_that_it_is_known_for(tokenizers):
    found = findings_of(tokenizers["llama"], observation="original")
    assert {f.rule: f.is_error for f in found} == {
        "prompts differ in colour codes only": True,
        "wrong examples": True,
        "unsaid dynamics": False,
    }
    examples = next(f.message for f in found if f.rule == "wrong examples")
    assert "RIGHT in state 0" in examples
    assert "where the expert goes LEFT" in examples
    assert "3 answers" in examples


def test_an_example_with_an_optimal_action_is_none(tokenizers):
    text = "AFFF\nFHFH\nFFFH\nHFFG\nIt is slippery.\n<think>away from the hole</think><answer>LEFT</answer>\n"
    prompts = [[{"role": "user", "content": f"{text}\nnow state {i}"}] for i in range(11)]
    assert rules_of(tokenizers["llama"], prompts=prompts) == {}
    wrong = [[{"role": "user", "content": m[0]["content"].replace("LEFT", "UP")}] for m in prompts]
    assert rules_of(tokenizers["llama"], prompts=wrong) == {"wrong examples": True}


EXAMPLES = {
    "cells apart": ("A F F F\nF H F H\nF F F H\nH F F G", "RIGHT", "wrong examples"),
    "indented": ("    AFFF\n    FHFH\n    FFFH\n    HFFG", "RIGHT", "wrong examples"),
    "lower case": ("AFFF\nFHFH\nFFFH\nHFFG", "right", "wrong examples"),
    "colour code": ("\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG", "RIGHT", "wrong examples"),
    # of a lake that the table does not have: by exact Q-values
    "another lake": ("SFF\nFAF\nHFG", "UP", "wrong examples"),
    "another lake, optimal": ("SFF\nFAF\nHFG", "RIGHT", None),
    # as the original's: the S moved to the agent, so that nothing says where it stands
    "no agent": ("F F S F\nF H F H\nF F F H\nH F F G", "DOWN", "unreadable examples"),
    "no lake": ("The form of a reply:", "UP", None),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_examples_however_they_are_written(case, tokenizers):
    lake, action, rule = EXAMPLES[case]
    text = f"{lake}\nIt is slippery.\n<think>.</think><answer>{action}</answer>"
    prompts = [[{"role": "user", "content": f"{text}\nnow state {i}"}] for i in range(11)]
    assert rules_of(tokenizers["llama"], prompts=prompts) == ({rule: rule == "wrong examples"} if rule else {})


def test_states_with_one_prompt(tokenizers):
    prompts = [[{"role": "user", "content": "Cross the slippery lake."}]] * 11
    [finding] = findings_of(tokenizers["llama"], prompts=prompts)
    assert finding.is_error
    assert "11 states share 1 prompts, first AFFF|FHFH|FFFH|HFFG and SAFF|FHFH|FFFH|HFFG" in finding.message


def test_prompts_beyond_the_context(tokenizers):
    [finding] = findings_of(tokenizers["llama"], context_tokens=100)
    assert finding.is_error
    assert "context of 100 tokens" in finding.message
    assert "(11 prompts)" in finding.message


def test_a_template_that_forgets_bos(tokenizers, tmp_path):
    tokenizer = load_tokenizer(str(build_tiny_model(tmp_path, "gemma")))
    if tokenizer("x")["input_ids"][0] != tokenizer.bos_token_id:
        tokenizer.add_bos_token = True
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "").replace("{{bos_token}}", "")
    assert rules_of(tokenizer) == {"prompt tokens": True}


@pytest.mark.parametrize("made_for", [True, False])
@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_bellman_residual(made_for, gamma):
    table = table_of(random_grids(20, seed=3), is_slippery=made_for, gamma=gamma)
    residual, fitted = bellman_residual(table, made_for)
    assert residual < 1e-9
    assert fitted == pytest.approx(gamma)
    assert bellman_residual(table, not made_for)[0] > 0.05


@pytest.mark.parametrize("goal", [0.1, 10.0, 100.0])
@pytest.mark.parametrize("is_slippery", [True, False])
def test_the_goal_may_be_worth_anything(goal, is_slippery, tokenizers):
    table = table_of(is_slippery=is_slippery)
    table["q_values"] = [[goal * q for q in row] for row in table["q_values"]]
    assert bellman_residual(table, is_slippery) == pytest.approx((0.0, 0.99), abs=1e-6)
    other = rules_of(tokenizers["llama"], table, is_slippery=not is_slippery)
    assert other["wrong dynamics"]


def test_a_table_without_successors_has_no_residual():
    assert np.isnan(bellman_residual(table_of().iloc[:1], True)[0])


@pytest.mark.parametrize("made_for", [True, False])
def test_a_csv_for_the_other_ice(tokenizers, made_for):
    found = findings_of(tokenizers["llama"], table_of(is_slippery=made_for), is_slippery=not made_for)
    message = next(f.message for f in found if f.rule == "wrong dynamics" and f.is_error)
    assert f"use --is_slippery {str(made_for).lower()}" in message


def test_learned_q_values_are_rough_at_most(tokenizers, tmp_path):
    options = {"method": "q_learning", "q_learning_steps": 50_000, "batches": 2, "episodes_per_batch": 5}
    path = write_expert_csv(ExpertOptions(**options, rows="states", output=str(tmp_path / "learned.csv")))
    assert set(rules_of(tokenizers["llama"], read_expert_csv(path))) <= {"rough Q-values"}
    noisy = table_of()
    noise = np.random.default_rng(0).normal(0, 0.1, (len(noisy), 4))
    noisy["q_values"] = (np.array(noisy["q_values"].tolist()) + noise).tolist()
    assert rules_of(tokenizers["llama"], noisy)["rough Q-values"] is False


def test_test_maps_among_the_training_maps(tokenizers):
    grids = random_grids(3, seed=3)
    [finding] = findings_of(tokenizers["llama"], evaluation_grids=[grids[0], GRID, grids[1]])
    assert finding.rule == "test maps are training maps"
    assert finding.is_error
    assert finding.message.startswith("1 of 3, first SFFF|FHFH|FFFH|HFFG")


def test_flat_rows(tokenizers):
    table = table_of()
    table.at[4, "q_values"] = [0.5, 0.5001, 0.5, 0.4999]
    found = {f.rule: f for f in findings_of(tokenizers["llama"], table)}
    assert not found["flat rows"].is_error
    assert found["flat rows"].message.startswith("1 of 11 states, first SFFF|AHFH|FFFH|HFFG")


def test_equal_q_values(tokenizers):
    table = table_of()
    table.at[4, "q_values"] = [0.5] * 4  # every action is optimal, and is rewarded so
    found = {f.rule: f for f in findings_of(tokenizers["llama"], table)}
    assert "flat rows" not in found
    assert not found["equal Q-values"].is_error
    assert found["equal Q-values"].message.startswith("in 1 of 11 states, first SFFF|AHFH|FFFH|HFFG")
    table["q_values"] = [[0.5] * 4] * 11
    assert rules_of(tokenizers["llama"], table)["equal Q-values"]


def test_idle_bonus(tokenizers):
    scale = AdvantageReward("minmax", 0.2, cap_bonus=True)
    [finding] = findings_of(tokenizers["llama"], scale=scale)
    assert str(finding).startswith("warning: idle bonus: --optimal_bonus 0.2 changes nothing")
    assert findings_of(tokenizers["llama"], scale=AdvantageReward("minmax", 0.0, cap_bonus=True)) == []


def test_tiny_q_values(tokenizers):
    table = table_of()
    table["q_values"] = [[1e-4 * q for q in row] for row in table["q_values"]]
    assert rules_of(tokenizers["llama"], table) == {"tiny Q-values": True}


def test_unsaid_dynamics_are_none_without_slip(tokenizers):
    dry, silent = table_of(is_slippery=False), [[{"role": "user", "content": f"cell {i}"}] for i in range(11)]
    assert rules_of(tokenizers["llama"], prompts=silent) == {"unsaid dynamics": False}
    assert "unsaid dynamics" not in rules_of(tokenizers["llama"], dry, is_slippery=False, prompts=silent)


@pytest.mark.parametrize(("second_best", "is_near"), [(0.95, True), (0.93, False)])
def test_a_near_tie_is_within_six_percent(second_best, is_near, tokenizers):
    table = table_of()
    table["q_values"] = [[1.0, 0.0, 0.0, 0.0]] * 10 + [[1.0, second_best, 0.0, 0.0]]
    found = rules_of(tokenizers["llama"], table, scale=AdvantageReward(optimal_bonus=0.0))
    assert ("near ties" in found) is is_near


def test_near_ties_of_the_deterministic_lake(tokenizers):
    """A hole beside the state makes its other actions nearly equal under min-max."""
    dry = table_of(is_slippery=False)
    found = {f.rule: f for f in findings_of(tokenizers["llama"], dry, is_slippery=False, scale=ORIGINAL_REWARD)}
    assert set(found) == {"near ties", "flat rows", "idle bonus"}
    assert not found["near ties"].is_error
    assert "near ties" not in rules_of(tokenizers["llama"], dry, is_slippery=False, scale=LOUD)
