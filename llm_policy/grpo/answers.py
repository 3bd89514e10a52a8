"""The exact distribution of a model's answer behind each of its thoughts, instead of one answer per thought.

A policy table from 8 or 16 sampled answers is a rough one, and its success is even rougher: the same adapter scored
.28 and .51 with 8 and 16 samples per state. The legal answers are few, so that their probabilities behind a thought can
be computed. Only the thoughts are sampled then, and after a warm start they hardly differ.

Axes: P prompts, G samples of each, A actions, N scored tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from llm_policy.chat import Messages, Reader
from llm_policy.completions import action_index, parse_completion
from llm_policy.grpo.packing import attention_mask, behind_prefix, only_positions, pack_groups

ANSWER_TAG = "<answer>"
PROMPTS_PER_PASS = 16


def answer_probabilities(
    reader: Reader,
    model: PreTrainedModel,
    prompts: Sequence[Messages],
    actions: Sequence[str],
    samples: int,
    guesses: Sequence[str] | None = None,
) -> tuple[np.ndarray, float]:
    """Sample `samples` completions of each prompt, and behind the thought of each compute what it answers.

    Returns:
        Probabilities (P, G, A) of the actions behind each sampled thought; rows sum to 1. What is no action, and a
        completion without an answer, counts as uniformly random: an agent has to move somehow. And the share of sampled
        completions that are well-formed and name an action.
    """
    texts = reader.completions(model, prompts, samples, guesses)
    # Thoughts of one prompt are mostly the same: each is scored once
    thoughts = [text[: text.index(ANSWER_TAG) + len(ANSWER_TAG)] if ANSWER_TAG in text else None for text in texts]
    asked = list(dict.fromkeys((i // samples, thought) for i, thought in enumerate(thoughts) if thought is not None))
    known: dict[tuple[int, str], np.ndarray] = {}
    for first in tqdm(range(0, len(asked), PROMPTS_PER_PASS), "scoring answers", leave=False, disable=None):
        batch = asked[first : first + PROMPTS_PER_PASS]
        scores_NA = _score(model, reader, [(prompts[p], thought) for p, thought in batch], actions)
        known.update(zip(batch, scores_NA, strict=True))
    uniform_A = np.full(len(actions), 1.0 / len(actions))
    rows = []
    for i, thought in enumerate(thoughts):
        row_A = np.zeros(len(actions)) if thought is None else known[i // samples, thought]
        rows.append(row_A + (1.0 - row_A.sum()) * uniform_A)
    return np.array(rows).reshape(len(prompts), samples, len(actions)), _valid_share(texts, actions)


def greedy_answers(
    reader: Reader,
    model: PreTrainedModel,
    prompts: Sequence[Messages],
    actions: Sequence[str],
    guesses: Sequence[str] | None = None,
) -> tuple[np.ndarray, float]:
    """The greedy completion of each prompt, in the form of `answer_probabilities`: (P, 1, A), one-hot or uniform."""
    texts = reader.completions(model, prompts, 0, guesses)
    rows = []
    for text in texts:
        action = action_index(parse_completion(text).answer, actions)
        rows.append(np.full(len(actions), 1.0 / len(actions)) if action is None else np.eye(len(actions))[action])
    return np.array(rows)[:, None], _valid_share(texts, actions)


def _valid_share(texts: Sequence[str], actions: Sequence[str]) -> float:
    """Share of completions that are well-formed and name an action."""
    parsed = [parse_completion(text) for text in texts]
    return sum(p.is_well_formed and action_index(p.answer, actions) is not None for p in parsed) / len(texts)


@torch.no_grad()
def _score(
    model: PreTrainedModel, reader: Reader, pairs: Sequence[tuple[Messages, str]], actions: Sequence[str]
) -> np.ndarray:
    """Probability of each action, with its closing tag, behind each (prompt, thought): (pairs, A), rows up to 1."""
    tokenizer = reader.tokenizer
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompts = [reader.prompt(messages) for messages, _ in pairs]
    wholes = [[encoded(f"{thought}{action}</answer>") for action in actions] for _, thought in pairs]
    packed = pack_groups(
        [prompt for prompt, whole in zip(prompts, wholes, strict=True) for _ in whole],
        [ids for whole in wholes for ids in whole],
        pad_token_id=tokenizer.pad_token_id,
        device=next(plain.parameters()).device,
    )
    backbone = plain.base_model
    was_training = plain.training
    plain.eval()
    try:
        prefix = behind_prefix(backbone, packed.prefix_ids_K, len(packed.input_ids_PL))
        with prefix, only_positions(backbone, packed.predictor_N):
            logits_NV = plain(
                input_ids=packed.input_ids_PL,
                position_ids=packed.position_ids_PL,
                attention_mask=attention_mask(plain, packed),
            ).logits[0]
    finally:
        plain.train(was_training)
    scores_N = logits_NV.float().log_softmax(-1).gather(1, packed.labels_N[:, None])[:, 0]
    completions, _ = packed.split(scores_N)
    scores = iter(completions)
    found = []
    for (_, thought), whole in zip(pairs, wholes, strict=True):
        given = encoded(thought)  # its own tokens are no part of the answer
        found.append([next(scores)[_shared(given, ids) :].sum().exp().item() for ids in whole])
    return np.array(found)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the two begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
