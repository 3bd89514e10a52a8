"""How much of a measured share is chance."""

import math

Z_95 = 1.96


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a success probability, in [0, 1] (Wilson 1927)."""
    share = successes / trials
    centre = share + Z_95**2 / (2 * trials)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    return max(0.0, (centre - half) / (1 + Z_95**2 / trials)), min(1.0, (centre + half) / (1 + Z_95**2 / trials))


def mcnemar_p(only_before: int, only_after: int) -> float:
    """Exact two-sided p of a change, by the questions that were right only before or only after it (McNemar 1947)."""
    changed = only_before + only_after
    tail = sum(math.comb(changed, k) for k in range(min(only_before, only_after) + 1)) / 2**changed
    return min(1.0, 2 * tail)
