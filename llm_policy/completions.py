"""Completion text -> answer text: the one parser for rewards, trainer and evaluation. A task says what it means.

Text from a model is only ever matched against patterns and names that we know; it is never evaluated.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

Reward = Callable[..., list[float]]  # TRL's: (completions, **columns) -> rewards

# The whole completion: one thought, one answer, nothing outside. Neither part may hold a tag of its own.
_TAGLESS = r"(?:(?!</?(?:think|answer)>).)*"
_WELL_FORMED = re.compile(rf"\s*<think>({_TAGLESS})</think>\s*<answer>({_TAGLESS})</answer>\s*", re.DOTALL)
_THOUGHT = re.compile(rf"<think>({_TAGLESS})</think>", re.DOTALL)
_ANSWER = re.compile(rf"<answer>({_TAGLESS})</answer>", re.DOTALL)
_LOOSELY_FORMED = re.compile(rf"<think>{_TAGLESS}</think>\s*<answer>{_TAGLESS}</answer>", re.DOTALL)


@dataclass(frozen=True)
class ParsedCompletion:
    """What a completion says.

    Attributes:
        is_well_formed: exactly `<think>...</think>` and then `<answer>...</answer>`, with white space around at most.
        answer: the text of the only answer, without white space around it; None where there is none, or several.
        last_answer: that of the last one; None where there is none.
        thought: the text of the first thought; empty where there is none.
        is_loosely_formed: a thought and then an answer in their tags, whatever stands around them.
    """

    is_well_formed: bool
    answer: str | None
    last_answer: str | None = None
    is_loosely_formed: bool = False
    thought: str = ""


def parse_completion(text: str) -> ParsedCompletion:
    """Read one completion.

    >>> parse_completion("<think>A hole.</think><answer> LEFT</answer>")
    ParsedCompletion(is_well_formed=True, answer='LEFT', last_answer='LEFT', is_loosely_formed=True, thought='A hole.')
    >>> parse_completion("I would go <answer>down</answer>")
    ParsedCompletion(is_well_formed=False, answer='down', last_answer='down', is_loosely_formed=False, thought='')
    >>> parse_completion("<think>?</think><answer>LEFT</answer><answer>UP</answer>")
    ParsedCompletion(is_well_formed=False, answer=None, last_answer='UP', is_loosely_formed=True, thought='?')
    """
    answers = [answer.strip() for answer in _ANSWER.findall(text)]
    return ParsedCompletion(
        is_well_formed=_WELL_FORMED.fullmatch(text) is not None,
        answer=answers[0] if len(answers) == 1 else None,
        last_answer=answers[-1] if answers else None,
        is_loosely_formed=_LOOSELY_FORMED.search(text) is not None,
        thought=found[1].strip() if (found := _THOUGHT.search(text)) else "",
    )


def common_words(said: Sequence[str], wanted: Sequence[str]) -> list[tuple[int, int]]:
    """(Place in the one, place in the other) of the words that two texts have in common, in their order.

    >>> common_words("out, 10: ice".split(), "0f: ice, 10: ice".split())
    [(1, 2), (2, 3)]
    """
    blocks = SequenceMatcher(None, said, wanted, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def tagged(is_answer: Callable[[str], bool]) -> Callable[[object, str], bool]:
    """Whether a completion, whatever its prompt, is one thought and one answer that means something."""

    def is_reply(_prompt: object, text: str) -> bool:
        parsed = parse_completion(text)
        return parsed.is_well_formed and parsed.answer is not None and is_answer(parsed.answer)

    return is_reply


def action_index(answer: str | None, actions: Sequence[str]) -> int | None:
    """Which of `actions` an answer names, upper and lower case being the same; None for anything else.

    >>> action_index("down", ("LEFT", "DOWN")), action_index("LEFT or DOWN", ("LEFT", "DOWN"))
    (1, None)
    """
    names = [action.upper() for action in actions]
    return names.index(answer.upper()) if answer is not None and answer.upper() in names else None


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion as TRL hands it to a reward: a plain string or a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def well_formed_rewards(
    rewards: Sequence[Reward], weights: Sequence[float], rows: Sequence[Mapping], answers: Sequence[str]
) -> np.ndarray:
    """What a well-formed completion earns with each of A answers to each of P rows, (P, A): the weighted sum.

    >>> def is_up(completions, **_):
    ...     return [float("UP" in completion) for completion in completions]
    >>> well_formed_rewards([is_up], [0.5], [{"state": 3}], ("LEFT", "UP")).tolist()
    [[0.0, 0.5]]

    Args:
        rewards: what they read of a completion beside its answer is the same for all of these.
        rows: the columns that the rewards read.
    """
    completions = [f"<think>.</think><answer>{answer}</answer>" for _ in rows for answer in answers]
    names = rows[0] if rows else ()
    columns = {name: [row[name] for row in rows for _ in answers] for name in names if name != "prompt"}
    earned = np.zeros(len(completions))
    for weight, reward in zip(weights, rewards, strict=True):
        if weight:  # rows may be tens of thousands
            earned += weight * np.asarray(reward(completions, **columns), dtype=float)
    return earned.reshape(len(rows), len(answers))
