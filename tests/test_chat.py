"""How a model is asked: chat templates that take a system turn and that do not, and its completions."""

import pytest
import torch
from datasets import Dataset
from tiny_models import build_tiny_model
from trl import GRPOConfig, GRPOTrainer

from llm_policy.chat import (
    Reader,
    accepts_system_role,
    check_prompt,
    fit_to_template,
    prompt_token_ids,
    reply_token_ids,
    sampling_config,
)
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, acting_states
from llm_policy.errors import InputError
from llm_policy.models import load_model, load_tokenizer
from prompts import policy_messages

GRID = CANONICAL_GRIDS["4x4"]  # SFFF FHFH FFFH HFFG
ARCHITECTURES = ("llama", "gemma")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {a: build_tiny_model(tmp_path_factory.mktemp("models") / a, a) for a in ARCHITECTURES}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {a: load_tokenizer(folder) for a, folder in folders.items()}


# Chat templates --------------------------------------------------------------------------------------------------


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
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('Only user and assistant!') }}{% endif %}"
    refusal += "{{ messages[0].content }}"
    tokenizer.chat_template = refusal
    assert not accepts_system_role(tokenizer)


def test_a_template_that_leaves_the_system_turn_out_does_not_take_one(folders):
    tokenizer = load_tokenizer(folders["llama"])
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert not accepts_system_role(tokenizer)


def test_a_template_of_the_last_turn_alone_takes_both_in_one(folders):
    tokenizer = load_tokenizer(folders["llama"])
    tokenizer.chat_template = "{{ messages[-1].content }}"
    messages = policy_messages(GRID, 0, True)
    text = tokenizer.decode(Reader(tokenizer).prompt(messages))
    assert all(message["content"] in text for message in messages)


BAD_TEMPLATES = {
    # Every state would have one and the same prompt
    "answer:": "its chat template leaves out what the user says, or part of it; correct chat_template",
    "{% for m in messages %}{{ m.content[:30] }}{% endfor %}": "leaves out what the user says, or part of it",
    "{% for m in messages %}{{ m.content[:2000] }}{% endfor %}": "leaves out what the user says, or part of it",
    "{% for m in messages %}{{ m.content[-2000:] }}{% endfor %}": "leaves out what the user says, or part of it",
    "{{ raise_exception('out of order') }}": "its chat template fails: TemplateError: out of order",
    "{{ foo.bar }}": "its chat template fails: UndefinedError: 'foo' is undefined",
    "{{ 1/0 }}": "its chat template fails: ZeroDivisionError",
    "{% include 'x' %}": "its chat template fails: TypeError",
    "{{ messages[-1].content }}{% if add_generation_prompt %}{{ 1/0 }}{% endif %}": "fails: ZeroDivisionError",
}


@pytest.mark.parametrize("template", BAD_TEMPLATES)
def test_a_broken_template_is_one_line(template, folders):
    tokenizer = load_tokenizer(folders["llama"])
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=f"^{folders['llama']}: .*{BAD_TEMPLATES[template]}"):
        Reader(tokenizer).prompt(policy_messages(GRID, 0, True))


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


# Completions -----------------------------------------------------------------------------------------------------

PROMPTS = [policy_messages(GRID, state, True) for state in acting_states(GRID)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_reader_fits_its_prompts_to_the_template(architecture, tokenizers):
    tokenizer = tokenizers[architecture]
    assert Reader(tokenizer).prompt(PROMPTS[3]) == prompt_token_ids(fit_to_template(PROMPTS[3], tokenizer), tokenizer)


@pytest.mark.parametrize("name", ["eos_token", "pad_token", "additional_special_tokens"])
def test_a_token_that_the_model_does_not_have_is_one_line(name, folders):
    model, tokenizer = load_model(folders["llama"], dtype="float32"), load_tokenizer(folders["llama"])
    tokenizer.add_special_tokens({name: ["row"] if name.endswith("s") else "<zz>"})
    with pytest.raises(InputError, match=r"its tokenizer makes the token 392, and its model has 392"):
        Reader(tokenizer).completions(model, PROMPTS[:1])


def test_more_completions_than_anyone_waits_for(tokenizers):
    with pytest.raises(InputError, match=r"^--samples_per_state 10000: 200 prompts make 2000000 completions, expected"):
        Reader(tokenizers["llama"]).completions(None, PROMPTS[:1] * 200, samples=10_000)


def test_greedy_answers_do_not_depend_on_how_they_are_batched(folders, tokenizers):
    model, tokenizer = load_model(folders["llama"], dtype="float32"), tokenizers["llama"]
    reader = Reader(tokenizer, max_completion_tokens=4, rows_per_batch=5)
    together = Reader(tokenizer, max_completion_tokens=4)
    assert reader.completions(model, PROMPTS, 0) == together.completions(model, PROMPTS, 0)


@pytest.mark.parametrize("samples", [0, 3])
def test_a_guess_changes_no_completion(samples, folders, tokenizers):
    """Right or wrong. (Sampled without any guess they have the same distribution, from other random numbers.)"""
    model, reader = load_model(folders["llama"], dtype="float32"), Reader(tokenizers["llama"], max_completion_tokens=6)
    found = []
    for guess in ("<think>", "something else that is longer"):
        torch.manual_seed(3)
        found.append(reader.completions(model, PROMPTS, samples, [guess] * len(PROMPTS)))
    assert found[0] == found[1]
    assert len(found[0]) == len(PROMPTS) * max(samples, 1)
    if samples == 0:
        assert reader.completions(model, PROMPTS) == found[0]


def test_samples_follow_the_seed_and_differ(folders, tokenizers):
    model, reader = load_model(folders["llama"], dtype="float32"), Reader(tokenizers["llama"], max_completion_tokens=6)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(reader.completions(model, PROMPTS[:2], 4))
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) > 1


def test_completions_end_where_the_model_ends_its_turns(folders, tokenizers):
    """Gemma's end token is not the one that ends its turns: its generation_config names both."""
    gemma, tokenizer = load_model(folders["gemma"]), tokenizers["gemma"]
    turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert set(sampling_config(gemma, tokenizer, 8).eos_token_id) == {tokenizer.eos_token_id, turn}
    assert set(sampling_config(gemma, tokenizer, 8, further_ends=(5,)).eos_token_id) == {
        5, tokenizer.eos_token_id, turn,
    }  # fmt: skip
    llama, tokenizer = load_model(folders["llama"]), tokenizers["llama"]
    assert sampling_config(llama, tokenizer, 8).eos_token_id == [tokenizer.eos_token_id]
    llama.generation_config.eos_token_id = None
    assert sampling_config(llama, tokenizer, 8).eos_token_id == [tokenizer.eos_token_id]


def test_sampling_is_from_all_tokens_or_greedy(folders, tokenizers):
    model, tokenizer = load_model(folders["llama"]), tokenizers["llama"]
    sampled = sampling_config(model, tokenizer, 8)
    assert (sampled.do_sample, sampled.temperature, sampled.top_k, sampled.max_new_tokens) == (True, 1.0, 0, 8)
    greedy = sampling_config(model, tokenizer, 8, temperature=0.0)
    assert (greedy.do_sample, greedy.temperature, greedy.top_k) == (False, None, None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_reply_ends_with_one_end_token_and_begins_with_none(architecture, tokenizers):
    tokenizer = tokenizers[architecture]
    token_ids = reply_token_ids("<answer>UP</answer>", tokenizer)
    assert token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(token_ids[:-1]) == "<answer>UP</answer>"


def test_a_process_samples_what_one_alone_would_sample_there(folders, tokenizers, monkeypatch):
    """The second of two has the second half of the random numbers, and not the first one's once more."""
    model, reader = load_model(folders["llama"], dtype="float32"), Reader(tokenizers["llama"], max_completion_tokens=6)
    torch.manual_seed(3)
    whole = reader.completions(model, PROMPTS[:4], 2)
    monkeypatch.setattr("llm_policy.processes.own_share", lambda number: slice(number // 2, number))
    torch.manual_seed(3)
    assert reader.completions(model, PROMPTS[:4], 2) == whole[4:]
