"""What each token of a packed row sees: tree by tree on a CPU, as blocks for FlexAttention on CUDA, or in one mask.

A walk through a row's trees, down each branch before the next, gives every token a number. What follows a token then
has the numbers right behind its own, so two numbers say who sees a key: itself and all behind it (the interval labels
of a tree; Dietz 1982). A dense mask holds L x M truths. FlexAttention asks for them block by block and leaves out the
blocks in which nobody sees anything: of 64 completions in one row, nearly all (Dong et al. 2024, arXiv 2412.05496).

    row      p0 p1 p2 a  b  e        prompt p0 p1 p2, completions a b c, a b d and e f
    number   0  1  2  3  4  5
    seen by  0: 1: 2: 3: 4: 5:
             6  6  6  5  5  6

Axes: P rows, L places in a row, M keys (what stands before the rows, then the rows).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from llm_policy.prompt_cache import TRIED

ATTENTION, BY_TREE = "sdpa_or_flex", "tree_by_tree"
SMALLEST_HEAD = 16  # numbers, of FlexAttention's kernels
RECOMPILES = 64
FEWEST_PLACES = 512  # of a row: below, a dense mask is cheap, and blocks would have each kind of shape compiled


@dataclass
class Sight:
    """Which keys each token sees, without a number for each pair.

    `numbers_PL` says when a walk comes to each token, and a key is seen by firsts_PM <= number < ends_PM. Positions
    are those of the tokens in their completions, for windows.
    """

    numbers_PL: torch.Tensor
    positions_PL: torch.Tensor
    firsts_PM: torch.Tensor
    ends_PM: torch.Tensor
    key_positions_PM: torch.Tensor

    def visible(self, window: int | None = None) -> torch.Tensor:
        """(P, L, M), bool. With a window, keys so many positions back and further are not seen."""
        numbers_PL1 = self.numbers_PL[:, :, None]
        visible_PLM = (self.firsts_PM[:, None] <= numbers_PL1) & (numbers_PL1 < self.ends_PM[:, None])
        if window is not None:
            visible_PLM &= self.positions_PL[:, :, None] - self.key_positions_PM[:, None] < window
        return visible_PLM

    def blocks(self, window: int | None = None) -> BlockMask:
        """The same, for FlexAttention."""
        numbers_PL, firsts_PM, ends_PM = self.numbers_PL, self.firsts_PM, self.ends_PM
        positions_PL, key_positions_PM = self.positions_PL, self.key_positions_PM
        reach = window or 0

        def sees(row, _head, token, key):
            number = numbers_PL[row, token]
            return (firsts_PM[row, key] <= number) & (number < ends_PM[row, key])

        def sees_near(row, head, token, key):
            distance = positions_PL[row, token] - key_positions_PM[row, key]
            return sees(row, head, token, key) & (distance < reach)

        (rows, length), keys, device = numbers_PL.shape, firsts_PM.size(1), numbers_PL.device
        make = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
        return make(sees if window is None else sees_near, rows, None, length, keys, device=str(device))


def attend(module, query, key, value, attention_mask, **options):
    """What a layer calls: FlexAttention for blocks, and PyTorch's own attention for everything else."""
    if isinstance(attention_mask, BlockMask):
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast does so for PyTorch's own alone
        # Not the kernel for decoding, which has no configuration for a short row and grouped heads
        options["kernel_options"] = {"BACKEND": "TRITON"}
        return flex_attention_forward(module, query, key, value, attention_mask, **options)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def attend_by_tree(module, query, key, value, attention_mask, tree_lengths=None, **options):
    """PyTorch's attention on each tree of a single row by itself: no comparison with another tree, and no padding.

    Args:
        query: of all trees, one behind the other, (1, heads, sum of `tree_lengths`, size of a head).
        key, value: the same behind M - L keys that all trees see.
        attention_mask: (trees, 1, L, M), bool; a shorter tree has the first places of its L and M.
        tree_lengths: None: an ordinary pass.
    """
    if tree_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    before = key.size(2) - query.size(2)
    (key_before, *keys), (value_before, *values) = (x.split([before, *tree_lengths], dim=2) for x in (key, value))
    attended = [
        sdpa_attention_forward(
            module,
            queries_1HTD,
            torch.cat([key_before, keys_1HTD], dim=2),
            torch.cat([value_before, values_1HTD], dim=2),
            mask_1LM[None, :, :length, : before + length],
            **options,
        )[0]
        for queries_1HTD, keys_1HTD, values_1HTD, mask_1LM, length in zip(
            query.split(tree_lengths, dim=2), keys, values, attention_mask, tree_lengths, strict=True
        )
    ]
    return torch.cat(attended, dim=1), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
AttentionInterface.register(BY_TREE, attend_by_tree)
AttentionMaskInterface.register(BY_TREE, sdpa_mask)


def goes_by_tree(model: PreTrainedModel) -> bool:
    """Whether packed trees go through `attend_by_tree`: on a CPU, where starting many small products costs little.

    Only in architectures that were tried: others keep the lengths of the trees from their attention (StableLM), or look
    at its name themselves (Falcon). Not where the pass is computed again on the way back, because the layers' attention
    is exchanged for the pass alone.
    """
    config = model.config.get_text_config()
    is_usual = config._attn_implementation == "sdpa" and config.model_type in TRIED
    return model.device.type == "cpu" and is_usual and not model.is_activation_checkpointing


@contextmanager
def going_by_tree(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the layers of `model` call `attend_by_tree`."""
    config = model.config.get_text_config()
    usual, config._attn_implementation = config._attn_implementation, BY_TREE
    try:
        yield
    finally:
        config._attn_implementation = usual


def takes_blocks(model: PreTrainedModel) -> bool:
    return model.config.get_text_config()._attn_implementation == ATTENTION


def prefer_blocks(model: PreTrainedModel) -> str:
    """On CUDA, packed rows go through FlexAttention from now on, if it works there. Returns a line that says so."""
    config = model.config.get_text_config()
    if model.device.type != "cuda" or config._attn_implementation != "sdpa":
        return ""
    if getattr(config, "attention_dropout", 0.0):  # which FlexAttention has not
        return ""
    # Each kind of shape is compiled by itself, and past the limit the whole matrix of scores would be computed
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=model.dtype == torch.bfloat16):  # as in training
            _try_out(model)
    except Exception as error:  # a compiler, a kernel or a driver may fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        return f"packed rows with a dense mask: FlexAttention does not work here ({reason})"
    config._attn_implementation = ATTENTION
    return "packed rows through FlexAttention"


def _try_out(model: PreTrainedModel) -> None:
    """Forwards and backwards, with heads like the model's and in several lengths, behind a key that all see."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size < SMALLEST_HEAD:
        raise ValueError(f"heads of {size} numbers, {SMALLEST_HEAD} is the least")
    for length in (60, 200, 600):
        numbers_PL = torch.arange(length, device=model.device)[None]
        keys_PM = torch.cat([numbers_PL[:, :1], numbers_PL], dim=1)
        sight = Sight(numbers_PL, numbers_PL, keys_PM, torch.full_like(keys_PM, length), keys_PM)
        shapes = (heads, length), (groups, length + 1), (groups, length + 1)
        query, key, value = (
            torch.randn(1, *shape, size, dtype=model.dtype, device=model.device, requires_grad=True) for shape in shapes
        )
        for window in {None, getattr(config, "sliding_window", None)}:
            attended, _ = attend(model, query, key, value, sight.blocks(window), scaling=size**-0.5, dropout=0.0)
            attended.sum().backward()
