"""Expert Q-values -> prompts -> GRPO -> LoRA adapter -> exact evaluation.

    python train_script.py                                         # configuration by hardware, says which
    python train_script.py --config configs/gemma_2b_it.yaml       # one GPU
    sbatch train_script.sh                                         # cluster
    python train_script.py --check only                            # what is wrong with data and prompts, no training
    python train_script.py --resume_from_checkpoint auto           # go on after a kill
    python train_script.py --help                                  # this script's options, then TRL's

Options of TRL's GRPOConfig and ModelConfig work here, or are refused in one line; flags win over the YAML file.
Exit codes: 0 done, 2 the input cannot be used (one line says why), 75 interrupted by SIGTERM or SIGUSR1, after a
checkpoint where there is one: the same command with --resume_from_checkpoint auto goes on.
"""

import json
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainerCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available

from evaluate_policy import evaluate_policies, model_policies, print_table, save_evaluation
from llm_policy.checkpoints import COMPLETE_MARK, DISK_WORDS, latest_checkpoint, remove_incomplete, supersede
from llm_policy.grpo.diagnostics import STOP_CONDITIONS, MetricsFile, PolicyDiagnostics, policy_verdict
from llm_policy.errors import EXIT_INPUT_ERROR, InputError, check_at_least, check_choices, run_script
from llm_policy.environments.expert_q import read_expert_csv
from llm_policy.environments.frozen_lake import ACTIONS, Grid, shortest_path_policy
from llm_policy.grpo.trainer import OBJECTIVES, PolicyTrainer, check_objective
from tasks.linter import lint
from llm_policy.environments.mdp import optimal_actions
from llm_policy.models import ROOT, load_model, load_tokenizer
from llm_policy.environments.policy_table import PolicyReader
from llm_policy.run_files import (
    CONFIG_FILE,
    EVALUATION_FILE,
    EXIT_INTERRUPTED,
    RUN_FILE,
    check_same_run,
    only_process_in,
    parse_config,
    write_run_files,
    write_whole,
)
from llm_policy.grpo.warm_start import check_joinable, join_adapters, sampled_format_validity, teach_format
from prompts import OBSERVATIONS, Messages, fit_to_template, format_example, policy_messages
from rewards import OPTIMAL_TOLERANCE, REWARD_SHAPES, AdvantageReward, reward_functions, well_formed_rewards

WARM_STARTS = ("auto", "always", "never")
CHECKS = ("stop", "warn", "only")
WARM_START_FOLDER, GRPO_FOLDER = "warm_start", "grpo"  # the two adapters that are joined in the end
REWARDS = tuple(reward.__name__ for reward in reward_functions(AdvantageReward()))
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
    "push_to_hub": "would upload GRPO's part of the adapter only; upload the run's folder in the end (hf upload)",
    "hub_token": "would stand in the run's files; set HF_TOKEN, or run `hf auth login`",
}
ATTENTION = (None, "eager", "sdpa")
# What may differ when the result of a finished run is asked for again, and when a run is gone on with
SHOWN_OTHERWISE = (
    "output_dir", "resume_from_checkpoint", "report_to", "check", "logging_steps", "log_completions", "disable_tqdm",
    "save_strategy", "save_steps", "save_total_limit",
)  # fmt: skip
LENGTH = ("max_steps", "num_train_epochs", "evaluate_steps", "stop_when", "samples_per_state", "episodes")
UNJOINABLE = ("use_dora", "lora_modules_to_save", "lora_target_parameters")  # LoRA variants that are no sum of factors
MAPS_JUDGED = 20  # of many maps, in the evaluations between steps (of the CSV's own, at the end too)


@dataclass
class ScriptArguments:
    """What TRL's own arguments do not cover: the expert, the lake, the reward, the objective, the warm start."""

    expert_csv: str = field(
        default=str(ROOT / "expert_demos_batched_avg_q.csv"),
        metadata={"help": "The expert's Q-values, one row a step."},
    )
    is_slippery: bool = field(default=True, metadata={"help": "The dynamics that the CSV was made for."})
    observation: str = field(
        default="coordinates", metadata={"help": f"What the model sees of a state: {', '.join(OBSERVATIONS)}."}
    )
    reward_shape: str = field(
        default="minmax", metadata={"help": f"Q-values to rewards in [0, 1]: {', '.join(REWARD_SHAPES)}."}
    )
    optimal_bonus: float = field(default=0.2, metadata={"help": "Added to the reward of an optimal action."})
    cap_bonus: bool = field(default=True, metadata={"help": "Cut reward + bonus at 1, as the original did."})
    objective: str = field(
        default="grpo", metadata={"help": f"{', '.join(OBJECTIVES)}: see llm_policy/grpo/trainer.py, departure 4."}
    )
    action_entropy_coef: float = field(
        default=0.0, metadata={"help": "Objective `expected`: weight of the action distribution's entropy (nats)."}
    )
    packed: bool = field(default=True, metadata={"help": "One row per prompt and group; false: TRL's own path."})
    merged_sampling: bool = field(
        default=True,
        metadata={"help": "Decode with the adapter merged into a copy of the weights; false: slower, no copy."},
    )
    warm_start: str = field(
        default="auto", metadata={"help": "Teach the answer format first: auto (only where needed), always, never."}
    )
    warm_start_steps: int = field(default=60, metadata={"help": "At most so many steps of it."})
    warm_start_prompts: int = field(default=11, metadata={"help": "Prompts a step, each with all four actions."})
    warm_start_learning_rate: float = field(default=1e-3, metadata={"help": "Its learning rate (AdamW, constant)."})
    warm_start_threshold: float = field(
        default=0.9, metadata={"help": "Share of sampled completions in form that makes it unnecessary, or ends it."}
    )
    evaluate_steps: int = field(
        default=10, metadata={"help": "Judge the greedy policy exactly every so many steps; 0: at the end only."}
    )
    test_maps: int = field(
        default=0,
        metadata={
            "help": "Hold out so many of the CSV's maps, drawn at random, and judge on them; 0: on those trained on, "
            f"the first {MAPS_JUDGED}."
        },
    )
    test_map_seed: int = field(default=1, metadata={"help": "Of the draw of test maps."})
    balance_actions: float = field(
        default=0.0,
        metadata={
            "help": "Share of the states that are drawn so that each action is the best one equally often; the others "
            "are drawn alike. Drawn once, as many as the run reads, so that some states may never come. 0: each state "
            "in turn."
        },
    )
    check: str = field(
        default="stop",
        metadata={
            "help": "Data and prompts before the first step. stop: an error ends the run; warn: say it and go on; "
            "only: say it and end."
        },
    )
    samples_per_state: int = field(
        default=8, metadata={"help": "Completions per state for the sampled distribution in the last table."}
    )
    episodes: int = field(default=1000, metadata={"help": "Simulated episodes beside the exact figures."})
    stop_when: str = field(default="never", metadata={"help": f"End early: {', '.join(STOP_CONDITIONS)}."})

    def __post_init__(self) -> None:
        choices = {
            "observation": OBSERVATIONS,
            "reward_shape": tuple(REWARD_SHAPES),
            "warm_start": WARM_STARTS,
            "stop_when": STOP_CONDITIONS,
            "check": CHECKS,
        }
        check_choices(self, choices)
        if self.stop_when in ("optimal", "either") and self.evaluate_steps == 0:
            raise InputError(f"--stop_when {self.stop_when}: needs --evaluate_steps of at least 1 to see the optimum")
        if not 0 < self.warm_start_threshold <= 1:
            raise InputError(f"--warm_start_threshold {self.warm_start_threshold:g}: expected a share, above 0 up to 1")
        if not 0 <= self.balance_actions <= 1:
            raise InputError(f"--balance_actions {self.balance_actions:g}: expected a share, from 0 to 1")
        if not self.warm_start_learning_rate > 0:
            raise InputError(f"--warm_start_learning_rate {self.warm_start_learning_rate:g}: expected a number above 0")
        least = {
            "warm_start_steps": 1,
            "warm_start_prompts": 1,
            "episodes": 1,
            "evaluate_steps": 0,
            "test_maps": 0,
            "test_map_seed": 0,
            "samples_per_state": 0,
        }
        check_at_least(self, least)


# Arguments -------------------------------------------------------------------------------------------------------


def default_config() -> Path:
    return ROOT / "configs" / ("gemma_2b_it.yaml" if torch.cuda.is_available() else "laptop.yaml")


def parse_arguments(argv: Sequence[str]) -> tuple[ScriptArguments, GRPOConfig, ModelConfig, str]:
    """Command line and YAML -> the three argument groups and the config's path. One-line `InputError`s."""
    groups, config = parse_config(argv, (ScriptArguments, GRPOConfig, ModelConfig), default_config())
    return *groups, config


def check_arguments(training: GRPOConfig, model: ModelConfig, trains: bool) -> None:
    """Conditions that TRL leaves to a crash in the first step, or does not check."""
    check_choices(training, TRL_CHOICES)
    counts = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "max_completion_length")
    check_at_least(training, {"seed": 0} | dict.fromkeys(counts, 1))
    if not training.temperature > 0:
        raise InputError(f"--temperature {training.temperature:g}: expected a number above 0")
    if training.eval_strategy != "no":
        kind = training.eval_strategy.value
        raise InputError(f"--eval_strategy {kind}: evaluation is this script's, --evaluate_steps")
    for name, reason in REFUSED.items():
        if getattr(training, name):
            raise InputError(f"--{name}: {reason}")
    if training.use_vllm and not is_vllm_available():
        raise InputError("--use_vllm true: needs the package vllm (pip install vllm), or leave it out")
    if trains and (training.n_gpu > 1 or training.world_size > 1):
        raise InputError(
            f"{max(training.n_gpu, training.world_size)} GPUs or processes: a run takes one; set CUDA_VISIBLE_DEVICES "
            "to one GPU, and give each seed a process of its own (train_script.sh does)"
        )
    if model.attn_implementation not in ATTENTION:
        raise InputError(
            f"--attn_implementation {model.attn_implementation}: rows of several completions need a mask of their own; "
            "expected eager or sdpa"
        )
    if not model.use_peft:
        raise InputError("--use_peft false: what is trained and saved here is a LoRA adapter; set use_peft to true")
    for name in UNJOINABLE:
        if getattr(model, name):
            raise InputError(
                f"--{name} {getattr(model, name)}: warm start and GRPO are joined into one adapter in the end, which "
                "only plain LoRA on linear layers can be; leave it out"
            )
    if training.reward_weights is not None and len(training.reward_weights) != len(REWARDS):
        raise InputError(f"--reward_weights {training.reward_weights}: expected one for each of {', '.join(REWARDS)}")
    if training.max_steps == 0 or (training.max_steps < 0 and training.num_train_epochs <= 0):
        raise InputError("--max_steps: expected at least 1")
    if training.save_total_limit == 1:
        raise InputError(
            "--save_total_limit 1: expected at least 2, for a kill while one is written must leave another"
        )
    steps_per_batch = training.steps_per_generation * training.num_iterations / training.gradient_accumulation_steps
    if steps_per_batch > 1 and steps_per_batch % 1:
        raise InputError(
            f"--steps_per_generation {training.steps_per_generation}: {steps_per_batch:g} optimiser steps on one batch "
            "of completions; expected a whole number (steps_per_generation x num_iterations / "
            "gradient_accumulation_steps)"
        )
    if training.save_strategy == "steps" and training.save_steps % max(1, steps_per_batch):
        raise InputError(
            f"--save_steps {training.save_steps:g}: expected a multiple of {steps_per_batch:g}, optimiser steps "
            "on one batch of completions (steps_per_generation x num_iterations / gradient_accumulation_steps), "
            "for completions are not saved"
        )


# Run folder ------------------------------------------------------------------------------------------------------


def check_output_dir(output_dir: Path, resume: str | None) -> None:
    """`InputError` for a file, and for a folder with a run in it that is not to be gone on with."""
    if output_dir.exists() and not output_dir.is_dir():
        raise InputError(f"--output_dir {output_dir}: is a file; name a folder")
    if resume is None and ((output_dir / CONFIG_FILE).exists() or any(output_dir.glob("checkpoint-*"))):
        raise InputError(
            f"--output_dir {output_dir}: holds another run; choose another folder, delete it, "
            "or go on with --resume_from_checkpoint auto"
        )


def checkpoint_to_go_on_from(output_dir: Path, resume: str | None) -> Path | None:
    """What `resume` names, or the latest complete one; None: from the beginning."""
    if resume is None:
        return None
    if resume != "auto":
        checkpoint = Path(resume)
        if not all((checkpoint / name).exists() for name in (COMPLETE_MARK, TRAINER_STATE_NAME)):
            raise InputError(f"--resume_from_checkpoint {resume}: no complete checkpoint there; try auto")
        checkpoint = checkpoint.resolve()
        if checkpoint.parent != output_dir.resolve():
            raise InputError(f"--resume_from_checkpoint {resume}: is of another run than --output_dir {output_dir}")
        if not checkpoint.name.removeprefix("checkpoint-").isdecimal():
            raise InputError(f"--resume_from_checkpoint {resume}: expected a folder checkpoint-STEPS; try auto")
        return checkpoint
    remove_incomplete(output_dir)
    return latest_checkpoint(output_dir)


def has_ended(checkpoint: Path, training: GRPOConfig, stop_when: str) -> bool:
    """Whether a run had taken its last step, or had stopped by `stop_when`, when it wrote `checkpoint`."""
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    diagnostics = state.stateful_callbacks.get(PolicyDiagnostics.__name__, {"attributes": {}})
    if training.max_steps > 0:
        is_last = state.global_step >= training.max_steps
    else:
        is_last = state.global_step >= state.max_steps and state.num_train_epochs >= training.num_train_epochs
    kept = diagnostics["attributes"]
    has_stopped = kept.get("has_stopped", False) and kept.get("stop_when", stop_when) == stop_when
    return is_last or has_stopped


class StopOnSignal(TrainerCallback):
    """SIGTERM or SIGUSR1: finish the step, write a checkpoint, leave. Outside of the steps leave at once."""

    def __init__(self, steps_per_batch: int) -> None:
        self.received: str | None = None
        self.at_once = False  # what is under way is begun again by a resumed run
        self.steps_per_batch = steps_per_batch  # completions are not saved: a checkpoint waits for their last use
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number, _frame) -> None:
        self.received = signal.Signals(number).name
        if self.at_once:
            print(f"{self.received}: leaving the evaluation; --resume_from_checkpoint auto begins it again", flush=True)
            raise SystemExit(EXIT_INTERRUPTED)
        print(f"{self.received}: finishing the step, then a checkpoint", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if self.received and state.global_step % self.steps_per_batch == 0:
            control.should_save = True
            control.should_training_stop = True


@contextmanager
def disk_errors() -> Iterator[None]:
    """One line for a disk that refuses, whatever was being written; torch and safetensors wrap it in their errors."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not any(words in str(error) for words in DISK_WORDS):
            raise
        raise InputError(f"the disk refuses ({error}); free space, then --resume_from_checkpoint auto") from error


# The job ---------------------------------------------------------------------------------------------------------


def held_out(table: pd.DataFrame, script: ScriptArguments) -> tuple[pd.DataFrame, list[Grid]]:
    """Rows to train on and the maps of the final table: `test_maps` of the CSV's, their rows left out, or its first."""
    grids = list(dict.fromkeys(table["grid"]))
    if not script.test_maps:
        return table, grids[:MAPS_JUDGED]
    if script.test_maps >= len(grids):
        raise InputError(
            f"--test_maps {script.test_maps}: {script.expert_csv} has {len(grids)} maps, and one must be left to "
            "train on; name fewer or make a CSV with more (python -m llm_policy.environments.expert_q --random_maps)"
        )
    tested = random.Random(script.test_map_seed).sample(grids, script.test_maps)
    return table[~table["grid"].isin(tested)].reset_index(drop=True), tested


def check_data(
    table, prompts: list[Messages], grids: list[Grid], script: ScriptArguments, scale: AdvantageReward, tokenizer,
    context_tokens: int, max_completion_tokens: int,
) -> bool:  # fmt: skip
    """Print what the linter finds; False where it found an error. `InputError` for one under `--check stop`."""
    findings = lint(
        table, prompts, tokenizer, script.is_slippery, scale, context_tokens, max_completion_tokens,
        evaluation_grids=grids if script.test_maps else (),
    )  # fmt: skip
    errors = [finding for finding in findings if finding.is_error]
    for finding in findings:
        if script.check != "stop" or not finding.is_error:
            print(f"{script.expert_csv}: {finding}", flush=True)
    if errors and script.check == "stop":
        raise InputError(
            f"{script.expert_csv}: {errors[0].rule}: {errors[0].message} (--check warn goes on all the same)"
        )
    return not errors


def balancing_weights(q_values_PA: np.ndarray) -> np.ndarray:
    """Weights (P,) that sum to 1: in draws with them each action is the best one equally often.

    With three states where LEFT is best and one where UP is: 1/6, 1/6, 1/6, 1/2. A state with several best actions
    weighs their mean, one where all are best (the goal out of reach) nothing, for it teaches nothing.
    """
    best_PA = optimal_actions(q_values_PA, OPTIMAL_TOLERANCE)
    share_PA = best_PA / best_PA.sum(axis=1, keepdims=True)
    if not best_PA.all():
        share_PA[best_PA.all(axis=1)] = 0.0
    how_often_A = np.maximum(share_PA.sum(axis=0), np.finfo(float).tiny)  # 0: an action that is best nowhere
    weights_P = (share_PA / how_often_A).sum(axis=1)
    return weights_P / weights_P.sum()


def build_dataset(table, prompts: list[Messages], training: GRPOConfig, balanced_share: float = 0.0) -> Dataset:
    """One row a state: `prompt` (messages), `q_values`, `state`, `map`. Repeated where a batch needs more rows.

    With a `balanced_share` above 0 as many rows are drawn, that share of them with `balancing_weights`.
    """
    rows = [
        {
            "prompt": messages,
            "q_values": record["q_values"],
            "state": record["state"],
            "map": "|".join(record["grid"]),
        }
        for record, messages in zip(table.to_dict("records"), prompts, strict=True)
    ]
    needed = training.generation_batch_size // training.num_generations
    if balanced_share:
        balanced_P = balancing_weights(np.array(table["q_values"].tolist()))
        weights_P = balanced_share * balanced_P + (1 - balanced_share) / len(rows)
        draws = max(len(rows), needed * training.max_steps)  # in a short table each state often enough
        drawn = np.random.default_rng(training.seed).choice(len(rows), size=draws, p=weights_P)
        rows = [rows[row] for row in drawn]
    if len(rows) < needed:
        print(f"{len(rows)} states for {needed} prompts a batch: states are repeated")
        rows = [rows[i % len(rows)] for i in range(needed)]
    return Dataset.from_list(rows)


def model_to_train(training: GRPOConfig, model_config: ModelConfig) -> tuple[PreTrainedModel, LoraConfig, list[Path]]:
    """The model, the LoRA that is to be trained on it, and the adapter folders that are merged into the model.

    There is one such folder where `--model_name_or_path` is an adapter, else none.
    """
    quantization = get_quantization_config(model_config)
    on_gpu = training.device.type == "cuda"
    model = load_model(
        model_config.model_name_or_path,
        dtype=model_config.dtype or "bfloat16",
        attn_implementation=model_config.attn_implementation,
        quantization_config=quantization,
        device_map={"": training.device.index or 0} if quantization is not None and on_gpu else None,
        revision=model_config.model_revision,
    )
    adapters, revision = [], model_config.model_revision
    if isinstance(model, PeftModel):
        revision = model.peft_config["default"].revision or "main"
        adapters = [Path(model_config.model_name_or_path).expanduser()]
        check_joinable(adapters[0], model.peft_config["default"])
        model = model.merge_and_unload()
    if quantization is None:
        model.to(training.device)
    lora = get_peft_config(model_config)
    lora.revision = None if revision == "main" else revision  # saved with the adapter, for whoever loads its base
    try:
        model = get_peft_model(model, lora).unload()  # a mistake in the names shows before anything is written
    except ValueError as error:
        raise InputError(f"--lora_target_modules {model_config.lora_target_modules}: {error}") from error
    return model, lora, adapters


def untrained_policies(
    model: PreTrainedModel, reader: PolicyReader, grids: list[Grid], file: Path
) -> tuple[dict, dict]:
    """As `model_policies`; kept in `file`, so that a resumed run shows the same row."""
    if not file.exists():
        print("judging the untrained model")
        tables, validities = model_policies(model, reader, grids, "untrained", 0)
        write_whole(file, json.dumps([{k: [t.tolist() for t in v] for k, v in tables.items()}, validities]))
    tables, validities = json.loads(file.read_text())
    return {name: [np.array(table) for table in rows] for name, rows in tables.items()}, validities


def format_taught(
    model: PreTrainedModel, lora: LoraConfig, tokenizer, reader: PolicyReader, table, script: ScriptArguments,
    training: GRPOConfig, stop: StopOnSignal, has_begun: bool,
) -> tuple[PreTrainedModel, dict]:  # fmt: skip
    """Teach the answer format where `--warm_start` asks for it, and merge it into the model.

    GRPO then trains a fresh adapter on top: going on with the warm start's own made the first steps five times as
    large and the policy state-blind for ten of them (LOG.md). Returns the model and what the warm start reported; an
    interrupted run finds both in its folder.
    """
    folder = Path(training.output_dir) / WARM_START_FOLDER
    report_file = folder / "report.json"
    if report_file.exists():
        print("warm start: taken from the interrupted run")
        report = json.loads(report_file.read_text())
    else:
        cells = list(zip(table["grid"], table["state"], strict=True))
        if script.warm_start == "always" and has_begun:
            raise InputError(f"{folder}: is gone, and the checkpoints stand on it; choose another --output_dir")
        if script.warm_start == "never" or has_begun:  # steps without a warm start: none was needed
            return model, {"steps": 0}
        if script.warm_start == "auto":
            validity = sampled_format_validity(model, reader, cells)
            needed = script.warm_start_threshold
            print(f"warm start: {validity:.0%} of sampled completions are in form ({needed:.0%} needed)")
            if validity >= needed:
                return model, {"steps": 0, "format_validity": validity}
        student = get_peft_model(model, lora)
        report = teach_format(
            student,
            tokenizer,
            reader,
            cells,
            max_steps=script.warm_start_steps,
            prompts_per_step=script.warm_start_prompts,
            learning_rate=script.warm_start_learning_rate,
            threshold=script.warm_start_threshold,
            seed=training.seed,
            should_stop=lambda: stop.received is not None,
        )
        if stop.received:
            return model, report
        student.save_pretrained(folder)
        write_whole(report_file, json.dumps(report) + "\n")
        model = student.unload()
    return PeftModel.from_pretrained(model, folder).merge_and_unload(), report


def policy_trainer(
    model: PeftModel, dataset: Dataset, reader: PolicyReader, scale: AdvantageReward, script: ScriptArguments,
    training: GRPOConfig,
) -> tuple[PolicyTrainer, dict[str, float]]:  # fmt: skip
    """The trainer with its rewards; what the best constant, the uniform and the optimal policy earn, for the chart."""
    functions = reward_functions(scale)
    if training.reward_weights is None:
        training.reward_weights = [1.0] + [0.0] * (len(functions) - 1)  # the components are logged, the mean is learnt

    def action_rewards(rows: list[dict]) -> np.ndarray:
        return well_formed_rewards([row["q_values"] for row in rows], scale, training.reward_weights)

    rewards_PA = action_rewards(dataset.select_columns("q_values").to_list())
    constant_action = int(rewards_PA.mean(axis=0).argmax())
    lines = {
        f"reward/always {ACTIONS[constant_action]}": float(rewards_PA[:, constant_action].mean()),
        "reward/uniform policy": float(rewards_PA.mean()),
        "reward/optimal policy": float(rewards_PA.max(axis=1).mean()),
    }
    trainer = PolicyTrainer(
        model,
        functions,
        training,
        train_dataset=dataset,
        processing_class=reader.tokenizer,
        objective=script.objective,
        packed=script.packed,
        merged_sampling=script.merged_sampling,
        action_names=ACTIONS,
        action_rewards=action_rewards,
        action_entropy_coef=script.action_entropy_coef,
        guesses=lambda rows: [reader.guess(tuple(row["map"].split("|")), row["state"]) for row in rows],
    )
    return trainer, lines


def saved_policy(trainer: PolicyTrainer, adapters: Sequence[Path], model_config: ModelConfig) -> PreTrainedModel:
    """What was trained, saved as one adapter on the plain base model, and loaded from there.

    Judged is what a user loads: PEFT loads an adapter in float32, in memory it has the model's dtype.
    """
    output_dir = Path(trainer.args.output_dir)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    trained.save_pretrained(output_dir / GRPO_FOLDER, selected_adapters=["default"])
    trainer.forget_merged_weights()  # a GPU has to hold the model once more, to be judged
    loading = {"dtype": model_config.dtype or "bfloat16", "attn_implementation": model_config.attn_implementation}
    lora = trained.peft_config["default"]
    base = load_model(lora.base_model_name_or_path, revision=lora.revision or "main", **loading)  # no warm start in it
    join_adapters(base, [*adapters, output_dir / GRPO_FOLDER]).save_pretrained(output_dir)
    trainer.processing_class.save_pretrained(output_dir)
    return load_model(output_dir, **loading).to(trainer.args.device)


@disk_errors()
def main(argv: Sequence[str] | None = None) -> int:
    script, training, model_config, config = parse_arguments(sys.argv[1:] if argv is None else argv)
    hardware = "CUDA" if training.device.type == "cuda" else "CPU"
    print(f"{hardware}: {config} with {model_config.model_name_or_path}, seed {training.seed}", flush=True)
    trains = script.check != "only"
    check_objective(script.objective, script.packed, training)
    check_arguments(training, model_config, trains)
    if script.objective == "grpo" and script.action_entropy_coef:
        print("--action_entropy_coef is of --objective expected and does nothing here; TRL's bonus is --entropy_coef")
    output_dir = Path(training.output_dir)
    is_finished = training.resume_from_checkpoint == "auto" and (output_dir / EVALUATION_FILE).exists()
    if trains and training.resume_from_checkpoint:
        may_differ = SHOWN_OTHERWISE if is_finished else (*SHOWN_OTHERWISE, *LENGTH)
        check_same_run(output_dir, (script, training, model_config), may_differ)
    if trains and is_finished:
        print(f"{output_dir} holds a finished run:\n{(output_dir / 'result.txt').read_text()}", end="")
        return 0
    if trains:
        check_output_dir(output_dir, training.resume_from_checkpoint)
    with only_process_in(output_dir) if trains else nullcontext():
        return train(script, training, model_config, config)


def train(script: ScriptArguments, training: GRPOConfig, model_config: ModelConfig, config: str) -> int:
    """Data, model, warm start, GRPO, evaluation, in `training.output_dir`; the exit code. `--check only`: the data."""
    trains, output_dir = script.check != "only", Path(training.output_dir)
    resume = checkpoint_to_go_on_from(output_dir, training.resume_from_checkpoint) if trains else None
    table = read_expert_csv(script.expert_csv)
    print(f"{script.expert_csv}: {table['count'].sum()} rows, {len(table)} states, {table['grid'].nunique()} maps")
    table, grids = held_out(table, script)
    if script.test_maps:
        print(f"{script.test_maps} maps held out, {len(table)} states to train on")

    steps_per_batch = training.steps_per_generation * training.num_iterations // training.gradient_accumulation_steps
    stop = StopOnSignal(max(1, steps_per_batch))
    set_seed(training.seed)
    tokenizer = load_tokenizer(model_config.model_name_or_path, revision=model_config.model_revision)
    model, lora, adapters = model_to_train(training, model_config)
    context_tokens = model.config.get_text_config().max_position_embeddings
    scale = AdvantageReward(script.reward_shape, script.optimal_bonus, script.cap_bonus)
    prompts = [
        fit_to_template(policy_messages(grid, state, script.is_slippery, script.observation), tokenizer)
        for grid, state in zip(table["grid"], table["state"], strict=True)
    ]
    limits = (context_tokens, training.max_completion_length)
    is_clean = check_data(table, prompts, grids, script, scale, tokenizer, *limits)
    if not trains:
        print("no errors" if is_clean else "errors: see above")
        return 0 if is_clean else EXIT_INPUT_ERROR
    dataset = build_dataset(table, prompts, training, script.balance_actions)
    reader = PolicyReader(tokenizer, script.is_slippery, script.observation, training.max_completion_length)
    settings = {
        "maps": ["|".join(grid) for grid in grids],
        "is_slippery": script.is_slippery,
        "observation": script.observation,
        "max_completion_length": training.max_completion_length,
        "dtype": model_config.dtype or "bfloat16",
        "on_adapter": bool(adapters),
    }
    if stop.received:
        print(f"{stop.received} before the first step: --resume_from_checkpoint auto begins again")
        return EXIT_INTERRUPTED
    if resume and training.resume_from_checkpoint != "auto":
        supersede(resume)
        (output_dir / EVALUATION_FILE).unlink(missing_ok=True)
    groups, go_on = (script, training, model_config), "--resume_from_checkpoint auto"
    on_gpu = training.device.type == "cuda"
    write_run_files(output_dir, groups, config, training.seed, settings, go_on, on_gpu)

    stop.at_once = True
    tables, validities = untrained_policies(model, reader, grids, output_dir / "untrained.json")
    stop.at_once = False

    model, warm_start = format_taught(model, lora, tokenizer, reader, table, script, training, stop, resume is not None)
    if stop.received:
        print(f"{stop.received} during the warm start: --resume_from_checkpoint auto begins it again")
        return EXIT_INTERRUPTED
    set_seed(training.seed)  # the same first adapter, whether the warm start was now or before a kill
    model = get_peft_model(model, lora)
    if warm_start["steps"]:
        adapters.append(output_dir / WARM_START_FOLDER)

    trainer, reward_lines = policy_trainer(model, dataset, reader, scale, script, training)
    first_cell, last_cell = [(table["grid"][row], table["state"][row]) for row in (0, len(table) - 1)]
    examples = [tokenizer.encode(format_example(*first_cell, a), add_special_tokens=False) for a in range(len(ACTIONS))]
    model.eval()  # under LoRA's dropout no two passes agree
    trainer.check_against_stock([reader.prompt(*first_cell), reader.prompt(*last_cell)], examples)
    diagnostics = PolicyDiagnostics(
        trainer, reader, grids[:MAPS_JUDGED], script.evaluate_steps, script.stop_when, reward_lines
    )
    for unwanted in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(unwanted)
    metrics = MetricsFile(output_dir / "metrics.jsonl")
    for callback in (diagnostics, stop, metrics):
        trainer.add_callback(callback)
    # Killed after the last step: the trainer would take one more
    if resume and has_ended(resume, training, script.stop_when):
        model.load_adapter(str(resume), adapter_name="default", is_trainable=True)
        trainer.state = TrainerState.load_from_json(str(resume / TRAINER_STATE_NAME))
        diagnostics.restore(trainer.state)
        metrics.cut_back(trainer.state)
    else:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    step = trainer.state.global_step
    is_saved = (output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}" / COMPLETE_MARK).exists()
    if stop.received and is_saved:
        print(f"{stop.received}: checkpoint of step {step} written; --resume_from_checkpoint auto goes on")
        return EXIT_INTERRUPTED

    stop.at_once = is_saved
    trained = saved_policy(trainer, adapters, model_config)
    set_seed(training.seed)  # the same samples, resumed or not
    trained_tables, trained_validities = model_policies(trained, reader, grids, "trained", script.samples_per_state)
    tables |= trained_tables
    if script.test_maps:
        tables["shortest path"] = [shortest_path_policy(grid) for grid in grids]
    evaluated = evaluate_policies(
        tables,
        grids,
        script.is_slippery,
        validities=validities | trained_validities,
        episodes=script.episodes,
        seed=training.seed,
    )
    summary = print_table(evaluated, f"{len(grids)} map(s), {'slippery' if script.is_slippery else 'not slippery'}")
    steps = f"warm start {warm_start['steps']} steps, GRPO {trainer.state.global_step}"
    trained_row = next(row for row in evaluated if row.name == "trained, greedy")  # of the adapter that was saved
    in_words = policy_verdict(trained_row.tables, grids, trained_row.scores)
    verdict = f"verdict: {diagnostics.with_collapse(in_words, trainer.state.global_step)} ({steps})"
    print(verdict)
    print(f"saved {output_dir}: adapter, {RUN_FILE}, {CONFIG_FILE}, metrics.jsonl, {EVALUATION_FILE}, policy.png")
    write_whole(output_dir / "result.txt", f"{summary}{verdict}\n")
    save_evaluation(evaluated, grids, script.is_slippery, output_dir)
    return 0


if __name__ == "__main__":
    run_script(main)
