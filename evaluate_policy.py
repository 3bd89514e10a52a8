"""Adapter, model or baseline -> policy -> exact score beside the optimum, a table, JSON and a picture.

    python evaluate_policy.py --policies runs/laptop                    # a run's adapter, on the run's own map or maps
    python evaluate_policy.py --policies random constant:LEFT expert q-learning shortest-path
    python evaluate_policy.py --policies google/gemma-2b-it --map 8x8 --samples_per_state 16
    python evaluate_policy.py --task taxi --policies random expert
    python evaluate_policy.py --policies runs/laptop runs/policy_gradient/FrozenLake-v1-ppo-mlp
    python evaluate_policy.py --policies runs/riddles                   # held-out questions
    python evaluate_policy.py --task arc --policies google/gemma-2b-it runs/riddles    # science questions, lm-eval

Optimum, uniform random and the best constant action always stand in the table. Success probabilities are exact
(dynamic programming over the policy table); simulated episodes stand beside them as a check, with their 95 % interval.
"""

from llm_policy.startup import announce

announce(__name__)

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType

from transformers import set_seed

from llm_policy.adapters import check_whole, quantization_of
from llm_policy.chat import Reader, check_prompt
from llm_policy.checkpoints import check_finished
from llm_policy.command_line import parse_arguments
from llm_policy.environments.judge import BASELINES, THOUGHTS_FILE, is_baseline
from llm_policy.errors import InputError, check_alone, packages_of, run_script
from llm_policy.hardware import take_granted_threads, this_device
from llm_policy.interruption import RESUME
from llm_policy.models import base_of_adapter, context_tokens, load_model, load_tokenizer, model_checksum
from llm_policy.number_format import cost_of, faster_format
from llm_policy.policy_gradient.arguments import EXTRA
from llm_policy.run_files import (
    CONFIG_FILE,
    EVALUATION_FILE,
    PICTURE_FILE,
    check_made_from,
    check_output_dir,
    only_process_in,
    run_settings,
)
from tasks import TASKS, Comparison, Judge, task_module

# Stand above what run.json says
OVERRIDES = ("map", "is_slippery", "observation", "thought", "horizon_steps", "test_dataset")
# Each read by some of the tasks, whose JUDGE_OPTIONS name it
CHOICES = (*OVERRIDES, "episodes", "max_completion_length")
WORDS = ("observation", "thought", "max_completion_length")  # in which a language model is asked
OF_LANGUAGE_MODELS = (*WORDS, "dtype")
OWN_FILES = (EVALUATION_FILE, PICTURE_FILE, THOUGHTS_FILE)
# What run.json says of what a run is judged on: the option that says it anew, and what it is called
SAID_BY = {"maps": ("map", "maps"), "held_out": ("test_dataset", "questions")}
# How a run held questions out, which says nothing of others: all that are named are asked, of all runs alike
OF_HELD_OUT = ("split_seed", "test_questions")


@dataclass
class EvaluationArguments:
    """What to judge, and where."""

    policies: list[str] = field(
        metadata={"help": f"Run folders, model names or paths, GGUF files, or baselines: {', '.join(BASELINES)}."}
    )
    task: str | None = field(default=None, metadata={"help": "Default: the run's, else frozen_lake."})
    map: str | None = field(default=None, metadata={"help": "Lake: 4x4, 8x8 or a text file. Default: the run's maps."})
    is_slippery: bool | None = field(default=None, metadata={"help": "Lake: slippery? Default: the run's, else true."})
    observation: str | None = field(default=None, metadata={"help": "As in training. Default: the runs'."})
    thought: str | None = field(default=None, metadata={"help": "As in training. Default: the runs'."})
    horizon_steps: int | None = field(
        default=None, metadata={"help": "Step limit. Default: the run's (PPO, TRPO), else the environment's."}
    )
    test_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Questions, all of them, of which a run may know some: samples, a .jsonl or .csv file, or hub/id. "
            "Default: what the run held out."
        },
    )
    samples_per_state: int = field(default=16, metadata={"help": "Completions per state; 0: greedy only."})
    episodes: int | None = field(
        default=None,
        metadata={"help": "Simulated episodes. Default: 1000 beside exact figures; without these, the run's."},
    )
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Tokens a completion may have. Default: the runs', else 64."}
    )
    dtype: str | None = field(
        default=None, metadata={"help": "Weights: bfloat16, float16 or float32. Default: the run's, else the faster."}
    )
    seed: int | None = field(
        default=None,
        metadata={
            "help": "Seed for sampling, simulation and Q-learning. Default: 0; without exact figures, the run's."
        },
    )
    output_dir: str | None = field(default=None, metadata={"help": "Where evaluation.json and policy.png go."})


def settings_of(name: str) -> dict:
    """What run.json says of a run, or of the run that a checkpoint belongs to; nothing where there is no run."""
    folder = Path(name)
    if settings := run_settings(folder):
        return settings
    return run_settings(folder.resolve().parent) if (folder / "adapter_config.json").exists() else {}


def task_of(settings: dict) -> str:
    """Runs from before there were tasks are the lake's."""
    return settings.get("task", "frozen_lake")


def shared_settings(runs: dict[str, dict], arguments: EvaluationArguments) -> dict:
    """Task, what is judged on and, if they agree on it, all else that the judge of the runs among the policies needs.

    `InputError` where they differ in what one table must have in common: what their task names in `JUDGED_ON`.
    """
    if arguments.task and getattr(task_module(arguments.task), "JUDGES_ANY_RUN", False):
        if others := [name for name, settings in runs.items() if "algorithm" in settings]:
            raise InputError(f"--policies {others[0]}: --task {arguments.task} judges language models; leave it out")
        return {}
    known = {name: settings for name, settings in runs.items() if settings}
    if not known:
        return {}
    for name, settings in known.items():
        if arguments.task not in (None, task_of(settings)):
            raise InputError(
                f"--task {arguments.task}: {name} belongs to the task {task_of(settings)}; leave --task out"
            )
    together = f"--policies {', '.join(known)}: these runs were judged on different"
    if len(tasks := {task_of(settings) for settings in known.values()}) > 1:
        raise InputError(f"{together} task; judge them one by one")
    shared: dict = {"task": tasks.pop()}
    module = task_module(shared["task"])
    for key in getattr(module, "JUDGED_ON", ()):
        option, called = SAID_BY.get(key, (key, key))
        if getattr(arguments, option, None) is not None:
            continue
        is_choice = hasattr(arguments, option)
        for name, settings in known.items():
            if key not in settings:
                remedy = f"give --{option}" if is_choice else "train again"
                raise InputError(f"--policies {name}: run.json names no {option}; {remedy}")
            if settings[key] != shared.setdefault(key, settings[key]):
                raise InputError(f"{together} {called}; judge them one by one" + f" or give --{option}" * is_choice)
    limits = {settings.get("horizon_steps") for settings in known.values() if "algorithm" in settings} - {None}
    if len(limits) > 1 and arguments.horizon_steps is None:
        raise InputError(
            f"--policies {', '.join(known)}: these runs were judged with different step limits, "
            f"{' and '.join(map(str, sorted(limits)))}; give --horizon_steps"
        )
    if limits:
        shared["horizon_steps"] = limits.pop()
    options = [option.name for option in fields(module.Arguments)] if hasattr(module, "Arguments") else []
    for key in {*WORDS, *options} - set(shared):  # a model without a run is asked as they are
        said = [settings.get(key) for settings in known.values() if "algorithm" not in settings]
        if said and said[0] is not None and all(value == said[0] for value in said):
            shared[key] = said[0]
    return shared


def judge_of(arguments: EvaluationArguments, settings: dict, reader: Reader | None) -> Judge:
    """The judge for what a run's settings say, with the command line's options above them."""
    task = arguments.task or settings.get("task", "frozen_lake")
    module = task_module(task)
    if not hasattr(module, "make_judge"):
        judged = ", ".join(name for name in TASKS if hasattr(task_module(name), "make_judge"))
        raise InputError(f"--task {task}: is judged by train_script.py alone; expected one of {judged}")
    if task_of(settings) != task:
        settings = {}  # another task's
    given = {name: getattr(arguments, name) for name in CHOICES if getattr(arguments, name) is not None}
    for name, value in given.items():
        if name not in getattr(module, "JUDGE_OPTIONS", ()):
            raise InputError(f"--{name} {value}: the task {task} has no such choice; leave it out")
    for replaced, (name, _) in SAID_BY.items():
        if getattr(arguments, name) is not None:
            of_run = (replaced, *(OF_HELD_OUT if name == "test_dataset" else ()))
            settings = {key: value for key, value in settings.items() if key not in of_run}
    above = {name: value for name, value in given.items() if name in OVERRIDES}
    return module.make_judge(settings | above, reader, arguments.episodes or 1000, arguments.seed or 0)


def model_answers(name: str, settings: dict, arguments: EvaluationArguments, shared: dict) -> dict[str, dict]:
    """Greedy answers of a model and, with `--samples_per_state`, its sampled ones, by the names of their rows."""
    if "algorithm" in settings:
        if arguments.map is not None and judge_of(arguments, settings, None).settings["maps"] != settings["maps"]:
            raise InputError(
                f"--map {arguments.map}: {name} knows the lake that it was trained on alone; leave --map out"
            )
        print(f"judging {name}", flush=True)
        return policy_gradient_judge().run_answers(Path(name), is_sampled=arguments.samples_per_state > 0)
    check_whole("--policies", name)
    if (Path(name) / CONFIG_FILE).exists() and not (Path(name) / "adapter_config.json").exists():
        raise InputError(f"--policies {name}: is not finished; {RESUME} resumes it")
    print(f"loading and judging {name}", flush=True)
    tokenizer = load_tokenizer(name)
    settings = settings | shared
    tokens = arguments.max_completion_length or settings.get("max_completion_length", 64)
    judge = judge_of(arguments, settings, Reader(tokenizer, tokens))
    device = this_device()
    on_gpu = device.type == "cuda"
    dtype = arguments.dtype or settings.get("dtype") or faster_format(on_gpu)[0]
    if line := cost_of(dtype, on_gpu):
        print(line, flush=True)
    quantization = quantization_of(settings | {"dtype": dtype})
    model = load_model(name, dtype, quantization_config=quantization, device=device)
    # Once it is loaded all files of the hub are there. On an adapter a run may have been made from that as well
    if (Path(name) / CONFIG_FILE).exists() and not settings.get("on_adapter"):
        check_made_from(Path(name), {"model": model_checksum(*base_of_adapter(name))}, "train again")
    check_prompt(judge.first_prompt(), tokenizer, context_tokens(model), judge.reader.max_completion_tokens)
    answers = {f"{name}, greedy": judge.answers(model)}
    if arguments.samples_per_state and getattr(judge, "draws_samples", True):
        answers[f"{name}, sampled"] = judge.answers(model, arguments.samples_per_state)
    return answers


def policy_gradient_judge() -> ModuleType:
    """Of the runs of train_policy_gradient.py; `InputError` where its packages are missing."""
    with packages_of(EXTRA):
        return importlib.import_module("llm_policy.policy_gradient.judge")


def main(argv: Sequence[str] | None = None) -> int:
    (arguments,), _ = parse_arguments(argv, (EvaluationArguments,), description=__doc__)
    check_alone()
    if arguments.output_dir is None:
        judge_policies(arguments)
        return 0
    output_dir = Path(arguments.output_dir)
    check_output_dir(output_dir, resumes=False, own=OWN_FILES)
    with only_process_in(output_dir):
        comparison = judge_policies(arguments)
        earlier = {path: path.stat().st_mtime_ns for name in OWN_FILES if (path := output_dir / name).exists()}
        comparison.save(output_dir)
        for path, written_ns in earlier.items():
            if path.stat().st_mtime_ns == written_ns:  # this judgement has no such file
                path.unlink()
        files = [name for name in OWN_FILES if (output_dir / name).exists()]
    print(f"saved {output_dir}: {', '.join(files)}")
    return 0


def episodes_beside_each_other(arguments: EvaluationArguments, runs: dict[str, dict]) -> Comparison:
    """Runs of train_policy_gradient.py in an environment that has no table of states."""
    others = [name for name in arguments.policies if "algorithm" not in runs.get(name, {})]
    if others:
        raise InputError(
            f"--policies {others[0]}: the other runs are judged by episodes, beside a random and the best constant "
            "policy; expected a run of train_policy_gradient.py in the same environment"
        )
    for option in ("task", *OVERRIDES, "dtype", "max_completion_length"):
        if getattr(arguments, option) is not None:
            raise InputError(
                f"--{option} {getattr(arguments, option)}: runs of train_policy_gradient.py are judged in the "
                "environment that they were trained in; leave it out"
            )
    if arguments.episodes == 1:
        raise InputError("--episodes 1: one episode has no interval; expected at least 2")
    asked = {"judge_episodes": arguments.episodes, "seed": arguments.seed}
    compared = policy_gradient_judge().compare_runs(
        [Path(name) for name in runs],
        is_sampled=arguments.samples_per_state > 0,
        **{option: value for option, value in asked.items() if value is not None},
    )
    return Comparison(compared.text, compared.save)


def _is_trained(settings: dict) -> bool:
    return any(name in settings for name in ("task", "algorithm", "maps"))


def judge_policies(arguments: EvaluationArguments) -> Comparison:
    """All policies beside each other, printed."""
    if threads := take_granted_threads():
        print(threads)
    if twice := [name for i, name in enumerate(arguments.policies) if name in arguments.policies[:i]]:
        raise InputError(f"--policies: {twice[0]} stands there twice; name each policy once")
    models = [name for name in arguments.policies if not is_baseline(name)]
    for name in models:
        check_finished(Path(name))
    runs = {name: settings_of(name) for name in models}
    if searches := [name for name, settings in runs.items() if "env_id" in settings and not _is_trained(settings)]:
        raise InputError(f"--policies {searches[0]}: is a run of search_policy.py; its result.txt is its judgement")
    if any(settings.get("algorithm") and "task" not in settings for settings in runs.values()):
        return episodes_beside_each_other(arguments, runs)
    shared = shared_settings(runs, arguments)
    judge = judge_of(arguments, shared, None)
    if all("algorithm" in settings for settings in runs.values()):
        for option in OF_LANGUAGE_MODELS:
            if (value := getattr(arguments, option)) is not None:
                raise InputError(f"--{option} {value}: is for language models, and there is none here; leave it out")

    # Every policy answers
    answers_of: dict[str, dict] = {}
    for name in arguments.policies:
        set_seed(arguments.seed or 0)  # its samples do not depend on who stands before it
        if is_baseline(name):
            print(f"judging {name}", flush=True)
            answers_of[name] = judge.baseline_answers(name)
        else:
            answers_of |= model_answers(name, runs[name], arguments, shared)

    # Beside each other
    return judge.compare(answers_of)


if __name__ == "__main__":
    run_script(main)
