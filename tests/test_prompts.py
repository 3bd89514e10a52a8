"""Every word that the model is told, for every cell; chat templates that take a system turn and that do not."""

import pytest
from datasets import Dataset
from tiny_models import build_tiny_model
from trl import GRPOConfig, GRPOTrainer

from llm_policy.completions import parse_completion
from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, acting_states
from llm_policy.errors import InputError
from llm_policy.models import load_model, load_tokenizer
from prompts import (
    OBSERVATIONS,
    accepts_system_role,
    check_prompt,
    fit_to_template,
    format_example,
    observation_text,
    policy_messages,
    prompt_token_ids,
)

GRID = CANONICAL_GRIDS["4x4"]  # SFFF FHFH FFFH HFFG
ARCHITECTURES = ("llama", "gemma")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {a: build_tiny_model(tmp_path_factory.mktemp("models") / a, a) for a in ARCHITECTURES}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {a: load_tokenizer(folder) for a, folder in folders.items()}


# What is said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", range(16))
def test_position_and_map_of_every_cell(state):
    row, column = divmod(state, 4)
    rows = [list(line) for line in GRID]
    rows[row][column] = "A"
    map_text = "\n".join(map("".join, rows))
    assert observation_text(GRID, state, "grid") == map_text
    assert observation_text(GRID, state, "coordinates") == f"You are at row {row}, column {column}.\n{map_text}"
    assert observation_text(GRID, state, "neighbours").startswith(
        f"You are at row {row}, column {column}.\n{map_text}\n"
    )


NEIGHBOURS = [
    # A corner, an edge, the inside, beside holes, beside the goal
    (0, "LEFT: edge, DOWN: ice, RIGHT: ice, UP: edge."),
    (4, "LEFT: edge, DOWN: ice, RIGHT: hole, UP: ice."),
    (6, "LEFT: hole, DOWN: ice, RIGHT: hole, UP: ice."),
    (14, "LEFT: ice, DOWN: edge, RIGHT: goal, UP: ice."),
]


@pytest.mark.parametrize(("state", "line"), NEIGHBOURS)
def test_neighbours(state, line):
    assert observation_text(GRID, state, "neighbours").splitlines()[-1] == line


def test_spaced_is_neighbours_with_cells_apart():
    text = observation_text(("SFHF", "FFFH"), 5, "spaced")
    assert text == "You are at row 1, column 1.\nS F H F\nF A F H\nLEFT: ice, DOWN: edge, RIGHT: ice, UP: ice."


WAYS = [
    (GRID, 0, "LEFT: edge, DOWN: ice with 1 way on, RIGHT: ice with 1 way on, UP: edge."),
    (GRID, 4, "LEFT: edge, DOWN: ice with 1 way on, RIGHT: hole, UP: ice with 1 way on."),
    (GRID, 14, "LEFT: ice with 1 way on, DOWN: edge, RIGHT: goal, UP: ice with 2 ways on."),
    # behind DOWN the goal counts as a way, too
    (GRID, 10, "LEFT: ice with 2 ways on, DOWN: ice with 2 ways on, RIGHT: hole, UP: ice with 1 way on."),
    (("SFG", "FHF", "FHF"), 3, "LEFT: edge, DOWN: ice with 0 ways on, RIGHT: hole, UP: ice with 1 way on."),
]


@pytest.mark.parametrize(("grid", "state", "line"), WAYS)
def test_ways_counts_the_sides_on_which_it_goes_on_behind_a_neighbour(grid, state, line):
    text = observation_text(grid, state, "ways")
    assert text.splitlines()[-1] == line
    assert text.splitlines()[:-1] == observation_text(grid, state, "spaced").splitlines()[:-1]


def test_maps_need_not_be_square():
    assert observation_text(("SFH", "FFG"), 4) == "You are at row 1, column 1.\nSFH\nFAG"


def test_unknown_observation():
    with pytest.raises(InputError, match="--observation 'pixels': expected one of grid, coordinates, neighbours"):
        observation_text(GRID, 0, "pixels")


def test_the_prompt_names_dynamics_letters_and_answer_form():
    system, user = policy_messages(GRID, 0, is_slippery=True)
    assert (system["role"], user["role"]) == ("system", "user")
    for words in ("S start", "F ice", "H hole", "G goal", "A you", "LEFT, DOWN, RIGHT or UP", "</think><answer>"):
        assert words in system["content"]
    assert "slippery" in system["content"].lower()
    assert "1/3" in system["content"]
    not_slippery = policy_messages(GRID, 0, is_slippery=False)[0]["content"]
    assert "not slippery" in not_slippery.lower()
    assert "1/3" not in not_slippery
    assert "{" not in system["content"] + not_slippery + user["content"]


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_distinct_states_have_distinct_prompts(observation):
    for grid in CANONICAL_GRIDS.values():
        texts = {str(policy_messages(grid, state, True, observation)) for state in acting_states(grid)}
        assert len(texts) == len(acting_states(grid))


@pytest.mark.parametrize("action", range(4))
def test_the_example_is_in_form_and_its_thought_names_no_action(action):
    for state in acting_states(GRID):
        example = format_example(GRID, state, action)
        parsed = parse_completion(example)
        assert (parsed.is_well_formed, parsed.action) == (True, action)
        thought = example.partition("</think>")[0]
        assert not any(name in thought.upper() for name in ACTIONS)
        # The thought is the same whatever the action is: no label can leak through it
        assert thought == format_example(GRID, state, 0).partition("</think>")[0]


# How it is said: chat templates --------------------------------------------------------------------------------


def test_system_turn_is_kept_where_the_template_takes_it(tokenizers):
    messages = policy_messages(GRID, 0, True)
    assert accepts_system_role(tokenizers["llama"])
    assert fit_to_template(messages, tokenizers["llama"]) == messages


def test_system_text_joins_the_user_turn_where_it_does_not(tokenizers):
    messages = policy_messages(GRID, 0, True)
    assert not accepts_system_role(tokenizers["gemma"])
    (user,) = fit_to_template(messages, tokenizers["gemma"])
    assert user == {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    assert [m["role"] for m in messages] == ["system", "user"], "the caller's list must stay as it is"
    # Nothing to join: left alone
    assert fit_to_template([user], tokenizers["gemma"]) == [user]
    # Turns after the first two stay
    assert fit_to_template([*messages, {"role": "assistant", "content": "UP"}], tokenizers["gemma"])[1:] == [
        {"role": "assistant", "content": "UP"}
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompt_ends_where_the_reply_begins_and_has_one_bos(architecture, tokenizers):
    tokenizer = tokenizers[architecture]
    messages = fit_to_template(policy_messages(GRID, 9, True), tokenizer)
    token_ids = prompt_token_ids(messages, tokenizer)
    text = tokenizer.decode(token_ids)
    assert "You are at row 2, column 1." in text
    assert text.rstrip("\n").endswith({"llama": "<|im_start|>assistant", "gemma": "<start_of_turn>model"}[architecture])
    if architecture == "gemma":
        # The trap: the text of the template through the tokenizer would have two
        assert (
            tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"].count(
                tokenizer.bos_token_id
            )
            == 2
        )
        assert token_ids[0] == tokenizer.bos_token_id
        assert token_ids.count(tokenizer.bos_token_id) == 1
    check_prompt(token_ids, tokenizer, context_tokens=512, max_completion_tokens=16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trl_makes_the_same_tokens_of_the_same_messages(architecture, folders, tokenizers, tmp_path):
    tokenizer = tokenizers[architecture]
    messages = [fit_to_template(policy_messages(GRID, state, True), tokenizer) for state in acting_states(GRID)]
    trainer = GRPOTrainer(
        load_model(folders[architecture], dtype="float32"),
        lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(tmp_path, use_cpu=True, bf16=False, report_to="none"),
        train_dataset=Dataset.from_list([{"prompt": m} for m in messages]),
        processing_class=tokenizer,
    )
    token_ids, *_ = trainer._tokenize_prompts(messages)
    assert token_ids == [prompt_token_ids(m, tokenizer) for m in messages]


def test_no_chat_template(folders):
    tokenizer = load_tokenizer(folders["llama"])
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="has no chat template; take an instruction-tuned model"):
        fit_to_template(policy_messages(GRID, 0, True), tokenizer)


def test_a_template_may_refuse_the_system_turn_in_any_words(folders):
    tokenizer = load_tokenizer(folders["llama"])
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('Only user and assistant!') }}{% endif %}ok"
    tokenizer.chat_template = refusal
    assert not accepts_system_role(tokenizer)


def test_the_original_prompt_asks_for_ice_under_its_examples():
    with pytest.raises(InputError, match=r"--observation original: its examples .* use another observation"):
        policy_messages(("SHF", "FFG"), 0, True, "original")
    with pytest.raises(InputError, match=r"not all of which are ice on SF\|FG"):
        policy_messages(("SF", "FG"), 0, True, "original")


def test_a_broken_template_is_no_missing_system_role(folders):
    tokenizer = load_tokenizer(folders["llama"])
    tokenizer.chat_template = "{{ raise_exception('out of order') }}"
    with pytest.raises(Exception, match="out of order"):
        accepts_system_role(tokenizer)


PROMPT_ERRORS = [
    # token ids, context, completion -> message
    (list(range(10, 110)), 128, 29, r"prompt of 100 tokens \+ --max_completion_length 29 exceed .* 128 tokens"),
    ([1, 1, 5], 128, 16, "writes '<bos>' .BOS. twice"),
]


@pytest.mark.parametrize(("token_ids", "context", "completion", "message"), PROMPT_ERRORS)
def test_prompts_that_would_be_seen_cut_or_with_two_bos(token_ids, context, completion, message, tokenizers):
    tokenizer = tokenizers["gemma"]
    assert tokenizer.bos_token_id == 1
    with pytest.raises(InputError, match=message):
        check_prompt(token_ids, tokenizer, context, completion)


def test_a_prompt_that_just_fits(tokenizers):
    check_prompt(list(range(10, 110)), tokenizers["gemma"], 128, 28)
    check_prompt([1, 5, 1], tokenizers["gemma"], 128, 28)
