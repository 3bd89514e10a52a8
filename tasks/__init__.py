"""What can be trained with `train_script.py --task NAME`, and what a task has to offer for that.

A task is one module with two names, and one line in `TASKS`:

    Arguments                                     a dataclass: the task's own options, each with a help text
    make_task(arguments, training, tokenizer)     what they describe, as a `Task`

A task whose policies `evaluate_policy.py` can judge without its training data has a third:

    make_judge(settings, reader, episodes, seed)  a `Judge` from what run.json says of a run, or from nothing; it has
                                                  `first_prompt`, `baseline_answers` and `reader`, too
                                                  (tasks/tabular_judge.py)

`JUDGE_OPTIONS` beside it names what it reads of those options of evaluate_policy.py that not every task has, and
`JUDGED_ON` those settings of its judge in which all runs of one table must agree. A module with `make_judge` alone is
judged and not trained. With `JUDGES_ANY_RUN` it judges runs of other tasks; a judge with `draws_samples = False` is
asked for greedy answers alone.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
from transformers import PreTrainedModel

from llm_policy.errors import InputError
from llm_policy.grpo.diagnostics import Judgement
from llm_policy.grpo.warm_start import IsReply, Lesson
from llm_policy.hindsight import Attempt

TASKS = {  # name: module. Imported when it is asked for, because parts that few need bring packages of their own
    "frozen_lake": "tasks.frozen_lake",
    "cliff_walking": "tasks.cliff_walking",
    "taxi": "tasks.taxi",
    "riddles": "tasks.riddles",
    "piqa": "tasks.piqa",
    "drawing": "tasks.drawing.task",
    "arc": "tasks.arc",
}


@dataclass(frozen=True)
class Comparison:
    """Several policies beside each other, and the baselines of the task.

    Attributes:
        text: the table, as wide as it wants to be.
        save: writes evaluation.json (last: it marks a finished run) and pictures into a folder.
    """

    text: str
    save: Callable[[Path], None]


class Judge(Protocol):
    """How a task tells how good a model is. Nothing of it depends on the training."""

    def answers(self, model: PreTrainedModel, samples: int = 0) -> dict:
        """What the model says: greedily, or `samples` times per prompt at temperature 1. Fit for a JSON file."""

    def judgement(self, answers: Mapping) -> Judgement:
        """Metrics, a verdict in words and a picture of such answers."""

    def compare(self, answers_of: Mapping[str, Mapping]) -> Comparison:
        """Print the table of all policies (name -> answers), with the task's baselines in front."""

    @property
    def settings(self) -> dict:
        """What run.json has to say, so that `make_judge` can make the same judge again."""


@dataclass(frozen=True)
class Task:
    """What `train_script.py` needs of a task. Optional parts say what an option of it needs.

    Attributes:
        rows: the dataset, one dict per example: `prompt` (chat messages) and the columns that the rewards read.
        reward_functions: TRL's contract, (completions, **columns) -> rewards. The first is learnt, all are logged,
            unless --reward_weights says otherwise. A name ends in `_reward`: it is the metric's name.
        judge: how good a model is, at the end.
        judge_between: the same on less, for the evaluations between steps; None: `judge`.
        is_reply: whether a completion to a prompt is of the kind that the warm start teaches: well-formed, and its
            answer means something. None: it is one of its lesson's replies, word for word.
        actions: the legal answers, if they are few. With `action_rewards` they make other objectives than grpo
            possible.
        action_rewards: (rows, reward weights) -> (rows, actions): what a well-formed completion earns with each action.
        lessons: what the warm start teaches: prompts, each with replies that differ in their answer alone. It teaches
            form and no label. Without them there is no warm start.
        guess: row -> a likely reply. Sampling then scores many of its tokens in one pass; the samples stay the same.
        reward_lines: for the chart, what policies that do not read the prompt would earn, by name.
        shown: metrics of the judge that stand in the line per step: name in the log -> label.
        source: all that the data holds, fit for JSON, where `rows` are drawn from it; a resumed run needs the same.
        full_reward: the most that a completion can earn, if that ends the training (--stop_when best, mean).
        attempts: replies to the first row's prompt, and how many there were before -> what came of each, and what it
            teaches in hindsight (train_hindsight.py).
        log_of_attempts: what is logged of such attempts, by metric.
        lint: context tokens -> findings about data and prompts, errors first.
        logs: names of `.jsonl` files that it adds lines to in the run's folder.
    """

    rows: list[dict]
    reward_functions: list[Callable[..., list[float]]]
    judge: Judge
    is_reply: IsReply | None
    judge_between: Judge | None = None
    actions: Sequence[str] = ()
    action_rewards: Callable[[list[dict], Sequence[float]], np.ndarray] | None = None
    lessons: Sequence[Lesson] = ()
    guess: Callable[[dict], str] | None = None
    reward_lines: Callable[[Sequence[float]], dict[str, float]] | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    source: object = None
    full_reward: float | None = None
    attempts: Callable[[Sequence[str], int], list[Attempt]] | None = None
    log_of_attempts: Callable[[Sequence[Attempt]], dict[str, float]] = lambda _: {}
    lint: Callable[[int], list] | None = None
    logs: Sequence[str] = ()


def task_module(name: str) -> ModuleType:
    """The module of a task; `InputError` for an unknown one."""
    if name not in TASKS:
        raise InputError(f"--task {name}: expected one of {', '.join(TASKS)}")
    return importlib.import_module(TASKS[name])
