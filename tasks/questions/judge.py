"""How many held-out questions a model answers right, beside chance, with what it answers instead.

Axes: P prompts (a question each), G samples per prompt.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from llm_policy.chat import Reader
from llm_policy.completions import parse_completion
from llm_policy.errors import InputError
from llm_policy.grpo.diagnostics import Judgement
from llm_policy.plots import shares_figure
from llm_policy.run_files import save_judgement
from llm_policy.statistics import mcnemar_p, wilson_interval
from llm_policy.tables import new_table, show
from tasks import Comparison
from tasks.questions.data import LETTERS, Question, QuestionWords, normalised

SHOWN_ANSWERS = 5  # the most frequent ones


@dataclass(frozen=True)
class Score:
    """What came of one model's answers.

    Attributes:
        right_P: share of a question's samples that are right, in [0, 1].
        interval: 95 %, of the accuracy. Samples of one question are no further questions.
        readable: share of completions from which an answer can be read: an option, or any word where there are none.
        well_formed: share of completions that are one thought and one answer and nothing else.
        words: mean number of words of an answer that can be read.
        said: answer -> how often; for options the letter of their place.
    """

    right_P: np.ndarray
    interval: tuple[float, float]
    readable: float
    well_formed: float
    words: float
    said: Counter

    @property
    def accuracy(self) -> float:
        return float(self.right_P.mean())

    @property
    def habit(self) -> str:
        """The most frequent answers and their shares."""
        total = sum(self.said.values())
        are_letters = set(self.said) <= set(LETTERS)
        shown = sorted(self.said.items()) if are_letters else self.said.most_common(SHOWN_ANSWERS)
        return ", ".join(f"{answer} {count / total:.0%}" for answer, count in shown)


@dataclass(frozen=True)
class QuestionJudge:
    """Asks a model every held-out question (`tasks.Judge`).

    Attributes:
        words: how they are asked.
        settings: what run.json says of them.
        called: what the questions are called.
    """

    questions: Sequence[Question]
    words: QuestionWords
    reader: Reader
    settings: dict
    seed: int = 0
    called: str = "held-out questions"

    def answers(self, model: PreTrainedModel, samples: int = 0) -> dict:
        """`texts`: the completions, those of one question next to each other."""
        prompts = [self.words.messages(question) for question in self.questions]
        guesses = [self.words.reply((question.legal or ("it",))[0]) for question in self.questions]
        return {"texts": self.reader.completions(model, prompts, samples, guesses)}

    def first_prompt(self) -> list[int]:
        """Token ids of the longest prompt, to check its length before all are asked."""
        prompts = [self.words.messages(question) for question in self.questions]
        return max((self.reader.prompt(prompt) for prompt in prompts), key=len)

    def baseline_answers(self, name: str) -> dict:
        """`random`, or `constant:WORDS`; `InputError` for another name."""
        kind, _, said = name.partition(":")
        if kind == "constant" and said:
            return {"texts": [self.words.reply(said)] * len(self.questions)}
        if name == "random" and all(question.options for question in self.questions):
            draw = np.random.default_rng(self.seed)
            return {"texts": [self.words.reply(str(draw.choice(question.legal))) for question in self.questions]}
        raise InputError(f"--policies {name!r}: expected a run folder, a model, constant:WORDS or, for options, random")

    def score(self, answers: Mapping) -> Score:
        per_question = len(answers["texts"]) // len(self.questions)
        right_PG = np.zeros((len(self.questions), per_question))
        said: Counter = Counter()
        words: list[int] = []
        well_formed = 0
        for i, text in enumerate(answers["texts"]):
            question, completion = self.questions[i // per_question], parse_completion(text)
            answer = completion.last_answer
            well_formed += completion.is_well_formed
            right_PG[divmod(i, per_question)] = question.is_right(answer)
            option = question.chosen(answer)
            if option is not None or (answer and not question.options):
                said[LETTERS[option] if option is not None else answer.lower()] += 1
                words.append(len(answer.split()))
        right_P = right_PG.mean(axis=1)
        return Score(
            right_P, wilson_interval(float(right_P.sum()), len(right_P)), len(words) / right_PG.size,
            well_formed / right_PG.size, float(np.mean(words or [0])), said,
        )  # fmt: skip

    def judgement(self, answers: Mapping) -> Judgement:
        score = self.score(answers)
        low, high = score.interval
        right = f"{score.right_P.sum():.4g} of {len(self.questions)} {self.called} are right"
        verdict = f"{right} ({score.accuracy:.0%}, 95 % interval {low:.0%} to {high:.0%})"
        if len(score.said) == 1 and score.readable == 1:
            verdict = f"one answer to all questions, {next(iter(score.said))}: {verdict}"
        metrics = {
            "accuracy": score.accuracy,
            "format_validity": score.well_formed,
            "readable": score.readable,
            "answer_words": score.words,
        }
        if self.questions[0].options:
            total = max(sum(score.said.values()), 1)
            longest = max(len(question.options) for question in self.questions)
            metrics |= {f"answers/{letter}": score.said[letter] / total for letter in LETTERS[:longest]}
        return Judgement(metrics, verdict, is_optimal=score.accuracy == 1.0)

    def baselines(self) -> dict[str, float]:
        """Accuracy of what reads no question."""
        places = Counter(question.chosen(question.answers[0]) for question in self.questions)
        if all(question.options for question in self.questions):
            place, count = places.most_common(1)[0]
            chance = float(np.mean([1 / len(question.options) for question in self.questions]))
            return {"random option": chance, f"always {LETTERS[place]}": count / len(self.questions)}
        right = Counter(name for q in self.questions for name in {normalised(answer) for answer in q.answers})
        name, count = right.most_common(1)[0]
        answer = next(a for q in self.questions for a in q.answers if normalised(a) == name)
        return {f"best constant answer ({answer})": count / len(self.questions)}

    def compare(self, answers_of: Mapping[str, Mapping]) -> Comparison:
        scores = {name: self.score(answers) for name, answers in answers_of.items()}
        columns = ("accuracy", "95 % interval", "readable", "well-formed", "words", "answers")
        title = f"{len(self.questions)} {self.called} of {self.settings['dataset']}"
        table = new_table(title, "policy", columns, left=("answers",))
        baselines = self.baselines()
        for name, accuracy in baselines.items():
            table.add_row(name, f"{accuracy:.1%}", "", "", "", "", "")
        for name, score in scores.items():
            low, high = score.interval
            shares = (f"{score.readable:.0%}", f"{score.well_formed:.0%}", f"{score.words:.1f}", score.habit)
            table.add_row(name, f"{score.accuracy:.1%}", f"{low:.0%} to {high:.0%}", *shares)
        text = show(table, *changes({name: s for name, s in scores.items() if not name.endswith(", sampled")}))
        return Comparison(text, partial(self._save, answers_of, scores, baselines))

    def _save(self, answers_of: Mapping[str, Mapping], scores: Mapping, baselines: Mapping, folder: Path) -> None:
        rows = [
            {
                "policy": name,
                "accuracy": score.accuracy,
                "interval": score.interval,
                "readable": score.readable,
                "format_validity": score.well_formed,
                "answer_words": score.words,
                "said": dict(score.said.most_common()),
                "right": score.right_P.tolist(),
            }
            for name, score in scores.items()
        ]
        completions = {name: answers["texts"] for name, answers in answers_of.items() if not name.endswith(", sampled")}
        asked = [
            {"question": q.text, "options": q.options, "answers": q.answers}
            | {"completions": {name: texts[number] for name, texts in completions.items()}}
            for number, q in enumerate(self.questions)
        ]
        content = {"settings": self.settings, "baselines": baselines, "policies": rows, "questions": asked}
        shares = {name: (score.accuracy, *score.interval) for name, score in scores.items()}
        figure = shares_figure(shares, baselines, f"{self.called} answered right", "95 % intervals")
        save_judgement(folder, json.dumps(content, indent=1) + "\n", figure)


def changes(scores: Mapping[str, Score]) -> list[str]:
    """A line for each greedy policy but the last: what the last one answers otherwise, and whether that is chance."""
    *before, last = scores
    lines = []
    for name in before:
        one, other = scores[name].right_P > 0.5, scores[last].right_P > 0.5
        only_one, only_other = int((one & ~other).sum()), int((other & ~one).sum())
        lines.append(
            f"{last} against {name}: {only_other} questions are right only after, {only_one} only before "
            f"(McNemar's exact p {mcnemar_p(only_one, only_other):.2g})."
        )
    return lines
