"""PIQA: which of two ways reaches a physical goal (Bisk et al., 2020, arXiv 1911.11641); answered by its letter.

A file or the hub's `baber/piqa` holds `goal`, `sol1`, `sol2` and `label` (0 or 1). The ways are shuffled: a coin, and a
policy of one letter, earn 50 %.
"""

import random

from llm_policy.errors import InputError
from tasks.questions.data import (
    SAMPLES_FOLDER,
    Fields,
    Question,
    QuestionWords,
    read_questions,
    text_of,
    with_options,
)
from tasks.questions.task import QuestionArguments, QuestionTask, split

Arguments = QuestionArguments
LABELS = {0: 0, 1: 1, "0": 0, "1": 1}


def physical_question(record: Fields, draw: random.Random) -> Question:
    goal, ways = text_of(record, "goal"), [text_of(record, name) for name in ("sol1", "sol2")]
    label = record.get("label")
    if isinstance(label, bool) or not isinstance(label, int | str) or label not in LABELS:
        raise InputError(f"column label: {label!r}, expected 0 or 1")
    if ways[0] == ways[1]:
        raise InputError(f"column sol2: the same as sol1, {ways[0]!r:.60}")
    return with_options(goal, ways, LABELS[label], draw)


def physical_questions(arguments: QuestionArguments) -> tuple[list[Question], list[Question]]:
    samples, seed = SAMPLES_FOLDER / "piqa.jsonl", arguments.split_seed
    return split(arguments, lambda name: read_questions(name, samples, physical_question, seed))


WORDS = QuestionWords("Which way reaches the goal?", "I compare both ways.")
TASK = QuestionTask(WORDS, Arguments, physical_questions)
JUDGE_OPTIONS = ("test_dataset", "max_completion_length")
JUDGED_ON = ("held_out",)
make_task, make_judge = TASK.make_task, TASK.make_judge
