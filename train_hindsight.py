"""Hindsight replay: what a program drew becomes the task that it solves. Beside GRPO on the same start and target.

    python train_hindsight.py                                  # 5 vertical lines, the embedded model
    python train_hindsight.py --target 9-vertical-lines        # names and files: --help
    python train_hindsight.py --resume_from_checkpoint auto    # resume after a kill; or shows the result

Needs requirements-drawing.txt. The warm start, which teaches the drawing functions, is shared with
`train_script.py --task drawing` of the same seed. SIGTERM or SIGUSR1 ends a run after a checkpoint, with exit code 75.
"""

from llm_policy.startup import announce

announce(__name__)

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import set_seed
from trl import ModelConfig

from llm_policy import adapters, run_files
from llm_policy.chat import Reader
from llm_policy.checkpoints import checkpoint_to_resume_from, is_finished, keep_newest
from llm_policy.command_line import parse_arguments
from llm_policy.errors import InputError, check_alone, check_choices, disk_errors, run_script
from llm_policy.grpo import arguments as rules
from llm_policy.grpo import lifecycle, stages
from llm_policy.grpo.arguments import WarmStartArguments
from llm_policy.hardware import take_granted_threads, this_device
from llm_policy.hindsight import HindsightLearner, HindsightLog, HindsightSettings
from llm_policy.interruption import RESUME, Interruption
from llm_policy.models import context_tokens, load_tokenizer
from llm_policy.number_format import number_format
from llm_policy.tables import counted
from tasks import Task, task_module

CONFIG = run_files.ROOT / "configs" / "drawing_hindsight.yaml"
TASK = "drawing"
STOP_CONDITIONS = ("best", "never")
LENGTH = {"epochs", *rules.LENGTH}  # options that may differ as long as a run has not ended


@dataclass
class HindsightArguments(WarmStartArguments, HindsightSettings):
    """Options of the script, beside the task's and the model's."""

    epochs: int = field(default=12, metadata={"help": "At most so many."})
    max_completion_length: int = field(default=192, metadata={"help": "Tokens of a program at most."})
    stop_when: str = field(default="best", metadata={"help": "best: with the first perfect program; or never."})
    samples_per_state: int = field(default=64, metadata={"help": "Programs in the last table; 0: greedy alone."})
    seed: int = field(default=0, metadata={"help": "Of the warm start, the samples and the adapter."})
    output_dir: str = field(default="runs/hindsight", metadata={"help": "The folder of the run."})
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "auto: resume, or show the result."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"stop_when": STOP_CONDITIONS})
        if self.resume_from_checkpoint is not None:
            check_choices(self, {"resume_from_checkpoint": ("auto",)})


@dataclass(frozen=True)
class Options:
    """Everything that was asked for."""

    script: HindsightArguments
    task: object  # the task's own `Arguments`
    model: ModelConfig
    config: str
    note: str

    @property
    def output_dir(self) -> Path:
        return Path(self.script.output_dir)

    @property
    def learner(self) -> str:
        return "hindsight" if self.script.learning_rate else "none"

    @property
    def groups(self) -> tuple:
        return self.script, self.task, self.model


def read_options(argv: Sequence[str] | None) -> Options:
    argv = sys.argv[1:] if argv is None else list(argv)
    groups = (HindsightArguments, task_module(TASK).Arguments, ModelConfig)
    chosen, note = number_format(argv, CONFIG, has_bf16=False)
    parsed, path = parse_arguments([*argv, *chosen], groups, description=__doc__, default_config=CONFIG)
    return Options(*parsed, path, note)


@disk_errors(f"free space, then {RESUME}")
def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(argv)
    check_alone()
    script, folder = options.script, options.output_dir
    print(f"{options.config} with {options.model.model_name_or_path}, seed {script.seed}", flush=True)
    for note in filter(None, (options.note, take_granted_threads())):
        print(note, flush=True)
    adapters.check_model_options(options.model)
    if is_finished(folder, options.groups, script.resume_from_checkpoint, rules.SHOWN_OTHERWISE, LENGTH):
        return 0
    with run_files.only_process_in(folder):
        return train(options)


def train(options: Options) -> int:
    """The whole job in `--output_dir`. Returns the exit code."""
    script, folder = options.script, options.output_dir
    resume = checkpoint_to_resume_from(folder, script.resume_from_checkpoint)
    lifecycle.check_length("epochs", script.epochs, resume)
    stop = Interruption("the step")

    # What is drawn, by which model
    tokenizer = load_tokenizer(options.model.model_name_or_path, revision=options.model.model_revision)
    task = task_module(TASK).make_task(options.task, script, tokenizer)
    set_seed(script.seed)
    model, lora, folders = adapters.model_to_train(options.model, this_device())
    check_prompt(task, context_tokens(model))
    reader = Reader(tokenizer, script.max_completion_length)
    job = stages.Job(task, script, options.model, reader, script.seed, folder)
    stop.leave_if_received(f"before the first epoch: {RESUME} begins again")
    run_files.check_made_from(folder, job.made_from)
    if resume:
        stages.unfinish(resume, task.logs)
    settings = job.judge_settings(TASK, folders) | {"learner": options.learner}
    job.write_run_files(options.groups, options.config, settings, this_device())

    # The untrained model, and the warm start, which teaches the drawing functions
    begun = job.beginning(model, lora, folders, stop, has_begun=resume is not None)

    # Hindsight replay on a fresh adapter
    set_seed(script.seed)
    model = adapters.fresh(begun.model, lora)
    model.eval()
    prompt = task.rows[0]["prompt"]
    learner = HindsightLearner(model, reader, prompt, script)
    replay(learner, task, script, folder, resume, stop, job.stands_on)

    # What was saved, judged beside the baselines
    stop.at_once = True
    learner.forget_merged_copy()
    adapters.save(model, folder / stages.GRPO_FOLDER)
    job.save_joined(model, [*begun.folders, folder / stages.GRPO_FOLDER])
    tokenizer.save_pretrained(folder)
    answers_of = begun.answers | job.judged_again(this_device(), script.samples_per_state)
    comparison = task.judge.compare(answers_of)
    in_words = task.judge.judgement(answers_of["trained, greedy"]).verdict
    epochs = counted(learner.epoch, "epoch")
    learnt = "hindsight" if options.learner == "hindsight" else "nothing learnt,"
    warm_start = f"warm start {begun.warm_start_steps} steps"
    stages.finish(folder, comparison, f"verdict: {in_words} ({warm_start}, {learnt} {epochs})")
    return 0


# The stages --------------------------------------------------------------------------------------------------------


def replay(
    learner: HindsightLearner, task: Task, script: HindsightArguments, folder: Path, resume: Path | None,
    stop: Interruption, stands_on: Sequence[Path],
) -> None:  # fmt: skip
    """Epochs until one program is perfect (`--stop_when`), `--epochs` are over, or a signal comes."""
    seconds = 0.0
    if resume:
        seconds = learner.restore(resume)
    log = HindsightLog(folder, learner.epoch, seconds)
    stop.part = "the epoch"

    def is_solved() -> bool:
        return script.stop_when == "best" and learner.best >= task.full_reward

    while learner.epoch < script.epochs and not is_solved():
        before = learner.generations
        attempts = task.attempts(learner.sample(), before)
        learner.epoch += 1
        best = max(attempt.reward for attempt in attempts)
        learner.best = max(learner.best, best)
        lessons = [] if is_solved() or not script.learning_rate else learner.lessons(attempts)
        loss = learner.learn(lessons)
        mean = sum(attempt.reward for attempt in attempts) / len(attempts)
        metrics = {"reward": mean, "drawing/generations": learner.generations, "lessons": len(lessons)}
        metrics |= task.log_of_attempts(attempts) | ({} if loss is None else {"loss": loss})
        words = f"best {best:.3g}  mean {mean:.3g}  lessons {len(lessons)}"
        words += "" if loss is None else f"  loss {loss:.3g}"
        log.write(learner.epoch, script.epochs, metrics, words)
        checkpoint = folder / f"checkpoint-{learner.epoch}"
        learner.save(checkpoint, stands_on, log.seconds)
        keep_newest(checkpoint.parent, 1)
        stop.leave_if_received(f"checkpoint of epoch {learner.epoch} written; {RESUME} resumes from it")


def check_prompt(task: Task, most_tokens: int) -> None:
    """Print what the linter warns of; `InputError` for the first error."""
    for finding in task.lint(most_tokens) if task.lint else []:
        if finding.is_error:
            raise InputError(f"{finding.source}: {finding.rule}: {finding.message}")
        print(f"{finding.source}: {finding}", flush=True)


if __name__ == "__main__":
    run_script(main)
