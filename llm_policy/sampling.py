"""Sampling with each prompt computed once, and kept once.

What all prompts begin with is prefilled once for all of them. Then all completions decode behind one copy of their
prompt (llm_policy/prompt_cache.py). Where the caller has a guess at the completions (after the warm start all but the
action is known), a pass scores many tokens of it in place of one. Sampling options besides temperature and length go to
`generate` of transformers, and so does a model whose attention cannot be exchanged.

Axes: P prompts, R completions, C rows of a pass (completions that are equal so far share one), W completions that take
a token, L places of the padded prompt, K own places of a row, N tokens of a pass, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from llm_policy.decoding import FixedDecoding, end_tokens, is_worth_recording, pick, up_to_end
from llm_policy.processes import progress
from llm_policy.prompt_cache import PromptCache, holds_prompts_once

TokenIds = Sequence[int]

# Values of the sampling options that leave the logits as they are; and options that do not touch them.
NEUTRAL = {"top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0)}
NOT_SAMPLING = {
    "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "pad_token_id", "bos_token_id", "eos_token_id",
    "disable_compile", "transformers_version",
}  # fmt: skip
LOGITS_PER_PASS = 2**28  # at most so many at the same time (0.5 GB in bfloat16)
GUESSED_PER_PASS = 64  # tokens of a row: what stands behind a wrong guess, or a shorter row's end, is for nothing
# Tokens of all rows of a pass, where guesses have failed, or twice as many as came true in the last pass: 16 a row took
# nearly four times as long as none while a model was half taught (LOG.md)
GUESSED_AGAIN = 16
FOUND_AGAIN = 2  # tokens in a row, at least, that stand elsewhere, too
NO_TOKEN = -1  # between texts


@torch.no_grad()
def sample_completions(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    completions_per_prompt: int = 1,
    rows_per_batch: int = 256,
    allowed_tokens: Callable[[int, torch.Tensor], list[int]] | None = None,
    guesses: Sequence[TokenIds] | None = None,
    noise_RT: torch.Tensor | None = None,
) -> list[list[int]]:
    """Sample (or decode greedily) `completions_per_prompt` continuations of every prompt.

    Args:
        prompts: token ids of P prompts, at least two tokens each.
        generation_config: as for `model.generate`; needs pad and end tokens and `max_new_tokens`. What the checkpoint
            ships with (Qwen2.5: repetition penalty 1.1, top_p 0.8) fills nothing in: training and evaluation agree.
        rows_per_batch: completions decoded at the same time, a bound on memory.
        allowed_tokens: `prefix_allowed_tokens_fn` of `generate`: (row, token ids so far) -> tokens that may come next.
        guesses: what the completion of each prompt may be, with its end token (P lists). Right or wrong, they change
            what is computed and not what is sampled: see `_sample_along`. Not used where `generate` decodes.
        noise_RT: uniform random numbers, one per token of each completion; drawn here without them. They alone decide
            what is sampled, except where `generate` decodes.

    Returns:
        P * completions_per_prompt lists of token ids, prompt by prompt, each up to and with its end token.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # its layers hold the adapter
    shipped = model.generation_config
    model.generation_config = GenerationConfig()
    prompts_per_batch = max(1, rows_per_batch // completions_per_prompt)
    if noise_RT is None:
        rows = len(prompts) * completions_per_prompt
        noise_RT = torch.rand(rows if generation_config.do_sample else 0, generation_config.max_new_tokens)
    completions: list[list[int]] = []
    try:
        firsts = range(0, len(prompts), prompts_per_batch)
        with evaluating(model):
            for first in progress(firsts, "asking the model", unit="batch"):  # many maps: minutes on a CPU
                batch = prompts[first : first + prompts_per_batch]
                guessed = guesses and guesses[first : first + prompts_per_batch]
                for place in range(0, completions_per_prompt, rows_per_batch):  # once, unless a prompt has more
                    group = min(rows_per_batch, completions_per_prompt - place)
                    noise = noise_RT[first * completions_per_prompt + place :][: len(batch) * group]
                    completions.extend(
                        _sample_batch(model, batch, generation_config, group, allowed_tokens, guessed, noise)
                    )
    finally:
        model.generation_config = shipped
    return completions


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout; afterwards as before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    group: int,
    allowed_tokens: Callable[[int, torch.Tensor], list[int]] | None,
    guesses: Sequence[TokenIds] | None,
    noise_RT: torch.Tensor,
) -> list[list[int]]:
    if allowed_tokens is not None or not _temperature_alone(generation_config) or not holds_prompts_once(model):
        return _generated(model, prompts, generation_config, group, allowed_tokens)
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

    # The cache holds all but the last prompt token, which is computed per completion. Told of no sliding windows, it
    # keeps what one has left, too.
    cache = DynamicCache()
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
    guesses = guesses or [()] * len(prompts)
    noise_RT = noise_RT.to(model.device)
    return _sample_along(guesses, model, cache, ids_PL, mask_PL, positions_PL, group, generation_config, noise_RT)


def _generated(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    generation_config: GenerationConfig,
    group: int,
    allowed_tokens: Callable[[int, torch.Tensor], list[int]] | None,
) -> list[list[int]]:
    """What `generate` of Transformers samples, with the model's own kind of cache, if it has one."""
    length, pad = max(map(len, prompts)), generation_config.pad_token_id
    padded = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(
        input_ids=torch.tensor(padded, device=model.device).repeat_interleave(group, 0),
        attention_mask=torch.tensor(mask, device=model.device).repeat_interleave(group, 0),
        generation_config=generation_config,
        prefix_allowed_tokens_fn=allowed_tokens,
    )
    ends = end_tokens(generation_config)
    return [up_to_end(row, ends) for row in output[:, length:].tolist()]


def _temperature_alone(config: GenerationConfig) -> bool:
    """Whether nothing but the temperature stands between the logits and what is sampled."""
    neutral = all(getattr(config, name) in values for name, values in NEUTRAL.items())
    return neutral and set(config.to_diff_dict()) <= {*NEUTRAL, *NOT_SAMPLING}


def _sample_along(
    guesses: Sequence[TokenIds],
    model: PreTrainedModel,
    prompts: DynamicCache,
    ids_PL: torch.Tensor,
    mask_PL: torch.Tensor,
    positions_PL: torch.Tensor,
    group: int,
    config: GenerationConfig,
    noise_RT: torch.Tensor,
) -> list[list[int]]:
    """Sample `group` completions of each prompt, several tokens per pass where guesses come true.

    A pass gives the distribution behind every token of a guess. A completion takes its samples from them as long as
    they are what was guessed; the first that is not ends its share of the pass, and is a sample like the others
    (speculative sampling, Leviathan et al. 2023, arXiv 2211.17192, with a guess in place of a draft model). Completions
    that are equal so far share a row. Where there is nothing to guess (`_Drafts`) this is decoding token by
    token; on CUDA in fixed places from then on (`FixedDecoding`), which no guess interrupts again.

    Args:
        prompts: cache of all prompts without their last token.
        noise_RT: one number per token, whichever pass it is sampled in: the guesses have no part in what comes out.
            Decoding greedily needs none.
    """
    vocabulary = model.config.get_text_config().vocab_size
    completions: list[list[int]] = [[] for _ in range(len(ids_PL) * group)]
    # One row for the completions of a prompt that are equal so far
    rows = [list(range(first, first + group)) for first in range(0, len(completions), group)]
    cache = PromptCache(prompts, mask_PL[:, :-1].bool(), positions_PL[:, :-1])
    last_C, positions_C = ids_PL[:, -1], positions_PL[:, -1]
    guesses = list(map(tuple, guesses))
    drafts = _Drafts(guesses)
    came_true = 0  # guessed tokens of the last pass, of all rows together
    while rows:
        again = min(GUESSED_PER_PASS, max(GUESSED_AGAIN, 2 * came_true) // len(rows))
        most = max(0, LOGITS_PER_PASS // (len(rows) * vocabulary) - 1)  # beside the token that is known
        ahead = []
        for first, *_ in rows:
            done = completions[first]
            guessed = drafts.next(guesses[first // group], done, again)
            ahead.append(guessed[: min(most, config.max_new_tokens - 1 - len(done))])
        longest = max(map(len, ahead))
        to_come = config.max_new_tokens - min(len(completions[first]) for first, *_ in rows)
        if longest == 0 and is_worth_recording(ids_PL.device, to_come):
            _decode_fixed(model, cache, last_C, positions_C, rows, completions, noise_RT, config)
            break
        padded = [[*tokens, *[config.pad_token_id] * (longest - len(tokens))] for tokens in ahead]
        guessed_CN = torch.tensor(padded, dtype=torch.long, device=ids_PL.device).view(len(rows), longest)
        logits_CNV = cache.forward(
            model,
            torch.cat([last_C[:, None], guessed_CN], dim=1),
            positions_C[:, None] + torch.arange(1 + longest, device=ids_PL.device),
        )
        parted = _take_samples(logits_CNV, rows, ahead, completions, noise_RT, config)
        if parted:
            advances_C = torch.tensor([len(tokens) for _, *tokens in parted], device=ids_PL.device)
            last_C = torch.tensor([tokens[-1] for _, *tokens in parted], device=ids_PL.device)
            parents_C = torch.tensor([row for row, *_ in parted], device=ids_PL.device)
            positions_C = positions_C[parents_C] + advances_C
            cache.select(parents_C, advances_C)
        came_true = sum(len(tokens) - 1 for _, *tokens in parted)
        rows = list(parted.values())
    return completions


def _decode_fixed(
    model: PreTrainedModel,
    cache: PromptCache,
    last_C: torch.Tensor,
    positions_C: torch.Tensor,
    rows: list[list[int]],
    completions: list[list[int]],
    noise_RT: torch.Tensor,
    config: GenerationConfig,
) -> None:
    """Add to the completions of all rows what is left of them, each in a row of its own from now on."""
    going = [completion for of_row in rows for completion in of_row]
    parents = [row for row, of_row in enumerate(rows) for _ in of_row]
    parents_C = torch.tensor(parents, device=last_C.device)
    cache.select(parents_C, torch.zeros_like(parents_C))
    noise_CT = noise_RT[going] if config.do_sample else None
    counts = [len(completions[i]) for i in going]
    decoding = FixedDecoding(model, cache, last_C[parents_C], positions_C[parents_C], counts, noise_CT, config)
    for i, tokens in zip(going, decoding.tokens(), strict=True):
        completions[i].extend(tokens)


class _Drafts:
    """What may come next in a completion: what follows its last tokens elsewhere, if they stand there, too.

    Looked up are its own guess, the guesses of the others in the batch, and what it has written itself (prompt lookup
    decoding, Saxena 2023). A thought that goes wrong is often another prompt's.
    """

    def __init__(self, guesses: Sequence[TokenIds]) -> None:
        self._texts = list(dict.fromkeys(map(tuple, guesses)))
        self._tokens = np.array([token for text in self._texts for token in (NO_TOKEN, *text)])
        self._starts = np.cumsum([0, *(1 + len(text) for text in self._texts)]) + 1  # the last is the completion's own

    def next(self, guess: TokenIds, completion: list[int], again: int) -> TokenIds:
        """Nothing where there is no guess: what is not known at all does not repeat itself enough.

        A guess goes on as long as it came true, and where the last token alone was another: one word for another,
        maybe. Later it goes on, `again` tokens at a time, from where most of the last tokens stand.
        """
        done = len(completion)
        if list(guess[: max(0, done - 1)]) == completion[:-1]:
            return guess[done : done + GUESSED_PER_PASS]
        if not again or not guess:
            return ()
        ends = _where_most_stand(np.concatenate([self._tokens, [NO_TOKEN, *completion]]), done)
        texts = np.searchsorted(self._starts, ends, side="right") - 1
        places = zip(texts.tolist(), (ends - self._starts[texts]).tolist(), strict=True)
        all_texts = [*self._texts, tuple(completion)]

        def likeness(where: tuple[int, int]) -> tuple[bool, int]:
            text, place = where
            return all_texts[text] == guess, -abs(place - done)

        text, place = max(places, key=likeness, default=(0, len(self._texts[0])))
        found = all_texts[text][place : place + again]
        if all_texts[text] is not all_texts[-1]:
            return found
        return (found * again)[:again]  # where its own end comes, it has gone round in a circle


def _where_most_stand(tokens: np.ndarray, written: int) -> np.ndarray:
    """Where in `tokens` a token follows what most of the last ones are, of which the last `written` count.

    At least `FOUND_AGAIN` of them, or there is no such place.
    """

    def those_behind(ends: np.ndarray, count: int) -> np.ndarray:
        before = tokens[np.maximum(ends[:, None] - np.arange(1, count + 1), 0)]
        return ends[(before == tokens[: -count - 1 : -1]).all(axis=1)]

    ends = those_behind(np.flatnonzero((tokens[:-1] == tokens[-1]) & (tokens[1:] != NO_TOKEN)) + 1, FOUND_AGAIN)
    count, too_many = FOUND_AGAIN, written + 1
    while len(ends) and count + 1 < too_many:  # twice as many as long as that goes, then by halves
        more = min(2 * count, (count + too_many) // 2)
        if len(longer := those_behind(ends, more)):
            ends, count = longer, more
        else:
            too_many = more
    return ends


def _take_samples(
    logits_CNV: torch.Tensor,
    rows: list[list[int]],
    ahead: list[TokenIds],
    completions: list[list[int]],
    noise_RT: torch.Tensor,
    config: GenerationConfig,
) -> dict[tuple[int, ...], list[int]]:
    """Add to each completion what a pass is good for: tokens as guessed, and the first that is not.

    Returns the completions that have not ended, by (row, *tokens added) in the order of the rows.
    """
    ends = end_tokens(config)
    is_plain = not config.do_sample and not config.min_new_tokens
    best = logits_CNV.argmax(2).tolist() if is_plain else None  # in one go
    parted: dict[tuple[int, ...], list[int]] = {}
    going = [(row, completion) for row, of_row in enumerate(rows) for completion in of_row]
    for t in range(logits_CNV.size(1)):
        if best:
            sampled = [best[row][t] for row, _ in going]
        else:
            row_W, completion_W, place_W = torch.tensor([(r, c, len(completions[c])) for r, c in going]).unbind(1)
            logits_WV = logits_CNV[row_W, t]
            is_early_W = place_W < (config.min_new_tokens or 0)
            if is_early_W.any():
                logits_WV[is_early_W.nonzero(), sorted(ends)] = -torch.inf
            sampled = pick(logits_WV, noise_RT[completion_W, place_W] if config.do_sample else None, config).tolist()
        as_guessed = []
        for (row, completion), token in zip(going, sampled, strict=True):
            tokens = completions[completion]
            tokens.append(token)
            if token in ends or len(tokens) == config.max_new_tokens:
                continue
            if t < len(ahead[row]) and token == ahead[row][t]:
                as_guessed.append((row, completion))
            else:
                parted.setdefault((row, *tokens[-t - 1 :]), []).append(completion)
        going = as_guessed
        if not going:
            break
    return dict(sorted(parted.items(), key=lambda part: part[0][0]))


def common_prefix(sequences: Sequence[TokenIds]) -> TokenIds:
    """What all sequences begin with; nothing where they are one and the same, because then nothing is gained."""
    first, last = min(map(tuple, sequences)), max(map(tuple, sequences))
    if first == last:
        return ()
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
