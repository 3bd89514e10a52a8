"""Sampling with each prompt computed once: prefill the unique prompts, fan the cache out to the group, decode.

What all prompts begin with is prefilled once for all of them. Everything after the prefill is `generate` of
transformers, so that every sampling option keeps its meaning.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from llm_policy.packing import common_prefix

TokenIds = Sequence[int]


@torch.no_grad()
def sample_completions(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    completions_per_prompt: int = 1,
    rows_per_batch: int = 256,
    allowed_tokens: Callable[[int, torch.Tensor], list[int]] | None = None,
) -> list[list[int]]:
    """Sample (or decode greedily) `completions_per_prompt` continuations of every prompt.

    Args:
        prompts: token ids of P prompts, at least two tokens each.
        generation_config: as for `model.generate`; needs pad and end tokens and `max_new_tokens`. What the checkpoint
            ships with (Qwen2.5: repetition penalty 1.1, top_p 0.8) fills nothing in: training and evaluation agree.
        rows_per_batch: completions decoded at the same time, a bound on memory.
        allowed_tokens: `prefix_allowed_tokens_fn` of `generate`: (row, token ids so far) -> tokens that may come next.

    Returns:
        P * completions_per_prompt lists of token ids, prompt by prompt, each up to and with its end token.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # its layers hold the adapter
    was_training, shipped = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    prompts_per_batch = max(1, rows_per_batch // completions_per_prompt)
    completions: list[list[int]] = []
    try:
        for first in range(0, len(prompts), prompts_per_batch):
            batch = prompts[first : first + prompts_per_batch]
            completions.extend(_sample_batch(model, batch, generation_config, completions_per_prompt, allowed_tokens))
    finally:
        model.generation_config = shipped
        model.train(was_training)
    return completions


def _sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    group: int,
    allowed_tokens: Callable[[int, torch.Tensor], list[int]] | None,
) -> list[list[int]]:
    config = model.config.get_text_config()
    # Padding stands behind the shared prefix, which a sliding window, counting places, would take for tokens.
    slides = getattr(config, "sliding_window", None) is not None
    shared = 0 if slides else len(common_prefix([prompt[:-1] for prompt in prompts]))
    length = max(map(len, prompts))
    padding = [length - len(prompt) for prompt in prompts]
    pad = generation_config.pad_token_id
    padded = [[*p[:shared], *[pad] * n, *p[shared:]] for p, n in zip(prompts, padding, strict=True)]
    mask = [[1] * shared + [0] * n + [1] * (length - shared - n) for n in padding]
    ids_PL = torch.tensor(padded, device=model.device)
    mask_PL = torch.tensor(mask, device=model.device)
    positions_PL = (mask_PL.cumsum(1) - 1).clamp(min=0)

    # The cache holds all but the last prompt token; generate computes that one per completion, as it must.
    cache = DynamicCache(config=config)
    if shared:
        model.base_model(input_ids=ids_PL[:1, :shared], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(prompts))
    model.base_model(
        input_ids=ids_PL[:, shared:-1],
        attention_mask=mask_PL[:, :-1],
        position_ids=positions_PL[:, shared:-1],
        past_key_values=cache,
        use_cache=True,
    )
    cache.batch_repeat_interleave(group)
    output = model.generate(
        input_ids=ids_PL.repeat_interleave(group, 0),
        attention_mask=mask_PL.repeat_interleave(group, 0),
        past_key_values=cache,
        generation_config=generation_config,
        prefix_allowed_tokens_fn=allowed_tokens,
    )
    return [_up_to_end(row, generation_config.eos_token_id) for row in output[:, length:].tolist()]


def _up_to_end(token_ids: list[int], end_token_ids: int | list[int]) -> list[int]:
    ends = {end_token_ids} if isinstance(end_token_ids, int) else set(end_token_ids)
    for i, token in enumerate(token_ids):
        if token in ends:
            return token_ids[: i + 1]
    return token_ids
