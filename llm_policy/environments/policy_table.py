"""A policy as a table, and its exact score beside the optimum.

A policy table `policy_SA` has one row per state (also those in which no action is chosen: uniform there); rows sum to
1. It is what evaluation, baselines, policy search and pictures exchange. Axes: S states, A actions.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache

import numpy as np

from llm_policy.environments.mdp import (
    AGREEMENT_GAMMA,
    PROBABILITY_ROUNDING,
    greedy_policy,
    optimal_actions,
    optimal_q,
    optimal_return,
    policy_return,
)
from llm_policy.environments.table_environment import TableEnvironment


@dataclass(frozen=True)
class PolicyScore:
    """How good a policy table is in its environment. Everything is exact; nothing is simulated.

    Attributes:
        success_probability: of reaching the goal from the start, without a step limit.
        success_at_horizon: within `horizon_steps` steps.
        percent_of_optimal: where success is what the environment pays, 100 * success_probability / optimal_success (100
            where the optimum is 0). Else by the return within the limit: 100 is the optimum, 0 the best policy that
            looks at nothing (one action everywhere, or all of them alike); a worse one is below 0.
        regret: what the policy lacks to the optimum, in success or in return.
        optimal_success: of the best policy without a step limit.
        optimal_at_horizon: of the best policy that may depend on the step, within the limit.
        optimal_states: acting states whose most probable action is optimal (discount `AGREEMENT_GAMMA`); of several
            equally probable ones, all.
        acting_states: states in which an action is chosen.
        format_validity: share of well-formed completions that name an action; None where no model was asked.
        return_at_horizon, optimal_return: expected return within the limit, of the policy and of the optimum; None
            where it is the success.
    """

    success_probability: float
    success_at_horizon: float
    percent_of_optimal: float
    regret: float
    optimal_success: float
    optimal_at_horizon: float
    optimal_states: int
    acting_states: int
    horizon_steps: int
    format_validity: float | None = None
    return_at_horizon: float | None = None
    optimal_return: float | None = None

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class _References:
    """What every policy in an environment is held against."""

    best_SA: np.ndarray
    optimal_success: float
    optimal_at_horizon: float
    optimal_return: float
    blind_return: float


@cache
def _references(environment: TableEnvironment, horizon_steps: int) -> _References:
    optimum = float(optimal_return(environment.mdp, horizon_steps))
    rounding = PROBABILITY_ROUNDING * max(1.0, abs(optimum))
    blind = [] if environment.pays_success else _blind_returns(environment, horizon_steps)
    return _References(
        best_actions(environment),
        float(optimal_return(environment.success_mdp)),
        float(optimal_return(environment.success_mdp, horizon_steps)),
        optimum,
        max((value for value in blind if optimum - value > rounding), default=optimum),  # the best below the optimum
    )


def _blind_returns(environment: TableEnvironment, horizon_steps: int) -> list[float]:
    """What each action earns where it is taken everywhere, and last what the uniformly random policy earns."""
    uniform_SA = uniform_policy(*environment.mdp.rewards_SA.shape)
    return [
        float(policy_return(environment.mdp, policy_SA, horizon_steps=horizon_steps))
        for policy_SA in (*constant_policies(environment), uniform_SA)
    ]


@lru_cache(maxsize=4096)
def best_actions(environment: TableEnvironment) -> np.ndarray:
    """Which actions are optimal in which state: bool (S, A), under the discount `AGREEMENT_GAMMA`."""
    return optimal_actions(optimal_q(environment.mdp, AGREEMENT_GAMMA))


def score_policy(
    environment: TableEnvironment,
    policy_SA: np.ndarray,
    horizon_steps: int | None = None,
    format_validity: float | None = None,
) -> PolicyScore:
    """Judge a policy table by dynamic programming.

    Args:
        horizon_steps: step limit; None takes the environment's.
    """
    horizon_steps = horizon_steps or environment.horizon_steps
    best = _references(environment, horizon_steps)
    # Rounding makes -1e-16 of nothing
    success = max(0.0, float(policy_return(environment.success_mdp, policy_SA)))
    earned = float(policy_return(environment.mdp, policy_SA, horizon_steps=horizon_steps))
    if environment.pays_success:
        percent = 100.0 * success / best.optimal_success if best.optimal_success > 0 else 100.0
        regret, at_horizon = best.optimal_success - success, earned
    else:
        spread = best.optimal_return - best.blind_return  # 0: nothing can be done within so few steps
        percent = 100.0 * (earned - best.blind_return) / spread if spread else 100.0
        regret = best.optimal_return - earned
        at_horizon = float(policy_return(environment.success_mdp, policy_SA, horizon_steps=horizon_steps))
    most_probable_SA = optimal_actions(policy_SA)
    return PolicyScore(
        success_probability=success,
        success_at_horizon=at_horizon,
        percent_of_optimal=percent,
        regret=regret,
        optimal_success=best.optimal_success,
        optimal_at_horizon=best.optimal_at_horizon,
        optimal_states=int((best.best_SA | ~most_probable_SA)[environment.acting_states].all(1).sum()),
        acting_states=len(environment.acting_states),
        horizon_steps=horizon_steps,
        format_validity=format_validity,
        return_at_horizon=None if environment.pays_success else earned,
        optimal_return=None if environment.pays_success else best.optimal_return,
    )


def uniform_policy(states: int, actions: int) -> np.ndarray:
    return np.full((states, actions), 1.0 / actions)


def constant_policy(states: int, action: int, actions: int) -> np.ndarray:
    return np.eye(actions)[np.full(states, action)]


def constant_policies(environment: TableEnvironment) -> list[np.ndarray]:
    """Each action, taken everywhere."""
    states, actions = environment.mdp.rewards_SA.shape
    return [constant_policy(states, action, actions) for action in range(actions)]


def expert_policy(environment: TableEnvironment) -> np.ndarray:
    """The greedy policy of the exact Q-values under the discount `AGREEMENT_GAMMA`: what an expert's CSV shows."""
    return greedy_policy(best_actions(environment))


def action_letters(policy_SA: np.ndarray, actions: Sequence[str]) -> str:
    """The initial of each state's most probable action; "." where several are (unreadable answers, say)."""
    return "".join(actions[int(row_A.argmax())][0] if (row_A == row_A.max()).sum() == 1 else "." for row_A in policy_SA)


def best_constant_action(environment: TableEnvironment, horizon_steps: int | None = None) -> int:
    """The action that, taken everywhere, earns the most within the limit: the best policy of one action."""
    return int(np.argmax(_blind_returns(environment, horizon_steps or environment.horizon_steps)[:-1]))
