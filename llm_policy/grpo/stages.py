"""What train_script.py and train_hindsight.py do before and after they learn: warm start, saving, the last judgement.

A task is a `tasks.Task` here, a judge a `tasks.Judge`: this package knows no task.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, set_seed
from trl import ModelConfig

from llm_policy import adapters, processes, run_files
from llm_policy.adapters import GRPO_FOLDER, WARM_START_FOLDER
from llm_policy.chat import Reader
from llm_policy.checkpoints import COMPLETE_MARK, write_list
from llm_policy.errors import OPTION_ERRORS, InputError
from llm_policy.grpo.arguments import WarmStartArguments
from llm_policy.grpo.lifecycle import StopOnSignal
from llm_policy.grpo.trainer import PolicyTrainer
from llm_policy.grpo.warm_start import Lesson, warm_started
from llm_policy.hardware import give_memory_back
from llm_policy.interruption import RESUME
from llm_policy.models import load_model, model_checksum
from llm_policy.reading import parse_json, read_text

UNTRAINED_FILE, WARM_START_FILE = "untrained.json", "warm_start.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FINISHED = (*run_files.OF_EACH_RUN, *ADAPTER_FILES)
TAUGHT_WITH = ("warm_start_steps", "warm_start_prompts", "warm_start_learning_rate", "warm_start_threshold")
LORA = ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", "use_rslora")
CHECKED_LESSONS = 256  # of all, spread evenly, say whether a warm start was made from the same


# Before -------------------------------------------------------------------------------------------------------------


def made_from(task, model_config: ModelConfig) -> dict[str, str]:
    """Checksums of data and model: a run that is resumed needs the same."""
    data = task.rows if task.source is None else task.source
    return {
        "data": run_files.checksum([data, task.judge.settings]),
        "model": model_checksum(model_config.model_name_or_path, model_config.model_revision),
    }


def judge_settings(
    task_name: str, judge, model_config: ModelConfig, max_completion_length: int, on_adapter: bool,
    checksums: Mapping[str, str],
) -> dict:  # fmt: skip
    """What evaluate_policy.py needs of run.json to judge the run again."""
    return {
        "task": task_name,
        **judge.settings,
        "max_completion_length": max_completion_length,
        "dtype": adapters.loading_options(model_config)["dtype"],
        **adapters.quantization(model_config),
        "on_adapter": on_adapter,
        "made_from": checksums,
    }


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


def beginning(
    model: PreTrainedModel, lora: LoraConfig, folders: Sequence[Path], task, reader: Reader, script: WarmStartArguments,
    seed: int, output_dir: Path, stop: StopOnSignal, has_begun: bool, taught_from: str,
) -> Beginning:  # fmt: skip
    """Teach the form of an answer, and judge the model before and after that where asked to.

    Args:
        folders: adapters that are in `model` already.
        has_begun: the run has checkpoints.
        taught_from: checksum of what the warm start is made from.
    """
    answers = {}
    stop.at_once = True
    if script.judge_untrained and not processes.in_pieces():
        answers["untrained, greedy"] = kept_answers("untrained", model, task.judge, output_dir / UNTRAINED_FILE)
    stop.at_once = False

    folder = warm_start_folder(script, seed, output_dir)
    model, report = warm_started(
        model, lora, reader, task.lessons, task.is_reply, script, seed, folder, stop.received_anywhere, has_begun,
        taught_from,
    )  # fmt: skip
    stop.leave_if_received(f"during the warm start: {RESUME} resumes it")
    if not report["steps"]:
        return Beginning(model, 0, list(folders), answers)

    stop.at_once = True
    if script.judge_warm_start:
        answers["warm start, greedy"] = kept_answers("warmed-up", model, task.judge, output_dir / WARM_START_FILE)
    stop.at_once = False
    is_continued = isinstance(model, PeftModel)  # by the adapter that will be learned
    return Beginning(model, report["steps"], [*folders, *([] if is_continued else [folder])], answers)


def warm_start_folder(script: WarmStartArguments, seed: int, output_dir: Path) -> Path:
    """Where the warm start of a run is kept: in the run, or where runs of the same seed share it."""
    shared = script.shared_warm_start
    return Path(shared) / f"seed-{seed}" if shared else output_dir / WARM_START_FOLDER


def stands_on(script: WarmStartArguments, seed: int, output_dir: Path) -> list[Path]:
    """What a run needs besides a checkpoint to resume from it."""
    files = (run_files.METRICS_FILE, UNTRAINED_FILE)
    return [*(output_dir / name for name in files), warm_start_folder(script, seed, output_dir)]


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

    asked = run_files.checksum(judge.settings)

    def kept() -> dict | None:
        try:
            content = parse_json(read_text(file))
            if content["judge"] != asked:  # handed over by a run that was judged on other questions
                return None
            judge.judgement(content["answers"])
        except (FileNotFoundError, InputError, *OPTION_ERRORS):  # cut, or an older version's
            return None
        return content["answers"]

    answers = processes.from_main(kept)
    if answers is None:
        print(f"judging the {which} model", flush=True)
        answers = judge.answers(model)
        if processes.is_main():
            run_files.write_whole(file, json.dumps({"judge": asked, "answers": answers}))
    return answers


# After --------------------------------------------------------------------------------------------------------------


def save_policy(trainer: PolicyTrainer, folders: Sequence[Path], model_config: ModelConfig) -> None:
    """Save what was trained as one adapter on the plain base model.

    Args:
        folders: adapters that GRPO's stands on.
    """
    output_dir = Path(trainer.args.output_dir)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    trainer.forget_merged_weights()  # a GPU has to hold the model once more, to be judged
    give_memory_back()
    if processes.in_pieces():
        trainer.save_model(str(output_dir / GRPO_FOLDER))  # all processes bring theirs
    elif processes.is_main():
        trained.save_pretrained(output_dir / GRPO_FOLDER, selected_adapters=["default"])
    if processes.is_main():
        save_joined(trained, [*folders, output_dir / GRPO_FOLDER], output_dir, model_config)
        trainer.processing_class.save_pretrained(output_dir)
    processes.wait_for_files(output_dir, ADAPTER_FILES)


def save_joined(trained: PeftModel, folders: Sequence[Path], output_dir: Path, model_config: ModelConfig) -> None:
    """Save the adapters in `folders`, which were trained on top of each other, as one on the plain base model."""
    lora = trained.peft_config["default"]
    # Joining looks at the adapters alone
    plain = adapters.loading_options(model_config) | {"quantization_config": None}
    name, revision = lora.base_model_name_or_path, lora.revision or "main"
    base = load_model(name, revision=revision, answers=False, **plain)  # no warm start
    adapters.joined(base, folders).save_pretrained(output_dir)


def judged_again(
    task, output_dir: Path, device: torch.device, model_config: ModelConfig, seed: int, samples: int
) -> dict[str, dict]:
    """What the model that was saved answers, by the name of its row; greedily and, with `samples`, sampled.

    It is read from the disk, as evaluate_policy.py reads it.
    """
    print("judging the trained model", flush=True)
    trained = load_model(output_dir, device=device, **adapters.loading_options(model_config))
    set_seed(seed)  # the same samples, resumed or not
    answers = {"trained, greedy": task.judge.answers(trained)}
    if samples:
        answers["trained, sampled"] = task.judge.answers(trained, samples)
    return answers


def unfinish(output_dir: Path) -> None:
    """Take away what a run had come to that now goes on, if anything: it would be judged as what comes of it."""
    for name in (run_files.EVALUATION_FILE, COMPLETE_MARK, run_files.RESULT_FILE, *ADAPTER_FILES):
        (output_dir / name).unlink(missing_ok=True)


def finish(output_dir: Path, comparison, verdict: str) -> None:
    """Write table, verdict and pictures, mark the run as finished, and say so.

    Args:
        comparison: a `tasks.Comparison`.
    """
    run_files.write_whole(output_dir / run_files.RESULT_FILE, f"{comparison.text}{verdict}\n")
    comparison.save(output_dir)
    files = sorted(path.name for path in output_dir.iterdir() if path.is_file() and not path.name.startswith("."))
    write_list(output_dir, [output_dir / name for name in FINISHED])
    print(f"{verdict}\nsaved {output_dir}: {', '.join(files)}")
