"""What a token of a tree sees: by numbers, as a dense mask, and through FlexAttention (here without its compiler)."""

from types import SimpleNamespace

import pytest
import torch
import transformers.integrations.flex_attention as transformers_flex
from test_packing import CASES, LONG, ROUNDING, expected_scores, packed_scores
from tiny_policies import ARCHITECTURE_NAMES, random_policy, token_ids
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_mask

from llm_policy.grpo import packing, tree_attention
from llm_policy.grpo.packing import attention_mask, pack_groups, pairs_per_token
from llm_policy.grpo.tree_attention import ATTENTION, attend_by_piece, prefer_blocks, takes_blocks


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention as plain operations, which know no CUDA, and on a CPU a gradient as well."""
    monkeypatch.setattr(
        transformers_flex,
        "compile_friendly_flex_attention",
        lambda *vectors, training=False, **options: torch_flex.flex_attention(*vectors, **options),
    )
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(packing, "FEWEST_PLACES", 0)
    monkeypatch.setattr(torch_flex, "_WARNINGS_SHOWN", {"flex_attention_performance"})


@pytest.fixture(params=[True, False], ids=["trees", "alone"])
def layout(request, monkeypatch):
    monkeypatch.setattr(packing, "_trees_are_cheaper", lambda *_: request.param)


@pytest.mark.parametrize("seed", range(5))
def test_a_token_sees_itself_and_what_leads_to_it(seed):
    """Twelve completions over an alphabet of two, which part and meet nowhere again."""
    generator = torch.Generator().manual_seed(seed)
    completions = [torch.randint(2, (length,), generator=generator).tolist() for length in range(1, 13)]
    packed = pack_groups([[7, 8, 9]] * 12, completions, share_prefix=False)
    row, visible = packed.input_ids_PL[0].tolist(), packed.sight.visible()[0]
    assert len(set(packed.sight.numbers_PL[0].tolist())) == len(row)
    paths = {tuple([7, 8, 9, *completion][:end]) for completion in completions for end in range(1, len(completion) + 3)}
    seen = [tuple(row[key] for key in line.nonzero()[:, 0]) for line in visible]
    assert sorted(seen) == sorted(paths), "keys stand in the order of their completion"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 5])
def test_blocks_say_what_the_dense_mask_says(layout, case, window):
    prompts, completions, branches, _ = CASES[case]
    packed = pack_groups(prompts, completions, branches)
    for sight in [packed.sight, *([packed.prompts.sight] if packed.prompts else [])]:
        visible = sight.visible(window)
        blocks = create_mask(sight.blocks(window).mask_mod, visible.size(0), 1, *visible.shape[1:], device="cpu")
        assert torch.equal(blocks[:, 0], visible)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_pieces_say_what_the_dense_mask_says(case, window, size, monkeypatch):
    monkeypatch.setattr(tree_attention, "TOKENS_OF_PIECE", size)
    prompts, completions, branches, _ = CASES[case]
    packed = pack_groups(prompts, completions, branches, by_piece=True)
    visible_LM = packed.sight.visible(window)[0]
    said_LM = torch.zeros_like(visible_LM)
    for piece in packed.sight.pieces(window):
        seen_TS = torch.ones_like(visible_LM[piece.tokens][:, piece.keys_S])
        seen_TS[:, len(piece.keys_S) - piece.hidden_TE.size(1) :] &= ~piece.hidden_TE
        assert seen_TS.any(0).all(), "no key that nobody sees"
        said_LM[piece.tokens, piece.keys_S] = seen_TS
    assert torch.equal(said_LM, visible_LM)


def test_pieces_of_a_completion_leave_out_the_others():
    completions = [[20 + i, *token_ids(256, seed=i)] for i in range(16)]
    packed = pack_groups([token_ids(128)] * 16, completions, share_prefix=False, by_piece=True)
    assert packed.input_ids_PL.shape == (1, 128 + 16 * 256)
    compared = sum(len(piece.hidden_TE) * len(piece.keys_S) for piece in packed.sight.pieces())
    # Prompt 1 x 1, then the two halves of a completion behind the prompt 1 x 2 and 1 x 3, in pieces of 128
    assert compared == 128**2 * (1 + 16 * 5)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_attention_piece_by_piece_is_pytorchs(groups, monkeypatch):
    """Six heads of grouped keys: values and gradients."""
    monkeypatch.setattr(tree_attention, "TOKENS_OF_PIECE", 16)
    prompts, completions, branches, _ = CASES["long branches"]
    sight = pack_groups(prompts, completions, branches, by_piece=True).sight
    (_, length), keys = sight.numbers_PL.shape, sight.firsts_PM.size(1)
    generator = torch.Generator().manual_seed(0)
    shapes = (6, length), (groups, keys), (groups, keys)
    vectors = [torch.randn(1, *shape, 8, generator=generator, requires_grad=True) for shape in shapes]
    gradient = torch.randn(1, length, 6, 8, generator=generator)
    number = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    found, _ = attend_by_piece(None, *vectors, number, scaling=0.3, pieces=[sight.pieces()])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *vectors, attn_mask=sight.visible()[:, None], scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(x, vectors, gradient) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_blocks_in_which_nobody_sees_anything_are_left_out():
    completions = [[20 + i, *token_ids(256, seed=i)] for i in range(16)]
    packed = pack_groups([token_ids(128)] * 16, completions, share_prefix=False)
    assert packed.input_ids_PL.shape == (1, 128 + 16 * 256)
    # Of 33 x 33 blocks each completion has 2 rows: the prompt's block, and 1 and 2 of its own
    assert packed.sight.blocks().sparsity() == pytest.approx(100 * (1 - (1 + 16 * 5) / 33**2))


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("case", ["long branches", "shared prefix", "completions that begin alike"])
def test_flex_attention_gives_the_same_scores_and_gradients(uncompiled, layout, architecture, case):
    prompts, completions, branches, _ = CASES[case]
    model = random_policy(architecture)
    packed = pack_groups(prompts, completions, branches)
    expected = expected_scores(model, prompts, completions, branches)
    model.config.get_text_config()._attn_implementation = ATTENTION
    masks = attention_mask(model, packed.sight)
    assert all(isinstance(mask, BlockMask) for mask in (masks.values() if isinstance(masks, dict) else [masks]))
    found = packed_scores(model, packed)
    torch.testing.assert_close(found, expected, **ROUNDING)
    weights = torch.linspace(-1.0, 1.0, torch.cat(found).numel())
    gradients = [
        torch.autograd.grad((weights * torch.cat(scores).flatten()).sum(), list(model.parameters()))
        for scores in (found, expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_where_blocks_are_left_out_trees_cost_nothing():
    model = random_policy("llama")
    many = [token_ids(200, seed=i) for i in range(64)]
    assert pack_groups([LONG] * 64, many, pairs_per_token=pairs_per_token(model)).prompts is not None
    model.config._attn_implementation = ATTENTION
    assert pack_groups([LONG] * 64, many, pairs_per_token=pairs_per_token(model)).prompts is None


def test_a_cpu_keeps_the_dense_mask():
    model = random_policy("llama")
    assert prefer_blocks(model) == ""
    assert not takes_blocks(model)


class OnCuda(SimpleNamespace):
    """A model that says it is on a GPU."""

    def __init__(self, head_dim: int = 16, attention: str = "sdpa") -> None:
        config = SimpleNamespace(
            _attn_implementation=attention, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim
        )
        config.get_text_config = lambda: config
        super().__init__(config=config, device=torch.device("cuda"), dtype=torch.float32, training=True)


def test_flex_attention_is_tried_before_it_is_used(uncompiled, monkeypatch):
    tried = []
    monkeypatch.setattr(tree_attention, "_try_out", tried.append)
    model = OnCuda()
    assert prefer_blocks(model) == "packed rows through FlexAttention"
    assert tried == [model]
    assert takes_blocks(model)


def test_the_trial_goes_forwards_and_backwards(uncompiled):
    model = OnCuda()
    model.device = torch.device("cpu")
    tree_attention._try_out(model)


def _no_kernel(_model):
    raise RuntimeError("no kernel\nand a page of text")


@pytest.mark.parametrize(
    ("head_dim", "try_out", "reason"),
    [(8, tree_attention._try_out, "heads of 8 numbers, 16 is the least"), (16, _no_kernel, "no kernel")],
)
def test_where_it_does_not_work_a_line_says_so(head_dim, try_out, reason, monkeypatch):
    monkeypatch.setattr(tree_attention, "_try_out", try_out)
    model = OnCuda(head_dim)
    assert prefer_blocks(model) == f"packed rows with a dense mask: FlexAttention does not work here ({reason})"
    assert not takes_blocks(model)


def test_who_asks_for_eager_attention_keeps_it():
    model = OnCuda(attention="eager")
    assert prefer_blocks(model) == ""
    assert model.config._attn_implementation == "eager"


def test_a_short_row_has_a_dense_mask(monkeypatch):
    """Blocks would have each kind of small shape compiled."""
    model = random_policy("llama")
    monkeypatch.setattr(model.config, "_attn_implementation", ATTENTION)
    for length, kind in ((8, torch.Tensor), (600, BlockMask)):
        packed = pack_groups([[7, 8]], [list(range(1, length))])
        assert isinstance(attention_mask(model, packed.sight), kind)
