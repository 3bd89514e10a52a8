"""Decoding many completions of a prompt with one copy of the prompt's keys and values.

`generate` holds the prompt once per completion and copies all of it for every token. Here each prompt stands once. All
rows that continue it ask its keys in one product, and their own tokens' keys, which are written in place, in another.
One softmax over both gives what plain attention gives, up to rounding (Hydragen, Juravsky et al. 2024, arXiv
2402.05099; bifurcated attention, Athiwaratkun et al. 2024, arXiv 2403.08845; both join two softmaxes by their
log-sum-exp, which is the same number):

                       prompt 0         prompt 1
    keys, once     [ p p p p p p ]  [ p p p p p p ]
    rows            a a a   b b         c d d          their own tokens, each behind its prompt

Axes: P prompts, C rows, N tokens of a pass, L places of a prompt, K own places, H key-value heads, R query heads per
key-value head, D of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "behind_prompts"
USUAL = ("sdpa", "eager", "sdpa_or_flex")  # the last is that of llm_policy/grpo/tree_attention.py
Mask = TypeVar("Mask")
PLACES = 16  # own places are made so many at a time. Products read all of them: a cut-out would be copied for each
SCORES_AT_ONCE = 2**20  # on a CPU, as many as its caches hold with what is computed of them
TRIED = (  # architectures whose attention is nothing else (tests/test_sampling.py)
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "granite", "smollm3",
)  # fmt: skip


def places_for(written: int) -> int:
    """Own places that a row has of which so many are written."""
    return -(-written // PLACES) * PLACES


class PromptCache(Cache):
    """Keys and values of P prompts, and those of C rows that continue them; at first one row for each prompt.

    Args:
        prompts: cache of all prompts, from a plain forward pass.
        visible_PL: False where a prompt is padded.
        positions_PL: of the prompts' tokens.
    """

    def __init__(self, prompts: DynamicCache, visible_PL: torch.Tensor, positions_PL: torch.Tensor) -> None:
        super().__init__(layers=[OwnLayer(layer.keys, layer.values) for layer in prompts.layers])
        prompts.layers.clear()  # they are kept here, and freed where no row needs them any more
        self.visible_PL, self.positions_PL = visible_PL, positions_PL
        self.prompt_C = torch.arange(len(visible_PL), device=visible_PL.device)  # each row's prompt, ascending
        self.visible_CK = visible_PL[:, :0]  # own places that are read; a wrong guess leaves some that are not
        self.positions_CK = positions_PL[:, :0]
        self.fixed: FixedPlaces | None = None
        self._arrange()

    def forward(self, model: PreTrainedModel, ids_CN: torch.Tensor, positions_CN: torch.Tensor) -> torch.Tensor:
        """Logits (C, N, V) of the rows' next tokens; their keys and values are kept."""
        if self.fixed is None:
            among_CNN = torch.ones(*ids_CN.shape, ids_CN.size(1), dtype=torch.bool, device=ids_CN.device).tril()
            before_CM = torch.cat([self.visible_PL[self.prompt_C], self.visible_CK], dim=1)
            visible_CNM = torch.cat([before_CM[:, None].expand(-1, ids_CN.size(1), -1), among_CNN], dim=2)
            self.positions_CK = torch.cat([self.positions_CK, positions_CN], dim=1)
            key_positions_CM = torch.cat([self.positions_PL[self.prompt_C], self.positions_CK], dim=1)
            written = self.positions_CK.size(1)
            unwritten = (0, places_for(written) - written)
            visible_CNM, key_positions_CM = pad(visible_CNM, unwritten), pad(key_positions_CM, unwritten)
        else:
            visible_CNM, key_positions_CM = self.fixed.with_token(positions_CN)
        distance_CNM = positions_CN[:, :, None] - key_positions_CM[:, None]

        def mask(window: int | None) -> torch.Tensor:
            return (visible_CNM if window is None else visible_CNM & (distance_CNM < window))[:, None]

        config = model.config.get_text_config()
        usual, config._attn_implementation = config._attn_implementation, ATTENTION
        try:
            logits_CNV = model(
                input_ids=ids_CN,
                position_ids=positions_CN,
                attention_mask=mask_by_layer(config, mask),
                past_key_values=self,
                use_cache=True,
                behind=self,
            ).logits
        finally:
            config._attn_implementation = usual
        if self.fixed is not None:
            self.fixed.next_own.add_(1)
        return logits_CNV

    def fix(self, room: int) -> None:
        """From now on no shape changes: a pass has one token per row, there are `room` of them, and all rows stay."""
        before_CM = torch.cat([self.visible_PL[self.prompt_C], self.visible_CK], dim=1)
        key_positions_CM = torch.cat([self.positions_PL[self.prompt_C], self.positions_CK], dim=1)
        next_own = torch.tensor([self.visible_CK.size(1)], device=before_CM.device)
        more = (0, room)
        self.fixed = FixedPlaces(pad(before_CM, more), pad(key_positions_CM, more), self.visible_PL.size(1), next_own)
        for layer in self.layers:
            layer.fix(self.visible_CK.size(1) + room, len(self.prompt_C), next_own)

    def select(self, parents_C: torch.Tensor, kept_C: torch.Tensor) -> None:
        """Row i continues row `parents_C[i]` (ascending) with the first `kept_C[i]` tokens of its last pass.

        Prompts that no row continues are forgotten.
        """
        kept_CN = torch.arange(int(kept_C.max()), device=kept_C.device) < kept_C[:, None]
        self.visible_CK = torch.cat([self.visible_CK[parents_C], kept_CN], dim=1)
        written = self.visible_CK.size(1)  # what no row keeps is written over
        self.positions_CK = self.positions_CK[parents_C, :written]
        rows = len(self.prompt_C)
        kept_P, self.prompt_C = self.prompt_C[parents_C].unique(return_inverse=True)
        is_fewer = len(kept_P) < len(self.visible_PL)
        if is_fewer:
            self.visible_PL, self.positions_PL = self.visible_PL[kept_P], self.positions_PL[kept_P]
        # Asked once: on a GPU each question waits for all that is under way
        goes_on = len(parents_C) == rows and bool((parents_C.diff() == 1).all())
        for layer in self.layers:
            layer.select(parents_C, kept_P if is_fewer else None, goes_on, written)
        self._arrange()

    def _arrange(self) -> None:
        """Where each row stands in a block of prompts x rows of one prompt; None where the rows are that block."""
        prompts = len(self.visible_PL)
        counts_P = self.prompt_C.bincount(minlength=prompts)
        width = int(counts_P.max())
        firsts_P = counts_P.cumsum(0) - counts_P
        within_C = torch.arange(len(self.prompt_C), device=self.prompt_C.device) - firsts_P[self.prompt_C]
        is_full = bool((counts_P == width).all())
        self.block = (prompts, width)
        self.places_C = None if is_full else self.prompt_C * width + within_C

    def as_block(self, rows: torch.Tensor) -> torch.Tensor:
        """(C, ...) -> (P, rows of a prompt, ...), zeros where a prompt has fewer."""
        if self.places_C is not None:
            padded = rows.new_zeros(self.block[0] * self.block[1], *rows.shape[1:])
            padded[self.places_C] = rows
            rows = padded
        return rows.view(*self.block, *rows.shape[1:])

    def as_rows(self, block: torch.Tensor) -> torch.Tensor:
        """(P, rows of a prompt, ...) -> (C, ...)."""
        rows = block.flatten(0, 1)
        return rows if self.places_C is None else rows[self.places_C]


@dataclass
class FixedPlaces:
    """Which keys are read, and their positions, (C, M) each, with room for all that will be written.

    `next_own` (1,) is the own place of the next token, of all rows alike.
    """

    visible_CM: torch.Tensor
    positions_CM: torch.Tensor
    of_prompt: int
    next_own: torch.Tensor

    def with_token(self, positions_C1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write down the next token, and return what it sees (C, 1, M), and all positions (C, M)."""
        self.visible_CM.index_fill_(1, self.of_prompt + self.next_own, True)
        self.positions_CM.index_copy_(1, self.of_prompt + self.next_own, positions_C1)
        return self.visible_CM[:, None], self.positions_CM


class OwnLayer(DynamicLayer):
    """One layer: the prompts' keys and values, and a row's own, written in place into room for more of them.

    What is not written yet, 0 or left by a wrong guess, is read, too, with weight 0: it has to be a number.
    """

    def __init__(self, prompt_keys_PHLD: torch.Tensor, prompt_values_PHLD: torch.Tensor) -> None:
        super().__init__()
        self.prompt_keys_PHLD, self.prompt_values_PHLD = prompt_keys_PHLD, prompt_values_PHLD
        self.length = 0  # own places of a row that are written
        self.next_own: torch.Tensor | None = None  # once fixed: where the next token goes
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args, **_options):
        if self.next_own is not None:
            self.keys.index_copy_(2, self.next_own, key_states)
            self.values.index_copy_(2, self.next_own, value_states)
            return self.keys, self.values
        before, self.length = self.length, self.length + key_states.size(2)
        self._make_room(len(key_states), places_for(self.length))
        self.keys[:, :, before : self.length] = key_states
        self.values[:, :, before : self.length] = value_states
        return self.keys, self.values

    def _make_room(self, rows: int, places: int) -> None:
        """So many own places of each row, and no more, in one piece of memory."""
        if self.keys is not None and self.keys.size(2) == places:
            return
        _, heads, _, size = self.prompt_keys_PHLD.shape
        roomy = [self.prompt_keys_PHLD.new_zeros(rows, heads, places, size) for _ in range(2)]
        if self.keys is not None:
            kept = min(places, self.keys.size(2))
            for own, whole in zip((self.keys, self.values), roomy, strict=True):
                whole[:, :, :kept] = own[:, :, :kept]
        self.keys, self.values = roomy

    def select(self, parents_C: torch.Tensor, kept_P: torch.Tensor | None, goes_on: bool, length: int) -> None:
        """`goes_on`: every row goes on by itself. `length`: so many own places stay."""
        self.length = length
        if kept_P is not None:
            self.prompt_keys_PHLD = self.prompt_keys_PHLD[kept_P]
            self.prompt_values_PHLD = self.prompt_values_PHLD[kept_P]
        if not goes_on and self.keys is not None:  # which nothing was written to yet
            self.keys, self.values = self.keys[parents_C], self.values[parents_C]

    def fix(self, places: int, rows: int, next_own: torch.Tensor) -> None:
        """Room for all places that will be written."""
        self._make_room(rows, places)
        self.next_own = next_own

    def get_seq_length(self) -> int:
        return self.length + self.prompt_keys_PHLD.size(2)


def attention_behind_prompts(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    behind: PromptCache,
    **_options,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: `query` (C, H * R, N, D) over its prompt's keys and its own.

    Args:
        key, value: a row's own, (C, H, K, D).
        attention_mask: bool, (C, 1, N, L + K), the prompt's places first: may the query see the key?
        behind: the cache that `key` and `value` come from.
    """
    layer = behind.layers[module.layer_idx]
    rows, heads, count = query.size(0), key.size(1), query.size(2)
    query_CHQD = query.reshape(rows, heads, -1, query.size(3)) * scaling  # Q: R query heads x N tokens

    def of_prompts(own_CHQX: torch.Tensor, prompts_PHXY: torch.Tensor) -> torch.Tensor:
        """Every row times its prompt's matrix, (C, H, Q, Y): one product per prompt and head."""
        block_PHGQX = behind.as_block(own_CHQX).transpose(1, 2)
        product = block_PHGQX.flatten(2, 3) @ prompts_PHXY
        return behind.as_rows(product.unflatten(2, block_PHGQX.shape[2:4]).transpose(1, 2))

    scores_CHQL = of_prompts(query_CHQD, layer.prompt_keys_PHLD.transpose(2, 3))
    places = scores_CHQL.size(3)
    of_row = query.size(1) * count * (places + key.size(2))
    at_once = rows if query.is_cuda else max(1, SCORES_AT_ONCE // of_row)
    own = []
    for first in range(0, rows, at_once):
        some = slice(first, first + at_once)
        scores = torch.cat([scores_CHQL[some], query_CHQD[some] @ key[some].transpose(2, 3)], dim=3)
        scores = scores.reshape(len(scores), -1, count, scores.size(3)).masked_fill_(
            ~attention_mask[some], torch.finfo(scores.dtype).min
        )
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype).view(len(scores), heads, -1, scores.size(3))
        scores_CHQL[some] = weights[..., :places]
        own.append(weights[..., places:] @ value[some])
    seen = of_prompts(scores_CHQL, layer.prompt_values_PHLD) + torch.cat(own)
    return seen.reshape(rows, -1, count, seen.size(3)).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_behind_prompts)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def mask_by_layer(config: PreTrainedConfig, mask: Callable[[int | None], Mask]) -> Mask | dict[str, Mask]:
    """The mask that a model's attention takes, or one for each kind of layer that it has.

    Args:
        mask: window -> mask. Layers with a window see, of what is visible, only so many positions back.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if window is None or layer_types == {"full_attention"}:
        return mask(None)
    if not layer_types:  # an architecture in which every layer slides
        return mask(window)
    return {"full_attention": mask(None), "sliding_attention": mask(window)}


def holds_prompts_once(model: PreTrainedModel) -> bool:
    """Whether the model's attention may be exchanged for `attention_behind_prompts`; says once where it may not.

    Others do more than this attention does (Gemma 2 caps scores, GPT-OSS has sinks), or were not tried, as quantised
    models were not.
    """
    config = model.config.get_text_config()
    is_usual = config._attn_implementation in USUAL and not getattr(model, "is_quantized", False)
    if config.model_type in TRIED and is_usual and not turns_by_length(model):
        return True
    _say_once(f"{config.model_type}: each completion decodes with a copy of its prompt, which is slower")
    return False


def turns_by_length(model: PreTrainedModel) -> bool:
    """Whether the rotation of a position depends on how long the pass is: no pass may then be cut in two."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in kinds)


@cache
def _say_once(line: str) -> None:
    print(line, flush=True)
