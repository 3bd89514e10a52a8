"""Drawing: the model writes a program that draws a picture (after experiments for the ARC challenge, docs/drawing.md).

The target is one picture. The warm start teaches the drawing functions on random pictures of one to four calls.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from llm_policy import processes
from llm_policy.chat import Messages, Reader, fit_to_template, reply_token_ids
from llm_policy.completions import completion_text
from llm_policy.errors import InputError
from llm_policy.grpo.warm_start import Lesson
from llm_policy.hindsight import Attempt
from llm_policy.metrics_log import read_logged
from llm_policy.run_files import METRICS_FILE, write_whole
from tasks import Task
from tasks.drawing.judge import PERFECT, DrawingJudge, Score, read_found, scored, together
from tasks.drawing.programs import cleaned
from tasks.drawing.sandbox import ERRORS, Grid, Outcome, Sandbox, code_of, grid_problem
from tasks.drawing.targets import NAMES, Target, empty, plain_program, random_program, read_target
from tasks.drawing.words import messages, reply
from tasks.linter import Finding, cut_replies, prompt_tokens

LINTED_DRAWINGS = 32  # of those that the warm start may teach

DEFAULT_TARGET = "5-vertical-lines"
LESSONS = 1_000_000
GENERATIONS = "drawing/generations"  # in the log: programs so far
JUDGE_OPTIONS = ("max_completion_length",)
JUDGED_ON = ("target", "wanted")
FOUND_FILE = "found.jsonl"


@dataclass
class Arguments:
    """Options of the drawing task."""

    target: str = field(default=DEFAULT_TARGET, metadata={"help": f"What to draw: {NAMES} with lines of digits."})
    show_functions: bool = field(
        default=False, metadata={"help": "List the drawing functions in the prompt, for a model that was not taught."}
    )


class RandomDrawings(Sequence[Lesson]):
    """Random pictures, each with a program that draws it; made when they are asked for.

    Programs whose picture stays empty are left out.
    """

    def __init__(self, sandbox: Sandbox, seed: int, show_functions: bool) -> None:
        self.sandbox, self.seed, self.show_functions = sandbox, seed, show_functions
        self._pictures: dict[str, tuple[Grid, Grid]] = {}  # prompt -> (given, wanted)

    def __len__(self) -> int:
        return LESSONS

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        for attempt in range(100):
            code, sides = random_program(f"{self.seed} {index % len(self)} {attempt}")
            given = empty(*sides)
            wanted = self.sandbox.run_all([code], given)[0].grid
            if wanted is not None and wanted != given:
                break
        prompt = messages(given, wanted, self.show_functions)
        self._pictures[prompt[-1]["content"]] = given, wanted
        return prompt, [reply(code)]

    def is_solved(self, prompt: Messages, text: str) -> bool:
        """Whether a completion to the prompt of one of them draws its picture."""
        given, wanted = self._pictures[prompt[-1]["content"]]
        return self.sandbox.run_all([code_of(text)], given)[0].grid == wanted


class PixelReward:
    """TRL's contract: the share of pixels that a completion's program draws right; 0 where it fails.

    Logs the best of each batch and what failed, and keeps the best program of the run in `found_file`. With several
    processes each has a part of the batch.
    """

    __name__ = "pixel_reward"

    def __init__(self, target: Target, sandbox: Sandbox, found_file: Path) -> None:
        self.target, self.sandbox, self.found_file = target, sandbox, found_file
        self.generations: int | None = None  # programs so far, once asked

    def score(self, texts: Sequence[str]) -> Score:
        codes = [code_of(text) for text in texts]
        return scored(codes, self.sandbox.run_all(codes, self.target.given), self.target.wanted)

    def __call__(
        self,
        completions: Sequence,
        trainer_state=None,
        log_metric: Callable[[str, float], None] = lambda *_: None,
        **_,
    ) -> list[float]:
        own = self.score([completion_text(completion) for completion in completions])
        score = together(processes.gathered([own]))
        count = len(score.shares)
        if trainer_state is not None:
            if self.generations is None:
                self.generations = processes.from_main(self._logged_generations)
            if processes.is_main():
                keep_best(self.found_file, score, self.generations)
            self.generations += count
            log_metric(GENERATIONS, self.generations)
        for name, value in batch_metrics(score.shares, score.errors).items():
            log_metric(f"drawing/{name}", value)
        return list(own.shares)

    def _logged_generations(self) -> int:
        """Of the steps before: a run may go on with other batches than it was begun with."""
        lines = read_logged(self.found_file.with_name(METRICS_FILE))
        return int(max((line[GENERATIONS] for line in lines if GENERATIONS in line), default=0))


def batch_metrics(shares: Sequence[float], errors: Mapping[str, int]) -> dict[str, float]:
    """What both learners log of a batch of programs: the best, the mean, the share that is perfect and that failed."""
    count = len(shares)
    failed = {kind: errors.get(kind, 0) / count for kind in ERRORS}
    solved = sum(share == PERFECT for share in shares) / count
    return {"best": max(shares), "mean": sum(shares) / count, "solved": solved} | failed


def keep_best(file: Path, score: Score, generations_before: int) -> None:
    """Add the best program of a batch to those in `file` if it is better than they are.

    Those of later batches are of steps that a resumed run takes again: they go.
    """
    written = read_found(file)
    found = [program for program in written if program["generation"] <= generations_before]
    if not found or score.best > found[-1]["share"]:
        number = generations_before + score.shares.index(score.best) + 1
        found.append({"share": score.best, "generation": number, "code": score.best_code})
    if found != written:
        write_whole(file, "".join(json.dumps(program) + "\n" for program in found))


def in_hindsight(
    code: str, outcome: Outcome, share: float, target: Target, sandbox: Sandbox, show_functions: bool
) -> Attempt:
    """What a program drew, as a task that it solves: the program without what draws nothing."""
    if outcome.grid is None or outcome.grid == target.given:
        return Attempt(share, error=outcome.error)
    short = cleaned(code, lambda other: sandbox.run_all([other], target.given)[0].grid)
    prompt = messages(target.given, outcome.grid, show_functions)
    return Attempt(share, json.dumps(outcome.grid), prompt, reply(short))


def make_task(arguments: Arguments, training, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task of drawing one target.

    Args:
        training: what has `seed`, `max_completion_length` and `output_dir`.
    """
    if weights := getattr(training, "reward_weights", None):
        raise InputError(f"--reward_weights {weights}: drawing has one reward; leave its weight out")
    if (strategy := getattr(training, "logging_strategy", "steps")) != "steps":
        raise InputError(
            f"--logging_strategy {strategy.value}: drawing counts its programs in every step's line; leave it out"
        )
    if (interval := getattr(training, "logging_steps", 1)) != 1:
        raise InputError(
            f"--logging_steps {interval:g}: drawing counts its programs in every step's line; leave it at 1"
        )
    if isinstance(training, GRPOConfig):
        passes = training.steps_per_generation * training.num_iterations
        if (accumulated := training.gradient_accumulation_steps) > passes:
            raise InputError(
                f"--gradient_accumulation_steps {accumulated}: drawing counts one batch of programs in a step; at most "
                f"{passes} here (steps_per_generation x num_iterations)"
            )
    target = read_target(arguments.target)
    sandbox = Sandbox()
    reader = Reader(tokenizer, training.max_completion_length)
    found_file = Path(training.output_dir) / FOUND_FILE
    settings = {"target": target.name, "wanted": target.wanted, "show_functions": arguments.show_functions}
    judge = DrawingJudge(target, reader, sandbox, arguments.show_functions, settings, found_file)
    drawings = RandomDrawings(sandbox, training.seed, arguments.show_functions)
    prompt = fit_to_template(judge.prompt, tokenizer)
    reward = PixelReward(target, sandbox, found_file)

    def attempts(texts: Sequence[str], generations_before: int) -> list[Attempt]:
        codes = [code_of(text) for text in texts]
        outcomes = sandbox.run_all(codes, target.given)
        score = scored(codes, outcomes, target.wanted)
        keep_best(found_file, score, generations_before)
        made: dict[str, Attempt] = {}  # equal programs are cleaned once: that takes far longer than to run them
        for code, outcome, share in zip(codes, outcomes, score.shares, strict=True):
            if code not in made:
                made[code] = in_hindsight(code, outcome, share, target, sandbox, arguments.show_functions)
        return [made[code] for code in codes]

    def log_of_attempts(made: Sequence[Attempt]) -> dict[str, float]:
        found = batch_metrics([attempt.reward for attempt in made], Counter(attempt.error for attempt in made))
        return {f"drawing/{name}": value for name, value in found.items()}

    def findings(context_tokens: int) -> list[Finding]:
        found = prompt_tokens([prompt], tokenizer, context_tokens, training.max_completion_length)
        taught = [text for _, replies in drawings[:LINTED_DRAWINGS] for text in replies]
        found += cut_replies(taught, tokenizer, training.max_completion_length)
        tokens = len(reply_token_ids(reply(plain_program(target.wanted)), tokenizer))
        if tokens > training.max_completion_length:
            words = f"a program that draws it rectangle by rectangle has {tokens} tokens, and completions are cut at "
            found.append(
                Finding("long program", f"{words}{training.max_completion_length}; raise --max_completion_length")
            )
        return [replace(finding, source=target.name) for finding in found]

    return Task(
        rows=[{"prompt": prompt}],
        reward_functions=[reward],
        attempts=attempts,
        log_of_attempts=log_of_attempts,
        full_reward=PERFECT,
        judge=judge,
        is_reply=drawings.is_solved,
        lessons=drawings,
        guess=lambda _row: reply("def task(img):\n    draw"),
        reward_lines=lambda weights: {f"reward/{name}": share for name, share in judge.baselines().items()},
        shown={"drawing/best": "best", "policy/best": "greedy"},
        lint=findings,
        logs=(FOUND_FILE,),
    )


def make_judge(settings: Mapping, reader: Reader, episodes: int, seed: int) -> DrawingJudge:
    """The judge of a run by its settings; without any, of the default target."""
    show_functions = settings.get("show_functions", False)
    wanted = settings.get("wanted")
    if wanted is None:
        target = read_target(DEFAULT_TARGET)
    elif problem := grid_problem(wanted):
        raise InputError(f"run.json: wanted: {problem}; train again")
    else:
        target = Target(str(settings.get("target")), empty(len(wanted), len(wanted[0])), wanted)
    known = {"target": target.name, "wanted": target.wanted, "show_functions": show_functions}
    return DrawingJudge(target, reader, Sandbox(), show_functions, known)
