"""The exact distribution of a model's answer behind each of its thoughts, instead of one answer per thought.

A policy table from 8 or 16 sampled answers is a rough one, and its success is even rougher: the same adapter scored
.28 and .51 with 8 and 16 samples per state. The legal answers are few, so that their probabilities behind a thought can
be computed. After a warm start nearly all thoughts are the taught one, whose own probability can be computed as well.
Samples only say how the rest is spread: one malformed sample among the 8 of a state, where one in a thousand is, cost
.07 of success.

Axes: P prompts, G samples of each, A actions, N scored tokens, or scored thoughts, V vocabulary.
"""

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel
from trl.trainer.utils import selective_log_softmax

from llm_policy import processes
from llm_policy.chat import Messages, Reader
from llm_policy.completions import action_index, common_words, parse_completion
from llm_policy.grpo.packing import Branch, may_share_prefix, only_positions, pack_groups, packed_pass
from llm_policy.grpo.tree_attention import goes_by_piece
from llm_policy.sampling import evaluating

ANSWER_TAG, END_TAG = "<answer>", "</answer>"
PUNCTUATION = ".,;:!()"
PROMPTS_PER_PASS = 16
# |Difference| of log-probabilities, packed against plain, that rounding explains; a wrong mask gives over 0.3
SAME = 0.1


def sampled_answers(
    reader: Reader,
    model: PreTrainedModel,
    prompts: Sequence[Messages],
    actions: Sequence[str],
    samples: int,
    guesses: Sequence[str] | None = None,
    is_fixed: bool = True,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Sample `samples` completions of each prompt, and behind the thought of each compute what it answers.

    Args:
        guesses: a likely completion of each prompt.
        is_fixed: the thoughts of the guesses are one sentence that hardly varies, and are computed, not sampled.
            Thoughts that the model may word otherwise are sampled, and the guesses only make that quick.

    Returns:
        Exact probabilities (P, A) of the actions behind the guessed thought; 0 where thoughts are not fixed.
        Per sample (P, G, A) what else is said: the exact probabilities of the actions in the prompt's spelling behind a
        sampled thought, and, where a sample says something else, what `answers_as_read` would make of it (another
        spelling is an action, too; what is none counts as uniformly random, because an agent has to move somehow).
        Both together are an unbiased estimate, but for completions that answer twice: the first answer counts there as
        well. A row of nan is a sample that says nothing else.
        And the share of sampled completions that are well-formed and name an action.
        `answer_weights` makes one of the first two.
    """
    texts = reader.completions(model, prompts, samples, guesses)
    thoughts = [_thought(text) for text in texts]
    guessed = [_thought(guess) if is_fixed else None for guess in guesses or [""] * len(prompts)]
    # Thoughts of one prompt are mostly the same: each is scored once
    asked = [*enumerate(guessed), *((i // samples, thought) for i, thought in enumerate(thoughts))]
    asked = [(p, thought) for p, thought in dict.fromkeys(asked) if thought is not None]
    pairs = [(prompts[p], thought) for p, thought in asked]
    known = dict(zip(asked, np.exp(_answer_scores(reader, model, pairs, actions, is_fixed)), strict=True))

    nothing_A = np.zeros(len(actions))
    exact_PA = np.array([known[p, t][0] * known[p, t][1:] if t else nothing_A for p, t in enumerate(guessed)])
    rest_PGA = np.full((len(prompts), samples, len(actions)), np.nan)
    for i, (text, thought) in enumerate(zip(texts, thoughts, strict=True)):
        p, g = divmod(i, samples)
        names_action = thought is not None and any(text.startswith(f"{thought}{a}{END_TAG}") for a in actions)
        names_action = names_action and parse_completion(text).answer in actions  # and not a second one behind it
        is_guessed = thought is not None and thought == guessed[p]
        if is_guessed and names_action:
            continue
        behind_A = nothing_A if thought is None or is_guessed else known[p, thought][1:]
        rest_PGA[p, g] = behind_A + (0.0 if names_action else _as_read(text, actions))
    return exact_PA, rest_PGA, _valid_share(texts, actions)


def answer_weights(exact_PA: np.ndarray, rest_PGA: np.ndarray) -> np.ndarray:
    """Weights (P, G, A) of the actions from `sampled_answers`, to be averaged and normalised (`mean_answers`).

    What the guessed thought leaves of 1 has the weights of the samples that say something else. Where none does, a
    uniformly random action is taken for it.
    """
    weights_PGA = rest_PGA.copy()
    for rest_GA in weights_PGA:
        is_guessed_G = np.isnan(rest_GA[:, 0])
        others_A = np.ones(rest_GA.shape[1]) if is_guessed_G.all() else rest_GA[~is_guessed_G].mean(0)
        rest_GA[is_guessed_G] = others_A / others_A.sum()
    left_P = (1.0 - exact_PA.sum(1)).clip(min=0.0)  # rounding may make it negative
    return exact_PA[:, None] + left_P[:, None, None] * weights_PGA


def answers_behind(
    reader: Reader, model: PreTrainedModel, prompts: Sequence[Messages], replies: Sequence[str], actions: Sequence[str]
) -> np.ndarray:
    """How probable each action is behind the thought of each reply, put into the model's mouth: (P, A).

    Rows sum to less than 1, because the model might say something else.
    """
    thoughts = [reply.partition(ANSWER_TAG)[0] + ANSWER_TAG for reply in replies]
    pairs = list(zip(prompts, thoughts, strict=True))
    return np.exp(_answer_scores(reader, model, pairs, actions))[:, 1:]


def answers_as_read(texts: Sequence[str], actions: Sequence[str]) -> tuple[np.ndarray, float]:
    """One completion of each prompt, in the form of `answer_weights`: (P, 1, A), one-hot or uniform."""
    return np.array([_as_read(text, actions) for text in texts])[:, None], _valid_share(texts, actions)


def true_thoughts(texts: Sequence[str], true: Sequence[str]) -> tuple[float, float]:
    """Share of the completions whose thought is that of the true one, and share of its words that are there, in [0, 1].

    >>> true_thoughts(["<think>a hole left</think><answer>UP</answer>"], ["<think>a hole right</think>"])
    (0.0, 0.6666666666666666)
    """
    pairs = [(_words(text), _words(expected)) for text, expected in zip(texts, true, strict=True)]
    words = [len(common_words(said, wanted)) / max(1, len(wanted)) for said, wanted in pairs]
    return sum(said == wanted for said, wanted in pairs) / len(pairs), sum(words) / len(words)


def words_said(texts: Sequence[str], true: Sequence[str], which: Collection[str]) -> float:
    """Of the words `which` in the true thoughts, the share that the completions have in the same place; 1 without any.

    Who calls every cell of a map ice has most words right, and no hole.

    >>> words_said(["<think>ice, ice, ice</think>"], ["<think>hole, ice, ice</think>"], {"hole"})
    0.0
    """
    there = wanted = 0
    for text, expected in zip(texts, true, strict=True):
        words = _words(expected)
        places = {i for i, word in enumerate(words) if word.strip(PUNCTUATION) in which}
        wanted += len(places)
        there += len(places & {place for _, place in common_words(_words(text), words)})
    return there / wanted if wanted else 1.0


def _words(text: str) -> list[str]:
    return parse_completion(text).thought.split()


def mean_answers(weights_PGA: np.ndarray) -> np.ndarray:
    """Probabilities (P, A) from `answer_weights`; rows sum to 1."""
    weights_PA = weights_PGA.mean(axis=1)
    return weights_PA / weights_PA.sum(axis=1, keepdims=True)


def _as_read(text: str, actions: Sequence[str]) -> np.ndarray:
    """One-hot of the action that a completion names, uniform where it names none: (A,)."""
    action = action_index(parse_completion(text).answer, actions)
    return np.full(len(actions), 1.0 / len(actions)) if action is None else np.eye(len(actions))[action]


def _valid_share(texts: Sequence[str], actions: Sequence[str]) -> float:
    """Share of completions that are well-formed and name an action."""
    parsed = [parse_completion(text) for text in texts]
    return sum(p.is_well_formed and action_index(p.answer, actions) is not None for p in parsed) / len(texts)


def _thought(text: str) -> str | None:
    """What a completion says up to its answer; None where there is no answer."""
    return text[: text.index(ANSWER_TAG) + len(ANSWER_TAG)] if ANSWER_TAG in text else None


# Scores --------------------------------------------------------------------------------------------------------


def _answer_scores(
    reader: Reader,
    model: PreTrainedModel,
    pairs: Sequence[tuple[Messages, str]],
    actions: Sequence[str],
    of_thoughts: bool = False,
) -> np.ndarray:
    """Log-probability of each thought behind its prompt, then of each action with its closing tag: (pairs, 1 + A).

    Args:
        of_thoughts: False: nan for the thoughts, whose many tokens then need no logits.
    """
    first_and_last = pairs[:: max(1, len(pairs) - 1)]  # two trees behind what both begin with
    score = _plain_scores
    if _packing_is_right(model, reader, first_and_last, actions):
        score = partial(_packed_scores, of_thoughts=of_thoughts)
    own, scores = pairs[processes.own_share(len(pairs))], []
    for first in processes.progress(range(0, len(own), PROMPTS_PER_PASS), "scoring answers"):
        scores.extend(score(model, reader, own[first : first + PROMPTS_PER_PASS], actions))
    return np.array(processes.gathered(scores)).reshape(len(pairs), 1 + len(actions))


def _packing_is_right(model: PreTrainedModel, reader: Reader, pairs: Sequence, actions: Sequence[str]) -> bool:
    """Whether the packed pass scores as plain rows do; architectures differ in what they make of a mask.

    Likely actions weigh more: in bfloat16 the log-probability of one that is nearly gone is rough.
    """
    if not pairs:
        return True
    packed_NA, plain_NA = (score(model, reader, pairs, actions)[:, 1:] for score in (_packed_scores, _plain_scores))
    difference = np.average(np.abs(packed_NA - plain_NA), weights=np.exp(plain_NA - plain_NA.max()))
    if difference <= SAME:
        return True
    print(f"packed log-probabilities differ by {difference:.3g}: answers are scored row by row, which is slower")
    return False


@torch.no_grad()
def _packed_scores(
    model: PreTrainedModel,
    reader: Reader,
    pairs: Sequence[tuple[Messages, str]],
    actions: Sequence[str],
    of_thoughts: bool = False,
) -> np.ndarray:
    """`_answer_scores` in one pass over all pairs."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    prompts, wholes, givens = _encoded(reader, pairs, actions)
    replies = [ids for whole in wholes for ids in whole]
    starts = [_shared(given, ids) for whole, given in zip(wholes, givens, strict=True) for ids in whole]
    ends = [Branch(i, start, tuple(ids[start:])) for i, (start, ids) in enumerate(zip(starts, replies, strict=True))]
    with_thought = set(range(0, len(replies), len(actions))) if of_thoughts else set()
    packed = pack_groups(
        [prompt for prompt, whole in zip(prompts, wholes, strict=True) for _ in whole],
        replies,
        ends,
        silent=set(range(len(replies))) - with_thought,
        pad_token_id=reader.tokenizer.pad_token_id,
        device=next(plain.parameters()).device,
        share_prefix=may_share_prefix(plain),
        by_piece=goes_by_piece(plain),
    )
    here = only_positions(plain.base_model, packed.predictor_U)
    with evaluating(plain), packed_pass(plain, packed) as inputs, here:
        logits_UV = plain(**inputs).logits[0]
    scores_U = selective_log_softmax(logits_UV.float(), packed.labels_U)
    whole_replies, answers = packed.split(scores_U[packed.scored_N].cpu())  # not one by one from a GPU
    thoughts = [
        whole_replies[i][: starts[i]].sum().item() if of_thoughts else np.nan
        for i in range(0, len(replies), len(actions))
    ]
    answers_NA = np.array([tokens.sum().item() for tokens in answers]).reshape(len(pairs), len(actions))
    return np.column_stack([thoughts, answers_NA])


@torch.no_grad()
def _plain_scores(
    model: PreTrainedModel, reader: Reader, pairs: Sequence[tuple[Messages, str]], actions: Sequence[str]
) -> np.ndarray:
    """The same from a row of its own for each action: no mask, nothing shared."""
    device = next(model.parameters()).device
    rows = []
    with evaluating(model):
        for prompt, whole, given in zip(*_encoded(reader, pairs, actions), strict=True):
            scores = []
            for ids in whole:
                logits_NV = model(torch.tensor([[*prompt, *ids]], device=device)).logits[0, len(prompt) - 1 : -1]
                scores.append(selective_log_softmax(logits_NV.float(), torch.tensor(ids, device=device)))
            starts = [_shared(given, ids) for ids in whole]
            answers = [tokens[start:].sum().item() for tokens, start in zip(scores, starts, strict=True)]
            rows.append([scores[0][: starts[0]].sum().item(), *answers])
    return np.array(rows)


def _encoded(reader: Reader, pairs: Sequence[tuple[Messages, str]], actions: Sequence[str]) -> tuple[list, list, list]:
    """Token ids of each prompt, of each thought with each action, and of each thought alone."""

    def encoded(text: str) -> list[int]:
        return reader.tokenizer.encode(text, add_special_tokens=False)

    wholes = [[encoded(f"{thought}{action}{END_TAG}") for action in actions] for _, thought in pairs]
    return [reader.prompt(messages) for messages, _ in pairs], wholes, [encoded(thought) for _, thought in pairs]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the two begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
