"""All completions of one prompt in one row, a tree of tokens: what they have in common is computed once.

Axes: P prompts (rows), L places in a row, K places of the shared prefix, M = K + L keys, N scored tokens.

Two tokens of a row are one where all before them is equal, too: a prompt stands once before all its completions, and
completions that begin alike (after the warm start they all do) part where they differ. A token sees itself and what
leads to it, and predicts whatever comes next in each completion that runs through it:

    prompt p0 p1 p2, completions a b c, a b d and e f

    row       p0 p1 p2 a  b  e
    follows   -  p0 p1 p2 a  p2
    position  0  1  2  3  4  3
    predicts        a  b  c  f
                    e     d

The last token of a completion predicts nothing and is not there. What all prompts begin with (chat template, rules of
the game) is computed once for all rows and stands before them as a key-value cache, through which the gradient flows:
of 116 prompt tokens of the 4x4 lake 88 are the same everywhere.

A branch ("what if the answer had been UP?") is one more path through the tree. Log-probabilities, entropies and
gradients equal those of one row per completion (tests/test_packing.py, and `check_against_stock` on the real model
before training).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from peft.helpers import disable_input_dtype_casting
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from llm_policy.sampling import TokenIds, common_prefix


@dataclass(frozen=True)
class Branch:
    """Continue completion `completion` with `token_ids` instead of its own tokens from `start` on."""

    completion: int
    start: int
    token_ids: tuple[int, ...]


@dataclass
class PackedGroups:
    """P rows of L tokens behind K tokens that they share, and where in the rows the N scored tokens are predicted.

    Scored tokens are ordered: all completions in the order given, token by token, then all branches.
    """

    prefix_ids_K: torch.Tensor
    input_ids_PL: torch.Tensor
    position_ids_PL: torch.Tensor
    visible_PLM: torch.Tensor  # bool: may the query see the key? M = K + L keys, the prefix first
    predictor_N: torch.Tensor  # index into the flattened P * L positions
    labels_N: torch.Tensor  # token ids
    completion_lengths: list[int]
    branch_lengths: list[int]

    def split(self, values_N: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per-token values -> one tensor per completion and one per branch."""
        pieces = values_N.split(self.completion_lengths + self.branch_lengths)
        return list(pieces[: len(self.completion_lengths)]), list(pieces[len(self.completion_lengths) :])


def pack_groups(
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds],
    branches: Sequence[Branch] = (),
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
    share_prefix: bool = True,
    silent: Collection[int] = (),
) -> PackedGroups:
    """Pack B completions with their B prompts; equal prompts share a row, whichever completion they belong to.

    Args:
        prompts: token ids of each completion's prompt (B lists, at least one token each).
        completions: token ids of each completion (B lists, at least one token each).
        branches: alternatives to score; their tokens come after the completions' in `predictor_N`.
        share_prefix: whether what all prompts begin with is taken out of the rows.
        silent: completions (by number) that are not scored; only what their branches need of them is computed.
    """
    shared = len(common_prefix([prompt[:-1] for prompt in prompts])) if share_prefix else 0
    scored = [() if i in silent else completion for i, completion in enumerate(completions)]
    # (completion, its tokens before the scored ones, scored tokens)
    paths: list[tuple[int, TokenIds, TokenIds]] = [(i, (), completion) for i, completion in enumerate(scored)]
    paths += [(b.completion, completions[b.completion][: b.start], b.token_ids) for b in branches]
    rows: dict[tuple[int, ...], _TokenTree] = {}
    predictors: list[tuple[_TokenTree, int]] = []
    labels: list[int] = []
    for i, kept, tokens in paths:
        if tokens:
            row = rows.setdefault(tuple(prompts[i]), _TokenTree(len(rows)))
            nodes = row.add([*prompts[i][shared:], *kept, *tokens[:-1]])
            predictors.extend((row, node) for node in nodes[-len(tokens) :])
            labels.extend(tokens)

    length = max(len(row.tokens) for row in rows.values())
    tokens_PL, depths_PL, visible_PLL = (
        torch.from_numpy(np.stack(arrays)).to(device)
        for arrays in zip(*(row.padded(length, pad_token_id) for row in rows.values()), strict=True)
    )
    return PackedGroups(
        prefix_ids_K=torch.tensor(prompts[0][:shared], dtype=torch.long, device=device),
        input_ids_PL=tokens_PL,
        position_ids_PL=depths_PL + shared,
        visible_PLM=torch.cat([visible_PLL.new_ones(*tokens_PL.shape, shared), visible_PLL], dim=2),
        predictor_N=torch.tensor([row.number * length + node for row, node in predictors], device=device),
        labels_N=torch.tensor(labels, device=device),
        completion_lengths=[len(completion) for completion in scored],
        branch_lengths=[len(branch.token_ids) for branch in branches],
    )


class _TokenTree:
    """One packed row while it grows: tokens in order of arrival, each behind the one that it follows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.followed: list[int] = []  # index of the token before; -1 at the beginning
        self._index: dict[tuple[int, int], int] = {}  # (token before, token) -> index

    def add(self, tokens: Sequence[int]) -> list[int]:
        """The indices of `tokens`, one after the other from the beginning; those not yet there are added."""
        path, before = [], -1
        for depth, token in enumerate(tokens):
            here = self._index.setdefault((before, token), len(self.tokens))
            if here == len(self.tokens):
                self.tokens.append(token)
                self.depths.append(depth)
                self.followed.append(before)
            path.append(here)
            before = here
        return path

    def padded(self, length: int, pad_token_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens (L,), depths (L,) and what each sees (L, L): itself and all before it. Padding sees itself."""
        count = len(self.tokens)
        tokens_L = np.full(length, pad_token_id)
        depths_L = np.arange(length)
        visible_LL = np.eye(length, dtype=bool)
        tokens_L[:count], depths_L[:count] = self.tokens, self.depths
        for here, before in enumerate(self.followed):
            if before >= 0:
                visible_LL[here, :here] = visible_LL[before, :here]
        return tokens_L, depths_L, visible_LL


def attention_mask(model: PreTrainedModel, packed: PackedGroups) -> torch.Tensor | dict[str, torch.Tensor]:
    """`packed.visible_PLM` in the form that the model's attention takes (one mask, or one for each kind of layer).

    Sliding-window layers see, besides, only the last `config.sliding_window` positions.
    """
    config = model.config.get_text_config()

    def as_mask(visible_PLM: torch.Tensor) -> torch.Tensor:
        visible_P1LM = visible_PLM[:, None]
        if config._attn_implementation == "sdpa":
            return visible_P1LM
        return torch.zeros(visible_P1LM.shape, dtype=model.dtype, device=visible_PLM.device).masked_fill_(
            ~visible_P1LM, torch.finfo(model.dtype).min
        )

    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if window is None or layer_types == {"full_attention"}:
        return as_mask(packed.visible_PLM)
    prefix_positions_K = torch.arange(len(packed.prefix_ids_K), device=packed.position_ids_PL.device)
    key_positions_PM = torch.cat(
        [prefix_positions_K.expand(len(packed.position_ids_PL), -1), packed.position_ids_PL], dim=1
    )
    distance_PLM = packed.position_ids_PL[:, :, None] - key_positions_PM[:, None, :]
    sliding = as_mask(packed.visible_PLM & (distance_PLM < window))
    if not layer_types:  # an architecture in which every layer slides
        return sliding
    return {"full_attention": as_mask(packed.visible_PLM), "sliding_attention": sliding}


@contextmanager
def behind_prefix(backbone: nn.Module, prefix_ids_K: torch.Tensor, rows: int) -> Iterator[None]:
    """Inside, `backbone` computes `prefix_ids_K` first and puts its keys and values, with gradient, before every row.

    A hook, so that it happens within the call of whatever wraps the model for several processes.
    """

    def compute_prefix(module, arguments, keywords):
        cache = DynamicCache()  # told of no sliding windows: what a layer sees is the mask's business
        module.forward(input_ids=prefix_ids_K.unsqueeze(0), past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(rows)
        return arguments, {**keywords, "past_key_values": cache}

    if len(prefix_ids_K) == 0:
        yield
        return
    handle = backbone.register_forward_pre_hook(compute_prefix, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def only_positions(backbone: nn.Module, positions_N: torch.Tensor) -> Iterator[None]:
    """Inside, `backbone` hands on (1, N, H) hidden states at `positions_N` of its flattened (P, L), not all of them.

    The projection to the vocabulary is then paid for scored tokens only. A position may stand in the list repeatedly.
    """

    def select(_module, _arguments, output):
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[positions_N].unsqueeze(0)
        return output

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


def packed_log_probabilities(
    model: nn.Module, plain_model: PreTrainedModel, packed: PackedGroups
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy (nats) of each scored token, both (N,), under the temperature of the fused head.

    PEFT casts the input of each LoRA layer to float32. Under autocast, which casts it back, that only costs memory: a
    fifth of the peak (LOG.md).

    Args:
        model: what to call: the model itself, or its wrapper for several processes.
        plain_model: the transformers model inside, after `trl.trainer.utils.add_fused_lm_head`.
    """
    backbone = plain_model.base_model
    prefix = behind_prefix(backbone, packed.prefix_ids_K, len(packed.input_ids_PL))
    is_autocast = torch.is_autocast_enabled(packed.input_ids_PL.device.type)
    is_recomputed = plain_model.is_activation_checkpointing  # after this block, with the casts
    uncast = disable_input_dtype_casting(model, active=is_autocast and not is_recomputed)
    with prefix, only_positions(backbone, packed.predictor_N), uncast:
        output = model(
            input_ids=packed.input_ids_PL,
            position_ids=packed.position_ids_PL,
            attention_mask=attention_mask(plain_model, packed),
            shift_labels=packed.labels_N.unsqueeze(0),
            fused_lm_head=True,
        )
    return output.log_probs[0], output.entropy[0]
