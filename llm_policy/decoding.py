"""Decoding a token of every row at a time, in places that do not change, so that a GPU needs no word from the host.

Token by token a host starts more than 500 small kernels per pass and waits for each sample: on an H200 a pass of
Gemma-2B's shape took eight times as long as its matrix products (LOG.md). Here all that changes from token to token
stands in tensors of fixed shape, the sampling included. So a pass can be recorded once as a CUDA graph, and replayed.
Rows that have ended stay: without them the pass would be another one, to be recorded anew.

Axes: C rows, S tokens of a row that are decoded here, T tokens of a completion, V vocabulary, E tokens that end one.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from llm_policy.prompt_cache import PromptCache

DEVICES = {"cuda"}  # where it is done; none on which a recording has failed
FEWEST = 16  # tokens that may still come, for which a recording pays
AT_FIRST = 2  # passes that are not recorded, and with which libraries make themselves ready
BETWEEN_LOOKS = 16  # passes; a look, whether all rows have ended, waits for the GPU


def is_worth_recording(device: torch.device, to_come: int) -> bool:
    """Whether `FixedDecoding` is worth it for so many tokens."""
    return device.type in DEVICES and to_come >= AT_FIRST + FEWEST


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
        self.counts, self.room = counts, config.max_new_tokens - min(counts)
        cache.fix(self.room)
        self.last_C1, self.positions_C1 = last_C[:, None].clone(), positions_C[:, None].clone()
        self.counts_C = torch.tensor(counts, device=device)
        self.ends_E = torch.tensor(sorted(end_tokens(config)), device=device)
        self.noise_CT = noise_CT
        self.sampled_CS = torch.zeros(len(counts), self.room, dtype=torch.long, device=device)
        self.step_1 = torch.zeros(1, dtype=torch.long, device=device)
        self.has_ended_C = torch.zeros(len(counts), dtype=torch.bool, device=device)

    def tokens(self) -> list[list[int]]:
        """What is sampled for each row, up to and with its end token."""
        step, taken = self._step, 0
        while taken < self.room:
            step()
            taken += 1
            if (taken <= AT_FIRST or taken % BETWEEN_LOOKS == 0) and self.has_ended_C.all():
                break
            if taken == AT_FIRST and self.last_C1.is_cuda:
                step = recorded(self._step)
        ends = end_tokens(self.config)
        return [
            up_to_end(row[: self.config.max_new_tokens - count], ends)
            for row, count in zip(self.sampled_CS[:, :taken].tolist(), self.counts, strict=True)
        ]

    def _step(self) -> None:
        """One token more of each row; reads and writes the same places each time."""
        logits_CV = self.cache.forward(self.model, self.last_C1, self.positions_C1)[:, -1]
        if least := self.config.min_new_tokens:
            without_end_CV = logits_CV.index_fill(1, self.ends_E, -torch.inf)
            logits_CV = torch.where(self.counts_C[:, None] < least, without_end_CV, logits_CV)
        noise_C = None
        if self.noise_CT is not None:
            number_C1 = self.counts_C[:, None].clamp(max=self.noise_CT.size(1) - 1)  # past it for those that have ended
            noise_C = self.noise_CT.gather(1, number_C1)[:, 0]
        token_C1 = pick(logits_CV, noise_C, self.config)[:, None]
        self.sampled_CS.index_copy_(1, self.step_1, token_C1)
        self.last_C1.copy_(token_C1)
        for tensor in (self.step_1, self.counts_C, self.positions_C1):
            tensor.add_(1)
        self.has_ended_C |= (token_C1 == self.ends_E).any(1) | (self.counts_C >= self.config.max_new_tokens)


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """A recording of `step`, which on CUDA replays what it does; recording does not carry it out.

    Where it fails (an operation needs the host), `step` itself, and no other recording is tried.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask the GPU meanwhile
            step()
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # a recording that fails does not leave its own
        DEVICES.discard("cuda")
        cause = str(error.__context__ or error).splitlines()[0][:120]
        print(f"decoding without a CUDA graph, which is slower: {cause}", flush=True)
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
