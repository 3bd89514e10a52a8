"""A second, tiny task: ten sums. One file and one entry in `TASKS`, no states, no Q-values, nothing of a lake."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llm_policy.chat import Messages, Reader
from llm_policy.completions import completion_text, parse_completion, tagged
from llm_policy.grpo.diagnostics import Judgement
from llm_policy.run_files import EVALUATION_FILE, write_whole
from tasks import Comparison, Task

SUMS = [(a, b) for a in (1, 2) for b in range(1, 6)]


@dataclass
class Arguments:
    right_reward: float = field(default=1.0, metadata={"help": "What a right sum earns."})


def prompt(a: int, b: int) -> Messages:
    return [{"role": "user", "content": f"{a} + {b} = ?"}]


def sum_reward(completions, result, right_reward: float, **_) -> list[float]:
    answers = [parse_completion(completion_text(completion)).answer for completion in completions]
    return [right_reward * float(answer == wanted) for answer, wanted in zip(answers, result, strict=True)]


def length_reward(completions, **_) -> list[float]:
    return [1.0 / (1 + len(completion_text(completion))) for completion in completions]


class SumJudge:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.settings: dict = {}

    def answers(self, model, samples: int = 0) -> dict:
        return {"texts": self.reader.completions(model, [prompt(*pair) for pair in SUMS], samples)}

    def judgement(self, answers: Mapping) -> Judgement:
        texts = answers["texts"]
        per_sum = len(texts) // len(SUMS)
        right = [parse_completion(text).answer == str(sum(SUMS[i // per_sum])) for i, text in enumerate(texts)]
        accuracy = sum(right) / len(right)
        return Judgement({"accuracy": accuracy}, f"{sum(right)} of {len(right)} sums are right", accuracy == 1.0)

    def compare(self, answers_of: Mapping[str, Mapping]) -> Comparison:
        text = "".join(f"{name}: {self.judgement(answers).verdict}\n" for name, answers in answers_of.items())
        print(text, end="")

        def save(folder: Path) -> None:
            write_whole(folder / EVALUATION_FILE, "{}")

        return Comparison(text, save)


def make_task(arguments: Arguments, training, tokenizer) -> Task:
    rewards = [partial(sum_reward, right_reward=arguments.right_reward), length_reward]
    rewards[0].__name__ = "sum_reward"
    return Task(
        rows=[{"prompt": prompt(a, b), "result": str(a + b)} for a, b in SUMS],
        reward_functions=rewards,
        judge=SumJudge(Reader(tokenizer, training.max_completion_length)),
        is_reply=tagged(str.isdecimal),
        lessons=[(prompt(a, b), [f"<think>add</think><answer>{n}</answer>" for n in (2, 3, 4)]) for a, b in SUMS],
        shown={"policy/accuracy": "accuracy"},
    )
