"""What is found in data and prompts that are known to be good, and known to be bad in one way each."""

import numpy as np
import pandas as pd
import pytest
from tiny_models import build_tiny_model

from llm_policy.chat import fit_to_template
from llm_policy.environments.expert_q import ExpertOptions, read_expert_csv, write_expert_csv
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, FrozenLake, random_grids
from llm_policy.environments.mdp import optimal_q
from llm_policy.environments.toy_text import CliffWalking, Taxi
from llm_policy.models import load_tokenizer
from prompts import format_example, policy_messages
from rewards import ORIGINAL_SHAPING, RewardShaping
from tasks import cliff_walking, taxi
from tasks.linter import bellman_residual, lint
from tasks.tabular import exact_expert

GRID = CANONICAL_GRIDS["4x4"]
LOUD = RewardShaping("minmax", 1.0, cap_bonus=False)


def table_of(grids=(GRID,), is_slippery=True, gamma=0.99) -> pd.DataFrame:
    """What `read_expert_csv` gives for the exact Q-values of all acting states."""
    rows = []
    for lake in (FrozenLake(grid, is_slippery) for grid in grids):
        q_SA = optimal_q(lake.mdp, gamma)
        rows += [
            {"state_str": lake.state_text(s), "environment": lake, "state": s, "q_values": q_SA[s].tolist()}
            for s in lake.acting_states
        ]
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        name: load_tokenizer(str(build_tiny_model(tmp_path_factory.mktemp(name), name))) for name in ("llama", "gemma")
    }


def findings_of(
    tokenizer, table=None, *, observation="coordinates", is_slippery=True, shaping=LOUD, prompts=None, **more
):
    """What is found in a table (by default the exact one of slippery ice) that is read as one of such ice."""
    table = (table_of() if table is None else table).copy()
    table["environment"] = [FrozenLake(lake.grid, is_slippery) for lake in table["environment"]]
    if prompts is None:
        states = zip(table["environment"], table["state"], strict=True)
        prompts = [fit_to_template(policy_messages(e.grid, s, is_slippery, observation), tokenizer) for e, s in states]
    limits = {"context_tokens": 2048, "max_completion_tokens": 32} | more
    return lint(table, prompts, tokenizer, shaping, **limits)


def rules_of(*args, **options) -> dict[str, bool]:
    return {finding.rule: finding.is_error for finding in findings_of(*args, **options)}


@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.parametrize("observation", ["grid", "coordinates", "neighbours", "spaced", "ways"])
def test_the_committed_expert_and_prompts_are_clean(tokenizers, model, observation):
    assert findings_of(tokenizers[model], observation=observation) == []


def test_a_template_that_cuts_what_the_user_says_makes_one_prompt_of_several_states(tmp_path):
    """Looked at is what the model reads, behind its chat template. Here it cuts nothing but what tells lakes apart."""
    tokenizer = load_tokenizer(str(build_tiny_model(tmp_path / "model")))
    words = "{{ m.content | replace('row', '') if m.content is string else '' }}"
    cut = "{% if 'row' in m.content %}lake{% else %}" + words + "{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: " + cut + "\n{% endfor %}"
    assert rules_of(tokenizer)["one prompt, several states"]


def test_states_of_which_the_expert_says_nothing_are_named(tokenizers):
    table = table_of()
    findings = [str(finding) for finding in findings_of(tokenizers["llama"], table[1:].reset_index(drop=True))]
    start = f"warning: states without rows: 1 of 11 states in which an agent acts, first {table['state_str'][0]}: "
    assert [finding.startswith(start) for finding in findings].count(True) == 1


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
    options = {"method": "q_learning", "q_learning_steps": 50_000, "batches": 2}
    path = write_expert_csv(ExpertOptions(**options, rows="states", output=str(tmp_path / "learned.csv")))
    assert set(rules_of(tokenizers["llama"], read_expert_csv(path))) <= {"rough Q-values"}
    noisy = table_of()
    noise = np.random.default_rng(0).normal(0, 0.1, (len(noisy), 4))
    noisy["q_values"] = (np.array(noisy["q_values"].tolist()) + noise).tolist()
    assert rules_of(tokenizers["llama"], noisy)["rough Q-values"] is False


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
    shaping = RewardShaping("minmax", 0.2, cap_bonus=True)
    [finding] = findings_of(tokenizers["llama"], shaping=shaping)
    assert str(finding).startswith("warning: idle bonus: --optimal_bonus 0.2 changes nothing")
    assert findings_of(tokenizers["llama"], shaping=RewardShaping("minmax", 0.0, cap_bonus=True)) == []


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
    found = rules_of(tokenizers["llama"], table, shaping=RewardShaping(optimal_bonus=0.0))
    assert ("near ties" in found) is is_near


def test_near_ties_of_the_deterministic_lake(tokenizers):
    """A hole beside the state makes its other actions nearly equal under min-max."""
    dry = table_of(is_slippery=False)
    found = {f.rule: f for f in findings_of(tokenizers["llama"], dry, is_slippery=False, shaping=ORIGINAL_SHAPING)}
    assert set(found) == {"near ties", "flat rows", "idle bonus"}
    assert not found["near ties"].is_error
    assert "near ties" not in rules_of(tokenizers["llama"], dry, is_slippery=False, shaping=LOUD)


# Replies that the warm start teaches -----------------------------------------------------------------------------


def test_replies_longer_than_a_completion(tokenizers):
    """They would be cut: no completion could be well-formed."""
    tokenizer = tokenizers["llama"]
    replies = [format_example(GRID, state, 2) for state in FrozenLake(GRID).acting_states]
    longest = max(len(tokenizer.encode(reply)) + 1 for reply in replies)
    assert findings_of(tokenizer, replies=replies, max_completion_tokens=longest) == []
    [finding] = findings_of(tokenizer, replies=[*replies, "<think>longer</think>" * 40], max_completion_tokens=longest)
    assert (finding.rule, finding.is_error) == ("cut replies", False)
    assert f"completions are cut at {longest}, so that 1 of {len(replies) + 1} cannot" in finding.message
    [finding] = findings_of(tokenizer, replies=replies, max_completion_tokens=8)
    assert (finding.rule, finding.is_error) == ("cut replies", True)
    assert f"up to {longest} tokens, and completions are cut at 8, so that 11 of 11 cannot" in finding.message


# Other environments ----------------------------------------------------------------------------------------------

TOY_TEXT = [(cliff_walking, CliffWalking()), (taxi, Taxi())]


def findings_elsewhere(tokenizer, module, environment, **changed) -> dict[str, bool]:
    """Rules broken by the exact expert of an environment, with `changed` columns."""
    expert = exact_expert(environment).assign(**changed)
    prompts = [
        fit_to_template(module.words(module.Arguments().observation, "place").messages(*state), tokenizer)
        for state in zip(expert["environment"], expert["state"], strict=True)
    ]
    return {f.rule: f.is_error for f in lint(expert, prompts, tokenizer, LOUD, 2048, 32)}


# Beside 100 for the cliff, one step more or less is little.
CLEAN = [(cliff_walking, CliffWalking(), {"flat rows": False}), (taxi, Taxi(), {})]


@pytest.mark.parametrize(("module", "environment", "rules"), CLEAN, ids=["cliff", "taxi"])
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_no_errors_in_other_environments(model, module, environment, rules, tokenizers):
    assert findings_elsewhere(tokenizers[model], module, environment) == rules


@pytest.mark.parametrize(("module", "environment"), TOY_TEXT, ids=["cliff", "taxi"])
def test_q_values_of_another_environment_are_rough(module, environment, tokenizers):
    expert = exact_expert(environment)
    assert bellman_residual(expert) == pytest.approx((0.0, 0.99), abs=1e-6)
    noise = np.random.default_rng(0).normal(0, 10, (len(expert), len(environment.actions)))
    rough = pd.Series((np.array(expert["q_values"].tolist()) + noise).tolist(), dtype=object)
    found = findings_elsewhere(tokenizers["llama"], module, environment, q_values=rough)
    assert found["rough Q-values"] is False
    assert "wrong dynamics" not in found, "for lakes"
