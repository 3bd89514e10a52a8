"""ARC: science questions of grade school (Clark et al., 2018, arXiv 1803.05457). Models of any task are judged on them.

    python evaluate_policy.py --task arc --policies MODEL runs/riddles                           # the bundled questions
    python evaluate_policy.py --task arc --policies MODEL --test_dataset allenai/ai2_arc         # ARC-Challenge

EleutherAI's lm-eval asks, with and without the system prompt, in three regimes whose figures must not be compared:

- `likelihood`: the likeliest option after "Answer:", the options not shown (lm-eval's `arc_challenge`)
- `letter`: options shown, the reply begins with "The best answer is" (`arc_challenge_llama`: Meta's protocol)
- `answer tags`: options shown, nothing begun; the letter or the words in the last answer tags (this repository's)

A file holds `question`, `choices` (`text` and `label`, two lists) and `answerKey`, as on the hub.
"""

import json
import math
import random
import string
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from transformers import PreTrainedModel

from llm_policy.chat import Reader, fit_to_template
from llm_policy.completions import parse_completion
from llm_policy.errors import InputError, writing
from llm_policy.run_files import EVALUATION_FILE, commit, write_whole
from llm_policy.tables import new_table, show
from tasks import Comparison
from tasks.questions.data import (
    FEWEST_OPTIONS,
    LETTERS,
    MOST_OPTIONS,
    SAMPLES,
    SAMPLES_FOLDER,
    Fields,
    Question,
    QuestionWords,
    read_questions,
    text_of,
    whole_characters,
)

JUDGES_ANY_RUN = True  # a run of another task, too
JUDGE_OPTIONS = ("test_dataset",)
HUB_DATASET = "allenai/ai2_arc"
WORDS = QuestionWords("Answer the question.", "I compare the options.")
MAX_ANSWER_TOKENS = 256
MAX_LETTER_TOKENS = 100  # as arc_challenge_llama
ROWS_PER_BATCH = 16
PROMPTS = ("without", "with")  # the system prompt
MEAN = {"aggregation": "mean", "higher_is_better": True}
OPTIONS_OF_LETTER = 4  # what the prompt of that regime has room for


def science_question(record: Fields, _: random.Random) -> Question:
    """A record of ARC. Labels may be letters or numbers; options stay in their order."""
    choices = record.get("choices")
    texts, labels = (choices.get(key) for key in ("text", "label")) if isinstance(choices, Mapping) else (None, None)
    if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
        raise InputError("column choices: expected {'text': [...], 'label': [...]}, two lists of one length")
    are_texts = all(isinstance(text, str) and text.strip() for text in texts)
    if not FEWEST_OPTIONS <= len(texts) <= MOST_OPTIONS or not are_texts:
        expected = f"{FEWEST_OPTIONS} to {MOST_OPTIONS}, all of them texts"
        raise InputError(f"column choices: {len(texts)} options, expected {expected}")
    if labels not in (list(LETTERS[: len(labels)]), list("12345678"[: len(labels)])):
        raise InputError(f"column choices: labels {labels}, expected A, B, C, ... or 1, 2, 3, ...")
    key = text_of(record, "answerKey")
    if key not in labels:
        raise InputError(f"column answerKey: {key!r}, expected one of {', '.join(labels)}")
    right = labels.index(key)
    texts = [whole_characters(text, "choices") for text in texts]
    return Question(text_of(record, "question"), (LETTERS[right], texts[right]), tuple(texts), by_letter=True)


def likelihood_task(data: Mapping) -> dict:
    return {
        **data,
        "task": "likelihood",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{right}}",
        "doc_to_choice": "{{options}}",
        "metric_list": [MEAN | {"metric": "acc"}],
    }


def written_task(data: Mapping, tokens: int) -> dict:
    """What the regimes share in which the model writes, greedily, at most `tokens`."""
    return {
        **data,
        "output_type": "generate_until",
        "doc_to_target": "{{letter}}",
        "generation_kwargs": {"do_sample": False, "max_gen_toks": tokens, "until": []},
        "metric_list": [MEAN | {"metric": "exact_match"}],
    }


def letter_task(data: Mapping) -> dict:
    shown = "\n".join(f"{letter}. {{{{ options[{i}] }}}}" for i, letter in enumerate(LETTERS[:OPTIONS_OF_LETTER]))
    return {
        **written_task(data, MAX_LETTER_TOKENS),
        "task": "letter",
        "process_docs": lambda rows: rows.filter(lambda row: len(row["options"]) == OPTIONS_OF_LETTER),
        "doc_to_text": "Given the following question and four candidate answers (A, B, C and D), choose the best "
        f"answer.\nQuestion: {{{{ question }}}}\n{shown}\nYour response should end with "
        '"The best answer is [the_answer_letter]" where the [the_answer_letter] is one of A, B, C or D.',
        "gen_prefix": "The best answer is",
    }


def answer_tags_task(data: Mapping) -> dict:
    return written_task(data, MAX_ANSWER_TOKENS) | {"task": "answer tags", "doc_to_text": "{{user}}"}


REGIMES = {"likelihood": likelihood_task, "letter": letter_task, "answer tags": answer_tags_task}


def said_letter(regime: str, question: Question, replies: Sequence) -> str | None:
    """The letter that a reply of lm-eval comes to; None where none can be read.

    Args:
        replies: `likelihood`: (log-likelihood, is greedy) of each option. Else the one text.
    """
    if regime == "likelihood":
        return LETTERS[max(range(len(replies)), key=lambda i: replies[i][0])]
    if regime == "letter":  # as arc_challenge_llama, which leaves punctuation out: nothing but the letter
        said = replies[0].translate(str.maketrans("", "", string.punctuation)).strip()
        is_letter = len(said) == 1 and said.upper() in LETTERS[: len(question.options)]
        option = question.chosen(said) if is_letter else None
    else:
        option = question.chosen(parse_completion(replies[0]).last_answer)
    return None if option is None else LETTERS[option]


@dataclass(frozen=True)
class ArcJudge:
    """Asks through lm-eval. Greedy alone: `draws_samples` says so to evaluate_policy.py."""

    questions: Sequence[Question]
    reader: Reader | None
    settings: dict
    draws_samples = False

    def first_prompt(self) -> list[int]:
        return max((self.reader.prompt(WORDS.messages(question)) for question in self.questions), key=len)

    def baseline_answers(self, name: str) -> dict:
        raise InputError(f"--policies {name!r}: --task arc judges models; chance stands in its table")

    def answers(self, model: PreTrainedModel, samples: int = 0) -> dict:
        """`results`: of each regime, with and without the system prompt, the letters that were read."""
        try:
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
        except ImportError as error:
            raise InputError(
                f"--task arc: the package lm-eval is missing ({error}); pip install -r requirements-arc.txt"
            ) from error
        tokenizer = self.reader.tokenizer

        class ChatModel(HFLM):
            def apply_chat_template(self, chat_history, add_generation_prompt=True):
                """lm-eval would leave out a system turn that the template refuses; here it opens the user's."""
                return super().apply_chat_template(fit_to_template(chat_history, tokenizer), add_generation_prompt)

        count = len(self.questions)
        has_letters = any(len(question.options) == OPTIONS_OF_LETTER for question in self.questions)
        regimes = {name: make for name, make in REGIMES.items() if name != "letter" or has_letters}
        print(
            f"lm-eval asks {count} questions in {len(regimes)} regimes, with and without the system prompt", flush=True
        )
        asked = ChatModel(pretrained=model, tokenizer=tokenizer, batch_size=ROWS_PER_BATCH)
        results = []
        with tempfile.TemporaryDirectory() as folder:
            data = self._data(Path(folder))
            for prompt in PROMPTS:
                found = simple_evaluate(
                    asked,
                    tasks=[make(data) for make in regimes.values()],
                    apply_chat_template=True,
                    system_instruction=None if prompt == "without" else self._system_prompt(),
                    bootstrap_iters=0,
                )
                for regime in regimes:
                    results.append(self._result(regime, prompt, found["samples"][regime]))
        return {"results": results}

    def _system_prompt(self) -> str:
        """lm-eval takes one for all questions: it names as many letters as any of them has."""
        longest = max(self.questions, key=lambda question: len(question.options))
        return WORDS.messages(longest)[0]["content"]

    def _data(self, folder: Path) -> dict:
        """The questions as a file that lm-eval reads; the options of its task that name it."""
        rows = [
            {
                "number": number,
                "question": question.text,
                "options": list(question.options),
                "right": question.chosen(question.answers[0]),
                "letter": question.answers[0],
                "user": WORDS.messages(question)[1]["content"],
            }
            for number, question in enumerate(self.questions)
        ]
        file = folder / "questions.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kwargs = {"data_files": {"test": str(file)}, "cache_dir": str(folder)}
        return {"dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test", "num_fewshot": 0}

    def _result(self, regime: str, prompt: str, samples: Sequence[Mapping]) -> dict:
        pairs = []
        for sample in samples:
            question = self.questions[sample["doc"]["number"]]
            replies = [reply[0] for reply in sample["resps"]]
            pairs.append((question, said_letter(regime, question, replies)))
        count = len(pairs)
        right = sum(question.is_right(said) for question, said in pairs)
        said = Counter(letter for _, letter in pairs if letter)
        accuracy = right / count
        return {
            "regime": regime,
            "system_prompt": prompt,
            "questions": count,
            "accuracy": accuracy,
            "standard_error": math.sqrt(accuracy * (1 - accuracy) / max(count - 1, 1)),
            "unreadable": 1 - sum(said.values()) / count,
            "letters": {letter: said[letter] for letter in sorted(said)},
            "right": [question.is_right(letter) for question, letter in pairs],
        }

    def compare(self, answers_of: Mapping[str, Mapping]) -> Comparison:
        columns = ("regime", "system prompt", "questions", "accuracy", "unreadable", "letters")
        right = Counter(question.answers[0] for question in self.questions)
        letter, most = right.most_common(1)[0]
        count = len(self.questions)
        chance = sum(1 / len(question.options) for question in self.questions) / count
        rows = [
            ["random option", "", "", str(count), f"{chance:.1%}", "", ""],
            [f"always {letter}", "", "", str(count), f"{most / count:.1%}", "", ""],
        ]
        for regime in REGIMES:
            for name, answers in answers_of.items():
                for found in (found for found in answers["results"] if found["regime"] == regime):
                    accuracy = f"{found['accuracy']:.1%} ± {found['standard_error']:.1%}"
                    letters = " ".join(f"{letter} {times}" for letter, times in found["letters"].items())
                    about = [regime, found["system_prompt"], str(found["questions"])]
                    rows.append(
                        [name.removesuffix(", greedy"), *about, accuracy, f"{found['unreadable']:.0%}", letters]
                    )
        left = ("regime", "system prompt", "letters")
        table = new_table(f"ARC: {self.settings['test_dataset']}", "policy", columns, left)
        for row in rows:
            table.add_row(*row)
        text = show(table, "± is one standard error. Regimes ask in different ways: compare within one only.")

        def save(folder: Path) -> None:
            made = {"date": date.today().isoformat(), "commit": commit()}
            baselines = {"random option": chance, f"always {letter}": most / count}
            content = {"task": "arc", **made, **self.settings, "baselines": baselines, "policies": answers_of}
            with writing(f"--output_dir {folder}", "make room, or name another folder"):
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / EVALUATION_FILE, json.dumps(content, indent=1) + "\n")

        return Comparison(text, save)


def make_judge(settings: Mapping, reader: Reader | None, episodes: int, seed: int) -> ArcJudge:
    """The judge on `test_dataset`: the bundled questions, a file, or ARC-Challenge's test split from the hub."""
    name = settings.get("test_dataset") or SAMPLES
    source = f"{HUB_DATASET}/ARC-Challenge:test" if name == HUB_DATASET else name
    questions = read_questions(source, SAMPLES_FOLDER / "arc.jsonl", science_question, seed)
    if reader is not None:  # lm-eval's lengths, whatever the run's
        reader = replace(reader, max_completion_tokens=MAX_ANSWER_TOKENS)
    return ArcJudge(questions, reader, {"test_dataset": name})
