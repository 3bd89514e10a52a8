"""How good a trained policy is: exactly where the environment has a table of states, else by fresh episodes.

Axes: S states, A actions.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.spaces import Discrete
from rich.table import Table
from scipy.stats import t as student
from stable_baselines3.common.evaluation import evaluate_policy

from llm_policy.command_line import parse_arguments
from llm_policy.environments.frozen_lake import FrozenLake, grid_text
from llm_policy.environments.gym_env import GymEnvironment, lake_grid, returns, seed_of, unversioned
from llm_policy.environments.gym_table import GymTable
from llm_policy.environments.judge import (
    evaluate_policies,
    evaluation_table,
    policy_verdict,
    save_evaluation,
)
from llm_policy.environments.mdp import MDP
from llm_policy.environments.policy_table import score_policy
from llm_policy.environments.table_environment import TableEnvironment
from llm_policy.environments.toy_text import gym_tables
from llm_policy.errors import InputError
from llm_policy.models import model_checksum
from llm_policy.policy_gradient.arguments import PolicyGradientArguments
from llm_policy.policy_gradient.environments import set_statistics, statistics_of
from llm_policy.policy_gradient.learner import (
    STATISTICS_FILE,
    Learner,
    load_policy,
    make_learner,
    training_env,
)
from llm_policy.processes import progress
from llm_policy.reading import parse_json, read_text
from llm_policy.run_files import CONFIG_FILE, EVALUATION_FILE, check_made_from, write_whole
from llm_policy.tables import new_table, number_text, show

# Mean returns of others, not run here: environment (HalfCheetah: any version) -> what -> score
PUBLISHED = {
    "CartPole-v1": {
        "PPO, 100k steps (rl-zoo)": "500 +- 0",
        "TRPO, 100k steps (rl-zoo)": "500 +- 0",
        "PPO (Verma and Shukla)": "500 by episode 350",
    },
    "HalfCheetah": {
        "v3, TRPO, 1M steps (sb3-contrib, 3 seeds)": "1803 +- 46",
        "v3, TRPO, 1M steps (a hub model card)": "4674 +- 60",
        "v3, PPO tuned, 1M steps (rl-zoo)": "5819 +- 664",
        "v4, PPO, 1M steps (CleanRL)": "1867 +- 48",
    },
    "FrozenLake-v1": {"TRPO, 8,000 episodes (arXiv 2511.21928)": ".22", "PPO, the same": ".16"},
}
JUDGED_AT_ONCE = 20  # episodes: a language model reads their states together
UNTRAINED, GREEDY, SAMPLED = "untrained, greedy", "trained, greedy", "trained, sampled"


def published_lines(environment: GymEnvironment) -> list[str]:
    """What others report of the environment as it usually is, as a line; [] where nothing is known."""
    known = PUBLISHED.get(environment.env_id) or PUBLISHED.get(unversioned(environment.env_id), {})
    figures = known if environment.is_usual else {}
    return ["published, not run here: " + "; ".join(f"{k} {v}" for k, v in figures.items())] if figures else []


# Exactly -------------------------------------------------------------------------------------------------------


def table_of(environment: GymEnvironment) -> TableEnvironment | None:
    """The same environment as a `TableEnvironment`; None where it has none, or dynamics of its own."""
    is_lake = isinstance(environment.env.unwrapped, FrozenLakeEnv)
    kind = FrozenLake if is_lake else gym_tables().get(environment.env_id)
    if kind is None or environment.mdp is None:
        return None
    if kind is FrozenLake:
        found = [FrozenLake(lake_grid(environment.env), is_slippery) for is_slippery in (True, False)]
    else:
        found = [kind()]
    return next((candidate for candidate in found if _are_same(candidate.mdp, environment.mdp)), None)


def _are_same(one: MDP, other: MDP) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("rewards_SA", "transitions_SAS", "start_S")]
    return all(a.shape == b.shape and np.allclose(a, b) for a, b in pairs)


@torch.no_grad()
def policy_table(learner: Learner, is_greedy: bool) -> np.ndarray:
    """`policy_SA` of a policy over discrete states."""
    states = learner.environment.env.observation_space
    assert isinstance(states, Discrete)
    learner.policy.set_training_mode(False)
    one_hot_SS = torch.eye(int(states.n), device=learner.policy.device)
    distribution = learner.policy.get_distribution(one_hot_SS).distribution
    assert isinstance(distribution, torch.distributions.Categorical)
    policy_SA = distribution.probs.double().cpu().numpy()
    policy_SA /= policy_SA.sum(axis=1, keepdims=True)
    return np.eye(policy_SA.shape[1])[policy_SA.argmax(axis=1)] if is_greedy else policy_SA


# By episodes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpisodeScore:
    """The undiscounted return of fresh episodes.

    Attributes:
        interval: half the width of the mean's 95 % interval (Student's t).
    """

    policy: str
    mean_return: float
    interval: float
    episodes: int
    lowest: float
    highest: float

    @classmethod
    def of(cls, policy: str, totals: Sequence[float]) -> "EpisodeScore":
        return cls(
            policy,
            float(np.mean(totals)),
            float(student.ppf(0.975, len(totals) - 1) * np.std(totals, ddof=1)) / len(totals) ** 0.5,
            len(totals),
            float(np.min(totals)),
            float(np.max(totals)),
        )


def episode_score(learner: Learner, arguments: PolicyGradientArguments, name: str, is_greedy: bool) -> EpisodeScore:
    """A policy in fresh episodes, all at once, with the statistics of its training, which stay as they are."""
    env = training_env(arguments, min(arguments.judge_episodes, JUDGED_AT_ONCE))
    env.training = env.norm_reward = False
    set_statistics(env, statistics_of(learner.env))
    env.seed(judge_seed(arguments))
    generators = torch.get_rng_state()
    torch.manual_seed(arguments.seed)
    most_steps = arguments.judge_episodes * learner.environment.horizon_steps
    print(f"judging {name}: {arguments.judge_episodes} fresh episodes, at most {most_steps:,} steps", flush=True)
    with progress(range(most_steps), f"judging {name}, at most", unit="step") as bar:
        totals, _ = evaluate_policy(
            _WithNoise(learner, env.num_envs), env, arguments.judge_episodes, deterministic=is_greedy,
            return_episode_rewards=True, callback=lambda *_: bar.update(),
        )  # fmt: skip
    torch.set_rng_state(generators)
    assert isinstance(totals, list)
    return EpisodeScore.of(name, totals)


class _WithNoise:
    """The policy as `evaluate_policy` asks it, with new state-dependent noise as often as in training.

    stable-baselines3 draws that noise while it trains and nowhere else: all episodes would share one draw.
    """

    def __init__(self, learner: Learner, copies: int) -> None:
        self.policy, self.copies, self.asked = learner.policy, copies, 0
        algorithm = learner.algorithm
        every = algorithm.sde_sample_freq if algorithm.sde_sample_freq > 0 else algorithm.n_steps
        self.every = every if algorithm.use_sde else 0

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        if self.every and self.asked % self.every == 0:
            self.policy.reset_noise(self.copies)
        self.asked += 1
        return self.policy.predict(observation, state, episode_start, deterministic)


def judge_seed(arguments: PolicyGradientArguments) -> int:
    """Of episodes that no training has seen, and no judgement with another --seed."""
    return seed_of(arguments.seed, "judge")


def reference_scores(environment: GymEnvironment, arguments: PolicyGradientArguments) -> list[EpisodeScore]:
    """Policies that look at nothing: uniformly random, and the best constant action (continuous: none, 0)."""
    env, episodes, seed = environment.env, arguments.judge_episodes, judge_seed(arguments)
    actions = env.action_space
    actions.seed(seed_of(arguments.seed, "actions"))  # else it draws the numbers of the environment
    scores = [EpisodeScore.of("uniform random", returns(env, lambda _: actions.sample(), episodes, seed))]
    if isinstance(actions, Discrete):
        constant = [
            EpisodeScore.of(f"best constant action ({a})", returns(env, _always(a), episodes, seed))
            for a in range(int(actions.n))
        ]
        scores.append(max(constant, key=lambda score: score.mean_return))
    else:
        nothing = np.clip(np.zeros(actions.shape, actions.dtype), actions.low, actions.high)
        scores.append(EpisodeScore.of("no action (0)", returns(env, _always(nothing), episodes, seed)))
    return scores


def _always(action) -> Callable:
    return lambda _: action


def score_table(scores: Sequence[EpisodeScore], title: str) -> Table:
    table = new_table(title, "policy", ("mean return", "95 % interval", "lowest", "highest", "episodes"))
    for s in scores:
        low, high = s.mean_return - s.interval, s.mean_return + s.interval
        table.add_row(
            s.policy, number_text(s.mean_return), f"{number_text(low)} to {number_text(high)}", number_text(s.lowest),
            number_text(s.highest), str(s.episodes),
        )  # fmt: skip
    return table


def verdict_of(scores: Sequence[EpisodeScore], environment: GymEnvironment) -> str:
    """Solved where Gymnasium says when that is; else beside the policies that look at nothing."""
    trained = next((score for score in scores if score.policy == GREEDY), None)
    if trained is None:
        return ""
    others = [score for score in scores if score.policy not in (GREEDY, SAMPLED)]
    best = max(others, key=lambda score: score.mean_return)
    threshold = environment.threshold
    figures = f"mean return {trained.mean_return:.1f} in {trained.episodes} episodes"
    if threshold is not None and trained.mean_return >= threshold:
        return f"solved: {figures} (Gymnasium asks for {threshold:g})"
    if trained.mean_return - trained.interval > best.mean_return + best.interval:
        asked = "" if threshold is None else f", short of the {threshold:g} that Gymnasium calls solved"
        return f"learned: {figures}{asked}; {best.policy} has {best.mean_return:.1f}"
    if trained.mean_return > best.mean_return:
        overlap = "their 95 % intervals overlap: more --judge_episodes tell"
        return f"cannot be told from {best.policy}: {figures}, and {best.mean_return:.1f}; {overlap}"
    return f"not learned: {figures}; {best.policy} has {best.mean_return:.1f}"


# Beside each other ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyComparison:
    """All policies of a run, or of several runs in one environment.

    Attributes:
        text: the table and what belongs below it.
        verdict: one line on the policy that is called `GREEDY`; "" without one.
        lines: for the picture of the curve, what policies that look at nothing earn, by name.
        save: writes evaluation.json, and policy.png where there is a table of states, into a folder.
    """

    text: str
    verdict: str
    lines: dict[str, float]
    save: Callable[[Path], None]


def answers(
    learner: Learner, arguments: PolicyGradientArguments, table: TableEnvironment | None, name: str, is_greedy: bool
) -> dict:
    """What there is to know of a policy, fit for JSON: its table of actions, or its score in fresh episodes."""
    if table is None:
        return asdict(episode_score(learner, arguments, name, is_greedy))
    return {"policies": [policy_table(learner, is_greedy).tolist()]}


def check_answers(found: dict, table: TableEnvironment | None) -> None:
    """An error for what is none of `answers`."""
    if table is None:
        numbers = [value for name, value in asdict(EpisodeScore(**found)).items() if name != "policy"]
        shape: tuple[int, ...] = (len(numbers),)
    else:
        (numbers,) = found["policies"]
        shape = table.mdp.rewards_SA.shape
    if np.shape(numbers) != shape or not np.isfinite(numbers).all():
        raise ValueError(f"expected numbers of the shape {shape}")


def compare(
    environment: GymEnvironment,
    arguments: PolicyGradientArguments,
    table: TableEnvironment | None,
    answers_of: Mapping[str, Mapping],
) -> PolicyComparison:
    """Print the table of all policies, with those that look at nothing in front.

    Args:
        answers_of: name -> `answers`.
    """
    about = {
        "env_id": environment.env_id, "horizon_steps": environment.horizon_steps, "env_options": arguments.options,
        "seed": arguments.seed,
    }  # fmt: skip
    title = f"{environment.env_id}{f' {arguments.env_options}' if arguments.options else ''}, seed {arguments.seed}"
    if table is None:
        scores = reference_scores(environment, arguments)
        lines = {score.policy: score.mean_return for score in scores}
        scores += [EpisodeScore(**found) for found in answers_of.values()]
        text = show(score_table(scores, title), *published_lines(environment))
        rows = json.dumps(about | {"policies": [asdict(score) for score in scores]}, indent=1)

        def save(folder: Path) -> None:
            write_whole(folder / EVALUATION_FILE, f"{rows}\n")

        return PolicyComparison(text, verdict_of(scores, environment), lines, save)
    policies = {name: [np.array(policy) for policy in found["policies"]] for name, found in answers_of.items()}
    horizon = environment.horizon_steps
    evaluated = evaluate_policies(policies, [table], horizon_steps=horizon, seed=arguments.seed)
    rows_table, ceiling = evaluation_table(evaluated, title)
    text = show(rows_table, ceiling, *published_lines(environment))
    greedy = policies.get(GREEDY, [])
    verdict = policy_verdict(greedy, [table], [score_policy(table, greedy[0], horizon)]) if greedy else ""
    firsts = {policy.name: policy.scores[0] for policy in evaluated if policy.is_reference}
    earned = {
        name: score.success_at_horizon if score.return_at_horizon is None else score.return_at_horizon
        for name, score in firsts.items()
    }
    return PolicyComparison(text, verdict, earned, partial(save_evaluation, evaluated, [table], about))


def table_settings(table: TableEnvironment | None) -> dict:
    """What run.json says of a table of states, in the words of the tasks, whose judges then know it."""
    if isinstance(table, FrozenLake):
        return {"task": "frozen_lake", "maps": [grid_text(table.grid)], "is_slippery": table.is_slippery}
    return {"task": table.task} if isinstance(table, GymTable) else {}


# Runs on disk --------------------------------------------------------------------------------------------------


def save_statistics(learner: Learner, folder: Path) -> None:
    write_whole(folder / STATISTICS_FILE, json.dumps(statistics_of(learner.env)) + "\n")


def load_run(folder: Path) -> tuple[Learner, PolicyGradientArguments]:
    """A finished run's policy with what scaled its states; `InputError` for a file that is gone or damaged."""
    (arguments,), _ = parse_arguments(
        ["--config", str(folder / CONFIG_FILE)], (PolicyGradientArguments,), description="a finished run"
    )
    arguments.output_dir = str(folder)  # it may have been moved
    learner = make_learner(arguments)
    if arguments.reads_text:  # once it is loaded all files of the hub are there
        check_made_from(folder, {"model": model_checksum(arguments.model_name_or_path)}, "train again")
    load_policy(learner, folder)
    file = folder / STATISTICS_FILE
    try:
        set_statistics(learner.env, parse_json(read_text(file)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({' '.join(str(error).split())}); train again") from error
    return learner, arguments


def run_answers(folder: Path, is_sampled: bool) -> dict[str, dict]:
    """A finished run's policy, greedy and if asked for sampled, as `tasks` judge a table of states."""
    return _answers_of(folder, *load_run(folder), is_sampled)


def _answers_of(
    folder: Path, learner: Learner, arguments: PolicyGradientArguments, is_sampled: bool
) -> dict[str, dict]:
    table = table_of(learner.environment)
    names = {f"{folder}, greedy": True} | ({f"{folder}, sampled": False} if is_sampled else {})
    return {name: answers(learner, arguments, table, name, is_greedy) for name, is_greedy in names.items()}


def compare_runs(folders: Sequence[Path], is_sampled: bool, **asked: int) -> PolicyComparison:
    """Finished runs in one environment without a table of states, beside each other, judged as the first one is.

    Args:
        asked: options that stand above those of the first run: `judge_episodes`, `seed`.
    """
    loaded = {folder: load_run(folder) for folder in folders}
    _, first = loaded[folders[0]]
    asked = {"judge_episodes": first.judge_episodes, "seed": first.seed} | asked  # the same for all runs
    runs = {folder: (learner, replace(settings, **asked)) for folder, (learner, settings) in loaded.items()}
    learner, arguments = runs[folders[0]]
    played_in = learner.environment.env_id, arguments.options, learner.environment.horizon_steps
    for folder, (other, settings) in runs.items():
        own = other.environment.env_id, settings.options, other.environment.horizon_steps
        if own != played_in:
            raise InputError(
                f"--policies {folder}: a run in {own[0]} {own[1]} with {own[2]} steps, {folders[0]} in another "
                "environment; judge them one by one"
            )
    answers_of: dict[str, dict] = {}
    for folder, run in runs.items():
        answers_of |= _answers_of(folder, *run, is_sampled)
    return compare(learner.environment, arguments, None, answers_of)
