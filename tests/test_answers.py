"""Exact answers behind sampled thoughts, against plain rows of the model and against counting samples."""

import numpy as np
import pytest
import torch
from tiny_policies import ARCHITECTURE_NAMES, add_random_adapter, plain_scores, random_policy, tokenizer_of

from llm_policy.chat import Reader
from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, acting_states
from llm_policy.grpo import answers
from llm_policy.grpo.answers import (
    answer_weights,
    answers_as_read,
    answers_behind,
    mean_answers,
    sampled_answers,
    true_thoughts,
    words_said,
)
from llm_policy.grpo.tree_attention import Sight
from llm_policy.models import load_model, load_tokenizer
from prompts import format_example, policy_messages

GRID = CANONICAL_GRIDS["4x4"]
PROMPTS = [policy_messages(GRID, state, True) for state in acting_states(GRID)]
GUESSES = [format_example(GRID, state, 0) for state in acting_states(GRID)]
THOUGHT = "<think>ice</think><answer>"


class Says(Reader):
    """A reader whose completions are given: prompt by prompt, sample by sample."""

    def completions(self, model, prompts, samples=0, guesses=None):
        return self.texts * len(prompts)


def answer_probabilities(*arguments, **options):
    """Weights (P, G, A), and the share of samples that are well-formed."""
    exact_PA, rest_PGA, valid = sampled_answers(*arguments, **options)
    return answer_weights(exact_PA, rest_PGA), valid


def says(architecture: str, texts: list[str], split_actions: bool = False) -> Says:
    reader = Says(tokenizer_of(architecture, split_actions))
    object.__setattr__(reader, "texts", texts)
    return reader


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("split_actions", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_behind_a_thought_stand_the_models_own_probabilities(architecture, split_actions, adapted):
    model = random_policy(architecture, split_actions=split_actions)
    model = add_random_adapter(model) if adapted else model
    reader = says(architecture, [f"{THOUGHT}UP</answer>"], split_actions)
    rows_PGA, valid = answer_probabilities(reader, model, PROMPTS[:3], ACTIONS, samples=1)
    assert (rows_PGA.shape, valid) == ((3, 1, 4), 1.0)
    tokenizer = reader.tokenizer
    for messages, (row_A,) in zip(PROMPTS, rows_PGA, strict=False):
        given = tokenizer.encode(THOUGHT, add_special_tokens=False)
        p_A = []
        for action in ACTIONS:
            ids = tokenizer.encode(f"{THOUGHT}{action}</answer>", add_special_tokens=False)
            with torch.no_grad():
                scores, _ = plain_scores(model.eval(), reader.prompt(messages), ids)
            p_A.append(scores[len(given) :].sum().exp().item())
        assert row_A == pytest.approx(p_A, abs=1e-4)


def test_each_thought_has_its_own_answers_and_what_has_none_is_uniform(answering_llama):
    model = load_model(answering_llama, dtype="float32")
    texts = [f"{THOUGHT}UP</answer>", "<think>else</think><answer>no idea", "no answer", f"{THOUGHT}LEFT</answer>"]
    rows_PGA, valid = answer_probabilities(says("llama", texts), model, PROMPTS[:2], ACTIONS, samples=4)
    assert valid == 0.5
    np.testing.assert_allclose(rows_PGA[:, 2], 0.25)
    np.testing.assert_allclose(mean_answers(rows_PGA).sum(axis=1), 1.0)
    np.testing.assert_allclose(rows_PGA[:, 0], rows_PGA[:, 3])  # the same thought, whatever was answered
    assert (rows_PGA[:, 1] > 0.25).all()  # its own answers, and what it said in their place


def test_the_mean_of_many_samples_is_what_it_computes(answering_llama):
    """The shares of 400 sampled answers, within four standard errors."""
    model, reader = load_model(answering_llama, dtype="float32"), Reader(load_tokenizer(answering_llama), 32)
    torch.manual_seed(0)
    exact_PGA, _ = answer_probabilities(reader, model, PROMPTS[:2], ACTIONS, 50, GUESSES[:2])
    texts = reader.completions(model, PROMPTS[:2], 400, GUESSES[:2])
    for p, exact_A in enumerate(mean_answers(exact_PGA)):
        of_prompt = texts[p * 400 : (p + 1) * 400]
        for a, action in enumerate(ACTIONS):
            share = np.mean([f"<answer>{action}</answer>" in text for text in of_prompt])
            unreadable = np.mean([not any(f"<answer>{a}</answer>" in text for a in ACTIONS) for text in of_prompt])
            error = 4 * (0.25 / 400) ** 0.5
            assert share - error < exact_A[a] < share + unreadable + error


OUTSIDE = {
    # samples of one state -> what becomes of the probability that the guessed thought with an action leaves
    "none says anything else": ([f"{THOUGHT}UP</answer>"] * 3, [0.25] * 4),
    "one without an answer": ([f"{THOUGHT}UP</answer>", f"{THOUGHT}DOWN</answer>", "?"], [0.25] * 4),
    "spelt otherwise": ([f"{THOUGHT}UP</answer>", f"{THOUGHT}Left</answer>", f"{THOUGHT}UP</answer>"], [1, 0, 0, 0]),
    "a second answer": ([f"{THOUGHT}UP</answer><answer>LEFT</answer>"] * 3, [0.25] * 4),
    "two of them": ([f"{THOUGHT}Left</answer>", f"{THOUGHT}Down</answer>", f"{THOUGHT}UP</answer>"], [0.5, 0.5, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_is_guessed_is_computed_and_the_rest_is_as_the_other_samples_say(case, answering_llama):
    texts, rest_A = OUTSIDE[case]
    model, tokenizer = load_model(answering_llama, dtype="float32"), load_tokenizer(answering_llama)
    reader = Says(tokenizer)
    object.__setattr__(reader, "texts", texts)
    rows_PGA, _ = answer_probabilities(reader, model, PROMPTS[:1], ACTIONS, 3, [f"{THOUGHT}UP</answer>"])
    whole_A = []
    for action in ACTIONS:
        ids = tokenizer.encode(f"{THOUGHT}{action}</answer>", add_special_tokens=False)
        with torch.no_grad():
            scores, _ = plain_scores(model.eval(), reader.prompt(PROMPTS[0]), ids)
        whole_A.append(scores.sum().exp().item())
    expected_A = np.array(whole_A) + (1 - sum(whole_A)) * np.array(rest_A)
    np.testing.assert_allclose(mean_answers(rows_PGA)[0], expected_A, atol=1e-4)


def test_one_malformed_sample_of_a_sure_policy_costs_what_it_weighs(monkeypatch):
    """.999 on UP: with one unreadable sample among 8 it was .903 before."""
    sure = np.log([1.0, 1e-9, 1e-9, 1e-9, 0.999])
    monkeypatch.setattr(answers, "_packed_scores", lambda _m, _r, pairs, _a, **_: np.tile(sure, (len(pairs), 1)))
    monkeypatch.setattr(answers, "_plain_scores", lambda _m, _r, pairs, _a, **_: np.tile(sure, (len(pairs), 1)))
    reader = says("llama", [f"{THOUGHT}UP</answer>"] * 7 + ["?"])
    rows_PGA, valid = answer_probabilities(reader, None, PROMPTS[:1], ACTIONS, 8, [f"{THOUGHT}UP</answer>"])
    assert mean_answers(rows_PGA)[0] == pytest.approx([0.00025, 0.00025, 0.00025, 0.99925], abs=1e-6)
    assert valid == 7 / 8


@pytest.mark.parametrize("samples", [1, 8])
def test_thoughts_that_vary_are_sampled_and_a_guess_changes_no_estimate(monkeypatch, samples):
    """UP at .997 behind every thought. As a fixed sentence, other thoughts would count as random moves."""
    sure = np.log([0.5, 1e-3, 1e-3, 1e-3, 0.997])  # half of the time another thought
    for name in ("_packed_scores", "_plain_scores"):
        monkeypatch.setattr(answers, name, lambda _m, _r, pairs, _a, **_: np.tile(sure, (len(pairs), 1)))
    reader = says("llama", [f"{THOUGHT}UP</answer>"] * samples)
    arguments = (reader, None, PROMPTS[:1], ACTIONS, samples)
    for guesses in (None, [f"{THOUGHT}UP</answer>"]):
        weights_PGA, _ = answer_probabilities(*arguments, guesses, is_fixed=False)
        assert mean_answers(weights_PGA)[0] == pytest.approx([0.001, 0.001, 0.001, 0.997], abs=1e-6)


def test_a_part_of_the_samples_knows_nothing_of_the_others():
    """One of eight says RIGHT, the others the guessed thought: only its own part may know of it."""
    exact_PA, rest_PGA = np.array([[0.5, 0, 0, 0]]), np.full((1, 8, 4), np.nan)
    rest_PGA[0, 7] = [0, 0, 1, 0]
    parts = [mean_answers(answer_weights(exact_PA, part))[0].tolist() for part in np.array_split(rest_PGA, 4, axis=1)]
    assert parts == [[0.625, 0.125, 0.125, 0.125]] * 3 + [[0.5, 0, 0.5, 0]]
    assert np.isnan(rest_PGA[0, :7]).all(), "stays as it was"


def test_rounding_makes_no_negative_probability():
    exact_PA, rest_PGA = np.array([[1.0 + 1.4e-7, 1e-9, 0, 0]]), np.array([[[0, 0, 1.0, 0]]])
    assert (mean_answers(answer_weights(exact_PA, rest_PGA)) >= 0).all()


def test_the_passes_add_up_whatever_their_size(answering_llama, monkeypatch):
    model, reader = load_model(answering_llama, dtype="float32"), Reader(load_tokenizer(answering_llama), 32)
    found = []
    for size in (1, 4, 100):
        monkeypatch.setattr("llm_policy.grpo.answers.PROMPTS_PER_PASS", size)
        torch.manual_seed(0)
        found.append(answer_probabilities(reader, model, PROMPTS, ACTIONS, 2, GUESSES)[0])
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
    np.testing.assert_allclose(found[2], found[0], atol=1e-4)
    assert not model.training


def test_answers_behind_a_thought_that_is_given():
    """As where the model had said that thought itself."""
    model, reader = random_policy("llama"), says("llama", [f"{THOUGHT}UP</answer>"])
    found_PA = answers_behind(reader, model, PROMPTS, reader.texts * len(PROMPTS), ACTIONS)
    said_PGA, _ = answer_probabilities(reader, model, PROMPTS, ACTIONS, 1)
    np.testing.assert_allclose(found_PA, said_PGA[:, 0], atol=1e-5)


@pytest.mark.parametrize("thoughts", [GUESSES, [f"{THOUGHT}UP</answer>", "<think></think><answer>UP</answer>"] * 2])
def test_answers_are_scored_alike_with_and_without_their_thoughts(thoughts):
    model, reader = random_policy("llama"), says("llama", [f"{THOUGHT}UP</answer>"])
    pairs = [(p, t.partition("<answer>")[0] + "<answer>") for p, t in zip(PROMPTS, thoughts, strict=False)]
    without, with_thoughts = (
        answers._packed_scores(model, reader, pairs, ACTIONS, of_thoughts=o) for o in (False, True)
    )
    plain = answers._plain_scores(model, reader, pairs, ACTIONS)
    np.testing.assert_allclose(with_thoughts, plain, atol=1e-4)
    np.testing.assert_allclose(without[:, 1:], plain[:, 1:], atol=1e-4)
    assert np.isnan(without[:, 0]).all()


def test_a_thought_that_is_given_costs_no_logits(monkeypatch):
    """Searches have hundreds of tokens: their logits alone were gigabytes."""
    scored, pack = [], answers.pack_groups
    monkeypatch.setattr(answers, "pack_groups", lambda *a, **k: scored.append(pack(*a, **k)) or scored[-1])
    model, reader = random_policy("llama"), says("llama", [f"{THOUGHT}UP</answer>"])
    answers_behind(
        reader, model, PROMPTS, [f"<think>{'word ' * 50}</think><answer>UP</answer>"] * len(PROMPTS), ACTIONS
    )
    longest = max(len(reader.tokenizer.encode(f"{action}</answer>", add_special_tokens=False)) for action in ACTIONS)
    assert len(scored[-1].predictor_U) <= len(PROMPTS) * len(ACTIONS) * longest


def test_answers_as_read_are_one_hot_or_uniform():
    rows_PGA, valid = answers_as_read([f"{THOUGHT}right</answer>", "?"], ACTIONS)
    assert rows_PGA[:, 0].tolist() == [[0, 0, 1, 0], [0.25] * 4]
    assert valid == 0.5


def test_a_thought_is_true_word_by_word():
    true = ["<think>ice left, hole right.</think><answer>UP</answer>"] * 4
    said = [
        "<think>ice left, hole right.</think><answer>DOWN</answer>",
        "<think>ice left, ice right.</think><answer>UP</answer>",
        "<think>ice left, hole right. And more.</think><answer>UP</answer>",
        "no thought",
    ]
    whole, words = true_thoughts(said, true)
    assert whole == 0.25
    assert words == pytest.approx((1 + 0.75 + 1 + 0) / 4)


def test_a_word_too_many_makes_no_other_word_false():
    true = "<think>LEFT out, DOWN 10: ice, UP out.</think>"
    said = "<think>LEFT 0f: ice, DOWN 10: ice, UP out.</think>"
    assert true_thoughts([said], [true]) == (0.0, pytest.approx(6 / 7))


def test_who_calls_everything_ice_has_seen_no_hole():
    true = ["<think>LEFT 00: ice, DOWN 10: hole. (11: hole, goal)</think>"]
    said = ["<think>LEFT 00: ice, DOWN 10: ice. (11: hole, goal)</think>"]
    assert words_said(true, true, {"hole", "goal"}) == 1.0
    assert words_said(said, true, {"hole", "goal"}) == pytest.approx(2 / 3)
    assert words_said(said, true, {"tree"}) == 1.0


OTHERWISE = {
    # what a sample says behind its thought -> the greedy rule's row, which is added to the exact one
    "another spelling": (f"{THOUGHT}Left</answer>", [1, 0, 0, 0]),
    "cut before the end": (f"{THOUGHT}UP", [0.25] * 4),
    "no action": (f"{THOUGHT}NORTH</answer>", [0.25] * 4),
    "an action": (f"{THOUGHT}UP</answer>", [0, 0, 0, 0]),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_what_is_not_scored_counts_as_it_is_read(case):
    text, added_A = OTHERWISE[case]
    model = random_policy("llama")
    (exact_A,) = answer_probabilities(says("llama", [f"{THOUGHT}UP</answer>"]), model, PROMPTS[:1], ACTIONS, 1)[0][0]
    (row_A,) = answer_probabilities(says("llama", [text]), model, PROMPTS[:1], ACTIONS, 1)[0][0]
    assert (row_A - exact_A).tolist() == pytest.approx(added_A)


def test_where_packing_goes_wrong_rows_are_scored_plainly(monkeypatch, capsys):
    model, reader = random_policy("llama"), says("llama", [f"{THOUGHT}UP</answer>"])
    expected, _ = answer_probabilities(reader, model, PROMPTS[:2], ACTIONS, 1)
    visible = Sight.visible
    monkeypatch.setattr(Sight, "visible", lambda *a: torch.ones_like(visible(*a)))  # all see all
    found, _ = answer_probabilities(reader, model, PROMPTS[:2], ACTIONS, 1)
    assert "scored row by row" in capsys.readouterr().out
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_packing_is_checked_on_two_trees(monkeypatch):
    compared = []
    monkeypatch.setattr(answers, "_packing_is_right", lambda *arguments: compared.append(arguments[2]) or True)
    monkeypatch.setattr(
        answers, "_packed_scores", lambda _, __, pairs, actions, **_o: np.zeros((len(pairs), 1 + len(actions)))
    )
    for count in range(4):
        answers._answer_scores(None, None, list(range(count)), ACTIONS)
    assert compared == [[], [0], [0, 1], [0, 2]]


@pytest.mark.parametrize(("action", "is_right"), [(0, False), (1, True)])
def test_a_likely_action_weighs_more_where_packing_is_checked(action, is_right, monkeypatch):
    """UP at 1e-9 may be wrong by a nat: that is what bfloat16 makes of it. LEFT at nearly 1 may not."""
    plain_NA = np.log(np.array([[0.97, 1e-9, 0.01, 0.01]]))
    packed_NA = plain_NA.copy()
    packed_NA[0, action] -= 1.0
    monkeypatch.setattr(answers, "_plain_scores", lambda *_: np.insert(plain_NA, 0, 0.0, axis=1))
    monkeypatch.setattr(answers, "_packed_scores", lambda *_: np.insert(packed_NA, 0, 0.0, axis=1))
    assert answers._packing_is_right(None, None, [("prompt", "thought")], ACTIONS) is is_right
