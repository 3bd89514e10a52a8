"""ProPS: a language model proposes policies in context, no weight changes; judged exactly, beside searches without one.

    python search_policy.py --env_id FrozenLake-v1                           # embedded model, no GPU, no key
    python search_policy.py --config configs/props_frozen_lake.yaml --model_name MODEL    # the paper's settings
    python search_policy.py --env_id CartPole-v1 --describe_environment true               # ProPS+
    python search_policy.py --proposer endpoint --base_url http://127.0.0.1:8000/v1 --model_name MODEL
    python search_policy.py --proposer recorded --answers runs/OTHER/answers.jsonl         # again, without the model

The same command goes on after a kill (`answers.jsonl` holds every answer and return) and shows a finished run again. An
endpoint's key comes from OPENAI_API_KEY and from nowhere else. Where this departs from the paper: the beginning of
llm_policy/policy_search/search.py. Exit codes: 0 done, 2 the input cannot be used (one line), 75 interrupted by Ctrl-C.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from llm_policy.errors import InputError, check_at_least, check_choices, run_script
from llm_policy.environments.mdp import optimal_policy, optimal_return, policy_return
from llm_policy.models import DTYPES, EMBEDDED_MODEL, ROOT, load_model, load_tokenizer
from llm_policy.plots import curves_figure
from llm_policy.policy_search.parameters import Parameters, Task, make_task, play, roll_out
from llm_policy.policy_search.search import (
    AnswerLog,
    History,
    Proposer,
    SearchSettings,
    Step,
    longest_prompt,
    search,
    seed_of,
)
from llm_policy.policy_search.proposers import (
    PROPOSERS,
    EndpointProposer,
    HillClimbingProposer,
    LocalProposer,
    RandomProposer,
    RecordedProposer,
)
from llm_policy.run_files import (
    CONFIG_FILE,
    EVALUATION_FILE,
    EXIT_INTERRUPTED,
    parse_config,
    resolved_config,
    write_run_files,
    write_whole,
)
from llm_policy.policy_search.prompts import ANSWER_PREFIX, environment_description

LOG_FILE, RESULT_FILE, CURVE_FILE = "answers.jsonl", "result.txt", "curve.png"
RESUMES = ("auto", "never")
NAMES = {"random": "random search", "hill_climbing": "hill climbing"}
# What may differ when a run goes on: where things are, and how patiently an endpoint is asked.
FREE_TO_CHANGE = {"output_dir", "resume", "base_url", "endpoint_retries", "endpoint_timeout_seconds"}
ENDPOINT_COMPLETION_TOKENS = 1024
# What an answer may take, generous for a tokenizer with a token a digit
TOKENS_AROUND, TOKENS_OF_REASON, TOKENS_PER_INTEGER, TOKENS_PER_DECIMAL = 16, 64, 3, 7
CHARACTERS_PER_TOKEN = 2  # of an unknown tokenizer, on text that is mostly numbers: a guess on the safe side

# arXiv 2511.21928, GPT-4o, 400 iterations x 20 episodes, mean (standard deviation) of 10 runs; not run here.
PUBLISHED = {
    "FrozenLake-v1": {"ProPS": ".57 (.17)", "ProPS+": ".19 (.05)", "TRPO": ".22", "PPO": ".16"},
    "CliffWalking-v1": {"ProPS": "-100.0", "ProPS+": "-96.4"},
    "CartPole-v1": {"ProPS": "478", "ProPS+": "500", "TRPO": "465"},
    "MountainCar-v0": {"ProPS": "-126", "ProPS+": "-117"},
    "MountainCarContinuous-v0": {"ProPS": "87.2", "ProPS+": "89.2"},
    "InvertedPendulum-v5": {"ProPS": "1000", "ProPS+": "1000"},
    "Swimmer-v5": {"ProPS": "219", "ProPS+": "227", "TRPO": "53"},
    "Hopper-v5": {"ProPS": "284", "ProPS+": "356", "TRPO": "717"},
}


@dataclass
class ScriptArguments:
    """The environment, who proposes, the judgement and the files; the search itself is `SearchSettings`."""

    env_id: str = field(default="FrozenLake-v1", metadata={"help": "A Gymnasium environment."})
    env_options: str = field(
        default="{}", metadata={"help": 'JSON for gymnasium.make: {"map_name": "8x8", "is_slippery": false}.'}
    )
    horizon_steps: int | None = field(
        default=None, metadata={"help": "Step limit. Default: the environment's; 100 where it has none."}
    )
    description_file: str | None = field(
        default=None, metadata={"help": "ProPS+: text file with a description of an environment that we have none of."}
    )
    proposer: str = field(default="local", metadata={"help": f"Who proposes: {', '.join(PROPOSERS)}."})
    model_name_or_path: str = field(
        default=str(EMBEDDED_MODEL.relative_to(ROOT)), metadata={"help": "local: hub id, folder, adapter or GGUF file."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": f"local: weights, one of {', '.join(DTYPES)}."})
    answer_prefix: str = field(
        default=ANSWER_PREFIX, metadata={"help": "local: the answer's beginning, put into the model's mouth."}
    )
    constrained: bool = field(
        default=True, metadata={"help": "local: only tokens that can still become an answer in form."}
    )
    base_url: str | None = field(default=None, metadata={"help": "endpoint: its URL. Default: OpenAI's."})
    model_name: str | None = field(default=None, metadata={"help": "endpoint: the model's name there."})
    endpoint_retries: int = field(default=8, metadata={"help": "endpoint: further tries, with growing pauses."})
    endpoint_timeout_seconds: float = field(default=120.0, metadata={"help": "endpoint: wait so long for an answer."})
    context_tokens: int | None = field(
        default=None, metadata={"help": "endpoint: the model's context, to check the prompts against before the start."}
    )
    answers: str | None = field(default=None, metadata={"help": "recorded: the answers.jsonl of an earlier run."})
    max_completion_tokens: int | None = field(
        default=None, metadata={"help": "Tokens an answer may have. Default: enough for the parameters and a reason."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Of the model's answers; 0: greedy."})
    baselines: bool = field(default=True, metadata={"help": "Also random search and hill climbing, same budget."})
    judge_episodes: int = field(
        default=100, metadata={"help": "Fresh episodes per judged policy, where it cannot be judged exactly."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "Default: runs/search/ENV_ID-PROPOSER."})
    resume: str = field(default="auto", metadata={"help": "auto: go on with what the folder holds; never: refuse it."})

    def __post_init__(self) -> None:
        if isinstance(self.env_options, dict):  # as a YAML file may write it
            self.env_options = json.dumps(self.env_options)
        try:
            self.options = json.loads(self.env_options)
        except ValueError as error:
            raise InputError(f"--env_options {self.env_options!r}: is no JSON ({error})") from error
        if not isinstance(self.options, dict):
            raise InputError(
                f'--env_options {self.env_options!r}: expected a JSON object such as {{"map_name": "8x8"}}'
            )
        choices = {"proposer": PROPOSERS, "dtype": DTYPES, "resume": RESUMES}
        check_choices(self, choices)
        least = {
            "horizon_steps": 1,
            "endpoint_retries": 0,
            "context_tokens": 1,
            "max_completion_tokens": 1,
            "judge_episodes": 2,
        }
        check_at_least(self, least)
        if self.proposer == "local" and self.constrained and not self.answer_prefix:
            raise InputError("--constrained true: needs an --answer_prefix")
        if self.temperature < 0:
            raise InputError(f"--temperature {self.temperature}: expected at least 0")
        if self.endpoint_timeout_seconds <= 0:
            raise InputError(f"--endpoint_timeout_seconds {self.endpoint_timeout_seconds}: expected more than 0")
        needed = {"endpoint": "model_name", "recorded": "answers"}.get(self.proposer)
        if needed and not getattr(self, needed):
            raise InputError(f"--proposer {self.proposer}: needs --{needed}")
        if self.output_dir is None:
            self.output_dir = f"runs/search/{self.env_id.replace('/', '-')}-{self.proposer}"


def parse_arguments(argv: Sequence[str]) -> tuple[ScriptArguments, SearchSettings, str]:
    """Command line and YAML (--config) -> the two argument groups and the config's path. One-line `InputError`s."""
    groups, config = parse_config(argv, (ScriptArguments, SearchSettings))
    return *groups, config


def check_output_dir(script: ScriptArguments, settings: SearchSettings) -> bool:
    """Whether the folder holds a finished run of these settings. `InputError` for another run or --resume never."""
    folder = Path(script.output_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output_dir {folder}: is a file; name a folder")
    config = folder / CONFIG_FILE
    if not config.exists():
        return False
    if script.resume == "never":
        raise InputError(f"--output_dir {folder}: holds a run; choose another folder, delete it, or take --resume auto")
    try:
        stored = dict(yaml.safe_load(config.read_text()) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{config}: cannot be read ({error}); choose another --output_dir") from error
    given = resolved_config(script, settings)
    differing = sorted({k for k in stored | given if stored.get(k) != given.get(k)} - FREE_TO_CHANGE)
    if differing:
        raise InputError(
            f"--output_dir {folder}: holds a run with other settings ({', '.join(differing)}); "
            "choose another folder or delete it"
        )
    return (folder / EVALUATION_FILE).exists()


# Proposer ----------------------------------------------------------------------------------------------------------


def optimum_hint(task: Task, settings: SearchSettings) -> float | None:
    """What the model is told of the best return."""
    if settings.optimum_hint == "none":
        return None
    if settings.optimum_hint != "exact":
        return float(settings.optimum_hint)
    if task.mdp is None:
        raise InputError(f"--optimum_hint exact: {task.env_id} has no transition table; give none or a number")
    return float(optimal_return(task.mdp, task.horizon_steps))


def description_of(task: Task, script: ScriptArguments, settings: SearchSettings) -> str | None:
    """What ProPS+ tells of the environment."""
    if not settings.describe_environment:
        return None
    if script.description_file is None:
        return environment_description(task)
    try:
        return Path(script.description_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--description_file {script.description_file}: cannot be read ({error})") from error


def make_proposer(
    task: Task, script: ScriptArguments, settings: SearchSettings, optimum: float | None, description: str | None
) -> Proposer:
    """Whom --proposer names. `InputError` where the longest prompt and the answer exceed the model's context."""
    space = task.space
    if script.proposer == "random":
        return RandomProposer(space, settings.seed)
    if script.proposer == "hill_climbing":
        return HillClimbingProposer(space, settings.seed)
    if script.proposer == "recorded":
        return RecordedProposer(script.answers)
    tokens_per_value = TOKENS_PER_INTEGER if space.is_tabular else TOKENS_PER_DECIMAL
    answer_tokens = TOKENS_AROUND + tokens_per_value * space.count + (TOKENS_OF_REASON if settings.ask_reason else 0)
    longest_answer = f"parameters: {space.text((space.lowest,) * space.count)}\nreason: {'because ' * 20}"
    prompt = longest_prompt(task, settings, optimum, description, longest_answer)
    if script.proposer == "endpoint":
        limit = script.max_completion_tokens or max(answer_tokens, ENDPOINT_COMPLETION_TOKENS)
        characters = sum(len(message["content"]) for message in prompt)
        check_context(task, -(-characters // CHARACTERS_PER_TOKEN), limit, script.context_tokens)
        return EndpointProposer(
            script.model_name,
            script.base_url,
            limit,
            script.temperature,
            settings.seed,
            script.endpoint_retries,
            script.endpoint_timeout_seconds,
        )
    limit = script.max_completion_tokens or answer_tokens
    tokenizer = load_tokenizer(script.model_name_or_path)
    model = load_model(script.model_name_or_path, dtype=script.dtype)
    proposer = LocalProposer(
        model,
        tokenizer,
        limit,
        script.temperature,
        settings.seed,
        script.answer_prefix,
        is_one_line=not settings.ask_reason,
        space=space if script.constrained else None,
    )
    context_tokens = model.config.get_text_config().max_position_embeddings
    check_context(task, len(proposer.prompt_tokens(prompt)), limit, context_tokens)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return proposer


def check_context(task: Task, prompt_tokens: int, answer_tokens: int, context_tokens: int | None) -> None:
    if context_tokens is not None and prompt_tokens + answer_tokens > context_tokens:
        raise InputError(
            f"--env_id {task.env_id}: {task.space.count} parameters a policy make prompts of up to {prompt_tokens} "
            f"tokens; with {answer_tokens} for the answer that exceeds the model's context of {context_tokens}: take "
            "--history best_and_recent with a smaller --history_best and --history_recent, or another model"
        )


# Judgement ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """What a policy is worth.

    Attributes:
        value: expected return within the step limit; on a lake that is the probability of success. Exact, or the mean
            of fresh episodes.
        standard_error: of that mean; None where the value is exact.
        value_without_limit: exact expected return without a step limit; None where it is not known.
    """

    value: float
    standard_error: float | None = None
    value_without_limit: float | None = None


class Judge:
    """Judges a policy exactly where the environment has a transition table, else by fresh episodes."""

    def __init__(self, task: Task, episodes: int, seed: int) -> None:
        self.task, self.episodes, self.seed = task, episodes, seed_of(seed, "judge")
        self._known: dict[Parameters, Judgement] = {}

    def __call__(self, parameters: Parameters) -> Judgement:
        if parameters not in self._known:
            if self.task.mdp is not None:
                self._known[parameters] = self.of_table(self.task.space.table(parameters))
            else:
                self._known[parameters] = self._of_returns(roll_out(self.task, parameters, self.episodes, self.seed))
        return self._known[parameters]

    def of_table(self, policy_SA: np.ndarray) -> Judgement:
        limited = policy_return(self.task.mdp, policy_SA, horizon_steps=self.task.horizon_steps)
        return Judgement(float(limited), None, float(policy_return(self.task.mdp, policy_SA)))

    def of_uniform_random(self) -> Judgement:
        if self.task.mdp is not None:
            return self.of_table(np.full(self.task.mdp.rewards_SA.shape, 1.0 / self.task.space.outputs))
        actions = self.task.env.action_space
        actions.seed(self.seed)
        return self._of_returns(play(self.task, lambda _: actions.sample(), self.episodes, self.seed))

    def _of_returns(self, returns: Sequence[float]) -> Judgement:
        return Judgement(float(np.mean(returns)), float(np.std(returns, ddof=1) / len(returns) ** 0.5))


@dataclass(frozen=True)
class Row:
    """A line of the last table."""

    policy: str
    judgement: Judgement | None
    parameters: Parameters | None = None
    search_mean: float | None = None  # as the search itself saw it: the best of many, so too high
    episodes: int | None = None

    def as_dict(self, task: Task) -> dict:
        judged = self.judgement or Judgement(float("nan"))
        unlimited = judged.value_without_limit
        return {
            "policy": self.policy,
            "value": None if self.judgement is None else judged.value,
            "standard_error": judged.standard_error,
            # JSON knows no -inf (a cliff walker that never arrives)
            "value_without_limit": unlimited if unlimited is None or np.isfinite(unlimited) else str(unlimited),
            "parameters": None if self.parameters is None else list(self.parameters),
            "search_mean": self.search_mean,
            "episodes": self.episodes,
        }


def row_of(name: str, steps: Sequence[Step], judge: Judge, episodes: int | None = None) -> Row:
    """A search's incumbent, at its end or when it had spent `episodes` episodes."""
    spent = [step for step in steps if step.best is not None and (episodes is None or step.episodes <= episodes)]
    if not spent:
        return Row(name, None, episodes=0)
    last = spent[-1]
    return Row(name, judge(last.best), last.best, last.best_mean, last.episodes)


def reference_rows(task: Task, judge: Judge) -> list[Row]:
    """The optimum where it can be computed, and the uniformly random policy."""
    rows = [Row("uniform random policy", judge.of_uniform_random())]
    if task.mdp is not None:
        rows.insert(0, Row("optimal", judge.of_table(optimal_policy(task.mdp))))
    return rows


def print_table(rows: Sequence[Row], task: Task, title: str) -> str:
    """Print the comparison; returns what was printed."""
    is_exact = task.mdp is not None
    what = "success" if task.env_id.startswith("FrozenLake") else "return"
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    columns = [f"{what} in {task.horizon_steps} steps", f"{what}, no limit"]
    for column in (*columns[: 2 if is_exact else 1], "as searched", "episodes"):
        table.add_column(column, justify="right")
    for row in rows:
        values = ["none" if row.judgement is None else _number(row.judgement.value, row.judgement.standard_error)]
        if is_exact:
            values.append("" if row.judgement is None else _number(row.judgement.value_without_limit))
        seen = "" if row.search_mean is None else _number(row.search_mean)
        table.add_row(row.policy, *values, seen, "" if row.episodes is None else str(row.episodes))
    console = Console(width=120, record=True)
    console.print(table)
    return console.export_text()


def _number(value: float | None, standard_error: float | None = None) -> str:
    if value is None:
        return ""
    shown = f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"
    return shown if standard_error is None else f"{shown} +- {standard_error:.2g}"


def verdict_of(searched: Row, others: Sequence[Row]) -> str:
    """Whether the search beats each search without a model; sampled values have to differ by two standard errors."""
    if searched.judgement is None:
        return f"verdict: {searched.policy} found no policy at all"
    sentences = []
    for other in others:
        difference = searched.judgement.value - (other.judgement.value if other.judgement else -np.inf)
        errors = [j.standard_error or 0.0 for j in (searched.judgement, other.judgement) if j]
        margin = 2 * float(np.hypot(*errors)) if len(errors) == 2 else 0.0
        if abs(difference) <= max(margin, 1e-9):
            sentences.append(f"cannot be told from {other.policy}" if margin else f"equals {other.policy}")
        else:
            sentences.append(f"{'beats' if difference > 0 else 'does not beat'} {other.policy}")
    return f"verdict: {searched.policy} {', '.join(sentences) or 'was compared with no other search'} (one seed)"


def published_text(env_id: str) -> list[str]:
    if env_id not in PUBLISHED:
        return []
    figures = ", ".join(f"{name} {value}" for name, value in PUBLISHED[env_id].items())
    return [f"published, not run here (arXiv 2511.21928, GPT-4o, 400 iterations x 20 episodes): {figures}"]


# The job -----------------------------------------------------------------------------------------------------------


def progress_printer(settings: SearchSettings, log: AnswerLog):
    """A line per iteration; one for the whole warm-up."""

    def print_step(step: Step) -> None:
        if step.iteration < 0:
            return
        if step.iteration == 0:
            print(f"warm-up: {settings.warm_up} random policies, best mean return {step.best_mean:.4g}", flush=True)
            return
        attempts = [r for a in range(settings.retries + 1) if (r := log.answer(step.iteration, a)) is not None]
        cost = f"{len(attempts)} calls, {sum(r['tokens_out'] for r in attempts)} tokens out, "
        cost += f"{sum(r['seconds'] for r in attempts):.1f} s"
        if step.returns is None:
            outcome = f"failed, {step.error}"
        else:
            outcome = f"return {np.mean(step.returns):.4g}{' (repeated policy)' if step.is_repeat else ''}"
        print(
            f"iteration {step.iteration}/{settings.iterations}: {outcome}; best {step.best_mean:.4g}; {cost}",
            flush=True,
        )

    return print_step


def cost_of(log: AnswerLog, history: History, steps: Sequence[Step], settings: SearchSettings, seconds: float) -> dict:
    """What the answers cost, those from before a kill included; `seconds` is this call's whole time."""
    answers = log.answers
    return {
        "calls": len(answers),
        "tokens_in": sum(record["tokens_in"] for record in answers),
        "tokens_out": sum(record["tokens_out"] for record in answers),
        "answer_seconds": round(sum(record["seconds"] for record in answers), 1),
        "seconds": round(seconds, 1),
        "episodes": history.episodes,
        "unusable_answers": sum(record["error"] is not None for record in answers),
        "failed_iterations": sum(step.returns is None for step in steps),
        "repeated_policies": sum(step.is_repeat for step in steps if step.iteration > 0),
        "iterations": settings.iterations,
    }


def cost_text(cost: Mapping) -> str:
    return (
        "cost: {calls} calls, {tokens_in} tokens in, {tokens_out} out, {answer_seconds} s of answers, {seconds} s "
        "in all; {unusable_answers} answers could not be used, {failed_iterations} of {iterations} iterations failed, "
        "{repeated_policies} repeated a policy"
    ).format(**cost)


def packages_used(script: ScriptArguments) -> dict[str, str]:
    names = ["torch", "transformers", "gymnasium", "numpy"]
    names += ["openai"] if script.proposer == "endpoint" else []
    names += ["mujoco"] if find_spec("mujoco") else []
    return {name: version(name) for name in names}


def run_search(script: ScriptArguments, settings: SearchSettings, config: str) -> None:
    began = time.perf_counter()
    task = make_task(script.env_id, script.options, script.horizon_steps)
    optimum = optimum_hint(task, settings)
    description = description_of(task, script, settings)
    proposer = make_proposer(task, script, settings, optimum, description)
    folder = Path(script.output_dir)
    log = AnswerLog(folder / LOG_FILE)
    run_settings = {"env_id": task.env_id, "horizon_steps": task.horizon_steps, "versions": packages_used(script)}
    on_gpu = script.proposer == "local" and torch.cuda.is_available()
    write_run_files(folder, (script, settings), config or "defaults", settings.seed, run_settings, on_gpu=on_gpu)
    kind = "a table of actions" if task.space.is_tabular else "W s + b"
    limit = f"at most {task.horizon_steps} steps an episode"
    print(f"{task.env_id}: {task.space.count} parameters ({kind}), {limit}", flush=True)
    if log.answers:
        print(f"{log.path}: {len(log.answers)} answers from before are taken and not asked again", flush=True)

    method = "ProPS+" if settings.describe_environment else "ProPS"
    models = {"local": script.model_name_or_path, "endpoint": script.model_name or ""}
    name = NAMES.get(script.proposer) or f"{method}, {Path(models.get(script.proposer, script.proposer)).name}"
    history, steps = search(
        task,
        proposer,
        settings,
        optimum=optimum,
        description=description,
        log=log,
        on_step=progress_printer(settings, log),
    )
    searches = {name: steps}
    if script.baselines:
        baselines = {"random": RandomProposer, "hill_climbing": HillClimbingProposer}
        for key, baseline in baselines.items():
            if NAMES[key] not in searches:
                searches[NAMES[key]] = search(task, baseline(task.space, settings.seed), settings)[1]

    judge = Judge(task, script.judge_episodes, settings.seed)
    searched = row_of(name, steps, judge)
    others = [row_of(n, s, judge, history.episodes) for n, s in searches.items() if n != name]
    references = reference_rows(task, judge)
    rows = [*references, *others, searched]
    title = f"{task.env_id} {script.env_options if script.options else ''}".strip()
    judged_by = "exactly" if task.mdp is not None else f"by {judge.episodes} fresh episodes"
    text = print_table(rows, task, f"{title}, seed {settings.seed}, judged {judged_by}")
    cost = cost_of(log, history, steps, settings, time.perf_counter() - began)
    lines = []
    if task.mdp is not None:
        ceiling = float(optimal_return(task.mdp, task.horizon_steps))
        lines.append(
            f"The best policy that may count its steps reaches {_number(ceiling)} in {task.horizon_steps} steps."
        )
    elif (threshold := task.env.spec.reward_threshold) is not None:
        lines.append(f"Gymnasium calls the task solved at a return of {threshold:g}.")
    if cost["failed_iterations"] and others:
        whole = [f"{n} {_number(row_of(n, s, judge).judgement.value)}" for n, s in searches.items() if n != name]
        lines.append(f"With the episodes of the failed iterations as well: {', '.join(whole)}.")
    if searched.parameters is not None:
        lines.append(f"best policy: {task.space.text(searched.parameters)}")
    verdict = verdict_of(searched, others)
    if cost["failed_iterations"] == settings.iterations:
        verdict = f"verdict: {name} gave no usable answer; its policy is the best of the warm-up"
    lines += [*published_text(task.env_id), cost_text(cost), verdict]
    print("\n".join(lines))

    curves = {}
    for n, s in searches.items():
        known = [step for step in s if step.iteration >= 0 and step.best is not None]
        curves[n] = [step.iteration for step in known], [judge(step.best).value for step in known]
    figure = curves_figure(
        {n: [curve] for n, curve in curves.items()},
        {row.policy: row.judgement.value for row in references},
        "iteration (0: after the warm-up)",
        f"{'exact' if task.mdp is not None else 'judged'} return of the best policy so far",
    )
    evaluation = {
        "env_id": task.env_id,
        "env_options": script.options,
        "horizon_steps": task.horizon_steps,
        "is_exact": task.mdp is not None,
        "judge_episodes": None if task.mdp is not None else script.judge_episodes,
        "method": method,
        "searched": name,
        "seed": settings.seed,
        "policies": [row.as_dict(task) for row in rows],
        "curves": {n: {"iteration": x, "value": y} for n, (x, y) in curves.items()},
        "cost": cost,
        "published": PUBLISHED.get(task.env_id, {}),
    }
    try:
        figure.savefig(folder / CURVE_FILE, dpi=120)
        (folder / RESULT_FILE).write_text(text + "\n".join(lines) + "\n")
        write_whole(
            folder / EVALUATION_FILE, json.dumps(evaluation, indent=1) + "\n"
        )  # last: the mark of a finished run
    except OSError as error:
        raise InputError(f"--output_dir {folder}: cannot be written ({error}); the same command goes on") from error
    print(f"saved {folder}: {LOG_FILE}, {EVALUATION_FILE}, {CURVE_FILE}, {RESULT_FILE}, {CONFIG_FILE}, run.json")


def main(argv: Sequence[str] | None = None) -> int:
    script, settings, config = parse_arguments(sys.argv[1:] if argv is None else argv)
    if check_output_dir(script, settings):
        print(
            f"{script.output_dir} holds a finished run:\n{(Path(script.output_dir) / RESULT_FILE).read_text()}", end=""
        )
        return 0
    try:
        run_search(script, settings, config)
    except KeyboardInterrupt:
        print(f"interrupted; {script.output_dir}/{LOG_FILE} holds what was answered, the same command goes on")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    run_script(main)
