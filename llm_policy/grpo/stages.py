"""What train_script.py and train_hindsight.py do before and after they learn: warm start, saving, the last judgement.

A task is a `tasks.Task` here, a judge a `tasks.Judge`: this package knows no task.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, set_seed
from trl import ModelConfig

from llm_policy import adapters, checkpoints, processes, run_files
from llm_policy.adapters import GRPO_FOLDER, WARM_START_FOLDER
from llm_policy.chat import Reader
from llm_policy.grpo.arguments import WarmStartArguments
from llm_policy.grpo.trainer import PolicyTrainer
from llm_policy.grpo.warm_start import Lesson, warm_started
from llm_policy.hardware import device_text, give_memory_back
from llm_policy.interruption import RESUME, Interruption
from llm_policy.models import load_model, model_checksum

UNTRAINED_FILE, WARM_START_FILE = "untrained.json", "warm_start.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FINISHED = (*run_files.OF_EACH_RUN, *ADAPTER_FILES)
TAUGHT_WITH = ("warm_start_steps", "warm_start_prompts", "warm_start_learning_rate", "warm_start_threshold")
LORA = ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", "use_rslora")
CHECKED_LESSONS = 256  # of all, spread evenly, say whether a warm start was made from the same


@dataclass(frozen=True)
class Beginning:
    """What the learning begins with.

    Attributes:
        model: stands on the warm start, where there was one.
        warm_start_steps: 0 without one.
        folders: adapters that the learned one will stand on.
        answers: of the models so far, by the name of their row.
    """

    model: PreTrainedModel | PeftModel
    warm_start_steps: int
    folders: list[Path]
    answers: dict[str, dict]


@dataclass(frozen=True)
class Job:
    """What is learnt, by which model, and in which folder: what a training does besides its learner's steps.

    Attributes:
        task: a `tasks.Task`.
        script: options of the warm start.
        model_config: which model, how it is loaded, and its LoRA adapter.
    """

    task: Any
    script: WarmStartArguments
    model_config: ModelConfig
    reader: Reader
    seed: int
    output_dir: Path

    @cached_property
    def made_from(self) -> dict[str, str]:
        """Checksums of data and model: a run that is resumed needs the same."""
        data = self.task.rows if self.task.source is None else self.task.source
        return {
            "data": run_files.checksum([data, self.task.judge.settings]),
            "model": model_checksum(self.model_config.model_name_or_path, self.model_config.model_revision),
        }

    def judge_settings(self, task_name: str, folders: Sequence[Path]) -> dict:
        """What evaluate_policy.py needs of run.json to judge the run again.

        Args:
            folders: adapters that the model stands on already.
        """
        return {
            "task": task_name,
            **self.task.judge.settings,
            "max_completion_length": self.reader.max_completion_tokens,
            "dtype": adapters.loading_options(self.model_config)["dtype"],
            **adapters.quantization(self.model_config),
            "on_adapter": bool(folders),
            "on_shared_warm_start": bool(self.script.shared_warm_start),
            "made_from": self.made_from,
        }

    def write_run_files(self, groups: Sequence, config: str, settings: dict, device: torch.device) -> None:
        """resolved_config.yaml and run.json, with all that evaluate_policy.py needs to judge the run again."""
        works_on = device_text(on_gpu=device.type == "cuda")
        run_files.write_run_files(
            self.output_dir, groups, config, self.seed, settings, works_on, RESUME, processes.count()
        )

    def beginning(
        self, model: PreTrainedModel, lora: LoraConfig, folders: Sequence[Path], stop: Interruption, has_begun: bool
    ) -> Beginning:
        """Teach the form of an answer, and judge the model before and after that where asked to.

        Args:
            folders: adapters that are in `model` already.
            has_begun: the run has checkpoints.
        """
        task, script, output_dir = self.task, self.script, self.output_dir
        answers = {}
        stop.at_once = True
        if script.judge_untrained and not processes.in_pieces():
            answers["untrained, greedy"] = kept_answers("untrained", model, task.judge, output_dir / UNTRAINED_FILE)
        stop.at_once = False

        taught_from = warm_start_checksum(script, self.model_config, self.made_from["model"], task.lessons)
        model, report = warm_started(
            model, lora, self.reader, task.lessons, task.is_reply, script, self.seed, self.warm_start_folder,
            stop.received_anywhere, has_begun, taught_from,
        )  # fmt: skip
        stop.leave_if_received(f"during the warm start: {RESUME} resumes it")
        if not report["steps"]:
            return Beginning(model, 0, list(folders), answers)

        stop.at_once = True
        if script.judge_warm_start:
            answers["warm start, greedy"] = kept_answers("warmed-up", model, task.judge, output_dir / WARM_START_FILE)
        stop.at_once = False
        is_continued = isinstance(model, PeftModel)  # by the adapter that will be learned
        stood_on = [*folders, *([] if is_continued else [self.warm_start_folder])]
        return Beginning(model, report["steps"], stood_on, answers)

    @property
    def warm_start_folder(self) -> Path:
        """Where the run's warm start is kept: in the run, or where runs of the same seed share it."""
        shared = self.script.shared_warm_start
        return Path(shared) / f"seed-{self.seed}" if shared else self.output_dir / WARM_START_FOLDER

    @property
    def stands_on(self) -> list[Path]:
        """What the run needs besides a checkpoint to resume from it."""
        files = (run_files.METRICS_FILE, UNTRAINED_FILE, *self.task.logs)
        return [*(self.output_dir / name for name in files), self.warm_start_folder]

    def save_joined(self, trained: PeftModel, folders: Sequence[Path]) -> None:
        """Save the adapters in `folders`, which were trained on top of each other, as one on the plain base model."""
        lora = trained.peft_config["default"]
        # Joining looks at the adapters alone
        plain = adapters.loading_options(self.model_config) | {"quantization_config": None}
        name, revision = lora.base_model_name_or_path, lora.revision or "main"
        base = load_model(name, revision=revision, answers=False, **plain)  # no warm start
        adapters.save(adapters.joined(base, folders), self.output_dir)

    def judged_again(self, device: torch.device, samples: int) -> dict[str, dict]:
        """What the model that was saved answers, by the name of its row; greedily and, with `samples`, sampled.

        It is read from the disk, as evaluate_policy.py reads it.
        """
        print("judging the trained model", flush=True)
        trained = load_model(self.output_dir, device=device, **adapters.loading_options(self.model_config))
        set_seed(self.seed)  # the same samples, resumed or not
        answers = {"trained, greedy": self.task.judge.answers(trained)}
        if samples:
            answers["trained, sampled"] = self.task.judge.answers(trained, samples)
        return answers


def warm_start_checksum(
    script: WarmStartArguments, model: ModelConfig, model_checksum: str, lessons: Sequence[Lesson]
) -> str:
    """What a warm start is made from, so that no run stands on another one's by mistake."""
    settings = {name: getattr(script, name) for name in TAUGHT_WITH} | {name: getattr(model, name) for name in LORA}
    count = min(CHECKED_LESSONS, len(lessons))  # there may be a million, made when they are asked for
    checked = [lessons[i * len(lessons) // count] for i in range(count)]
    return run_files.checksum([model_checksum, settings, len(lessons), checked])


def kept_answers(which: str, model: PreTrainedModel, judge, file: Path) -> dict:
    """What the model answers before GRPO; kept in `file`, so that a resumed run shows the same row.

    Args:
        judge: a task's (`tasks.Judge`).
    """
    asked = run_files.checksum(judge.settings)  # of other questions they are where another run handed them over
    answers = processes.from_main(lambda: run_files.read_kept(file, asked, judge.judgement))
    if answers is None:
        print(f"judging the {which} model", flush=True)
        answers = judge.answers(model)
        if processes.is_main():
            run_files.write_kept(file, asked, answers)
    return answers


def save_policy(job: Job, trainer: PolicyTrainer, folders: Sequence[Path]) -> None:
    """Save what was trained as one adapter on the plain base model.

    Args:
        folders: adapters that GRPO's stands on.
    """
    trained = trainer.accelerator.unwrap_model(trainer.model)
    trainer.forget_merged_weights()  # a GPU has to hold the model once more, to be judged
    give_memory_back()
    own = job.output_dir / GRPO_FOLDER
    if processes.in_pieces():
        trainer.save_model(str(own))  # all processes bring theirs
    elif processes.is_main():
        adapters.save(trained, own, selected_adapters=["default"])
    if processes.is_main():
        job.save_joined(trained, [*folders, own])
        trainer.processing_class.save_pretrained(job.output_dir)
    processes.wait_for_files(job.output_dir, ADAPTER_FILES)


def unfinish(checkpoint: Path, logs: Iterable[str]) -> None:
    """Take away what a run had come to that now goes on from `checkpoint`: it would be judged as what comes of it.

    Args:
        logs: of its task, without those that scripts and trainer keep.
    """
    output_dir = checkpoint.parent
    for name in (run_files.EVALUATION_FILE, checkpoints.COMPLETE_MARK, run_files.RESULT_FILE, *ADAPTER_FILES):
        (output_dir / name).unlink(missing_ok=True)
    checkpoints.cut_logs(checkpoint, logs)


def finish(output_dir: Path, comparison, verdict: str) -> None:
    """Say the verdict, write it below the table, and mark the run as finished.

    Args:
        comparison: a `tasks.Comparison`.
    """
    print(verdict)
    checkpoints.finish(output_dir, f"{comparison.text}{verdict}\n", comparison.save, FINISHED)
