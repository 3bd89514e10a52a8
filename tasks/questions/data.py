"""Questions: what is right, which records of a file or the hub they are made of, their words, and their split."""

import csv
import io
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_policy.chat import Messages
from llm_policy.errors import InputError
from llm_policy.models import first_line
from llm_policy.reading import parse_json, read_text
from llm_policy.run_files import ROOT

SAMPLES = "samples"  # the name of the questions that come with this repository
SAMPLES_FOLDER = ROOT / "data/samples"
LETTERS = "ABCDEFGH"
FEWEST_OPTIONS, MOST_OPTIONS = 2, len(LETTERS)
FILE_ENDINGS = (".jsonl", ".csv")
ARTICLES = ("a", "an", "the")
LETTER_IN_FRONT = re.compile(  # "B: robin", "B - robin", "(B) robin", "B\nrobin", but not "B robin" or "A.M."
    rf"\W*([{LETTERS}])(?:\W*|\s*(?:[^\w\s'’.-]|[.](?=\s)|\s[-–—]\s|\n)(?:(?![-−.]\d)\W)*(.+))",
    re.IGNORECASE | re.DOTALL,
)
TOO_MANY = "fields without a name"  # of a CSV's record


# What is right -------------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """A text as it is compared: no case, article in front, punctuation or simple plural. Numbers keep sign and point.

    >>> normalised("The Maps."), normalised("a piano"), normalised("A"), normalised("-3.5")
    ('map', 'piano', 'a', 'minus 3.5')
    """
    composed = unicodedata.normalize("NFC", text.casefold())
    signed = re.sub(r"(?<![\w)])[-−](?=\.?\d)", " minus ", re.sub(r"['’]", "", composed))
    signed = re.sub(r"(?<![\w.])\.(?=\d)", "0.", signed)
    words = re.sub(r"(?<!\d)\.|\.(?!\d)", " ", "".join(c if _is_told(c) else " " for c in signed)).split()
    if len(words) > 1 and words[0] in ARTICLES:
        words = words[1:]
    return " ".join(map(_singular, words))


def _is_told(character: str) -> bool:
    """Letters, digits, points, and marks, which stand for vowels in other scripts."""
    return character.isalnum() or character == "." or unicodedata.category(character)[0] == "M"


def matches(answer: str | None, answers: Iterable[str]) -> bool:
    """Whether an answer is one of those that are right. Several guesses at once are none of them."""
    return answer is not None and normalised(answer) in {normalised(right) for right in answers}


def _singular(word: str) -> str:
    """One form for a word and its simple plural: "cooky" stands for cookie and cookies, "ax" for axe, ax and axes."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith("ie") and len(word) > 3:
        return word[:-2] + "y"
    if word.endswith(("ches", "shes", "xes", "sses", "oes", "uses")):
        return word[:-2]
    if word.endswith(("che", "she", "xe", "sse", "oe", "use")):
        return word[:-1]
    if word.endswith("s") and len(word) > 3 and not word.endswith(("ss", "us")):
        return word[:-1]
    return word


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        text: what is asked.
        answers: every text that is right, the one to show first.
        options: what to choose from, as they are shown; none where any word may be said.
        by_letter: the options have letters, and a letter answers.
    """

    text: str
    answers: tuple[str, ...]
    options: tuple[str, ...] = ()
    by_letter: bool = False

    @property
    def legal(self) -> tuple[str, ...]:
        """The answers that the options allow, in their order; none where any word may be said."""
        return tuple(LETTERS[: len(self.options)]) if self.by_letter else self.options

    @property
    def lettered(self) -> list[str]:
        """The options with their letters, as a prompt shows them."""
        return [f"{letter}: {option}" for letter, option in zip(LETTERS, self.options, strict=False)]

    @property
    def in_words(self) -> str:
        """The right answer, also where a letter stands for it."""
        return self.answers[1 if self.by_letter else 0]

    def chosen(self, answer: str | None) -> int | None:
        """Which option an answer names, by its letter, its words, or both as they are shown; None for anything else.

        >>> question = Question("Which bird sings?", ("B", "robin"), ("fly", "robin"), by_letter=True)
        >>> [question.chosen(answer) for answer in ("b.", "a robin", "B: robin", "A: robin", "A - robin", "C")]
        [1, 1, 1, None, None, None]
        """
        if answer is None:
            return None
        letter, words = None, answer
        spelled = [asked(option) for option in self.options]
        if len(said := asked(answer)) > 1 and spelled.count(said) == 1:  # "E. coli" is no E
            return spelled.index(said)
        if self.by_letter and said in (shown := [asked(option) for option in self.lettered]):  # "A: -3", of -3 and 3
            return shown.index(said)
        if self.by_letter and (in_front := LETTER_IN_FRONT.fullmatch(answer.strip())):
            letter, words = LETTERS.index(in_front[1].upper()), in_front[2]
            if not words:
                return letter if letter < len(self.options) else None
        said = normalised(words)
        found = [number for number, option in enumerate(self.options) if said and normalised(option) == said]
        return found[0] if len(found) == 1 and letter in (None, found[0]) else None

    def is_right(self, answer: str | None) -> bool:
        if self.by_letter:
            return self.chosen(answer) == LETTERS.index(self.answers[0])
        return matches(answer, self.answers)


def with_options(text: str, options: Sequence[str], right: int, draw: random.Random) -> Question:
    """A question whose options have letters, in an order of `draw`."""
    order = draw.sample(range(len(options)), len(options))
    shuffled = tuple(options[i] for i in order)
    return Question(text, (LETTERS[order.index(right)], options[right]), shuffled, by_letter=True)


@dataclass(frozen=True)
class QuestionWords:
    """What a model is told and taught.

    Attributes:
        system: the instruction. What a reply looks like is added to it.
        thought: what the warm start teaches to think. It depends on nothing, so that no label is taught.
    """

    system: str
    thought: str

    def messages(self, question: Question) -> Messages:
        if question.by_letter:
            answer, shown = " or ".join(question.legal), question.lettered
        elif question.options:
            answer, shown = "one of the options", [f"Options: {', '.join(question.options)}"]
        else:
            answer, shown = "one or two words", []
        system = f"{self.system} Reply <think>thought</think><answer>ANSWER</answer>, ANSWER is {answer}."
        return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join([question.text, *shown])}]

    def reply(self, answer: str) -> str:
        return f"<think>{self.thought}</think><answer>{answer}</answer>"


# Reading -----------------------------------------------------------------------------------------------------


Fields = Mapping[str, object]
Reading = Callable[[Fields, random.Random], Question]  # raises InputError, with the column in front


def read_questions(
    name: str, samples: Path, read: Reading, seed: int, records: Iterable[tuple[str, Fields]] | None = None
) -> list[Question]:
    """The questions of a file or a hub dataset, each once. `InputError` names the row, the column and the remedy.

    Rows of the hub that cannot be asked are left out and counted.

    Args:
        name: as `--dataset` has it.
        samples: the file that "samples" stands for.
        records: (where it stands, record), where `name` stands for something else.
    """
    found: dict[tuple[str, frozenset[str]], Question] = {}
    repeated, left_out = 0, []
    for number, (where, record) in enumerate(_records(name, samples) if records is None else records):
        problem = ""
        try:
            question = read(record, random.Random(f"{seed} {number}"))
        except InputError as error:
            problem = str(error)
        else:
            key = (asked(question.text), frozenset(question.options))
            first = found.setdefault(key, question)
            if normalised(first.in_words) != normalised(question.in_words):
                one, other = first.in_words, question.in_words
                problem = f"asks again what had the answer {one!r}, now {other!r}; keep one of the two"
            elif first is not question:
                repeated += 1
        if problem and not is_of_the_hub(name):
            raise InputError(f"{where}: {problem}")
        if problem:  # in what others wrote
            left_out.append(f"{where}: {problem}")
    if not found:
        raise InputError(left_out[0] if left_out else f"dataset {name}: holds no question")
    if left_out:
        print(f"{name}: {len(left_out)} rows are left out, the first is {left_out[0]}", flush=True)
    if repeated:
        print(f"{name}: {repeated} questions are there twice and count once", flush=True)
    return list(found.values())


def is_of_the_hub(name: str) -> bool:
    """Whether `--dataset` names what somebody else has written, not a file of the user's, or one of ours."""
    return name != SAMPLES and not name.endswith(FILE_ENDINGS)


def _records(name: str, samples: Path) -> Iterator[tuple[str, Fields]]:
    """(where it stands, record) of each question."""
    path = samples if name == SAMPLES else Path(name)
    path = path if path.exists() else ROOT / path  # of a configuration that is used in another folder
    if not path.name.endswith(FILE_ENDINGS):
        yield from _hub_records(name)
        return
    try:
        text = read_text(path, encoding="utf-8-sig")
        if path.suffix == ".csv":
            rows = csv.DictReader(io.StringIO(text, newline=""), restkey=TOO_MANY, strict=True)
            numbered = [(rows.line_num, row) for row in rows]
        else:
            numbered = []
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    numbered.append((number, _object(path, number, line)))
    except FileNotFoundError:
        raise InputError(
            f"dataset {name}: no such file; give a file that is there, or leave the option out for the bundled samples"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"dataset {name}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except (OSError, ValueError, csv.Error) as error:
        said = " ".join(str(error).split())
        kind = "a line of names, then fields with commas" if path.suffix == ".csv" else "a JSON object per line"
        raise InputError(f"dataset {name}: cannot be read ({said}); expected {kind}") from None
    for number, record in numbered:
        if TOO_MANY in record:
            raise InputError(
                f"{path}: line {number}: has more fields than the first line has names, {str(record[TOO_MANY])[:60]}; "
                "put a text with a comma in double quotes"
            )
        yield f"{path}: line {number}", record


def _object(path: Path, number: int, line: str) -> Fields:
    """The fields in a line of a .jsonl; `InputError` where it holds something else."""
    try:
        record = parse_json(line)
    except ValueError as error:
        said = " ".join(str(error).split())
        raise InputError(f"{path}: line {number}: cannot be read ({said}); expected a JSON object") from None
    if not isinstance(record, dict):
        raise InputError(f"{path}: line {number}: {str(record)[:40]!r}, expected an object in braces")
    return record


def _hub_records(name: str) -> Iterator[tuple[str, Fields]]:
    import datasets  # takes two seconds

    path, _, split = name.partition(":")
    owner_and_name, config = path.split("/")[:2], path.split("/")[2:]
    try:
        rows = datasets.load_dataset("/".join(owner_and_name), *config, split=split or "train")
    except Exception as error:  # of the network, the hub or the dataset's own files: whatever these lead to
        raise InputError(
            f"dataset {name}: neither a .jsonl or .csv file nor a dataset that the hub gives ({first_line(error)}); "
            "give a file, or leave the option out for the bundled samples"
        ) from error
    for number, record in enumerate(rows):
        yield f"{name}: row {number}", record


def text_of(record: Fields, column: str) -> str:
    """A text that must be there; `InputError` with the column in front."""
    if column not in record:
        found = ", ".join(map(str, record))[:100]
        raise InputError(f"column {column} is missing; found {found}")
    value = record[column]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"column {column}: {value!r}, expected a text")
    return whole_characters(value.strip(), column)


def whole_characters(text: str, column: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"column {column}: {text!r:.60}, holds half a character") from error
    return text


def held_out(questions: Sequence[Question], share: float, seed: int) -> tuple[list[Question], list[Question]]:
    """(to train on, to judge on): no question, and no free answer, is on both sides."""
    groups: dict[int, list[Question]] = {}
    group_of: dict[str, int] = {}
    for number, question in enumerate(questions):
        merged = [question]
        for old in sorted({group_of[key] for key in keys_of(question) if key in group_of}):
            merged = groups.pop(old) + merged
        groups[number] = merged
        for member in merged:
            group_of |= dict.fromkeys(keys_of(member), number)
    shuffled = list(groups.values())
    random.Random(seed).shuffle(shuffled)
    judged: list[Question] = []
    while shuffled and len(judged) < share * len(questions):
        judged += shuffled.pop()
    trained = [question for group in shuffled for question in group]
    if not trained or not judged:
        raise InputError(
            f"--test_share {share:g}: leaves {len(trained)} questions to train on and {len(judged)} to judge on; "
            "expected some of both"
        )
    if len(judged) > 1 + share * len(questions) and max(map(len, groups.values())) > share * len(questions):
        print(
            f"--test_share {share:g}: {len(judged)} of {len(questions)} are held out, because those with one answer "
            "stay together",
            flush=True,
        )
    return trained, judged


def keys_of(question: Question) -> set[str]:
    """What a question may have in common with no other one on the other side: a free answer; lettered, its text."""
    if question.by_letter:
        return {asked(question.text)}
    return {normalised(answer) for answer in question.answers}


def asked(text: str) -> str:
    """A question as it is compared: no case, single blanks."""
    return " ".join(text.casefold().split())
