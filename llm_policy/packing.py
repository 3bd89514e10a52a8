"""Many completions of one prompt in one row: the prompt is computed once, each completion sees it and itself only.

A row holds the prompt without its last token, then one segment per completion. A segment starts with the prompt's last
token and stops before the completion's last token, so that position t of a segment predicts token t of its completion:

    prompt    p0 p1 p2 p3                       positions 0 1 2 3
    segment 1             p4 a0 a1              positions 4 5 6      predicts a0 a1 a2
    segment 2                      p4 b0        positions 4 5        predicts b0 b1

What all prompts begin with (chat template, rules of the game) is computed once for all rows and stands before them as
a key-value cache, through which the gradient flows: of 116 prompt tokens of the 4x4 lake 88 are the same everywhere.

A branch is a segment that leaves a completion on the way ("what if the answer had been UP?"): it sees the prompt and
the completion up to where it branches. Log-probabilities, entropies and gradients equal those of one row per completion
(tests/test_packing.py, and `check_against_stock` on the real model before training).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

TokenIds = Sequence[int]


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
        silent: completions (by number) that are computed for their branches' sake and not scored themselves.
    """
    shared = len(common_prefix([prompt[:-1] for prompt in prompts])) if share_prefix else 0
    row_of_prompt: dict[tuple[int, ...], int] = {}
    rows: list[_Row] = []
    completion_segments: list[tuple[int, int, int]] = []  # row, first position in the row, segment number
    for prompt, completion in zip(prompts, completions, strict=True):
        key = tuple(prompt)
        if key not in row_of_prompt:
            row_of_prompt[key] = len(rows)
            rows.append(_Row(key[shared:-1], shared))
        row = row_of_prompt[key]
        tokens = [key[-1], *completion[:-1]]
        completion_segments.append((row, *rows[row].append(tokens, len(key) - 1, parent=0, branch_position=len(key))))

    scored = [() if i in silent else completion for i, completion in enumerate(completions)]
    predictors = [(row, start + t) for (row, start, _), c in zip(completion_segments, scored, strict=True)
                  for t in range(len(c))]  # fmt: skip
    labels = [token for completion in scored for token in completion]
    for branch in branches:
        row, start, segment = completion_segments[branch.completion]
        position = len(prompts[branch.completion]) - 1 + branch.start
        predictors.append((row, start + branch.start))  # the first token is predicted where the completion stands
        labels.extend(branch.token_ids)
        if len(branch.token_ids) > 1:
            first, _ = rows[row].append(branch.token_ids[:-1], position + 1, segment, branch_position=position + 1)
            predictors.extend((row, first + t) for t in range(len(branch.token_ids) - 1))

    length = max(len(row.tokens) for row in rows)
    columns = torch.tensor([row.padded(length, pad_token_id) for row in rows], device=device)  # P, 5, L
    tokens_PL, positions_PL, segments_PL, parents_PL, branch_positions_PL = columns.unbind(1)
    same_segment = segments_PL[:, :, None] == segments_PL[:, None, :]
    in_parent = parents_PL[:, :, None] == segments_PL[:, None, :]
    visible_PLL = same_segment & (positions_PL[:, None, :] <= positions_PL[:, :, None])
    visible_PLL |= in_parent & (positions_PL[:, None, :] < branch_positions_PL[:, :, None])
    visible_PLL |= (segments_PL[:, None, :] == 0) & (segments_PL[:, :, None] > 0)  # everyone sees the prompt
    return PackedGroups(
        prefix_ids_K=torch.tensor(prompts[0][:shared], dtype=torch.long, device=device),
        input_ids_PL=tokens_PL,
        position_ids_PL=positions_PL,
        visible_PLM=torch.cat([visible_PLL.new_ones(*tokens_PL.shape, shared), visible_PLL], dim=2),
        predictor_N=torch.tensor([row * length + column for row, column in predictors], device=device),
        labels_N=torch.tensor(labels, device=device),
        completion_lengths=[len(completion) for completion in scored],
        branch_lengths=[len(branch.token_ids) for branch in branches],
    )


def common_prefix(sequences: Sequence[TokenIds]) -> TokenIds:
    """What all sequences begin with; nothing where they are one and the same, for then nothing is gained."""
    first, last = min(map(tuple, sequences)), max(map(tuple, sequences))
    if first == last:
        return ()
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


class _Row:
    """One packed row while it grows. Segment 0 is the prompt; padding has segment -1 and sees only itself."""

    def __init__(self, prompt: TokenIds, position: int) -> None:
        count = len(prompt)
        self.tokens = list(prompt)
        self.positions = list(range(position, position + count))
        self.segments = [0] * count
        self.parents = [0] * count
        self.branch_positions = [0] * count
        self.segment_count = 1

    def append(self, tokens: TokenIds, position: int, parent: int, branch_position: int) -> tuple[int, int]:
        """Add a segment whose first token has `position`; returns its first column and its segment number."""
        first, segment = len(self.tokens), self.segment_count
        self.tokens.extend(tokens)
        self.positions.extend(range(position, position + len(tokens)))
        self.segments.extend([segment] * len(tokens))
        self.parents.extend([parent] * len(tokens))
        self.branch_positions.extend([branch_position] * len(tokens))
        self.segment_count += 1
        return first, segment

    def padded(self, length: int, pad_token_id: int) -> list[list[int]]:
        missing = length - len(self.tokens)
        return [
            self.tokens + [pad_token_id] * missing,
            self.positions + list(range(missing)),
            self.segments + [-1] * missing,
            self.parents + [-2] * missing,
            self.branch_positions + [0] * missing,
        ]


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

    Args:
        model: what to call: the model itself, or its wrapper for several processes.
        plain_model: the transformers model inside, after `trl.trainer.utils.add_fused_lm_head`.
    """
    backbone = plain_model.base_model
    prefix = behind_prefix(backbone, packed.prefix_ids_K, len(packed.input_ids_PL))
    with prefix, only_positions(backbone, packed.predictor_N):
        output = model(
            input_ids=packed.input_ids_PL,
            position_ids=packed.position_ids_PL,
            attention_mask=attention_mask(plain_model, packed),
            shift_labels=packed.labels_N.unsqueeze(0),
            fused_lm_head=True,
        )
    return output.log_probs[0], output.entropy[0]
