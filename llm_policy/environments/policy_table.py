"""A model or a baseline -> its policy as a table, and the table's exact score beside the optimum.

A policy table `policy_SA` has one row per cell of the map (terminal cells too, uniform there); rows sum to 1. It is
what evaluation, baselines, policy search and pictures exchange.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from llm_policy.completions import parse_completion
from llm_policy.environments.frozen_lake import ACTIONS, Grid, acting_states, lake_mdp
from llm_policy.environments.mdp import AGREEMENT_GAMMA, MDP, optimal_actions, optimal_q, optimal_return, policy_return
from llm_policy.sampling import sample_completions
from prompts import fit_to_template, format_example, policy_messages, prompt_token_ids


@dataclass(frozen=True)
class PolicyScore:
    """How good a policy table is on its map. Probabilities are exact, of reaching the goal from the start.

    Attributes:
        success_probability: without a step limit.
        success_at_horizon: within `horizon_steps` steps.
        percent_of_optimal: 100 * success_probability / optimal_success; 100 where the optimum is 0.
        regret: optimal_success - success_probability.
        optimal_success: of the best policy without a step limit.
        optimal_at_horizon: of the best policy that may depend on the step, within the limit.
        optimal_states: acting states whose most probable action is optimal (discount `AGREEMENT_GAMMA`); of several
            equally probable ones, all.
        acting_states: cells from which the agent acts.
        format_validity: share of the completions in the asked form; None where no model was asked.
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

    def as_dict(self) -> dict:
        return asdict(self)


def score_policy(
    grid: Grid, is_slippery: bool, policy_SA: np.ndarray, horizon_steps: int, format_validity: float | None = None
) -> PolicyScore:
    """Judge a policy table on one map by dynamic programming; nothing is simulated."""
    mdp = lake_mdp(grid, is_slippery)
    success = max(0.0, float(policy_return(mdp, policy_SA)))  # rounding makes -1e-16 of nothing
    optimum = float(optimal_return(mdp))
    states = acting_states(grid)
    best_SA = optimal_actions(optimal_q(mdp, AGREEMENT_GAMMA))
    most_probable_SA = optimal_actions(policy_SA)
    return PolicyScore(
        success_probability=success,
        success_at_horizon=float(policy_return(mdp, policy_SA, horizon_steps=horizon_steps)),
        percent_of_optimal=100.0 * success / optimum if optimum > 0 else 100.0,
        regret=optimum - success,
        optimal_success=optimum,
        optimal_at_horizon=float(optimal_return(mdp, horizon_steps)),
        optimal_states=int((best_SA | ~most_probable_SA)[states].all(1).sum()),
        acting_states=len(states),
        horizon_steps=horizon_steps,
        format_validity=format_validity,
    )


def uniform_policy(states: int) -> np.ndarray:
    return np.full((states, len(ACTIONS)), 1.0 / len(ACTIONS))


def constant_policy(states: int, action: int) -> np.ndarray:
    return np.eye(len(ACTIONS))[np.full(states, action)]


def action_letters(policy_SA: np.ndarray) -> str:
    """The initial of each cell's most probable action; "." where several are (terminal cells, unreadable answers)."""
    return "".join(ACTIONS[int(row_A.argmax())][0] if (row_A == row_A.max()).sum() == 1 else "." for row_A in policy_SA)


def best_constant_action(mdp: MDP, horizon_steps: int) -> int:
    """The action that, taken everywhere, reaches the goal most often: the best policy of one action."""
    states = mdp.rewards_SA.shape[0]
    returns = [policy_return(mdp, constant_policy(states, a), horizon_steps=horizon_steps) for a in range(len(ACTIONS))]
    return int(np.argmax(returns))


@dataclass(frozen=True)
class PolicyReader:
    """Asks a language model for its policy: one prompt per acting state, all states of all maps in one batch.

    Attributes:
        observation: see `prompts.observation_text`.
        max_completion_tokens: what is not answered by then counts as unreadable.
    """

    tokenizer: PreTrainedTokenizerBase
    is_slippery: bool
    observation: str = "coordinates"
    max_completion_tokens: int = 64
    rows_per_batch: int = 256

    def prompt(self, grid: Grid, state: int) -> list[int]:
        """Token ids of the prompt of one state."""
        messages = policy_messages(grid, state, self.is_slippery, self.observation)
        return prompt_token_ids(fit_to_template(messages, self.tokenizer), self.tokenizer)

    def guess(self, grid: Grid, state: int) -> list[int]:
        """Token ids of what the warm start teaches as a reply; which action it names does not matter here."""
        reply = self.tokenizer.encode(format_example(grid, state, 0), add_special_tokens=False)
        return [*reply, self.tokenizer.eos_token_id]

    def completions(self, model: PreTrainedModel, cells: Sequence[tuple[Grid, int]], samples: int) -> list[str]:
        """Texts of `samples` sampled completions per (map, state), or of the greedy one where `samples` is 0."""
        ends = model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        config = GenerationConfig(
            max_new_tokens=self.max_completion_tokens,
            do_sample=samples > 0,
            temperature=1.0 if samples else None,
            top_k=0 if samples else None,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted({*ends, self.tokenizer.eos_token_id}),
            disable_compile=True,
        )
        token_ids = sample_completions(
            model,
            [self.prompt(*cell) for cell in cells],
            config,
            max(samples, 1),
            self.rows_per_batch,
            guesses=[self.guess(*cell) for cell in cells],
        )
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    def policies(self, model: PreTrainedModel, grids: Sequence[Grid], samples: int = 0) -> "ModelPolicies":
        """The model's policy on every map.

        Args:
            samples: completions per state at temperature 1; 0 asks once, greedily.

        A completion that names no action counts as a uniformly random one: the agent has to move somehow. How many
        there were stands in the format validity, which every score shows beside it.
        """
        cells = [(m, state) for m, grid in enumerate(grids) for state in acting_states(grid)]
        texts = self.completions(model, [(grids[m], state) for m, state in cells], samples)
        per_state = max(samples, 1)
        tables = [uniform_policy(len(grid) * len(grid[0])) for grid in grids]
        well_formed = 0
        for i, (m, state) in enumerate(cells):
            row_A = np.zeros(len(ACTIONS))
            for text in texts[i * per_state : (i + 1) * per_state]:
                parsed = parse_completion(text)
                well_formed += parsed.is_well_formed and parsed.action is not None
                row_A += 1.0 / len(ACTIONS) if parsed.action is None else np.eye(len(ACTIONS))[parsed.action]
            tables[m][state] = row_A / per_state
        return ModelPolicies(tables, well_formed / max(len(texts), 1), texts)


@dataclass(frozen=True)
class ModelPolicies:
    """Policy tables (one `policy_SA` a map), the share of well-formed completions that name an action, all texts."""

    tables: list[np.ndarray]
    format_validity: float
    texts: list[str]
