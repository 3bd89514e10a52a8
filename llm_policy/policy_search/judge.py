"""What the policies of a search are worth: exactly where there is a transition table, else by fresh episodes.

Axes: S states, A actions.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from llm_policy.environments.gym_env import GymEnvironment, returns, seed_of
from llm_policy.environments.mdp import optimal_policy, optimal_return, policy_return
from llm_policy.errors import InputError
from llm_policy.policy_search.parameters import Parameters, SearchProblem
from llm_policy.policy_search.search import Step
from llm_policy.tables import new_table, number_text

# Within a limit another policy may be better: 0.63 of 100 steps on the 8x8 lake, where this one has 0.51
OPTIMAL_ROW = "optimal without a limit"
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


@dataclass(frozen=True)
class PolicyValue:
    """What a policy is worth.

    Attributes:
        value: expected return within the step limit; on a lake that is the probability of success. Exact, or the mean
            of fresh episodes.
        standard_error: of that mean; None where the value is exact.
        value_without_limit: exact expected return without a step limit; None where it is unknown.
    """

    value: float
    standard_error: float | None = None
    value_without_limit: float | None = None


class SearchJudge:
    """Judges each policy once: exactly where the environment has a transition table, else by fresh episodes."""

    def __init__(self, problem: SearchProblem, episodes: int, seed: int) -> None:
        self.environment, self.space = problem.environment, problem.space
        self.problem, self.episodes, self.seed = problem, episodes, seed_of(seed, "judge")
        self._known: dict[Parameters, PolicyValue] = {}

    def __call__(self, parameters: Parameters) -> PolicyValue:
        if parameters not in self._known:
            if self.environment.mdp is not None:
                self._known[parameters] = self.of_table(self.space.policy_table(parameters))
            else:
                self._known[parameters] = _sampled(self.problem.returns(parameters, self.episodes, self.seed))
        return self._known[parameters]

    def of_table(self, policy_SA: np.ndarray) -> PolicyValue:
        mdp = self.environment.mdp
        assert mdp is not None
        limited = policy_return(mdp, policy_SA, horizon_steps=self.environment.horizon_steps)
        return PolicyValue(float(limited), None, float(policy_return(mdp, policy_SA)))

    def of_uniform_random(self) -> PolicyValue:
        if self.environment.mdp is not None:
            return self.of_table(np.full(self.environment.mdp.rewards_SA.shape, 1.0 / self.space.outputs))
        actions = self.environment.env.action_space
        actions.seed(seed_of(self.seed, "actions"))  # else it draws the numbers of the environment
        return _sampled(returns(self.environment.env, lambda _: actions.sample(), self.episodes, self.seed))


def _sampled(totals: Sequence[float]) -> PolicyValue:
    return PolicyValue(float(np.mean(totals)), float(np.std(totals, ddof=1) / len(totals) ** 0.5))


# Comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        judgement: None where a search found no policy.
        search_mean: the mean return that the search itself saw; as the best of many it is too high.
        episodes: what the search spent.
    """

    policy: str
    judgement: PolicyValue | None
    parameters: Parameters | None = None
    search_mean: float | None = None
    episodes: int | None = None

    def as_dict(self) -> dict:
        judged = self.judgement or PolicyValue(float("nan"))
        unlimited = judged.value_without_limit
        return {
            "policy": self.policy,
            "value": None if self.judgement is None else judged.value,
            "standard_error": judged.standard_error,
            # JSON has no -inf (a cliff walker that never arrives)
            "value_without_limit": unlimited if unlimited is None or np.isfinite(unlimited) else str(unlimited),
            "parameters": None if self.parameters is None else list(self.parameters),
            "search_mean": self.search_mean,
            "episodes": self.episodes,
        }


@dataclass(frozen=True)
class SearchComparison:
    """A search beside references and searches without a model.

    Attributes:
        references: what is optimal without a limit, where it can be computed, and the uniformly random policy.
        others: the searches without a model, at the number of episodes that `searched` spent.
        curves: search -> iterations, and the value of its best policy after each.
    """

    references: list[Row]
    others: list[Row]
    searched: Row
    curves: dict[str, tuple[list[int], list[float]]]

    @property
    def rows(self) -> list[Row]:
        return [*self.references, *self.others, self.searched]


def compare(searches: Mapping[str, Sequence[Step]], searched: str, judge: SearchJudge) -> SearchComparison:
    """Judge the search called `searched` beside all others of `searches` (name -> its steps)."""
    row = row_of(searched, searches[searched], judge)
    spent = searches[searched][-1].episodes
    others = [row_of(name, steps, judge, spent) for name, steps in searches.items() if name != searched]
    return SearchComparison(
        reference_rows(judge), others, row, {n: curve_of(steps, judge) for n, steps in searches.items()}
    )


def row_of(name: str, steps: Sequence[Step], judge: SearchJudge, episodes: int | None = None) -> Row:
    """The best policy of a search, at its end or when it had spent `episodes` episodes."""
    spent = [step for step in steps if step.best is not None and (episodes is None or step.episodes <= episodes)]
    if not spent:
        return Row(name, None, episodes=0)
    last = spent[-1]
    assert last.best is not None
    return Row(name, judge(last.best), last.best, last.best_mean, last.episodes)


def reference_rows(judge: SearchJudge) -> list[Row]:
    """The policy that is optimal without a limit where it can be computed, and the uniformly random one."""
    rows = [Row("uniform random policy", judge.of_uniform_random())]
    if judge.environment.mdp is not None:
        with suppress(InputError):  # rewards that never end have no optimum without a limit
            rows.insert(0, Row(OPTIMAL_ROW, judge.of_table(optimal_policy(judge.environment.mdp))))
    return rows


def curve_of(steps: Sequence[Step], judge: SearchJudge) -> tuple[list[int], list[float]]:
    """Iterations from the end of the warm-up (0), and the value of the best policy after each."""
    known = [(step.iteration, step.best) for step in steps if step.iteration >= 0 and step.best is not None]
    return [iteration for iteration, _ in known], [judge(best).value for _, best in known]


# Words -----------------------------------------------------------------------------------------------------------


def comparison_table(rows: Sequence[Row], environment: GymEnvironment, title: str) -> Table:
    is_exact = environment.mdp is not None
    is_lake = environment.env_id.startswith("FrozenLake") and "reward_schedule" not in environment.options
    what = "success" if is_lake else "return"
    columns = [f"{what} in {environment.horizon_steps} steps", *([f"{what}, no limit"] if is_exact else [])]
    table = new_table(title, "policy", (*columns, "as searched", "episodes"))
    for row in rows:
        values = ["none" if row.judgement is None else number_text(row.judgement.value, row.judgement.standard_error)]
        if is_exact:
            values.append("" if row.judgement is None else number_text(row.judgement.value_without_limit))
        episodes = "" if row.episodes is None else str(row.episodes)
        table.add_row(row.policy, *values, number_text(row.search_mean), episodes)
    return table


def ceiling_text(environment: GymEnvironment) -> list[str]:
    """The best that any policy reaches, or what Gymnasium calls solved; [] where neither is known."""
    if environment.mdp is not None:
        ceiling = number_text(float(optimal_return(environment.mdp, environment.horizon_steps)))
        return [f"The best policy that may count its steps reaches {ceiling} in {environment.horizon_steps} steps."]
    threshold = environment.threshold
    return [] if threshold is None else [f"Gymnasium calls the task solved at a return of {threshold:g}."]


def published_of(environment: GymEnvironment) -> dict[str, str]:
    """Figures of the paper that compare with ours; {} where there are none."""
    return PUBLISHED.get(environment.env_id, {}) if environment.is_usual else {}


def published_text(environment: GymEnvironment) -> list[str]:
    if not (known := published_of(environment)):
        return []
    figures = ", ".join(f"{name} {value}" for name, value in known.items())
    return [f"published, not run here (arXiv 2511.21928; ProPS asks GPT-4o, 400 iterations x 20 episodes): {figures}"]


def verdict_of(searched: Row, others: Sequence[Row]) -> str:
    """Whether the search beats each search without a model; sampled values must differ by two standard errors."""
    if searched.judgement is None:
        return f"verdict: {searched.policy} found no policy at all"
    sentences = []
    for other in others:
        difference = searched.judgement.value - (other.judgement.value if other.judgement else -np.inf)
        errors = [j.standard_error or 0.0 for j in (searched.judgement, other.judgement) if j]
        margin = 2 * math.hypot(*errors) if len(errors) == 2 else 0.0
        if abs(difference) <= max(margin, 1e-9):
            sentences.append(f"cannot be told from {other.policy}" if margin else f"equals {other.policy}")
        else:
            sentences.append(f"{'beats' if difference > 0 else 'does not beat'} {other.policy}")
    return f"verdict: {searched.policy} {', '.join(sentences) or 'was compared with no other search'} (one seed)"
