"""Completion text -> action: the one parser for rewards and evaluation.

Text from a model is only ever matched against names that we know; it is never evaluated.
"""

import re
from dataclasses import dataclass

from llm_policy.environments.frozen_lake import ACTIONS

# The whole completion: one thought, one answer, nothing outside. Neither part may hold a tag of its own.
_TAGLESS = r"(?:(?!</?(?:think|answer)>).)*"
_WELL_FORMED = re.compile(rf"\s*<think>({_TAGLESS})</think>\s*<answer>({_TAGLESS})</answer>\s*", re.DOTALL)
_ANSWER = re.compile(rf"<answer>({_TAGLESS})</answer>", re.DOTALL)


@dataclass(frozen=True)
class ParsedCompletion:
    """What a completion says.

    Attributes:
        is_well_formed: exactly `<think>...</think>` and then `<answer>...</answer>`, with white space around at most.
        action: index into `ACTIONS`, or None where there is no single answer that names a legal action.
    """

    is_well_formed: bool
    action: int | None


def parse_completion(text: str) -> ParsedCompletion:
    """Read one completion. Upper and lower case are the same; a name with anything beside it is no action.

    >>> parse_completion("<think>The hole is on the right.</think><answer>LEFT</answer>")
    ParsedCompletion(is_well_formed=True, action=0)
    >>> parse_completion("I would go <answer>down</answer>")
    ParsedCompletion(is_well_formed=False, action=1)
    >>> parse_completion("<think>?</think><answer>LEFT or UP</answer>")
    ParsedCompletion(is_well_formed=True, action=None)
    """
    answers = _ANSWER.findall(text)
    name = answers[0].strip().upper() if len(answers) == 1 else ""
    return ParsedCompletion(
        is_well_formed=_WELL_FORMED.fullmatch(text) is not None,
        action=ACTIONS.index(name) if name in ACTIONS else None,
    )


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion as TRL hands it to a reward: a plain string or a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
