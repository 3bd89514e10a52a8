"""Decoding a token of every row at a time, in places that do not change, so that a GPU needs no word from the host.

Token by token a host starts a thousand small kernels a pass and waits for each sample: on an H200 a pass of Gemma-2B's
shape took eight times as long as its matrix products (LOG.md). Here all that changes from token to token stands in
tensors of fixed shape, the sampling included. So a pass can be recorded once as a CUDA graph, and replayed. Rows that
have ended stay, because a pass of a few rows takes a GPU as long as one of many.

Axes: C rows, S tokens of a row that are decoded here, T tokens of a completion, V vocabulary, E tokens that end one.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from llm_policy.prompt_cache import PromptCache, say_once

DEVICES = ("cuda",)
FEWEST = 16  # tokens that may still come, for which a recording pays
AT_FIRST = 4  # passes that are not recorded, and with which libraries make themselves ready
BETWEEN_LOOKS = 16  # passes; a look, whether all rows have ended, waits for the GPU


def pays(device: torch.device, to_come: int) -> bool:
    """Whether `FixedDecoding` is worth it for so many tokens."""
    return device.type in DEVICES and to_come >= FEWEST


class FixedDecoding:
    """C completions, each with a row of its own, on to their ends.

    Args:
        cache: of their prompts and of all their tokens but the last.
        last_C, positions_C: each row's last token, and its position.
        counts: tokens of each completion so far.
        noise_CT: as in `sample_completions`; None: greedily.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PromptCache,
        last_C: torch.Tensor,
        positions_C: torch.Tensor,
        counts: Sequence[int],
        noise_CT: torch.Tensor | None,
        config: GenerationConfig,
    ) -> None:
        device = last_C.device
        self.model, self.cache, self.config = model, cache, config
        self.most = config.max_new_tokens - min(counts)
        cache.fix(self.most)
        self.last_C1, self.positions_C1 = last_C[:, None].clone(), positions_C[:, None].clone()
        self.counts_C = torch.tensor(counts, device=device)
        self.ends_E = torch.tensor(sorted(end_tokens(config)), device=device)
        self.noise_CT = noise_CT
        self.sampled_CS = torch.zeros(len(counts), self.most, dtype=torch.long, device=device)
        self.done = torch.zeros(1, dtype=torch.long, device=device)
        self.has_ended_C = torch.zeros(len(counts), dtype=torch.bool, device=device)

    def tokens(self) -> list[list[int]]:
        """What is sampled for each row, up to and with its end token."""
        step, taken = self._step, 0
        while taken < self.most:
            step()
            taken += 1
            if taken == AT_FIRST and self.most - taken >= FEWEST:
                step = recorded(self._step)
            if taken % BETWEEN_LOOKS == 0 and self.has_ended_C.all():
                break
        ends, counts = set(self.ends_E.tolist()), (self.counts_C - taken).tolist()
        return [
            up_to_end(row[: self.config.max_new_tokens - count], ends)
            for row, count in zip(self.sampled_CS[:, :taken].tolist(), counts, strict=True)
        ]

    def _step(self) -> None:
        """One token more of each row; reads and writes the same places each time."""
        logits_CV = self.cache.forward(self.model, self.last_C1, self.positions_C1)[:, -1]
        if least := self.config.min_new_tokens:
            without_end_CV = logits_CV.index_fill(1, self.ends_E, -torch.inf)
            logits_CV = torch.where(self.counts_C[:, None] < least, without_end_CV, logits_CV)
        noise_C = None
        if self.noise_CT is not None:
            place_C1 = self.counts_C[:, None].clamp(max=self.noise_CT.size(1) - 1)  # of those that have ended
            noise_C = self.noise_CT.gather(1, place_C1)[:, 0]
        token_C1 = pick(logits_CV, noise_C, self.config)[:, None]
        self.sampled_CS.index_copy_(1, self.done, token_C1)
        self.last_C1.copy_(token_C1)
        for count in (self.done, self.counts_C, self.positions_C1):
            count += 1
        self.has_ended_C |= (token_C1 == self.ends_E).any(1) | (self.counts_C >= self.config.max_new_tokens)


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """`step`, or on CUDA a recording of it. Recording does not carry it out."""
    if not torch.cuda.is_available():
        return step
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask the GPU meanwhile
            step()
    except RuntimeError as error:  # an operation that needs the host
        say_once(f"decoding without a CUDA graph, which is slower: {str(error).splitlines()[0][:120]}")
        return step
    return graph.replay


def pick(logits_CV: torch.Tensor, noise_C: torch.Tensor | None, config: GenerationConfig) -> torch.Tensor:
    """One token per row: the most probable, or the one in whose share of the cumulated distribution the noise falls."""
    if noise_C is None:
        return logits_CV.argmax(1)
    logits_CV = logits_CV.float()
    if config.temperature not in (None, 1.0):
        logits_CV = logits_CV / config.temperature
    shares_CV = logits_CV.softmax(1).cumsum(1)
    return torch.searchsorted(shares_CV, noise_C[:, None] * shares_CV[:, -1:], right=True)[:, 0].clamp(
        max=logits_CV.size(1) - 1
    )


def end_tokens(config: GenerationConfig) -> set[int]:
    return {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id)


def up_to_end(token_ids: list[int], ends: set[int]) -> list[int]:
    for i, token in enumerate(token_ids):
        if token in ends:
            return token_ids[: i + 1]
    return token_ids
