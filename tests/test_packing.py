import pytest
import torch
from tiny_policies import ARCHITECTURE_NAMES, add_random_adapter, plain_scores, random_policy, token_ids
from transformers import MistralConfig, MistralForCausalLM
from trl.trainer.utils import add_fused_lm_head

from llm_policy.grpo import packing, tree_attention
from llm_policy.grpo.packing import Branch, PackedGroups, attention_mask, pack_groups, packed_log_probabilities
from llm_policy.grpo.tree_attention import goes_by_piece

ROUNDING = {"rtol": 1e-5, "atol": 2e-5}  # of float32 sums taken in another order


@pytest.fixture(params=["rows of trees", "by piece", "alone"])
def by_piece(request, monkeypatch):
    """Completions of a prompt in one tree, in rows or one tree after the other, or each completion in its own row."""
    monkeypatch.setattr(packing, "_trees_are_cheaper", lambda *_: request.param != "alone")
    monkeypatch.setattr(tree_attention, "TOKENS_OF_PIECE", 4)
    return request.param == "by piece"


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(packing, "_trees_are_cheaper", lambda *_: False)


LONG, SHORT, SINGLE = token_ids(30, seed=1), token_ids(7, seed=2), token_ids(1, seed=3)
ANSWERS = [token_ids(length, seed=length) for length in (9, 1, 5, 4)]

# (prompts, completions, branches, rows that they take)
CASES = {
    # one completion, as in an evaluation
    "group of one": ([LONG], ANSWERS[:1], [], 1),
    # completions of 9, 1 and 5 tokens behind one prompt (gemma3's window of 16 ends within it)
    "ragged completions": ([LONG] * 3, ANSWERS[:3], [], 1),
    # prompts of 30, 7 and 1 tokens: the two short ones share a row
    "ragged prompts": ([LONG, SHORT, SINGLE], ANSWERS[:3], [], 2),
    # behind 30 tokens that all begin with, trees of 8, 9, 11, 12 and 20 tokens: two rows are full
    "trees that share a row": (
        [LONG + token_ids(length, seed=50 + i) for i, length in enumerate((5, 4, 11, 8, 12))],
        [ANSWERS[3], ANSWERS[3], ANSWERS[1], ANSWERS[3], ANSWERS[0]],
        [Branch(1, 4, (12, 13)), Branch(3, 1, (14, 15)), Branch(2, 0, (12,))],
        3,
    ),
    # equal prompts that do not stand next to each other share a row, and the order of the scores stays
    "scattered groups": ([LONG, SHORT, LONG, SHORT], ANSWERS, [], 2),
    # 30 tokens that all begin with, 12 more, 7 more and none: they stand before three rows as a cache
    "shared prefix": (
        [LONG + token_ids(12, seed=4), LONG + SHORT, LONG, LONG + SHORT],
        ANSWERS,
        [Branch(0, 4, (12,)), Branch(1, 0, (13, 14)), Branch(2, 4, tuple(SHORT))],
        3,
    ),
    # completions that are equal, begin alike, or end where another goes on; a branch off what they share
    "completions that begin alike": (
        [LONG] * 4 + [SHORT],
        [ANSWERS[0], ANSWERS[0], ANSWERS[0][:5] + ANSWERS[2], ANSWERS[0][:3], ANSWERS[0]],
        [Branch(1, 4, (12,)), Branch(2, 4, (12, 13)), Branch(2, 7, (14, 15)), Branch(4, 4, (12, 13))],
        2,
    ),
    # one other token at the beginning, in the middle and at the end
    "branches of one token": (
        [LONG] * 2,
        ANSWERS[:2],
        [Branch(0, 0, (11,)), Branch(0, 4, (12,)), Branch(1, 0, (13,))],
        1,
    ),
    # several tokens, several at one place, one longer than what it replaces, in two rows
    "long branches": (
        [LONG, SHORT],
        [ANSWERS[0], ANSWERS[2]],
        [Branch(0, 3, (11, 12, 13)), Branch(0, 3, (14, 15)), Branch(1, 4, tuple(LONG)), Branch(1, 0, (16, 17))],
        2,
    ),
}


def packed_scores(model, packed: PackedGroups, temperature: float = 1.0) -> list[torch.Tensor]:
    """(T, 2) log-probabilities and entropies of each completion and branch. The model is left as it was."""
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    try:
        values_N2 = torch.stack(packed_log_probabilities(model, model, packed, temperature), dim=1)
    finally:
        del model.forward
    completions, branches = packed.split(values_N2)
    return completions + branches


def expected_scores(model, prompts, completions, branches, temperature: float = 1.0) -> list[torch.Tensor]:
    """The same from one plain row per completion and per branch."""
    rows = [(prompt, completion, 0) for prompt, completion in zip(prompts, completions, strict=True)]
    for branch in branches:
        kept = completions[branch.completion][: branch.start]
        rows.append((prompts[branch.completion], [*kept, *branch.token_ids], branch.start))
    return [torch.stack(plain_scores(model, p, c, temperature), dim=1)[start:] for p, c, start in rows]


def largest_difference(model, packed, expected) -> float:
    return (torch.cat(packed_scores(model, packed)) - torch.cat(expected)).abs().max().item()


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("by_piece", [False, True])
@torch.no_grad()
def test_packed_scores_equal_plain_ones(architecture, case, temperature, by_piece, monkeypatch):
    monkeypatch.setattr(tree_attention, "TOKENS_OF_PIECE", 4)  # trees of these cases end within pieces and at them
    prompts, completions, branches, row_count = CASES[case]
    model = random_policy(architecture)
    packed = pack_groups(prompts, completions, branches, by_piece=by_piece)
    assert len(packed.input_ids_PL) == (1 if by_piece else row_count)
    found = packed_scores(model, packed, temperature)
    expected = expected_scores(model, prompts, completions, branches, temperature)
    torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_scores_are_the_same_where_each_completion_has_its_row(alone, architecture, case):
    prompts, completions, branches, _ = CASES[case]
    model = random_policy(architecture)
    packed = pack_groups(prompts, completions, branches)
    assert packed.prompts is not None
    assert len(packed.input_ids_PL) == len(completions)
    assert len(packed.prompts.input_ids_QJ) == len({tuple(prompt) for prompt in prompts})
    torch.testing.assert_close(
        packed_scores(model, packed), expected_scores(model, prompts, completions, branches), **ROUNDING
    )


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("case", ["long branches", "shared prefix", "completions that begin alike"])
def test_gradients_flow_through_what_is_shared_as_through_plain_rows(by_piece, architecture, case):
    prompts, completions, branches, _ = CASES[case]
    model = random_policy(architecture)
    packed = pack_groups([*prompts, LONG], [*completions, ANSWERS[3]], branches, by_piece=by_piece)

    def gradients(scores):
        """Of a sum in which every token's log-probability and entropy has a weight of its own."""
        values = torch.cat(scores).flatten()
        weights = torch.linspace(-1.0, 1.0, len(values))
        return torch.autograd.grad((weights * values).sum(), list(model.parameters()))

    found = gradients(packed_scores(model, packed))
    expected = gradients(expected_scores(model, [*prompts, LONG], [*completions, ANSWERS[3]], branches))
    for name, a, b in zip(dict(model.named_parameters()), found, expected, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")


def _blind_to_prompt(packed):
    packed.sight.ends_PM[:, : len(LONG) - 1] = len(LONG) - 1


def _without_segments(packed):
    packed.sight.ends_PM[:] = packed.input_ids_PL.size(1)


def _positions_that_go_on(packed):
    packed.position_ids_PL[:] = torch.arange(packed.position_ids_PL.size(1))


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("damage", [_blind_to_prompt, _without_segments, _positions_that_go_on])
@torch.no_grad()
def test_a_wrong_mask_or_position_shows(architecture, damage):
    prompts, completions, branches, _ = CASES["ragged completions"]
    model = random_policy(architecture)
    packed = pack_groups(prompts, completions, branches)
    expected = expected_scores(model, prompts, completions, branches)
    assert largest_difference(model, packed, expected) < ROUNDING["atol"]
    damage(packed)
    assert largest_difference(model, packed, expected) > 0.05


@torch.no_grad()
def test_the_sliding_window_is_part_of_the_mask():
    prompts, completions, branches, _ = CASES["ragged completions"]
    model = random_policy("gemma3")
    packed = pack_groups(prompts, completions, branches)
    masks = attention_mask(model, packed.sight)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert masks["sliding_attention"].sum() < masks["full_attention"].sum()
    model.config.sliding_window = 15  # the plain rows keep 16: each layer has its own copy
    expected = expected_scores(random_policy("gemma3"), prompts, completions, branches)
    assert largest_difference(model, packed, expected) > 1e-3


@pytest.mark.parametrize("case", ["ragged prompts", "long branches", "shared prefix", "completions that begin alike"])
@torch.no_grad()
def test_an_architecture_in_which_every_layer_slides(case):
    prompts, completions, branches, _ = CASES[case]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = MistralForCausalLM(
        MistralConfig(vocab_size=400, num_key_value_heads=2, sliding_window=8, initializer_range=0.3, **sizes)
    ).eval()
    packed = pack_groups(prompts, completions, branches)
    assert isinstance(attention_mask(model, packed.sight), torch.Tensor)
    assert largest_difference(model, packed, expected_scores(model, prompts, completions, branches)) < ROUNDING["atol"]
    model.config.sliding_window = None
    assert largest_difference(model, packed, expected_scores(model, prompts, completions, branches)) < ROUNDING["atol"]


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@torch.no_grad()
def test_eager_attention_takes_the_mask_in_its_own_form(architecture):
    prompts, completions, branches, _ = CASES["shared prefix"]
    model = random_policy(architecture)
    model.set_attn_implementation("eager")
    packed = pack_groups(prompts, completions, branches)
    assert largest_difference(model, packed, expected_scores(model, prompts, completions, branches)) < ROUNDING["atol"]


def test_the_row_of_the_docstring():
    packed = pack_groups([[1, 2, 3]] * 3, [[4, 5, 6], [4, 5, 7], [8, 9]])
    assert packed.input_ids_PL.tolist() == [[1, 2, 3, 4, 5, 8]]
    assert packed.position_ids_PL.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert packed.predictor_U.tolist() == [2, 3, 4, 4, 2, 5]
    assert packed.labels_U.tolist() == [4, 5, 6, 7, 8, 9]
    assert packed.scored_N.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert packed.sight.visible()[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],  # the third completion does not see the others
    ]


def test_the_rows_of_completions_that_share_none(alone):
    packed = pack_groups([[1, 2, 3]] * 2 + [[1, 7]], [[4, 5, 6], [4, 9], [8, 9]])
    assert packed.prefix_ids_K.tolist() == [1]
    assert packed.prompts.input_ids_QJ.tolist() == [[2], [0]]
    assert packed.prompts.prompt_P.tolist() == [0, 0, 1]
    assert packed.input_ids_PL.tolist() == [[3, 4, 5], [3, 4, 0], [7, 8, 0]]
    assert packed.position_ids_PL[:, 0].tolist() == [2, 2, 1]
    assert packed.sight.visible()[:, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 0, 0]]
    assert packed.predictor_U[packed.scored_N].tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_completions_share_a_row_as_long_as_that_is_cheaper():
    """One prompt of 100 tokens; the price of a comparison as in a model of 576 numbers per token."""

    def is_tree(completions, length, begin_alike=0):
        whole = [[*token_ids(begin_alike), *token_ids(length, seed=i)] for i in range(completions)]
        return pack_groups([token_ids(100)] * completions, whole, pairs_per_token=3456).prompts is None

    assert is_tree(8, 8)
    assert not is_tree(64, 200)
    assert is_tree(64, 4, begin_alike=200)


def test_rows_that_short_trees_share_are_cheaper():
    """Eight completions in a long tree, and eight short trees that fill two rows of its length."""
    prompts = [[*token_ids(100), *token_ids(3, seed=90 + i)] for i in range(9)]
    completions = [token_ids(20, seed=i) for i in range(8)] + [token_ids(6)] * 8
    packed = pack_groups([prompts[0]] * 8 + prompts[1:], completions, pairs_per_token=3456)
    assert packed.prompts is None
    assert packed.input_ids_PL.shape == (2, 155)


def test_trees_one_after_the_other_have_no_padding():
    packed = pack_groups([[1, 2, 3]] * 2 + [[1, 7]], [[4, 5, 6], [4, 9, 9], [8, 9]], by_piece=True)
    assert packed.prefix_ids_K.tolist() == [1]
    assert packed.input_ids_PL.tolist() == [[2, 3, 4, 5, 9, 7, 8]]
    assert packed.position_ids_PL.tolist() == [[1, 2, 3, 4, 4, 1, 2]]
    assert packed.predictor_U[packed.scored_N].tolist() == [1, 2, 3, 1, 2, 4, 5, 6]
    assert packed.sight.visible()[0, -2:].int().tolist() == [[1, 0, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@torch.no_grad()
def test_a_tree_that_saw_another_would_show(architecture):
    """Were a token of the first tree seen by the second one."""
    prompts, completions, branches, _ = CASES["trees that share a row"]
    model = random_policy(architecture)
    packed = pack_groups(prompts, completions, branches, by_piece=True)
    expected = expected_scores(model, prompts, completions, branches)
    assert largest_difference(model, packed, expected) < ROUNDING["atol"]
    assert model.config._attn_implementation == "sdpa"
    first = len(packed.prefix_ids_K)
    packed.sight.ends_PM[:, first] = packed.sight.numbers_PL.size(1)
    assert largest_difference(model, packed, expected) > 0.05


def test_trees_go_piece_by_piece_on_a_cpu_with_its_own_attention():
    model = random_policy("llama")
    assert goes_by_piece(model)
    model.gradient_checkpointing_enable()
    assert not goes_by_piece(model), "what is computed again would meet another attention"
    model.gradient_checkpointing_disable()
    model.config.model_type = "stablelm"
    assert not goes_by_piece(model), "its layers keep the pieces to themselves"
    model.config.model_type = "llama"
    model.config.attention_dropout = 0.1
    assert not goes_by_piece(model), "no weight is dropped there"
    model.config.attention_dropout = 0.0
    model.set_attn_implementation("eager")
    assert not goes_by_piece(model)


def test_equal_beginnings_are_computed_once():
    apart = pack_groups([token_ids(100, seed=i) for i in range(8)], [token_ids(10)] * 8)
    together = pack_groups([token_ids(100)] * 8, [token_ids(10, seed=i) for i in range(8)])
    alike = pack_groups([token_ids(100)] * 8, [[*token_ids(9), i, *token_ids(3)] for i in range(8)])
    assert apart.input_ids_PL.numel() == 8 * 109
    assert together.input_ids_PL.numel() == 100 + 8 * 9
    assert alike.input_ids_PL.numel() == 109 + 8 * 3


def test_silent_completions_are_computed_for_their_branches_only():
    prompts, completions = [SHORT, LONG, SHORT], ANSWERS[:3]
    packed = pack_groups(prompts, completions, [Branch(0, 4, (12, 13))], silent={0, 1})
    assert packed.input_ids_PL.shape == (1, 7 + 4 + 1 + 4)  # the prompt of the second is in no row
    model = random_policy("llama")
    found = packed_scores(model, packed)
    assert [len(scores) for scores in found] == [0, 0, 5, 2]
    expected = expected_scores(model, prompts, completions, [Branch(0, 4, (12, 13))])
    torch.testing.assert_close(found[2:], expected[2:], **ROUNDING)


def test_what_all_prompts_begin_with_is_computed_once():
    prompts = [token_ids(90) + token_ids(20, seed=i) for i in range(8)]
    packed = pack_groups(prompts, [token_ids(10)] * 8)
    assert packed.prefix_ids_K.tolist() == token_ids(90)
    assert packed.input_ids_PL.shape == (8, 29)
    assert packed.position_ids_PL[0].tolist() == list(range(90, 119))
    apart = pack_groups(prompts, [token_ids(10)] * 8, share_prefix=False)
    assert len(apart.prefix_ids_K) == 0
    assert apart.input_ids_PL.shape == (8, 119)


def test_inputs_of_the_adapter_stay_in_bfloat16_under_autocast():
    """PEFT would keep a float32 copy of each; elsewhere it still casts."""
    model = add_random_adapter(random_policy("llama").bfloat16())
    plain = model.get_base_model()
    packed = pack_groups([LONG], ANSWERS[:1], [], pad_token_id=0, device=torch.device("cpu"))
    seen = set()
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    add_fused_lm_head(plain, 1.0, outputs=("log_probs", "entropy"))
    with torch.autocast("cpu", torch.bfloat16):
        log_p_N, _ = packed_log_probabilities(model, plain, packed)
    assert seen == {torch.bfloat16}
    log_p_N.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    seen.clear()
    without_autocast, _ = packed_log_probabilities(model, plain, packed)
    assert seen == {torch.float32}
    torch.testing.assert_close(log_p_N, without_autocast, rtol=0.1, atol=0.3, check_dtype=False)
