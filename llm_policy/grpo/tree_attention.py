"""What each token of a packed row sees: piece by piece on a CPU, as blocks for FlexAttention on CUDA, or in one mask.

A walk through a row's trees, down each branch before the next, gives every token a number. What follows a token then
has the numbers right behind its own, so two numbers say who sees a key: itself and all behind it (the interval labels
of a tree; Dietz 1982). A dense mask holds L x M truths. FlexAttention asks for them block by block and leaves out the
blocks in which nobody sees anything: of 64 completions in one row, nearly all (Dong et al. 2024, arXiv 2412.05496). On
a CPU some tokens at a time are compared with the keys that any of them sees.

    row      p0 p1 p2 a  b  e        prompt p0 p1 p2, completions a b c, a b d and e f
    number   0  1  2  3  4  5
    seen by  0: 1: 2: 3: 4: 5:
             6  6  6  5  5  6

Axes: P rows, L places in a row, M keys (what stands before the rows, then the rows), H heads, G key-value heads, D of a
head, T tokens of a piece, N keys that they might see, S that any of them sees, E of these that not all see.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from llm_policy.prompt_cache import TRIED

ATTENTION, BY_PIECE = "sdpa_or_flex", "piece_by_piece"
TOKENS_OF_PIECE = 128  # measured (two threads of an AMD EPYC): the scores of more leave its caches
SMALLEST_HEAD = 16  # numbers, of FlexAttention's kernels
RECOMPILES = 64
FEWEST_PLACES = 512  # of a row: below, a dense mask is cheap, and blocks would have each kind of shape compiled


@dataclass(frozen=True)
class Piece:
    """Some tokens that stand together in a row, and what they see.

    Attributes:
        tokens: their places in the row.
        keys_S: the keys that any of them sees, by number; at the end those that not all of them see.
        hidden_TE: which of these E at the end a token does not see, bool.
    """

    tokens: slice
    keys_S: torch.Tensor
    hidden_TE: torch.Tensor


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

    def visible(
        self, window: int | None = None, tokens: slice = slice(None), keys: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """(P, L, M), bool. With a window, keys so many positions back and further are not seen.

        Args:
            tokens, keys: of each row, these alone.
        """
        numbers_PL1 = self.numbers_PL[:, tokens, None]
        visible_PLM = (self.firsts_PM[:, None, keys] <= numbers_PL1) & (numbers_PL1 < self.ends_PM[:, None, keys])
        if window is not None:
            visible_PLM &= self.positions_PL[:, tokens, None] - self.key_positions_PM[:, None, keys] < window
        return visible_PLM

    def pieces(self, window: int | None = None) -> list[Piece]:
        """The same for a single row, piece by piece."""
        pieces = []
        for first in range(0, self.numbers_PL.size(1), TOKENS_OF_PIECE):
            tokens = slice(first, first + TOKENS_OF_PIECE)
            numbers_T = self.numbers_PL[0, tokens]
            maybe_M = (self.firsts_PM[0] <= numbers_T.max()) & (numbers_T.min() < self.ends_PM[0])
            keys_N = maybe_M.nonzero()[:, 0]  # of a long row few, for each of which every token is asked
            visible_TN = self.visible(window, tokens, keys_N)[0]
            seen_by_all_N = visible_TN.all(0)
            not_by_all_N = visible_TN.any(0) & ~seen_by_all_N
            keys_S = torch.cat([keys_N[seen_by_all_N], keys_N[not_by_all_N]])
            pieces.append(Piece(tokens, keys_S, ~visible_TN[:, not_by_all_N]))
        return pieces

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


class PieceByPiece(torch.autograd.Function):
    """Attention of one row, softmax(Q K^T) V, with the keys that a piece's tokens see and no others.

    Its weights are computed again on the way back, so that no L x M of them are kept (FlashAttention, Dao et al. 2022,
    arXiv 2205.14135). Scores have the row's number format, as in transformers' eager attention, sums float32.
    """

    @staticmethod
    def forward(ctx, query_HLD, key_GMD, value_GMD, pieces):
        ctx.save_for_backward(query_HLD, key_GMD, value_GMD)
        ctx.pieces = pieces
        query_GRLD = query_HLD.unflatten(0, (len(key_GMD), -1))
        attended_GRLD = torch.empty_like(query_GRLD)
        for piece in pieces:
            query_GRTD = query_GRLD[:, :, piece.tokens]
            key_GSD, value_GSD = (x_GMD.index_select(1, piece.keys_S) for x_GMD in (key_GMD, value_GMD))
            weights_GXS = _weights(query_GRTD, key_GSD, piece)
            attended_GRLD[:, :, piece.tokens] = (weights_GXS @ value_GSD).view_as(query_GRTD)
        return attended_GRLD.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_HLD):
        query_HLD, key_GMD, value_GMD = ctx.saved_tensors
        query_GRLD, gradient_GRLD = (x_HLD.unflatten(0, (len(key_GMD), -1)) for x_HLD in (query_HLD, gradient_HLD))
        of_query_GRLD = torch.empty_like(query_GRLD)
        of_key_GMD, of_value_GMD = (torch.zeros_like(key_GMD, dtype=torch.float32) for _ in range(2))
        for piece in ctx.pieces:
            query_GRTD = query_GRLD[:, :, piece.tokens]
            gradient_GXD = gradient_GRLD[:, :, piece.tokens].flatten(1, 2)
            key_GSD, value_GSD = (x_GMD.index_select(1, piece.keys_S) for x_GMD in (key_GMD, value_GMD))
            weights_GXS = _weights(query_GRTD, key_GSD, piece)
            of_scores_GXS = torch.ops.aten._softmax_backward_data(
                gradient_GXD @ value_GSD.mT, weights_GXS, -1, weights_GXS.dtype
            )
            of_query_GRLD[:, :, piece.tokens] = (of_scores_GXS @ key_GSD).view_as(query_GRTD)
            of_key_GMD.index_add_(1, piece.keys_S, (of_scores_GXS.mT @ query_GRTD.flatten(1, 2)).float())
            of_value_GMD.index_add_(1, piece.keys_S, (weights_GXS.mT @ gradient_GXD).float())
        of_query_HLD = of_query_GRLD.flatten(0, 1)
        return of_query_HLD, of_key_GMD.to(key_GMD.dtype), of_value_GMD.to(value_GMD.dtype), None


def _weights(query_GRTD: torch.Tensor, key_GSD: torch.Tensor, piece: Piece) -> torch.Tensor:
    """How much each token of a piece, once for each head, takes of each key: (G, X = R T, S), sums of 1."""
    scores_GXS = query_GRTD.flatten(1, 2) @ key_GSD.mT
    first = len(piece.keys_S) - piece.hidden_TE.size(1)
    scores_GXS.view(*query_GRTD.shape[:3], -1)[..., first:].masked_fill_(piece.hidden_TE, -torch.inf)
    return scores_GXS.softmax(-1)  # computed in float32


def attend_by_piece(module, query, key, value, attention_mask, scaling, pieces=None, **options):
    """Attention of a single row through `PieceByPiece`.

    Args:
        query: (1, H, L, D).
        key, value: the same of G heads behind M - L keys that stand before the row.
        attention_mask: which of the lists in `pieces` is this layer's, a number in four dimensions.
        pieces: None: an ordinary pass.
    """
    if pieces is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    query, key = (query * scaling).to(value.dtype), key.to(value.dtype)
    attended_HLD = PieceByPiece.apply(query[0], key[0], value[0], pieces[int(attention_mask)])
    return attended_HLD.transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
AttentionInterface.register(BY_PIECE, attend_by_piece)
AttentionMaskInterface.register(BY_PIECE, sdpa_mask)


def goes_by_piece(model: PreTrainedModel) -> bool:
    """Whether packed trees go through `attend_by_piece`: on a CPU, where starting many small products costs little.

    Only in architectures that were tried: others keep the pieces from their attention (StableLM), or look at its name
    themselves (Falcon). Not with dropout in it, and not where the pass is computed again on the way back, because the
    layers' attention is exchanged for the pass alone.
    """
    config = model.config.get_text_config()
    is_usual = config._attn_implementation == "sdpa" and config.model_type in TRIED
    drops = getattr(config, "attention_dropout", 0.0)
    return model.device.type == "cpu" and is_usual and not drops and not model.is_activation_checkpointing


@contextmanager
def going_by_piece(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the layers of `model` call `attend_by_piece`."""
    config = model.config.get_text_config()
    usual, config._attn_implementation = config._attn_implementation, BY_PIECE
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
