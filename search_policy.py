"""ProPS: a language model proposes policies in context, beside searches without a model. No training.

    python search_policy.py                                               # embedded model: 4 to 5 minutes
    python search_policy.py --env_id CartPole-v1 --describe_environment true                      # ProPS+
    python search_policy.py --proposer hill_climbing --iterations 400                # no model: 4 seconds
    python search_policy.py --proposer endpoint --base_url http://127.0.0.1:8000/v1 --model_name MODEL
    python search_policy.py --config configs/props_frozen_lake.yaml                 # the paper's settings
    python search_policy.py --proposer recorded --answers runs/OTHER/answers.jsonl     # without the model

The same command resumes after a kill, or shows the result. An endpoint's key comes only from OPENAI_API_KEY.
Departures from the paper: llm_policy/policy_search/search.py.
"""

from llm_policy.startup import announce

announce(__name__)

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from llm_policy.checkpoints import check_finished, finish
from llm_policy.command_line import option_name, parse_arguments, take_config
from llm_policy.environments.gym_env import GymEnvironment, folder_name, read_env_options
from llm_policy.errors import EXIT_INTERRUPTED, InputError, check_alone, check_choices, run_script, writing
from llm_policy.hardware import device_text, take_granted_threads
from llm_policy.models import model_checksum
from llm_policy.number_format import begun_with, faster_format
from llm_policy.plots import curves_figure
from llm_policy.policy_search.answer_log import AnswerLog, read_log
from llm_policy.policy_search.judge import (
    SearchComparison,
    SearchJudge,
    ceiling_text,
    compare,
    comparison_table,
    published_of,
    published_text,
    verdict_of,
)
from llm_policy.policy_search.parameters import SearchProblem, search_problem
from llm_policy.policy_search.progress import cost_of, cost_text, progress_line
from llm_policy.policy_search.prompts import environment_description
from llm_policy.policy_search.proposers import (
    MODEL_OWNERS,
    NAMES_WITHOUT_MODEL,
    HillClimbingProposer,
    ProposerSettings,
    RandomProposer,
    make_proposer,
)
from llm_policy.policy_search.search import SearchSettings, Step, search, told_optimum
from llm_policy.reading import read_text
from llm_policy.run_files import (
    CONFIG_FILE,
    EVALUATION_FILE,
    RESULT_FILE,
    RUN_FILE,
    check_made_from,
    check_output_dir,
    check_same_run,
    finished_text,
    only_process_in,
    write_run_files,
    write_whole,
)
from llm_policy.tables import counted, number_text, show

LOG_FILE, CURVE_FILE = "answers.jsonl", "curve.png"
FINISHED = (CONFIG_FILE, RUN_FILE, LOG_FILE, RESULT_FILE, EVALUATION_FILE)
LARGEST_DESCRIPTION = 1_000_000  # bytes
RESUMES = ("auto", "never")
# What may differ when a run is resumed: where things are, and how patiently an endpoint is asked.
FREE_TO_CHANGE = {"output_dir", "resume", "base_url", "endpoint_retries", "endpoint_timeout_seconds"}
BEFORE_AN_ANSWER = {"model_name", "max_completion_tokens", "temperature"}  # an endpoint may refuse the first question


@dataclass
class ScriptArguments:
    """The environment, the judgement and the files."""

    env_id: str = field(default="FrozenLake-v1", metadata={"help": "A Gymnasium environment."})
    # A YAML file may hold a mapping; with None among the types, the parser takes text
    env_options: dict | str | None = field(
        default="{}", metadata={"help": 'JSON for gymnasium.make: {"is_slippery": false}.'}
    )
    horizon_steps: int | None = field(
        default=None, metadata={"help": "Step limit. Default: the environment's, else 100."}
    )
    description_file: str | None = field(
        default=None, metadata={"help": "ProPS+: a text for an environment that has no description here."}
    )
    baselines: bool = field(default=True, metadata={"help": "Also random search and hill climbing, same budget."})
    judge_episodes: int = field(
        default=100, metadata={"help": "Fresh episodes per policy that cannot be judged exactly."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "Default: runs/search/ENV_ID-PROPOSER."})
    resume: str = field(default="auto", metadata={"help": "auto: resume the run in the folder; never: refuse it."})

    def __post_init__(self) -> None:
        self.env_options, self.options = read_env_options(self.env_options)
        check_choices(self, {"resume": RESUMES})


Arguments = tuple[ScriptArguments, ProposerSettings, SearchSettings]


def read_arguments(argv: Sequence[str] | None) -> tuple[Arguments, str]:
    """Command line and YAML file -> the groups of arguments, and the file's path. One-line `InputError`s."""
    groups = ScriptArguments, ProposerSettings, SearchSettings
    (script, proposing, settings), config = parse_arguments(argv, groups, description=__doc__)
    words, _ = take_config(sys.argv[1:] if argv is None else list(argv), None)
    named = {option_name(word) for word in words if word.startswith("--")}
    for option, owners in MODEL_OWNERS.items():
        if option in named and proposing.proposer not in owners:
            whose = " or ".join(owners)
            raise InputError(f"--{option}: is for --proposer {whose}, and this is --proposer {proposing.proposer}")
    for option in ("history_best", "history_recent"):
        if option in named and settings.history == "whole":
            raise InputError(f"--{option}: is for --history best_and_recent, and this is --history whole")
    if script.description_file is not None and not settings.describe_environment:
        raise InputError(f"--description_file {script.description_file}: needs --describe_environment true (ProPS+)")
    if script.output_dir is None:
        script.output_dir = f"runs/search/{folder_name(script.env_id)}-{proposing.proposer}"
    if proposing.proposer == "local" and proposing.dtype == "auto":
        proposing.dtype = begun_with(Path(script.output_dir)) or faster_format(torch.cuda.is_available())[0]
    return (script, proposing, settings), config


def is_finished(folder: Path, arguments: Arguments) -> bool:
    """Whether the folder holds a finished run of these arguments. `InputError` for another run or --resume never."""
    check_output_dir(folder, resumes=True)
    if arguments[0].resume == "never" and (folder / CONFIG_FILE).exists():
        raise InputError(f"--output_dir {folder}: holds a run; choose another folder, delete it, or take --resume auto")
    records = read_log(folder / LOG_FILE) if (folder / LOG_FILE).exists() else []  # a damaged one is refused here
    is_answered = any(record["kind"] == "answer" for record in records)
    if is_answered and not (folder / RUN_FILE).exists():
        raise InputError(
            f"{folder / RUN_FILE}: is gone, and it says which model gave the answers in {LOG_FILE}; put it back, or "
            "choose another --output_dir"
        )
    check_same_run(folder, arguments, FREE_TO_CHANGE if is_answered else FREE_TO_CHANGE | BEFORE_AN_ANSWER)
    return (folder / EVALUATION_FILE).exists() and (folder / RESULT_FILE).exists()


# Stages ------------------------------------------------------------------------------------------------------------


def description_of(environment: GymEnvironment, script: ScriptArguments, settings: SearchSettings) -> str | None:
    """What ProPS+ tells of the environment; None for ProPS."""
    if not settings.describe_environment:
        return None
    if script.description_file is None:
        return environment_description(environment)
    try:
        return read_text(script.description_file, most=LARGEST_DESCRIPTION).strip()
    except (OSError, ValueError) as error:
        raise InputError(f"--description_file {script.description_file}: cannot be read ({error})") from error


def write_settings(folder: Path, arguments: Arguments, config: str, environment: GymEnvironment) -> None:
    """`resolved_config.yaml` and `run.json`, with the versions of the packages that this search uses.

    `InputError` where the folder holds answers of another model under the same name.
    """
    _, proposing, settings = arguments
    is_local = proposing.proposer == "local"
    made_from = {"model": model_checksum(proposing.model_name_or_path)} if is_local else {}
    check_made_from(folder, made_from)
    packages = ["torch", "transformers", "gymnasium", "numpy"]
    packages += ["openai"] if proposing.proposer == "endpoint" else []
    packages += ["mujoco"] if find_spec("mujoco") else []
    run = {
        "env_id": environment.env_id,
        "horizon_steps": environment.horizon_steps,
        "made_from": made_from,
        "versions": {name: version(name) for name in packages},
    }
    device = device_text(is_local and torch.cuda.is_available())
    write_run_files(folder, arguments, config or "defaults", settings.seed, run, device)


def search_without_model(problem: SearchProblem, settings: SearchSettings, known: str) -> dict[str, list[Step]]:
    """Random search and hill climbing with the same settings, by name; not the one that is `known` already."""
    searches = {}
    for key, proposer in {"random": RandomProposer, "hill_climbing": HillClimbingProposer}.items():
        name = NAMES_WITHOUT_MODEL[key]
        if name != known:
            print(f"{name}, {counted(settings.iterations, 'iteration')}", flush=True)
            searches[name] = search(problem, proposer(problem.space, settings.seed), settings)[1]
    return searches


def closing_lines(
    problem: SearchProblem, compared: SearchComparison, whole_budgets: dict[str, float], cost: dict
) -> list[str]:
    """What stands below the table; the verdict is the last line.

    Args:
        whole_budgets: search without a model -> the value that it reached with the episodes of all iterations.
    """
    searched = compared.searched
    lines = ceiling_text(problem.environment)
    if cost["failed_iterations"] and whole_budgets:
        reached = ", ".join(f"{name} {number_text(value)}" for name, value in whole_budgets.items())
        lines.append(f"With the episodes of the failed iterations as well: {reached}.")
    if searched.parameters is not None:
        lines.append(f"best policy: {problem.space.text(searched.parameters)}")
    verdict = verdict_of(searched, compared.others)
    if cost["failed_iterations"] == cost["iterations"] and searched.judgement is not None:
        verdict = f"verdict: {searched.policy} gave no usable answer; its policy is the best of the warm-up"
    elif has_only_warm_up(*compared.curves.get(searched.policy, ((), ()))):
        lines.append("No proposal was better than the best random policy of the warm-up.")
    return [*lines, *published_text(problem.environment), cost_text(cost), verdict]


def has_only_warm_up(iterations: Sequence[int], values: Sequence[float]) -> bool:
    """Whether no iteration came to more than the warm-up (0), by the values of the best policy after each."""
    return 0 in iterations and len({*values}) == 1


def save(folder: Path, text: str, evaluation: dict, compared: SearchComparison, title: str) -> None:
    """`curve.png`, `result.txt` and, as the mark of a finished run, `evaluation.json`."""
    figure = curves_figure(
        {name: [curve] for name, curve in compared.curves.items()},
        {row.policy: row.judgement.value for row in compared.references if row.judgement},
        "iteration (0: after the warm-up)",
        f"{'exact' if evaluation['is_exact'] else 'judged'} return of the best policy so far",
        title,
    )

    def write_evaluation(folder: Path) -> None:
        write_whole(folder / EVALUATION_FILE, json.dumps(evaluation, indent=1) + "\n")

    with writing(f"--output_dir {folder}", "once it can, the same command resumes the run"):
        figure.savefig(folder / CURVE_FILE, dpi=120)
        finish(folder, text, write_evaluation, FINISHED)


# The job -----------------------------------------------------------------------------------------------------------


def run_search(folder: Path, arguments: Arguments, config: str) -> None:
    script, proposing, settings = arguments
    began = time.perf_counter()

    # The environment, and the policies that may be proposed for it
    problem = search_problem(script.env_id, script.options, script.horizon_steps)
    environment, space = problem.environment, problem.space
    kind = "a table of actions" if space.is_tabular else "W s + b"
    limit = f"at most {counted(environment.horizon_steps, 'step')} per episode"
    print(f"{environment.env_id}: {space.count} parameters ({kind}), {limit}", flush=True)

    # Who proposes, and what it is told
    optimum = told_optimum(environment, settings)
    description = description_of(environment, script, settings)
    if proposing.proposer == "local":
        if threads := take_granted_threads():
            print(threads)
        print(f"loading {proposing.model_name_or_path} in {proposing.dtype}", flush=True)
    proposer = make_proposer(problem, proposing, settings, optimum, description)
    method = "ProPS+" if settings.describe_environment else "ProPS"
    name = proposing.name(method)

    # The run's files: settings, and the answers of an earlier call
    log = AnswerLog(folder / LOG_FILE)
    write_settings(folder, arguments, config, environment)
    if log.answers:
        print(f"{log.path}: {counted(len(log.answers), 'earlier answer')}, not asked again", flush=True)

    # The search
    def print_progress(step: Step) -> None:
        if line := progress_line(step, settings, log):
            print(line, flush=True)

    _, steps = search(
        problem, proposer, settings, optimum=optimum, description=description, log=log, on_step=print_progress
    )

    # Searches without a model, with the same budget
    searches = {name: steps} | (search_without_model(problem, settings, name) if script.baselines else {})

    # Judgement
    is_exact = environment.mdp is not None
    judged_by = "exactly" if is_exact else f"by {script.judge_episodes} fresh episodes"
    print(f"judging the policies {judged_by}", flush=True)
    judge = SearchJudge(problem, script.judge_episodes, settings.seed)
    compared = compare(searches, name, judge)
    cost = cost_of(log, steps, settings, time.perf_counter() - began)
    whole_budgets = {n: judge(s[-1].best).value for n, s in searches.items() if n != name and s[-1].best is not None}
    title = f"{environment.env_id} {script.env_options if script.options else ''}".strip() + f", seed {settings.seed}"
    text = show(
        comparison_table(compared.rows, environment, f"{title}, judged {judged_by}"),
        *closing_lines(problem, compared, whole_budgets, cost),
    )

    # Files
    evaluation = {
        "env_id": environment.env_id,
        "env_options": script.options,
        "horizon_steps": environment.horizon_steps,
        "is_exact": is_exact,
        "judge_episodes": None if is_exact else script.judge_episodes,
        "method": None if proposing.proposer in NAMES_WITHOUT_MODEL else method,
        "searched": name,
        "seed": settings.seed,
        "policies": [row.as_dict() for row in compared.rows],
        "curves": {n: {"iteration": x, "value": y} for n, (x, y) in compared.curves.items()},
        "cost": cost,
        "published": published_of(environment),
    }
    save(folder, text, evaluation, compared, title)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, config = read_arguments(argv)
    check_alone()
    folder = Path(str(arguments[0].output_dir))
    if is_finished(folder, arguments):
        check_finished(folder)
        print(finished_text(folder), end="")
        return 0
    try:
        with only_process_in(folder):
            run_search(folder, arguments, config)
    except KeyboardInterrupt:
        log, resumes = folder / LOG_FILE, "the same command resumes the run"
        print(
            f"interrupted; {log} holds the answers so far, and {resumes}" if log.exists() else f"interrupted; {resumes}"
        )
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    run_script(main)
