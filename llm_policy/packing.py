"""Many completions of one prompt in one row: the prompt is computed once, each completion sees it and itself only.

A row holds the prompt without its last token, then one segment per completion. A segment starts with the prompt's last
token and stops before the completion's last token, so that position t of a segment predicts token t of its completion:

    prompt    p0 p1 p2 p3                       positions 0 1 2 3
    segment 1             p4 a0 a1              positions 4 5 6      predicts a0 a1 a2
    segment 2                      p4 b0        positions 4 5        predicts b0 b1

A branch is a segment that leaves a completion on the way ("what if the answer had been UP?"): it sees the prompt and
the completion up to where it branches. Log-probabilities, entropies and gradients equal those of one row per completion
(tests/test_packing.py, and `check_against_stock` on the real model before training).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

TokenIds = Sequence[int]


@dataclass(frozen=True)
class Branch:
    """Continue completion `completion` with `token_ids` instead of its own tokens from `start` on."""

    completion: int
    start: int
    token_ids: tuple[int, ...]


@dataclass
class PackedGroups:
    """P rows of L tokens, and where in them the N scored tokens are predicted.

    Scored tokens are ordered: all completions in the order given, token by token, then all branches.
    """

    input_ids_PL: torch.Tensor
    position_ids_PL: torch.Tensor
    visible_PLL: torch.Tensor  # bool: may the query (second axis) see the key (third axis)?
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
) -> PackedGroups:
    """Pack B completions with their B prompts; equal prompts share a row, whichever completion they belong to.

    Args:
        prompts: token ids of each completion's prompt (B lists, at least one token each).
        completions: token ids of each completion (B lists, at least one token each).
        branches: alternatives to score; their tokens come after the completions' in `predictor_N`.
    """
    row_of_prompt: dict[tuple[int, ...], int] = {}
    rows: list[_Row] = []
    completion_segments: list[tuple[int, int, int]] = []  # row, first position in the row, segment number
    for prompt, completion in zip(prompts, completions, strict=True):
        key = tuple(prompt)
        if key not in row_of_prompt:
            row_of_prompt[key] = len(rows)
            rows.append(_Row(key))
        row = row_of_prompt[key]
        tokens = [key[-1], *completion[:-1]]
        completion_segments.append((row, *rows[row].append(tokens, len(key) - 1, parent=0, branch_position=len(key))))

    predictors = [(row, start + t) for (row, start, _), c in zip(completion_segments, completions, strict=True)
                  for t in range(len(c))]  # fmt: skip
    labels = [token for completion in completions for token in completion]
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
        input_ids_PL=tokens_PL,
        position_ids_PL=positions_PL,
        visible_PLL=visible_PLL,
        predictor_N=torch.tensor([row * length + column for row, column in predictors], device=device),
        labels_N=torch.tensor(labels, device=device),
        completion_lengths=[len(completion) for completion in completions],
        branch_lengths=[len(branch.token_ids) for branch in branches],
    )


class _Row:
    """One packed row while it grows. Segment 0 is the prompt; padding has segment -1 and sees only itself."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        count = len(prompt) - 1
        self.tokens = list(prompt[:-1])
        self.positions = list(range(count))
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
    """`packed.visible_PLL` in the form that the model's attention takes (one mask, or one for each kind of layer).

    Sliding-window layers see, besides, only the last `config.sliding_window` positions.
    """
    config = model.config.get_text_config()

    def as_mask(visible_PLL: torch.Tensor) -> torch.Tensor:
        visible_P1LL = visible_PLL[:, None]
        if config._attn_implementation == "sdpa":
            return visible_P1LL
        return torch.zeros(visible_P1LL.shape, dtype=model.dtype, device=visible_PLL.device).masked_fill_(
            ~visible_P1LL, torch.finfo(model.dtype).min
        )

    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if window is None or layer_types == {"full_attention"}:
        return as_mask(packed.visible_PLL)
    distance_PLL = packed.position_ids_PL[:, :, None] - packed.position_ids_PL[:, None, :]
    sliding = as_mask(packed.visible_PLL & (distance_PLL < window))
    if not layer_types:  # an architecture in which every layer slides
        return sliding
    return {"full_attention": as_mask(packed.visible_PLL), "sliding_attention": sliding}


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
    with only_positions(plain_model.base_model, packed.predictor_N):
        output = model(
            input_ids=packed.input_ids_PL,
            position_ids=packed.position_ids_PL,
            attention_mask=attention_mask(plain_model, packed),
            shift_labels=packed.labels_N.unsqueeze(0),
            fused_lm_head=True,
        )
    return output.log_probs[0], output.entropy[0]
