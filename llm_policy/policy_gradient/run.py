"""One run: environment, actor and algorithm -> training -> judgement -> files. What train_policy_gradient.py does."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from stable_baselines3.common.utils import set_random_seed

from llm_policy import run_files
from llm_policy.checkpoints import checkpoint_to_resume_from, finish
from llm_policy.command_line import relative
from llm_policy.environments.table_environment import TableEnvironment
from llm_policy.errors import writing
from llm_policy.hardware import device_text, take_granted_threads
from llm_policy.interruption import RESUME
from llm_policy.models import model_checksum
from llm_policy.plots import curves_figure
from llm_policy.policy_gradient import judge
from llm_policy.policy_gradient.arguments import FREE_TO_CHANGE, PolicyGradientArguments
from llm_policy.policy_gradient.judge import GREEDY, SAMPLED, UNTRAINED
from llm_policy.policy_gradient.learner import POLICY_FILE, STATISTICS_FILE, Learner, make_learner, save_policy
from llm_policy.policy_gradient.progress import BLOCK, Progress, block_means

CURVE_FILE, UNTRAINED_FILE = "curve.png", "untrained.json"
FINISHED = (*run_files.OF_EACH_RUN, POLICY_FILE, STATISTICS_FILE)


def train(folder: Path, arguments: PolicyGradientArguments, config: str) -> None:
    # The environment, the actor and the algorithm
    if threads := take_granted_threads(useful=None if arguments.reads_text else 1):
        print(threads)
    learner = make_learner(arguments)
    print(about(learner, arguments, config), flush=True)
    resume = checkpoint_to_resume_from(folder, arguments.resume_from_checkpoint)
    table = judge.table_of(learner.environment)
    made_from = {"model": model_checksum(arguments.model_name_or_path)} if arguments.reads_text else {}
    run_files.check_made_from(folder, made_from)

    # The policy before training; an environment that fails has done so before there is a run
    answers_of = {UNTRAINED: kept_answers(folder / UNTRAINED_FILE, learner, arguments, table)}
    write_settings(folder, arguments, config, learner, table, made_from)

    # Training
    set_random_seed(arguments.seed)
    progress = Progress(learner, folder, arguments, resume, stands_on=[folder / UNTRAINED_FILE])
    if progress.steps_left:
        learner.algorithm.learn(progress.steps_left, progress, log_interval=None, reset_num_timesteps=False)

    # What came of it, beside policies that look at nothing
    progress.stop.at_once = True
    for name in (GREEDY, SAMPLED):
        answers_of[name] = judge.answers(learner, arguments, table, name, is_greedy=name == GREEDY)
    compared = judge.compare(learner.environment, arguments, table, answers_of)
    verdict = f"verdict: {compared.verdict} ({progress.spent()})"
    print(verdict)
    save(folder, learner, compared, verdict, progress.episode_returns, title_of(arguments))


# The stages --------------------------------------------------------------------------------------------------------


def title_of(arguments: PolicyGradientArguments) -> str:
    return f"{arguments.env_id}, {arguments.algorithm.upper()}, actor {arguments.actor}, seed {arguments.seed}"


def about(learner: Learner, arguments: PolicyGradientArguments, config: str) -> str:
    """The first lines: what runs, how large it is, whose settings it has, and what the actor reads."""
    trained = sum(parameter.numel() for parameter in learner.policy.parameters())
    lines = [
        f"{title_of(arguments)}: {arguments.timesteps:,} steps, environments: {arguments.n_envs}, "
        f"{trained:,} parameters are trained",
        f"settings: {relative(config) if config else 'those of stable-baselines3, not tuned for this environment'}",
    ]
    if learner.reader is not None:
        first = learner.reader.text_of(np.zeros(learner.env.observation_space.shape))
        model = arguments.model_name_or_path
        untaught = " with random weights" if arguments.actor == "random" else ""
        lines.append(f"{Path(model).name}{untaught} in {learner.reader.encoder.dtype} reads: {first}")
        tokenizer = learner.reader.encoder.tokenizer
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            lines.append(f"texts are padded with the end token, {tokenizer.eos_token}")
    return "\n".join(lines)


def write_settings(
    folder: Path, arguments: PolicyGradientArguments, config: str, learner: Learner, table: TableEnvironment | None,
    made_from: dict[str, str],
) -> None:  # fmt: skip
    """resolved_config.yaml and run.json, with all that evaluate_policy.py needs to judge the run again."""
    packages = ["torch", "gymnasium", "numpy", "stable-baselines3", "sb3-contrib", "transformers", "peft"]
    packages += ["mujoco"] if find_spec("mujoco") else []
    settings = {
        "env_id": learner.environment.env_id,
        "algorithm": arguments.algorithm,
        "actor": arguments.actor,
        "horizon_steps": learner.environment.horizon_steps,
        "made_from": made_from,
        **({"dtype": learner.reader.encoder.dtype} if learner.reader else {}),
        **judge.table_settings(table),
        "versions": {name: version(name) for name in packages},
    }
    device = device_text(on_gpu=learner.policy.device.type == "cuda")
    run_files.write_run_files(folder, [arguments], config or "defaults", arguments.seed, settings, device, RESUME)


def kept_answers(
    file: Path, learner: Learner, arguments: PolicyGradientArguments, table: TableEnvironment | None
) -> dict:
    """How good the policy is before training; kept in `file`, so that a resumed run shows the same row."""
    asked = {name: value for name, value in run_files.resolved_config(arguments).items() if name not in FREE_TO_CHANGE}
    checksum = run_files.checksum(asked)
    found = run_files.read_kept(file, checksum, lambda kept: judge.check_answers(kept, table))
    if found is None:
        found = judge.answers(learner, arguments, table, UNTRAINED, is_greedy=True)
        run_files.write_kept(file, checksum, found)
    return found


def save(
    folder: Path,
    learner: Learner,
    compared: judge.PolicyComparison,
    verdict: str,
    episode_returns: list[float],
    title: str,
) -> None:
    """The policy, the curve, the text, and as the mark of a finished run evaluation.json."""
    figure = curves_figure(
        {title: [block_means(episode_returns)]}, compared.lines, "episodes", f"mean return of {BLOCK} episodes"
    )
    with writing(f"--output_dir {folder}", f"free space, then {RESUME}"):
        save_policy(learner, folder)
        judge.save_statistics(learner, folder)
        figure.savefig(folder / CURVE_FILE, dpi=120)
        finish(folder, f"{compared.text}{verdict}\n", compared.save, FINISHED)
