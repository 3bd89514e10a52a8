"""A task -> prompts -> warm start -> GRPO -> LoRA adapter -> judgement.

    python train_script.py                                         # configuration by hardware, says which
    python train_script.py --config configs/gemma_2b_it.yaml       # one GPU
    python train_script.py --task taxi --expert_csv runs/taxi.csv  # another task; `--task taxi --help`
    python train_script.py --check only                            # what is wrong with data and prompts, no training
    python train_script.py --resume_from_checkpoint auto           # resume after a kill
    sbatch train_script.sh                                         # cluster

Options of TRL's GRPOConfig and ModelConfig work here, or are refused in one line. SIGTERM or SIGUSR1 ends a run after a
checkpoint, with exit code 75. Departures from TRL: llm_policy/grpo/trainer.py.
"""

from llm_policy.startup import announce

announce(__name__)

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, set_seed
from trl import GRPOConfig, ModelConfig

from llm_policy import adapters, processes, run_files
from llm_policy.chat import Reader, reply_token_ids
from llm_policy.checkpoints import checkpoint_to_resume_from, is_finished, supersede
from llm_policy.command_line import asks_for_help, parse_arguments, read_option, take_config
from llm_policy.errors import EXIT_INPUT_ERROR, OPTION_ERRORS, InputError, disk_errors, library_errors, run_script
from llm_policy.grpo import arguments as rules
from llm_policy.grpo import lifecycle, stages
from llm_policy.grpo.diagnostics import MetricsFile, PolicyDiagnostics, steps_per_batch
from llm_policy.grpo.expected import SUPERVISED
from llm_policy.grpo.trainer import PolicyTrainer
from llm_policy.hardware import take_granted_threads
from llm_policy.interruption import RESUME
from llm_policy.models import context_tokens, load_tokenizer
from llm_policy.number_format import is_unset, number_format
from tasks import Task, task_module

CONFIGS = {  # task: on a GPU, without one
    "frozen_lake": ("gemma_2b_it", "laptop"),
    "riddles": ("riddles_llama_8b", "riddles_laptop"),
    "piqa": ("piqa_llama_8b", "piqa_laptop"),
}


@dataclass(frozen=True)
class Options:
    """Everything that was asked for."""

    script: rules.ScriptArguments
    task: object  # the task's own `Arguments`
    training: GRPOConfig
    model: ModelConfig
    config: str  # path of the YAML file
    note: str = ""  # on the number format

    @property
    def groups(self) -> tuple:
        return self.script, self.task, self.training, self.model

    @property
    def output_dir(self) -> Path:
        return Path(self.training.output_dir)

    @property
    def trains(self) -> bool:
        return self.script.check != "only"


def default_config(task: str) -> Path | None:
    """The task's configuration, by hardware where it has one for each; None where it has none."""
    for_gpu, for_cpu = CONFIGS.get(task, (task, task))
    path = run_files.ROOT / "configs" / f"{for_gpu if torch.cuda.is_available() else for_cpu}.yaml"
    return path if path.exists() else None


def read_options(argv: Sequence[str] | None) -> Options:
    """Command line and YAML file -> options; one-line `InputError`s."""
    argv = sys.argv[1:] if argv is None else list(argv)
    task = read_option(argv, "task", "frozen_lake")
    if not hasattr(module := task_module(task), "make_task"):
        raise InputError(f"--task {task}: is judged and not trained; `python evaluate_policy.py --task {task}` judges")
    config = default_config(task)
    is_configured = take_config(argv, config)[1] or read_option(argv, "model_name_or_path", "")
    if not is_configured and not asks_for_help(argv):
        raise InputError(f"--task {task}: has no configs/{task}.yaml; name a configuration with --config")
    groups = (rules.ScriptArguments, module.Arguments, GRPOConfig, ModelConfig)
    lacks_gpu = not torch.cuda.is_available() and is_unset(read_option(argv, "use_cpu", "", config, bare="true"))
    argv += ["--use_cpu", "true"] * lacks_gpu  # for --check only, which a login node can do as well
    chosen, note = number_format(argv, config)
    parsed, path = parse_arguments([*argv, *chosen], groups, description=__doc__, default_config=config)
    options = Options(*parsed, path, note)
    if lacks_gpu and options.trains:
        raise InputError("--use_cpu false: CUDA finds no GPU here; --use_cpu true trains on the CPU")
    return options


@processes.one_of_several(f"{RESUME} resumes from the last checkpoint")
@disk_errors(f"free space, then {RESUME}")
def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(argv)
    script, training, output_dir = options.script, options.training, options.output_dir
    on_gpu = training.device.type == "cuda"
    hardware, threads = ("CUDA", "") if on_gpu else ("CPU", take_granted_threads())
    config = options.config or "no configuration"
    together = f", {processes.count()} processes" if processes.count() > 1 else ""
    print(f"{hardware}: {config} with {options.model.model_name_or_path}, seed {training.seed}{together}", flush=True)
    for note in filter(None, (options.note, threads)):
        print(note, flush=True)
    if training.use_cpu and torch.cuda.is_available():
        print(f"{options.config} says use_cpu: true; --use_cpu false takes the GPU")
    rules.check_arguments(script, training, options.model)
    without_effect = {
        "action_entropy_coef": ("grpo", "cloning"),
        "form_coef": ("grpo",),
        "thought_coef": ("grpo",),
        "action_baseline": ("grpo", *SUPERVISED),
    }
    for name, without in without_effect.items():
        if script.objective in without and getattr(script, name):
            has_own_bonus = (name, script.objective) == ("action_entropy_coef", "grpo")
            hint = "; TRL's bonus is --entropy_coef" if has_own_bonus else ""
            print(f"--{name} is for the other objectives and has no effect under --objective {script.objective}{hint}")
    if not options.trains:
        return train(options)

    if processes.count() > 1:
        asked = {f"--{name}": value for name, value in run_files.resolved_config(*options.groups).items()}
        processes.check_agreement(asked | run_files.source_facts())
    if processes.from_main(lambda: has_ended(options)):
        return 0
    with run_files.only_process_in(output_dir) if processes.is_main() else nullcontext():
        return train(options)


def has_ended(options: Options) -> bool:
    """Whether the run has ended already, and its result is printed; `InputError` where its folder is not to be used."""
    output_dir, resume, may_differ = options.output_dir, options.training.resume_from_checkpoint, rules.SHOWN_OTHERWISE
    if resume and run_files.processes_before(output_dir) not in (None, processes.count()):
        may_differ = (*may_differ, *rules.BATCH)
    return is_finished(output_dir, options.groups, resume, may_differ, rules.LENGTH)


def train(options: Options) -> int:
    """The whole job in `--output_dir`; with `--check only` no further than the check. Returns the exit code."""
    script, training, output_dir = options.script, options.training, options.output_dir
    resume = None
    if options.trains:
        resume = processes.from_main(lambda: checkpoint_to_resume_from(output_dir, training.resume_from_checkpoint))
        lifecycle.check_length("max_steps", training.max_steps, resume)
        lifecycle.check_epochs(training, resume)
        if processes.is_main():
            say_what_differs(output_dir, training)
    stop = lifecycle.StopOnSignal(steps_per_batch(training))

    # What is learnt, and how it is judged
    tokenizer = load_tokenizer(options.model.model_name_or_path, revision=options.model.model_revision)
    task = task_module(script.task).make_task(options.task, training, tokenizer)
    rules.check_task(script, training, task)

    # The model, and the adapters that are in it already
    set_seed(training.seed)
    device = torch.device("cpu") if processes.in_pieces() else training.device
    model, lora, folders = adapters.model_to_train(options.model, device)

    # Data and prompts, before a step is paid for
    is_clean = check_data(task, options, context_tokens(model))
    if not options.trains:
        print("no errors" if is_clean else "errors: see above")
        return 0 if is_clean else EXIT_INPUT_ERROR

    # A resumed run goes on with what it was begun with
    reader = Reader(tokenizer, training.max_completion_length)
    job = stages.Job(task, script, options.model, reader, training.seed, output_dir)
    processes.check_agreement(job.made_from)

    # From here on the run has files
    stop.leave_if_received(f"before the first step: {RESUME} begins again")
    if processes.is_main():
        run_files.check_made_from(output_dir, job.made_from)
        if resume and training.resume_from_checkpoint != "auto":
            supersede(resume)
        if resume:
            stages.unfinish(resume, task.logs)
        settings = job.judge_settings(script.task, folders)
        job.write_run_files(options.groups, options.config, settings, training.device)
    if resume:
        processes.wait_for_files(resume)

    # The untrained model, and the warm start: the form of an answer, and what it comes to alone
    begun = job.beginning(model, lora, folders, stop, has_begun=resume is not None)

    # GRPO on a fresh adapter
    set_seed(training.seed)  # the same first adapter, whether the warm start was now or before a kill
    model = adapters.fresh(begun.model, lora)
    trainer, reward_lines = policy_trainer(model, tokenizer, options, job)
    compare_with_stock(trainer, task, reader)
    judge = task.judge_between or task.judge
    diagnostics = PolicyDiagnostics(
        trainer, lambda model: judge.judgement(judge.answers(model)), script.evaluate_steps, script.stop_when,
        reward_lines,
        lambda model: judge.judgement(judge.answers(model, 1)), task.full_reward,
    )  # fmt: skip
    metrics = MetricsFile(output_dir / run_files.METRICS_FILE, task.shown, script.stop_when != "never")
    judges = [] if processes.in_pieces() else [diagnostics]
    for callback in (*judges, stop, metrics, lifecycle.StopAtNonFinite()):
        trainer.add_callback(callback)
    with library_errors("the trainer needs another package", (ImportError,)):
        lifecycle.train_or_restore(trainer, diagnostics, metrics, resume)
    steps, is_saved = trainer.state.global_step, lifecycle.last_step_is_saved(trainer)
    if is_saved:
        stop.leave_if_received(f"checkpoint of step {steps} written; {RESUME} resumes from it")

    # What was saved, judged beside the baselines
    stop.at_once = is_saved
    print("saving the adapter", flush=True)
    stages.save_policy(job, trainer, begun.folders)
    if processes.in_pieces():
        print(f"saved {output_dir}; where the whole model fits: python evaluate_policy.py --policies {output_dir}")
        return 0
    answers_of = begun.answers | job.judged_again(training.device, script.samples_per_state)
    comparison = task.judge.compare(answers_of)
    in_words = diagnostics.with_collapse(task.judge.judgement(answers_of["trained, greedy"]), steps)
    if processes.is_main():
        warm_start = f"warm start {begun.warm_start_steps} steps"
        stages.finish(output_dir, comparison, f"verdict: {in_words} ({warm_start}, GRPO {steps})")
    return 0


# The stages --------------------------------------------------------------------------------------------------------


def check_data(task: Task, options: Options, context_tokens: int) -> bool:
    """Print what the linter finds; False where it found an error. `InputError` for one under `--check stop`."""
    check = options.script.check
    findings = task.lint(context_tokens) if task.lint else []
    errors = [finding for finding in findings if finding.is_error]
    for finding in findings:
        if check != "stop" or not finding.is_error:
            print(f"{finding.source}: {finding}", flush=True)
    if errors and check == "stop":
        raise InputError(
            f"{errors[0].source}: {errors[0].rule}: {errors[0].message} (--check warn continues all the same)"
        )
    return not errors


def say_what_differs(output_dir: Path, training: GRPOConfig) -> None:
    """A line where a run goes on in another number of processes than before."""
    before = run_files.processes_before(output_dir)
    if before not in (None, processes.count()):
        print(
            f"{before} processes before, now {processes.count()}: other random numbers; "
            f"{training.generation_batch_size} completions are sampled at a time",
            flush=True,
        )


def policy_trainer(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, options: Options, job: stages.Job
) -> tuple[PolicyTrainer, dict[str, float]]:
    """The trainer with the task's rewards; what policies that do not read the prompt would earn, for the chart."""
    script, training, task = options.script, options.training, job.task
    if training.reward_weights is None:  # the first is learnt, the others are logged
        training.reward_weights = [1.0] + [0.0] * (len(task.reward_functions) - 1)
    weights = training.reward_weights
    # Every process uses its whole adapter in every step; of a model with eyes, that of the text alone
    training.ddp_find_unused_parameters = hasattr(model.config, "vision_config")
    with library_errors("the trainer refuses these options", OPTION_ERRORS):
        trainer = PolicyTrainer(
            model,
            list(task.reward_functions),
            training,
            train_dataset=Dataset.from_list(enough_rows(task.rows, training)),
            processing_class=tokenizer,
            objective=script.objective,
            packed=script.packed,
            merged_sampling=script.merged_sampling,
            actions=task.actions,
            action_rewards=task.action_rewards and (lambda rows: task.action_rewards(rows, weights)),
            action_entropy_coef=script.action_entropy_coef,
            form_coef=script.form_coef,
            thought_coef=script.thought_coef,
            action_baseline=script.action_baseline,
            stands_on=job.stands_on,
            guesses=task.guess and (lambda rows: [reply_token_ids(task.guess(row), tokenizer) for row in rows]),
        )
    for unwanted in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(unwanted)
    return trainer, task.reward_lines(weights) if task.reward_lines else {}


def enough_rows(rows: list[dict], training: GRPOConfig) -> list[dict]:
    """The rows, repeated where a step needs more: an epoch's end would end the step."""
    passes = training.steps_per_generation * training.num_iterations
    batches = max(1, training.gradient_accumulation_steps // passes)
    needed = batches * training.generation_batch_size // training.num_generations
    if len(rows) >= needed:
        return rows
    print(f"{len(rows)} rows for {needed} prompts per step: rows are repeated")
    return [rows[i % len(rows)] for i in range(needed)]


def compare_with_stock(trainer: PolicyTrainer, task: Task, reader: Reader) -> None:
    """`InputError` where the packed pass does not score the first and the last prompt as TRL's own pass does."""
    if not trainer.packed:
        return
    print("comparing the packed pass with TRL's", flush=True)
    prompts = [task.rows[0]["prompt"], task.rows[-1]["prompt"]]
    replies = ["<think>.</think><answer>.</answer>"]
    if task.lessons:
        prompts, replies = [task.lessons[0][0], task.lessons[-1][0]], task.lessons[0][1]
    trainer.model.eval()  # under LoRA's dropout no two passes agree
    trainer.check_against_stock(
        [reader.prompt(prompt) for prompt in prompts],
        [reader.tokenizer.encode(reply, add_special_tokens=False) for reply in replies],
    )


if __name__ == "__main__":
    run_script(main)
