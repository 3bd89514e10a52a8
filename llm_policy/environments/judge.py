"""Policy tables -> how good they are: exact scores beside the optimum, a verdict, a table, JSON and a picture.

Axes: S states, A actions, N acting states of all environments, R learners.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.table import Table

from llm_policy.environments.expert_q import learn_q
from llm_policy.environments.frozen_lake import FrozenLake, shortest_path_policy
from llm_policy.environments.gym_env import seed_of, steps
from llm_policy.environments.mdp import AGREEMENT_GAMMA, OPTIMAL_PERCENT, greedy_policy, optimal_policy
from llm_policy.environments.pictures import policy_figure
from llm_policy.environments.policy_table import (
    PolicyScore,
    action_letters,
    best_actions,
    best_constant_action,
    constant_policies,
    constant_policy,
    expert_policy,
    score_policy,
    uniform_policy,
)
from llm_policy.environments.table_environment import TableEnvironment
from llm_policy.errors import InputError
from llm_policy.run_files import save_judgement
from llm_policy.statistics import wilson_interval
from llm_policy.tables import new_table

OPTIMAL = "optimal"
BASELINES = ("random", "constant:ACTION", "expert", "q-learning", "shortest-path")
Q_LEARNING_RUNS, Q_LEARNING_STEPS = 5, 100_000
NEARLY_ALWAYS = 0.8  # share of the states with one action
THOUGHTS_FILE = "thoughts.png"


# One policy in words and numbers -------------------------------------------------------------------------------


def mutual_information(policies_SA: Sequence[np.ndarray], environments: Sequence[TableEnvironment]) -> float:
    """I(state; action) in nats over uniformly drawn acting states: 0 for a state-blind policy, at most ln A.

    States whose answer could not be read (a uniform row) are left out.
    """
    rows_NA, chooses_N = _acting_rows(policies_SA, environments)
    if not chooses_N.any():
        return 0.0
    rows_NA = rows_NA[chooses_N]

    def entropy(p: np.ndarray) -> np.ndarray:
        return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)

    return max(0.0, float(entropy(rows_NA.mean(0)) - entropy(rows_NA).mean()))


def policy_verdict(
    policies_SA: Sequence[np.ndarray], environments: Sequence[TableEnvironment], scores: Sequence[PolicyScore]
) -> str:
    """One line about greedy policies: unreadable, random, learned, state-blind, not learned, or how far it came."""
    rows_NA, chooses_N = _acting_rows(policies_SA, environments)
    actions = environments[0].actions
    right, states = sum(s.optimal_states for s in scores), sum(s.acting_states for s in scores)
    percent = float(np.mean([s.percent_of_optimal for s in scores]))
    shown = percent if percent >= OPTIMAL_PERCENT else min(percent, 99)  # 99.5 is not all
    summary = f"{right}/{states} states, {shown:.0f} % of optimal"
    readable = int(chooses_N.sum())
    if not readable and scores[0].format_validity is not None:
        return f"no readable answer ({summary}): lower --learning_rate, or teach the form first (--warm_start)"
    if not readable:
        return f"uniformly random in every state ({summary})"
    if readable < states:
        summary += f", {states - readable} without readable answer"
    if percent >= OPTIMAL_PERCENT:
        return f"learned: {summary}"
    if right == states:  # the optimum of each state is of discounted returns, the percentage of those without
        return f"learned what the expert does: {summary}"
    chosen_A = np.bincount(rows_NA[chooses_N].argmax(1), minlength=len(actions))
    habit, times = actions[int(chosen_A.argmax())], int(chosen_A.max())
    if times == readable > 1:
        return f"state-blind: always {habit} ({summary})"
    if times >= NEARLY_ALWAYS * readable > 1:
        return f"nearly state-blind: {habit} in {times} of {readable} states ({summary})"
    blind_states, blind_percent = _of_one_action(environments, scores[0].horizon_steps)
    if right <= blind_states and percent <= blind_percent:
        return f"not learned: {summary}, and one action everywhere has {blind_states} states, or {blind_percent:.0f} %"
    return f"partly learned: {summary}"


def _of_one_action(environments: Sequence[TableEnvironment], horizon_steps: int) -> tuple[int, float]:
    """The most optimal states, and the most percent of the optimum, that one action in all states has."""
    found_EA = [_scores_of_one_action(environment, horizon_steps) for environment in environments]
    by_action = list(zip(*found_EA, strict=True))
    states = max(sum(score.optimal_states for score in scores) for scores in by_action)
    return states, max(float(np.mean([score.percent_of_optimal for score in scores])) for scores in by_action)


@cache
def _scores_of_one_action(environment: TableEnvironment, horizon_steps: int) -> list[PolicyScore]:
    return [score_policy(environment, policy_SA, horizon_steps) for policy_SA in constant_policies(environment)]


def _acting_rows(
    policies_SA: Sequence[np.ndarray], environments: Sequence[TableEnvironment]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows (N, A) of all acting states, and which of them choose an action: a uniform one is no readable answer."""
    rows_NA = np.concatenate([p[e.acting_states] for p, e in zip(policies_SA, environments, strict=True)])
    return rows_NA, np.ptp(rows_NA, axis=1) > 1e-9


# Baselines -----------------------------------------------------------------------------------------------------


def is_baseline(name: str) -> bool:
    return name.partition(":")[0] in {baseline.partition(":")[0] for baseline in BASELINES}


def baseline_policy(name: str, environment: TableEnvironment, seed: int = 0) -> np.ndarray | None:
    """Policy table of a baseline by name (see `BASELINES`); None for a name that is none of this environment's."""
    states, actions = environment.mdp.rewards_SA.shape
    kind, _, action = name.partition(":")
    if name == "random":
        return uniform_policy(states, actions)
    names = [name.upper() for name in environment.actions]
    if kind == "constant" and action.upper() in names:
        return constant_policy(states, names.index(action.upper()), actions)
    if name == "expert":
        return expert_policy(environment)
    if name == "q-learning":
        learners_RSA = learn_q(environment, AGREEMENT_GAMMA, Q_LEARNING_RUNS, Q_LEARNING_STEPS, seed)
        return greedy_policy(learners_RSA.mean(axis=0))
    if name == "shortest-path" and isinstance(environment, FrozenLake):
        return shortest_path_policy(environment.grid)
    return None


# Several policies beside each other ----------------------------------------------------------------------------


@dataclass
class EvaluatedPolicy:
    """A policy in one or several environments: `policies_SA[m]` and `scores[m]` belong to environment m."""

    name: str
    policies_SA: list[np.ndarray]
    scores: list[PolicyScore]
    simulated_successes: int
    simulated_episodes: int
    actions: tuple[str, ...]
    is_reference: bool = False
    """Whether it stands in every table: the optimum, or what looks at nothing."""

    def mean(self, attribute: str) -> float:
        return float(np.mean([getattr(score, attribute) for score in self.scores]))

    @property
    def format_validity(self) -> float | None:
        return self.scores[0].format_validity

    @property
    def simulated_interval(self) -> tuple[float, float]:
        """The 95 % interval of the simulated success probability."""
        return wilson_interval(self.simulated_successes, self.simulated_episodes)

    def as_dict(self) -> dict:
        """Means over the maps, and of each map what it takes to see where the policy errs."""
        numbers = [k for k, v in self.scores[0].as_dict().items() if v is not None]
        low, high = self.simulated_interval
        if len(self.policies_SA) == 1:
            details = {"policy_SA": self.policies_SA[0].round(6).tolist()}
        else:
            details = {
                "percents_of_optimal": [round(score.percent_of_optimal, 2) for score in self.scores],
                "actions": [action_letters(policy_SA, self.actions) for policy_SA in self.policies_SA],
            }
        return {
            "policy": self.name,
            "maps": len(self.scores),
            **{k: self.mean(k) for k in numbers},
            "simulated_success": self.simulated_successes / self.simulated_episodes,
            "simulated_interval": [low, high],
            "simulated_episodes": self.simulated_episodes,
            **details,
        }


def evaluate_policies(
    named_policies: Mapping[str, Sequence[np.ndarray]],
    environments: Sequence[TableEnvironment],
    *,
    validities: Mapping[str, float] | None = None,
    horizon_steps: int | None = None,
    episodes: int = 1000,
    seed: int = 0,
) -> list[EvaluatedPolicy]:
    """Judge each policy in every environment, with optimum, random and the best constant action in front.

    Where rewards never end there is no optimum without a step limit, and its row is left out.

    Args:
        named_policies: name -> one `policy_SA` per environment.
        validities: name -> share of readable completions, for policies that a model gave.
        horizon_steps: step limit; None takes each environment's own.
        episodes: simulated per policy, over all environments together.
    """
    actions = environments[0].actions
    constants = [best_constant_action(environment, horizon_steps) for environment in environments]
    best_constant = "best constant action" + (f" ({actions[constants[0]]})" if len(set(constants)) == 1 else "")
    shapes = [environment.mdp.rewards_SA.shape for environment in environments]
    rows: dict[str, Sequence[np.ndarray]] = {}
    with suppress(InputError):  # rewards that never end have no optimum without a limit
        rows[OPTIMAL] = [optimal_policy(environment.mdp) for environment in environments]
    rows |= {
        "uniform random": [uniform_policy(*shape) for shape in shapes],
        best_constant: [constant_policy(shape[0], a, shape[1]) for shape, a in zip(shapes, constants, strict=True)],
    }
    per_map = -(-episodes // len(environments))
    evaluated = []
    for name, policies_SA in [*rows.items(), *named_policies.items()]:
        validity = (validities or {}).get(name)
        pairs = list(zip(environments, policies_SA, strict=True))
        scores = [score_policy(environment, policy_SA, horizon_steps, validity) for environment, policy_SA in pairs]
        successes = sum(
            simulated_successes(environment, policy_SA, horizon_steps, per_map, seed + m)
            for m, (environment, policy_SA) in enumerate(pairs)
        )
        evaluated.append(
            EvaluatedPolicy(
                name, list(policies_SA), scores, successes, per_map * len(environments), actions, name in rows
            )
        )
    return evaluated


def simulated_successes(
    environment: TableEnvironment, policy_SA: np.ndarray, horizon_steps: int | None, episodes: int, seed: int
) -> int:
    """Successes in `episodes` episodes of the Gymnasium environment itself, sampling actions from the table."""
    generator = np.random.default_rng(seed_of(seed, "actions"))  # the environment draws its own numbers from `seed`
    cumulative_SA = policy_SA.cumsum(axis=1)

    def act(state: int) -> int:
        action = int((cumulative_SA[state] < generator.random()).sum())
        return min(action, policy_SA.shape[1] - 1)

    env = environment.make(horizon_steps)
    ends = [step for step in steps(env, act, episodes, seed) if step.terminated]
    return sum(environment.is_goal(step.next_observation) for step in ends)


def evaluation_table(evaluated: Sequence[EvaluatedPolicy], title: str) -> tuple[Table, str]:
    """The comparison as a table, and a note on what no policy table can beat."""
    horizons = sorted({score.horizon_steps for score in evaluated[0].scores})
    limit = f"{' or '.join(map(str, horizons))} steps"
    pays_return = evaluated[0].scores[0].return_at_horizon is not None
    returns = [f"return in {limit}"] if pays_return else []
    columns = ["success", f"in {limit}", *returns, "% of optimal", "regret", "optimal states", "well-formed"]
    table = new_table(title, "policy", (*columns, "simulated"))
    for policy in evaluated:
        low, high = policy.simulated_interval
        right, states = sum(s.optimal_states for s in policy.scores), sum(s.acting_states for s in policy.scores)
        table.add_row(
            policy.name,
            f"{policy.mean('success_probability'):.4f}",
            f"{policy.mean('success_at_horizon'):.4f}",
            *([f"{policy.mean('return_at_horizon'):.1f}"] if pays_return else []),
            f"{policy.mean('percent_of_optimal'):.1f}",
            f"{policy.mean('regret'):.4f}",
            f"{right}/{states}",
            "" if policy.format_validity is None else f"{100 * policy.format_validity:.0f} %",
            f"{low:.3f}-{high:.3f}",
        )
    reached = f"reaches {evaluated[0].mean('optimal_at_horizon'):.4f}"
    if pays_return:
        reached = f"earns {evaluated[0].mean('optimal_return'):.1f}"
    return table, f"The best policy that may count its steps {reached} in {limit}."


def _what_it_earns(score: PolicyScore) -> str:
    if score.return_at_horizon is None:
        return f"success {score.success_probability:.3f}"
    return f"return {score.return_at_horizon:.1f}"


def save_evaluation(
    evaluated: Sequence[EvaluatedPolicy], environments: Sequence[TableEnvironment], about: Mapping, folder: Path
) -> None:
    """`evaluation.json` and `policy.png`.

    The picture of one map shows the optimum and up to four policies. That of several shows one policy, the last greedy
    one of a model, on five of them, from its worst map to its best.

    Args:
        about: what stands in the JSON in front of the policies: which maps, which dynamics.
    """
    rows = ",\n".join(json.dumps(policy.as_dict()) for policy in evaluated)  # a line per policy: maps may be hundreds
    text = f'{json.dumps(dict(about))[:-1]}, "policies": [\n{rows}\n]}}\n'
    if len(environments) == 1:
        best_and_named = [p for p in evaluated if p.name == OPTIMAL or not p.is_reference]
        shown = [(p, 0, f"{p.name}\n{_what_it_earns(p.scores[0])}") for p in best_and_named[:5]]
    else:
        policy = next((p for p in reversed(evaluated) if p.name.endswith(", greedy")), evaluated[-1])
        percents = [score.percent_of_optimal for score in policy.scores]
        count = len(environments)
        picked = np.argsort(percents, kind="stable")[np.linspace(0, count - 1, min(5, count)).astype(int)]
        shown = [(policy, m, f"{policy.name}\n{percents[m]:.0f} % of optimal") for m in picked]
    figure = policy_figure(
        [(title, environments[m], p.policies_SA[m], best_actions(environments[m])) for p, m, title in shown]
    )
    save_judgement(folder, text, figure)
