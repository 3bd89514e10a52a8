"""Options of a training run beside TRL's, and the rules that TRL does not check or leaves to a crash in step 1."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from transformers import GenerationConfig, Trainer, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from trl import GRPOConfig, ModelConfig
from trl.import_utils import is_vllm_available

from llm_policy import processes
from llm_policy.adapters import check_model_options
from llm_policy.errors import OPTION_ERRORS, InputError, check_choices, library_errors
from llm_policy.grpo.diagnostics import BATCH_CONDITIONS, STOP_CONDITIONS
from llm_policy.grpo.expected import SUPERVISED, TERMS

OBJECTIVES = (*TERMS, "grpo")
WARM_STARTS = ("auto", "always", "never")
CHECKS = ("stop", "warn", "only")
# TRL checks these late or not at all, and has no list of them: its help texts name them (tests/test_arguments.py).
TRL_CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
REFUSED = {
    "trust_remote_code": "is not passed on to the model here; leave it out",
    "model_init_kwargs": "is not passed on to the model here; leave it out",
    "cache_implementation": "is not passed on to the model here; leave it out",
    "enable_jit_checkpoint": "would take the signals; SIGTERM writes a checkpoint here anyway",
    "save_only_model": "leaves nothing to resume from; leave it out",
    "restore_callback_states_from_checkpoint": "would make our callbacks anew; a resumed run restores them anyway",
    "eval_steps": "evaluation is this script's, --evaluate_steps",
    "label_smoothing_factor": "has no effect on GRPO; leave it out",
    "eval_on_start": "evaluation is this script's: the untrained model is judged anyway; leave it out",
    "remove_unused_columns": "would take away what the rewards need; leave it out",
    "chat_template_kwargs": "would reach the trainer's prompts alone, not the judge's; leave it out",
    "torch_compile": "would compile passes that are not made for it; leave it and its backend and mode out",
    "dataloader_multiprocessing_context": "is for workers that load data, and the rows are in memory; leave it out",
    "use_liger_kernel": "is deprecated by TRL, and was not tried with the packed pass; leave it out",
    "sync_ref_model": "needs a model of its own beside the adapter; leave it out, --beta is against the base model",
    "push_to_hub": "would upload GRPO's part of the adapter only; upload the run's folder in the end (hf upload)",
    "data_seed": "has no effect: --seed decides the order of the rows; leave it out",
    "hub_token": "would stand in the run's files; set HF_TOKEN, or run `hf auth login`",
}
NOT_GENERATED = ("num_beams", "num_return_sequences", "stop_strings", "cache_implementation")
# What may differ when the result of a finished run is asked for again, and when a run is resumed
SHOWN_OTHERWISE = (
    "output_dir", "resume_from_checkpoint", "report_to", "check", "logging_steps", "log_completions", "disable_tqdm",
    "save_strategy", "save_steps", "save_total_limit", "judge_warm_start",
)  # fmt: skip
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")  # of other processes
IN_PIECES = {  # what a run under FSDP must say: TRL's own pass, and no judgement
    "objective": "grpo", "packed": False, "form_coef": 0, "warm_start": "never", "evaluate_steps": 0,
    "stop_when": "never",
}  # fmt: skip
LENGTH = ("max_steps", "num_train_epochs", "evaluate_steps", "stop_when", "samples_per_state", "episodes")


@dataclass
class WarmStartArguments:
    """What is taught before anything is learnt."""

    rare: ClassVar[tuple[str, ...]] = (
        "warm_start_prompts", "warm_start_learning_rate", "warm_start_threshold", "warm_start_folder",
        "judge_untrained", "judge_warm_start",
    )  # fmt: skip

    judge_untrained: bool = field(
        default=True, metadata={"help": "Judge the untrained model, too, which may take long where thoughts are long."}
    )
    judge_warm_start: bool = field(
        default=True, metadata={"help": "Judge what the warm start alone comes to; on many maps that is minutes."}
    )
    warm_start: str = field(default="auto", metadata={"help": "Teach the form first: auto, always or never."})
    warm_start_steps: int = field(default=60, metadata={"help": "At most so many steps of it."})
    warm_start_prompts: int = field(default=11, metadata={"help": "Prompts per step, each with all its replies."})
    warm_start_learning_rate: float = field(
        default=1e-3, metadata={"help": "Its learning rate (AdamW), which falls over the second half."}
    )
    warm_start_threshold: float = field(default=0.9, metadata={"help": "Share of replies as taught that ends it."})
    warm_start_folder: str = field(
        default="", metadata={"help": "Share it with other runs of the same seed, in this folder. Default: the run's."}
    )

    def __post_init__(self) -> None:
        check_choices(self, {"warm_start": WARM_STARTS})
        if (shared := Path(self.warm_start_folder)).exists() and not shared.is_dir():
            raise InputError(f"--warm_start_folder {shared}: is a file; name a folder")

    @property
    def shared_warm_start(self) -> str:
        """The folder of one that runs share. Empty without: who asked for no warm start takes no other's."""
        return self.warm_start_folder if self.warm_start != "never" else ""


@dataclass
class ScriptArguments(WarmStartArguments):
    """What neither TRL nor the task covers: the task's name, the objective, the warm start, the evaluations."""

    task: str = field(default="frozen_lake", metadata={"help": "What is trained: a name in tasks/__init__.py."})
    objective: str = field(default="grpo", metadata={"help": f"{', '.join(OBJECTIVES)} (grpo/expected.py)."})
    action_entropy_coef: float = field(
        default=0.0, metadata={"help": "Weight of the entropy (nats); temperature of distillation."}
    )
    form_coef: float = field(
        default=0.0, metadata={"help": "Weight of the form's log-odds; raises the thoughts that are sampled, too."}
    )
    thought_coef: float = field(
        default=0.0, metadata={"help": "Weight of the taught thought's log-likelihood, rehearsed as well."}
    )
    action_baseline: float = field(
        default=0.0,
        metadata={
            "help": "Share of an action's mean reward in the batch that is taken off it (expected, natural), falling "
            "to 0. At 1 no action pays that does not read the state."
        },
    )
    packed: bool = field(default=True, metadata={"help": "Compute what completions share once; false: TRL's own pass."})
    merged_sampling: bool = field(
        default=True,
        metadata={"help": "Sample from a merged copy of the weights."},
    )
    evaluate_steps: int = field(default=10, metadata={"help": "Judge every so many steps; 0: at the end only."})
    check: str = field(
        default="stop",
        metadata={"help": "Check data and prompts: stop at an error, warn, or only."},
    )
    samples_per_state: int = field(default=8, metadata={"help": "Samples per prompt in the last table; 0: none."})
    stop_when: str = field(default="never", metadata={"help": f"End early: {', '.join(STOP_CONDITIONS)}."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"stop_when": STOP_CONDITIONS, "check": CHECKS, "objective": OBJECTIVES})
        if self.stop_when in ("optimal", "either") and self.evaluate_steps == 0:
            raise InputError(f"--stop_when {self.stop_when}: needs --evaluate_steps of at least 1 to see the optimum")
        if self.objective == "distillation" and not self.action_entropy_coef > 0:
            raise InputError(f"--action_entropy_coef {self.action_entropy_coef:g}: distillation needs a number above 0")


def check_arguments(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> None:
    """`InputError` for options that cannot be honoured, alone or together."""
    check_choices(training, TRL_CHOICES)
    _check_objective(script, training)
    if training.eval_strategy != "no":
        kind = training.eval_strategy.value
        raise InputError(f"--eval_strategy {kind}: evaluation is this script's, --evaluate_steps")
    if training.save_strategy == "best":
        raise InputError("--save_strategy best: waits for evaluations that are not made here; use steps")
    if training.train_sampling_strategy != GRPOConfig.train_sampling_strategy:
        raise InputError(
            f"--train_sampling_strategy {training.train_sampling_strategy}: groups are sampled in an order of their "
            "own; leave it out"
        )
    epochs = training.num_train_epochs
    if training.max_steps > 0 and epochs != GRPOConfig.num_train_epochs:
        raise InputError(
            f"--num_train_epochs {epochs:g}: --max_steps {training.max_steps} decides; change that, or give "
            "--max_steps -1 as well"
        )
    for name, reason in REFUSED.items():
        if getattr(training, name):
            raise InputError(f"--{name}: {reason}")
    if training.use_vllm and not is_vllm_available():
        raise InputError(
            "--use_vllm true: needs vllm, 0.22 to 0.31, which brings its own PyTorch; install it in an environment of "
            "its own, or leave the option out"
        )
    if training.full_determinism and training.device.type == "cuda":
        raise InputError("--full_determinism true: sampling adds probabilities up, which PyTorch then refuses on a GPU")
    has_compiler = os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))
    if script.check != "only" and training.device.type == "cuda" and not has_compiler:
        raise InputError("no C compiler: Triton builds kernels with one; install gcc and Python's headers, or set CC")
    if script.check != "only" and training.n_gpu > 1:
        raise InputError(
            f"{training.n_gpu} GPUs and one process: give each GPU its own (python -m llm_policy.launch "
            f"--nproc_per_node {training.n_gpu} train_script.py ...), or set CUDA_VISIBLE_DEVICES to one of them"
        )
    generation = {} if training.generation_kwargs is None else training.generation_kwargs
    if not isinstance(generation, dict):
        raise InputError(f"--generation_kwargs {generation}: expected an object in braces, like '{{\"top_k\": 5}}'")
    if unknown := [name for name in generation if not hasattr(GenerationConfig(), name)]:
        raise InputError(f"--generation_kwargs {unknown[0]}: is no option of generate; leave it out")
    for name in NOT_GENERATED:
        if (asked := generation.get(name)) not in (None, 1):
            raise InputError(
                f"--generation_kwargs {name} {asked}: sampling behind a shared prompt has no such option; leave it out"
            )
    if training.max_completion_length is None:
        raise InputError("--max_completion_length null: expected a whole number")
    check_processes(training, script, model)
    check_model_options(model)
    if training.max_steps == 0 or (training.max_steps < 0 and training.num_train_epochs <= 0):
        raise InputError("--max_steps: expected at least 1")
    if training.save_total_limit == 1:
        raise InputError(
            "--save_total_limit 1: expected at least 2, because a kill while one is written must leave another"
        )
    _check_batches(training)
    _ask_libraries(training)


def check_processes(training: GRPOConfig, script: ScriptArguments, model: ModelConfig) -> None:
    """`InputError` where several processes cannot train together in the way that is asked for."""
    if training.fsdp or training.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        raise InputError(
            "--fsdp, --deepspeed: a model in pieces is trained with `accelerate launch --config_file "
            "configs/accelerate/fsdp.yaml` here"
        )
    if processes.in_pieces():
        wrong = [name for name, value in IN_PIECES.items() if getattr(script, name) != value]
        if wrong or model.load_in_4bit or model.load_in_8bit:
            needed = " ".join(f"--{name} {str(value).lower()}" for name, value in IN_PIECES.items())
            raise InputError(
                "FSDP: no process holds the whole model, which packing, warm start and judging need; expected "
                f"{needed} and no quantised weights"
            )
    if training.world_size == 1:
        return
    rows = training.per_device_train_batch_size * training.steps_per_generation
    if script.packed and rows % training.num_generations:
        raise InputError(
            f"--per_device_train_batch_size {training.per_device_train_batch_size}: {rows} completions of each of "
            f"{training.world_size} processes (x --steps_per_generation {training.steps_per_generation}), expected a "
            f"multiple of --num_generations {training.num_generations}, so that a group stays in one process"
        )


def _ask_libraries(training: GRPOConfig) -> None:
    """`InputError` for what optimisers, schedules and charts would refuse after the warm start, if at all."""
    if not training.optim_target_modules:  # with these an optimiser asks for the model
        what = f"--optim {training.optim.value}, --optim_args {training.optim_args}"
        with library_errors(what, OPTION_ERRORS):
            kind, options = Trainer.get_optimizer_cls_and_kwargs(training)
            optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
        schedule, steps = training.lr_scheduler_type.value, max(training.max_steps, 1)
        what = f"--lr_scheduler_type {schedule}, --lr_scheduler_kwargs {training.lr_scheduler_kwargs}"
        with library_errors(what, OPTION_ERRORS):
            get_scheduler(
                schedule, optimizer, training.get_warmup_steps(steps), steps,
                scheduler_specific_kwargs=training.lr_scheduler_kwargs,
            )  # fmt: skip
    installed = ("none", *get_available_reporting_integrations())
    for name in training.report_to:
        if name not in installed:
            raise InputError(f"--report_to {name}: expected one of {', '.join(installed)}, which are installed here")


def _check_objective(script: ScriptArguments, training: GRPOConfig) -> None:
    """`InputError` for options that the objective cannot be had with."""
    if script.objective == "grpo":
        return
    if not script.packed:
        raise InputError(
            f"--objective {script.objective}: needs --packed true; TRL's own pass knows --objective grpo only"
        )
    if training.importance_sampling_level != "token":
        raise InputError(
            f"--importance_sampling_level {training.importance_sampling_level}: one ratio for all tokens carries the "
            "sampled term back to the answer; use token, or --objective grpo"
        )
    is_one_state = training.generation_batch_size == training.num_generations
    if script.objective in SUPERVISED and script.stop_when == "collapsed":
        raise InputError(
            f"--stop_when collapsed: --objective {script.objective} has no groups that could agree; use optimal"
        )
    if script.objective == "natural" and training.multi_objective_aggregation != "sum_then_normalize":
        raise InputError(
            f"--multi_objective_aggregation {training.multi_objective_aggregation}: under natural the luck of the "
            "sampled action is taken out of the sum of rewards; leave it out, or use --objective expected or grpo"
        )
    if script.action_baseline and script.objective not in SUPERVISED and is_one_state:
        raise InputError(
            f"--action_baseline {script.action_baseline:g}: takes off what the states of a batch have in common, and "
            "here a batch has one state; use a larger --per_device_train_batch_size or --steps_per_generation"
        )


def _check_batches(training: GRPOConfig) -> None:
    """Completions are not saved, so that steps and checkpoints have to come out even with their batches."""
    passes, accumulated = training.steps_per_generation * training.num_iterations, training.gradient_accumulation_steps
    steps_per_batch = passes / accumulated
    if passes % accumulated and accumulated % passes:
        raise InputError(
            f"--steps_per_generation {training.steps_per_generation}: {steps_per_batch:g} optimiser steps on one batch "
            "of completions; expected a whole number, or one over a whole number (steps_per_generation x "
            "num_iterations / gradient_accumulation_steps)"
        )
    counted = {"save_steps": training.save_steps} if training.save_strategy == "steps" else {}
    for name, steps in ({"max_steps": training.max_steps} | counted).items():
        if steps > 0 and steps % max(1, steps_per_batch):
            raise InputError(
                f"--{name} {steps:g}: expected a multiple of {steps_per_batch:g}, optimiser steps on one batch of "
                "completions (steps_per_generation x num_iterations / gradient_accumulation_steps), because "
                "completions are not saved"
            )


def check_task(script: ScriptArguments, training: GRPOConfig, task) -> None:
    """`InputError` where the task lacks what an option needs."""
    if script.objective != "grpo" and (not task.actions or task.action_rewards is None):
        raise InputError(
            f"--objective {script.objective}: --task {script.task} knows no reward for every legal answer; "
            "use --objective grpo"
        )
    if script.objective in SUPERVISED and task.guess is None:
        raise InputError(
            f"--objective {script.objective}: --task {script.task} has no replies to teach; use --objective grpo"
        )
    if script.thought_coef and task.guess is None:
        raise InputError(
            f"--thought_coef {script.thought_coef:g}: --task {script.task} has no thoughts to teach; leave it out"
        )
    if script.stop_when in BATCH_CONDITIONS and task.full_reward is None:
        raise InputError(f"--stop_when {script.stop_when}: --task {script.task} has no largest reward; name another")
    if script.warm_start == "always" and not task.lessons:
        raise InputError(f"--warm_start always: --task {script.task} has no replies to teach; use --warm_start never")
    names = [reward.__name__ for reward in task.reward_functions]
    if training.reward_weights is not None and len(training.reward_weights) != len(names):
        raise InputError(f"--reward_weights {training.reward_weights}: expected one for each of {', '.join(names)}")
    if training.reward_weights is not None and not any(training.reward_weights):
        raise InputError(f"--reward_weights {training.reward_weights}: every reward would be 0; expected one above 0")
