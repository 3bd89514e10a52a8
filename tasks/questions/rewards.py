"""What a completion earns: right, short, in form, and their sum. Pure functions, in TRL's contract."""

from collections.abc import Sequence

from llm_policy.completions import completion_text, parse_completion
from tasks.questions.data import Question

CORRECT, SHORT, FORM = 2.0, 0.5, 0.5
FREE_WORDS, WORDS_TO_ZERO = 3, 10  # an answer of so many words is short; so many more earn nothing


def _last_answers(completions: Sequence) -> list[str | None]:
    return [parse_completion(completion_text(completion)).last_answer for completion in completions]


def correct_reward(
    completions: Sequence, answers: Sequence[Sequence[str]], lettered: Sequence[Sequence[str]] | None = None, **_
) -> list[float]:
    """2.0 where the last answer is right, whatever its case, article, punctuation or plural; else 0.0.

    With `answers` ["map"], `<answer>The maps.</answer>` earns 2.0 and `<answer>map or globe</answer>` 0.0.

    Args:
        lettered: the options of each question whose answer is a letter, in the order of the letters; else [].
    """
    asked = zip(_last_answers(completions), answers, lettered or [()] * len(answers), strict=True)
    return [
        CORRECT * Question("", tuple(right), tuple(options), by_letter=bool(options)).is_right(answer)
        for answer, right, options in asked
    ]


def short_reward(completions: Sequence, **_) -> list[float]:
    """0.5 for a last answer of one to three words, 0.05 less for each further word; 0.0 for none, or an empty one.

    `<answer>a grand piano</answer>` earns 0.5, `<answer></answer>` 0.0.
    """
    counts = [len((answer or "").split()) for answer in _last_answers(completions)]
    return [SHORT * max(0.0, 1 - max(0, words - FREE_WORDS) / WORDS_TO_ZERO) if words else 0.0 for words in counts]


def soft_format_reward(completions: Sequence, **_) -> list[float]:
    """0.5 where a thought and then an answer stand in their tags, over as many lines as they like; else 0.0.

    `Well, <think>keys</think><answer>piano</answer>!` earns 0.5, `<answer>piano</answer>` 0.0.
    """
    return [FORM * parse_completion(completion_text(completion)).is_loosely_formed for completion in completions]


PARTS = (correct_reward, short_reward, soft_format_reward)


def question_reward(completions: Sequence, **columns) -> list[float]:
    """The sum of the three, 0 to 3: what GRPO maximises.

    With `answers` ["map"], `<think>flat</think><answer>a map</answer>` earns 3.0, and with `globe` in it 1.0.
    """
    return [sum(parts) for parts in zip(*(part(completions, **columns) for part in PARTS), strict=True)]


REWARDS = (question_reward, *PARTS)
