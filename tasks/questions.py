"""What tasks of questions share: questions from a file or the hub, their split, rewards, and the task itself.

Axes: P prompts (a question each), A actions (the letters of the options).

A task of its own adds how a record becomes a `Question`, and its words (`QuestionWords`); see riddles.py and piqa.py.
The judge is in question_judge.py.
"""

import csv
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from llm_policy.chat import Messages, Reader, fit_to_template
from llm_policy.completions import completion_text, parse_completion
from llm_policy.errors import InputError
from llm_policy.models import first_line
from llm_policy.reading import read_text
from llm_policy.run_files import ROOT
from tasks import Task
from tasks.linter import Finding, cut_replies, prompt_tokens, same_prompts
from tasks.question_judge import LETTERS, QuestionJudge

SAMPLES = "samples"  # the name of the questions that come with this repository
SAMPLES_FOLDER = ROOT / "data/samples"
REPLIES_TAUGHT = 4  # per prompt, where any word may be an answer
JUDGED_BETWEEN = 100  # held-out questions in the evaluations between steps
CORRECT, SHORT, FORM = 2.0, 0.5, 0.5
FREE_WORDS, WORDS_TO_ZERO = 3, 10  # an answer of so many words is short; so many more earn nothing
ARTICLES = ("a", "an", "the")


# What is right -------------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """A text as it is compared: no case, article in front, punctuation or simple plural.

    >>> normalised("The Maps."), normalised("a piano"), normalised("A")
    ('map', 'piano', 'a')
    """
    words = re.sub(r"[^\w\s]|_", " ", re.sub(r"['’]", "", text.casefold())).split()
    if len(words) > 1 and words[0] in ARTICLES:
        words = words[1:]
    return " ".join(map(_singular, words))


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    if word.endswith("s") and len(word) > 3 and not word.endswith(("ss", "us", "is")):
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

    def chosen(self, answer: str | None) -> int | None:
        """Which option an answer names, by its letter or its words; None for anything else."""
        if answer is None:
            return None
        said = normalised(answer)
        for names in (self.legal, self.options):
            if said in (found := [normalised(name) for name in names]):
                return found.index(said)
        return None

    def is_right(self, answer: str | None) -> bool:
        """Whether an answer is one of `answers`. Several guesses at once are none of them."""
        return answer is not None and normalised(answer) in {normalised(right) for right in self.answers}


def with_options(text: str, options: Sequence[str], right: int, draw: random.Random) -> Question:
    """A question whose options have letters, in an order of `draw`."""
    order = draw.sample(range(len(options)), len(options))
    shuffled = tuple(options[i] for i in order)
    return Question(text, (LETTERS[order.index(right)], options[right]), shuffled, by_letter=True)


# Rewards ---------------------------------------------------------------------------------------------------------


def _last_answers(completions: Sequence) -> list[str | None]:
    return [parse_completion(completion_text(completion)).last_answer for completion in completions]


def correct_reward(completions: Sequence, answers: Sequence[Sequence[str]], **_) -> list[float]:
    """2.0 where the last answer is right, whatever its case, article, punctuation or plural; else 0.0.

    With `answers` ["map"], `<answer>The maps.</answer>` earns 2.0 and `<answer>map or globe</answer>` 0.0.
    """
    pairs = zip(_last_answers(completions), answers, strict=True)
    return [CORRECT * Question("", tuple(right)).is_right(answer) for answer, right in pairs]


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


def legal_rewards(questions: Sequence[Question], weights: Sequence[float]) -> np.ndarray:
    """What a well-formed completion earns with each of a question's letters, (P, A), under the weights of `REWARDS`."""
    right_PA = np.array([[question.is_right(letter) for letter in question.legal] for question in questions])
    parts = [CORRECT * right_PA, np.full(right_PA.shape, SHORT), np.full(right_PA.shape, FORM)]
    return sum(weight * part for weight, part in zip(weights, [sum(parts), *parts], strict=True))


# Data ------------------------------------------------------------------------------------------------------------


@dataclass
class QuestionArguments:
    """Options of every task of questions."""

    dataset: str = field(
        default=SAMPLES, metadata={"help": "samples (bundled), a .jsonl or .csv file, or hub/id[/config][:split]."}
    )
    test_dataset: str = field(default="", metadata={"help": "What to judge on. Default: a part held out of --dataset."})
    test_share: float = field(default=0.25, metadata={"help": "Share of --dataset that is held out to judge on."})
    test_questions: int = field(default=0, metadata={"help": "Judge on at most so many questions; 0: on all."})
    split_seed: int | None = field(
        default=None, metadata={"help": "Seed of the split and of the order of the options. Default: --seed."}
    )


Fields = Mapping[str, object]
Reading = Callable[[Fields, random.Random], Question]  # raises InputError, with the column in front


def read_questions(
    name: str, samples: Path, read: Reading, seed: int, records: Iterable[tuple[str, Fields]] | None = None
) -> list[Question]:
    """The questions of a file or a hub dataset, each once. `InputError` names the row, the column and the remedy.

    Args:
        name: as `--dataset` has it.
        samples: the file that "samples" stands for.
        records: (where it stands, record), where `name` stands for something else.
    """
    found: dict[tuple[str, frozenset[str]], Question] = {}
    repeated = 0
    for number, (where, record) in enumerate(_records(name, samples) if records is None else records):
        try:
            question = read(record, random.Random(f"{seed} {number}"))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        key = (normalised(question.text), frozenset(question.options))
        if key not in found:
            found[key] = question
        elif normalised(found[key].answers[-1]) == normalised(question.answers[-1]):
            repeated += 1
        else:
            one, other = found[key].answers[-1], question.answers[-1]
            raise InputError(f"{where}: asks again what had the answer {one!r}, now {other!r}; keep one of the two")
    if not found:
        raise InputError(f"--dataset {name}: holds no question")
    if repeated:
        print(f"{name}: {repeated} questions are there twice and count once", flush=True)
    return list(found.values())


def _records(name: str, samples: Path) -> Iterator[tuple[str, Fields]]:
    """(where it stands, record) of each question."""
    path = samples if name == SAMPLES else Path(name).expanduser()
    path = path if path.exists() else ROOT / path  # of a configuration that is used in another folder
    if path.suffix not in (".jsonl", ".csv"):
        yield from _hub_records(name)
        return
    try:
        text = read_text(path, encoding="utf-8-sig")
        if path.suffix == ".csv":
            rows = csv.DictReader(text.splitlines(keepends=True), strict=True)
            numbered = [(rows.line_num, {k: v for k, v in row.items() if k is not None}) for row in rows]
        else:
            lines = enumerate(text.split("\n"), start=1)
            numbered = [(number, json.loads(line)) for number, line in lines if line.strip()]
    except FileNotFoundError:
        raise InputError(f"--dataset {name}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--dataset {name}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"--dataset {name}: cannot be read ({' '.join(str(error).split())})") from None
    for number, record in numbered:
        if not isinstance(record, dict):
            raise InputError(f"{path}: line {number}: {str(record)[:40]!r}, expected an object in braces")
        yield f"{path}: line {number}", record


def _hub_records(name: str) -> Iterator[tuple[str, Fields]]:
    import datasets  # takes two seconds

    path, _, split = name.partition(":")
    owner_and_name, config = path.split("/")[:2], path.split("/")[2:]
    try:
        rows = datasets.load_dataset("/".join(owner_and_name), *config, split=split or "train")
    except Exception as error:  # of the network, the hub or the dataset's own files: whatever these lead to
        raise InputError(
            f"--dataset {name}: neither a .jsonl or .csv file nor a dataset that the hub gives ({first_line(error)}); "
            "give a file, or leave it out to take the bundled samples"
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
    return value.strip()


def held_out(questions: Sequence[Question], share: float, seed: int) -> tuple[list[Question], list[Question]]:
    """(to train on, to judge on): no free answer is on both sides."""
    groups: dict[int, list[Question]] = {}
    group_of: dict[str, int] = {}
    for number, question in enumerate(questions):
        keys = () if question.by_letter else {normalised(answer) for answer in question.answers}
        merged = [question]
        for old in {group_of[key] for key in keys if key in group_of}:
            merged = groups.pop(old) + merged
        groups[number] = merged
        for member in merged:
            group_of |= {normalised(answer): number for answer in member.answers}
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
    return trained, judged


@dataclass(frozen=True)
class QuestionWords:
    """What a model is told and taught.

    Attributes:
        system: the instruction; {answer} stands for what the answer tags hold.
        thought: what the warm start teaches to think. It depends on nothing, so that no label is taught.
    """

    system: str
    thought: str

    def messages(self, question: Question) -> Messages:
        if question.by_letter:
            answer = " or ".join(question.legal)
            shown = [f"{letter}: {option}" for letter, option in zip(question.legal, question.options, strict=True)]
        elif question.options:
            answer, shown = "one of the options", [f"Options: {', '.join(question.options)}"]
        else:
            answer, shown = "one or two words", []
        system = f"{self.system} Reply <think>thought</think><answer>ANSWER</answer>, ANSWER is {answer}."
        return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join([question.text, *shown])}]

    def reply(self, answer: str) -> str:
        return f"<think>{self.thought}</think><answer>{answer}</answer>"


# Task ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuestionTask:
    """A kind of questions: its words, and how its options become questions to train on and to judge on."""

    words: QuestionWords
    arguments: type
    questions: Callable[..., tuple[list[Question], list[Question]]]

    def make_task(self, arguments, training: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
        if arguments.split_seed is None:
            arguments = replace(arguments, split_seed=training.seed)
        trained, judged = self.questions(arguments)
        judged = judged[: arguments.test_questions or None]
        print(f"{len(trained)} questions to train on, {len(judged)} held out to judge on", flush=True)
        reader = Reader(tokenizer, training.max_completion_length)
        judge = QuestionJudge(judged, self.words, reader, self._settings(arguments, judged))
        return question_task(self.words, trained, judge, tokenizer, training)

    def make_judge(self, settings: Mapping, reader: Reader, episodes: int, seed: int) -> QuestionJudge:
        """The judge of a run by its settings; without any, of the held-out samples."""
        given = {f.name: settings[f.name] for f in fields(self.arguments) if f.name in settings}
        try:
            arguments = TypeAdapter(self.arguments).validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"run.json: {first['loc'][0]} {first['input']!r:.80}: {first['msg']}") from error
        if arguments.split_seed is None:
            arguments = replace(arguments, split_seed=seed)
        if arguments.test_dataset:
            arguments = replace(arguments, dataset=arguments.test_dataset)  # what was trained on need not be there
        _, judged = self.questions(arguments)
        judged = judged[: arguments.test_questions or None]
        known = self._settings(arguments, judged)
        if settings.get("held_out", known["held_out"]) != known["held_out"]:
            raise InputError(
                f"--dataset {arguments.dataset}: has other questions than when the run was judged; put the old file "
                "back, or judge with --task alone"
            )
        return QuestionJudge(judged, self.words, reader, known, seed)

    @staticmethod
    def _settings(arguments, judged: Sequence[Question]) -> dict:
        """The options, and a checksum of the questions that are judged."""
        content = json.dumps([asdict(question) for question in judged])
        return asdict(arguments) | {"held_out": hashlib.sha256(content.encode()).hexdigest()[:16]}


def question_task(
    words: QuestionWords,
    questions: Sequence[Question],
    judge: QuestionJudge,
    tokenizer: PreTrainedTokenizerBase,
    training: GRPOConfig,
) -> Task:
    """The task of answering `questions`."""
    rows = [
        {
            "prompt": fit_to_template(words.messages(question), tokenizer),
            "answers": list(question.answers),
            "row": row,
        }
        for row, question in enumerate(questions)
    ]
    pool = sorted({question.answers[0] for question in questions})
    draw = random.Random(training.seed)
    lessons = [
        (
            words.messages(question),
            [words.reply(a) for a in question.legal or draw.sample(pool, min(REPLIES_TAUGHT, len(pool)))],
        )
        for question in questions
    ]
    legal = {normalised(option) for question in questions for option in question.legal}  # of one question or another
    letters = questions[0].legal if all(q.by_letter and q.legal == questions[0].legal for q in questions) else ()

    def action_rewards(rows: list[dict], weights: Sequence[float]) -> np.ndarray:
        return legal_rewards([questions[row["row"]] for row in rows], weights)

    def reward_lines(weights: Sequence[float]) -> dict[str, float]:
        whole, correct = weights[0], weights[0] + weights[1]
        right = correct * CORRECT
        form = (whole + weights[2]) * SHORT + (whole + weights[3]) * FORM
        by_chance = np.mean([1 / len(q.options) if q.options else 0.0 for q in questions])
        return {"reward/random option": form + right * float(by_chance), "reward/all right": form + right}

    def findings(context_tokens: int) -> list[Finding]:
        prompts = [row["prompt"] for row in rows]
        replies = [reply for _, taught in lessons for reply in taught]
        found = [
            *same_prompts([q.text for q in questions], prompts, tokenizer, "questions"),
            *prompt_tokens(prompts, tokenizer, context_tokens, training.max_completion_length),
            *cut_replies(replies, tokenizer, training.max_completion_length),
        ]
        found = [replace(finding, source=judge.settings["dataset"]) for finding in found]
        return sorted(found, key=lambda finding: not finding.is_error)

    return Task(
        rows=rows,
        reward_functions=list(REWARDS),
        judge=judge,
        judge_between=replace(judge, questions=judge.questions[:JUDGED_BETWEEN]),
        is_answer=lambda answer: normalised(answer) in legal if legal else bool(answer.strip()),
        actions=letters,
        action_rewards=action_rewards if letters else None,
        lessons=lessons,
        guess=lambda row: words.reply((questions[row["row"]].legal or pool)[0]),
        reward_lines=reward_lines,
        shown={"policy/accuracy": "held-out accuracy", "rewards/correct_reward/mean": "correct"},
        lint=findings,
    )
