"""From questions to a `Task`. A kind of questions adds its words and how its options become questions (`QuestionTask`).

Axes: P prompts (a question each), A actions (the letters of the options).
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from llm_policy.chat import Messages, Reader, fit_to_template
from llm_policy.completions import tagged, well_formed_rewards
from llm_policy.errors import InputError
from llm_policy.reading import first_of
from llm_policy.run_files import checksum
from tasks import Task
from tasks.linter import Finding, cut_replies, prompt_tokens, same_prompts
from tasks.questions.data import SAMPLES, Question, QuestionWords, asked, held_out, keys_of, normalised
from tasks.questions.judge import QuestionJudge
from tasks.questions.rewards import REWARDS

REPLIES_TAUGHT = 4  # per prompt, where any word may be an answer
JUDGED_BETWEEN = 100  # held-out questions in the evaluations between steps


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


def split(arguments: QuestionArguments, read: Callable[[str], list[Question]]) -> tuple[list[Question], list[Question]]:
    """(to train on, to judge on): a part of the dataset held out, or all of the other one, and nothing on both sides.

    Args:
        read: name of a dataset -> its questions.
    """
    questions = read(arguments.dataset)
    if not arguments.test_dataset:
        return held_out(questions, arguments.test_share, arguments.split_seed)
    judged = read(arguments.test_dataset)
    known = set().union(*map(keys_of, judged))
    texts = {asked(question.text) for question in judged}
    trained = [q for q in questions if not known & keys_of(q) and (q.options or asked(q.text) not in texts)]
    if len(trained) < len(questions) and arguments.dataset != arguments.test_dataset:  # as where a run is judged
        left_out = f"{len(questions) - len(trained)} questions are left out of training"
        print(f"{left_out}: --test_dataset holds their text or their answer", flush=True)
    return trained, judged


@dataclass(frozen=True)
class QuestionTask:
    """A kind of questions: its words, and how its options become questions to train on and to judge on."""

    words: QuestionWords
    arguments: type
    questions: Callable[..., tuple[list[Question], list[Question]]]

    def make_task(self, arguments, training: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
        if arguments.split_seed is None:
            arguments = replace(arguments, split_seed=training.seed)
        if arguments.test_dataset and arguments.test_share != QuestionArguments.test_share:
            raise InputError(
                f"--test_share {arguments.test_share:g}: nothing of --dataset is held out beside --test_dataset "
                f"{arguments.test_dataset}; leave one of the two out"
            )
        trained, judged = self.questions(arguments)
        if not trained:
            raise InputError(
                f"--test_dataset {arguments.test_dataset}: holds every question or answer of --dataset "
                f"{arguments.dataset}, so that none is left to train on; name another, or leave it out to hold a part "
                "of --dataset out"
            )
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
            raise InputError(f"run.json: {first_of(error)}") from error
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
                "back, or name questions with --test_dataset"
            )
        judge = QuestionJudge(judged, self.words, reader, known, seed)
        if arguments.test_dataset and "held_out" not in settings:  # a run may have been trained on some of these
            judge = replace(judge, called="questions")
        return judge

    @staticmethod
    def _settings(arguments, judged: Sequence[Question]) -> dict:
        """The options, and a checksum of the questions that are judged."""
        return asdict(arguments) | {"held_out": checksum([asdict(question) for question in judged])}


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
            "lettered": list(question.options if question.by_letter else ()),
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
    legal_of = {
        prompt[-1]["content"]: set(map(normalised, q.legal)) for q, (prompt, _) in zip(questions, lessons, strict=True)
    }
    letters = questions[0].legal if all(q.by_letter and q.legal == questions[0].legal for q in questions) else ()

    def is_reply(prompt: Messages, text: str) -> bool:
        """One thought, and one answer that the question has among its options, if it has any."""
        legal = legal_of[prompt[-1]["content"]]
        return tagged(lambda answer: normalised(answer) in legal if legal else bool(answer.strip()))(prompt, text)

    def action_rewards(rows: list[dict], weights: Sequence[float]) -> np.ndarray:
        return well_formed_rewards(REWARDS, weights, rows, letters)

    def reward_lines(weights: Sequence[float]) -> dict[str, float]:
        def mean(answers_of: Callable[[Question], Sequence[str]]) -> float:
            pairs = zip(rows, map(answers_of, questions), strict=True)
            return float(np.mean([well_formed_rewards(REWARDS, weights, [row], said).mean() for row, said in pairs]))

        wrong = ("?",)  # where any word may be said
        return {
            "reward/random option": mean(lambda question: question.legal or wrong),
            "reward/all right": mean(lambda question: question.answers[:1]),
        }

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
        is_reply=is_reply,
        actions=letters,
        action_rewards=action_rewards if letters else None,
        lessons=lessons,
        guess=lambda row: words.reply((questions[row["row"]].legal or pool)[0]),
        reward_lines=reward_lines,
        shown={"policy/accuracy": "held-out accuracy", "rewards/correct_reward/mean": "correct"},
        lint=findings,
    )
