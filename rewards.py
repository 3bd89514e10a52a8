"""Completions and the expert's Q-values of their state -> rewards. Pure functions with TRL's contract.

Axes: P states (one per prompt), A actions.

The original's reward of the actions, which the defaults reproduce:

    combined = (format + advantage) / 2,      format in {0, 1}
    advantage = min(1, (Q(a) - Q_min) / (Q_max - Q_min) + optimal_bonus * [a is optimal])

With the cap the bonus does nothing (an optimal action already has 1.0): the original asks for both, so both are
options with a name. A completion from which no action can be read has advantage 0. Stricter than the original: there a
reply has the form if both pairs of tags occur anywhere, and of several answers the first counts; here it must be the
two and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_policy.completions import Reward, action_index, completion_text, parse_completion
from llm_policy.environments.frozen_lake import ACTIONS
from llm_policy.environments.mdp import OPTIMAL_TOLERANCE, optimal_actions
from llm_policy.errors import InputError


def _minmax_PA(q_values_PA: np.ndarray) -> np.ndarray:
    """(Q - Q_min) / (Q_max - Q_min); 1 for every action where all Q-values are equal, because then each is optimal."""
    span_P1 = np.ptp(q_values_PA, axis=1, keepdims=True)
    above_worst_PA = q_values_PA - q_values_PA.min(axis=1, keepdims=True)
    differ_P1 = span_P1 > OPTIMAL_TOLERANCE  # without it the last decimal of equal values would become 0 and 1
    return np.where(differ_P1, above_worst_PA / np.where(differ_P1, span_P1, 1.0), 1.0)


def _gap_PA(q_values_PA: np.ndarray) -> np.ndarray:
    """exp of the relative loss against the best action, times 10: keeps 5 % worse (0.61) apart from optimal (1)."""
    best_P1 = q_values_PA.max(axis=1, keepdims=True)
    size_P1 = np.maximum(np.abs(best_P1), 1e-9)
    loss_PA = best_P1 - q_values_PA
    return np.exp(-10.0 * np.where(loss_PA > OPTIMAL_TOLERANCE, loss_PA, 0.0) / size_P1)


def _rank_PA(q_values_PA: np.ndarray) -> np.ndarray:
    """Share of the other actions that are not better: 1 best, 0 worst, blind to how much better. Ties share."""
    worse_or_equal = q_values_PA[:, None, :] <= q_values_PA[:, :, None] + OPTIMAL_TOLERANCE
    return (worse_or_equal.sum(axis=2) - 1) / (q_values_PA.shape[1] - 1)


REWARD_SHAPES = {"minmax": _minmax_PA, "gap": _gap_PA, "rank": _rank_PA}


@dataclass(frozen=True)
class RewardShaping:
    """How the Q-values of a state become rewards for its actions.

    Attributes:
        shape: `minmax` (the original's), `gap` (sharper near the optimum) or `rank`.
        optimal_bonus: added for an optimal action, in units of the reward.
        cap_bonus: whether the sum is cut at 1, as in the original.
    """

    shape: str = "minmax"
    optimal_bonus: float = 0.2
    cap_bonus: bool = True

    def __post_init__(self) -> None:
        if self.shape not in REWARD_SHAPES:
            raise InputError(f"--reward_shape {self.shape!r}: expected one of {', '.join(REWARD_SHAPES)}")

    def of_actions(self, q_values_PA: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        """Reward of every action. Q-values of P states -> array (P, A), in [0, 1] or [0, 1 + optimal_bonus]."""
        q_values_PA = np.asarray(q_values_PA, dtype=float)
        rewards_PA = REWARD_SHAPES[self.shape](q_values_PA)
        rewards_PA = rewards_PA + self.optimal_bonus * optimal_actions(q_values_PA)
        return np.minimum(rewards_PA, 1.0) if self.cap_bonus else rewards_PA


ORIGINAL_SHAPING = RewardShaping()


def format_reward(completions: Sequence, **_) -> list[float]:
    """1.0 where the completion is one thought and one answer in their tags, else 0.0.

    `<think>ice</think><answer>UP</answer>` earns 1.0, `UP` earns 0.0.
    """
    return [float(parse_completion(completion_text(completion)).is_well_formed) for completion in completions]


def advantage_reward(
    completions: Sequence,
    q_values: Sequence[Sequence[float]],
    shaping: RewardShaping = ORIGINAL_SHAPING,
    actions: Sequence[str] = ACTIONS,
    **_,
) -> list[float]:
    """Shaped Q-value of the chosen action; 0.0 where no action can be read.

    With `q_values` [0.2, 0.4, 0.6, 0.1] an answer of RIGHT (the best) earns 1.0, LEFT (0.2 - 0.1) / (0.6 - 0.1) = 0.2.

    Args:
        actions: their names, in the order of `q_values`.
    """
    if len(completions) == 0:
        return []
    answers = [parse_completion(completion_text(completion)).answer for completion in completions]
    rewards_PA = shaping.of_actions(q_values)
    chosen = [action_index(answer, actions) for answer in answers]
    return [0.0 if a is None else float(rewards_A[a]) for a, rewards_A in zip(chosen, rewards_PA, strict=True)]


def combined_reward(
    completions: Sequence,
    q_values: Sequence[Sequence[float]],
    shaping: RewardShaping = ORIGINAL_SHAPING,
    actions: Sequence[str] = ACTIONS,
    **_,
) -> list[float]:
    """Mean of `format_reward` and `advantage_reward`: what GRPO maximises.

    With `q_values` [0.2, 0.4, 0.6, 0.1], `<think>go</think><answer>LEFT</answer>` earns (1 + 0.2) / 2 = 0.6 and
    `<answer>RIGHT</answer>` without a thought (0 + 1) / 2 = 0.5.
    """
    advantages = advantage_reward(completions, q_values, shaping, actions)
    return [(form + advantage) / 2 for form, advantage in zip(format_reward(completions), advantages, strict=True)]


# What is logged, in this order; `reward_weights` says what is learnt, by default the first. A further reward is one
# function and one entry.
REWARDS = (combined_reward, format_reward, advantage_reward)


def reward_functions(shaping: RewardShaping, actions: Sequence[str] = ACTIONS) -> list[Reward]:
    """`REWARDS` with `shaping` and `actions` bound, under the names that TRL logs."""

    def bind(reward: Reward) -> Reward:
        def bound(completions: Sequence, **columns) -> list[float]:
            return reward(completions, **{**columns, "shaping": shaping, "actions": actions})

        bound.__name__ = reward.__name__
        return bound

    return [bind(reward) for reward in REWARDS]
