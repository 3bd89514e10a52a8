"""The summary in README.md, across all subjects."""

from collections.abc import Mapping, Sequence

import numpy as np

from llm_policy.environments.mdp import OPTIMAL_PERCENT
from llm_policy.report.cells import FEW, link, markdown, values
from llm_policy.report.dates import made_by
from llm_policy.report.lakes import SUMMARY_LAKE, on_gpu, other_size
from llm_policy.report.other_games import summary_row
from llm_policy.report.studies import OPTIMAL, POLICY_GRADIENT, SEARCH, TRAINED, UNTRAINED

OURS = "GRPO, this repository"
SEARCHES = f"{OURS}: it searches the map in its thought"
# The rows of training: what each is called there, and the score
SUMMARY = {
    "natural_slippery": (OURS, "success_probability"),
    "original_reproduced": ("the original, reproduced", "success_probability"),
    "ablation_objective_grpo": ("GRPO of sampled rewards alone", "success_probability"),
    "cloning_slippery": ("supervision: cloning of the best action", "success_probability"),
    "natural_qwen_coder_2e-4": (f"{OURS}: Qwen2.5-Coder-0.5B-Instruct", "success_probability"),
    "natural_deterministic": (OURS, "success_probability"),
    "thought_search_dry": (SEARCHES, "percent_of_optimal"),
    "thought_search_slippery_80": (SEARCHES, "percent_of_optimal"),
    "thought_search_8x8_dry": (SEARCHES, "percent_of_optimal"),
}
SUMMARY_SEARCH = "props_frozen_lake"
SUMMARY_POLICY_GRADIENTS = {  # what each is called there; within the step limit
    "frozen_lake_ppo_mlp": "PPO, a network that reads the state's number",
    "frozen_lake_ppo_frozen": "PPO, behind SmolLM2-135M-Instruct that reads the grid",
    "frozen_lake_trpo_frozen": "TRPO, behind the same",
}


def summary_section(
    results: Mapping[str, list[dict]], searches: Mapping[str, list[dict]], played: Mapping[str, list[dict]],
    games: Mapping[str, list[dict]],
) -> str:  # fmt: skip
    """The table of README.md: each system beside its optimum and its baselines."""
    rows = [_summary_row(name, results[name], *SUMMARY[name]) for name in SUMMARY if name in results]
    if SUMMARY_LAKE in results:
        rows[1:1] = _summary_baselines(results[SUMMARY_LAKE][0])
    rows += [summary_row(name, seeds) for name, seeds in games.items()]
    if SUMMARY_LAKE in results and (searches or played):  # what these are compared with
        rows.append(_summary_row(SUMMARY_LAKE, results[SUMMARY_LAKE], OURS, "success_at_horizon"))
    if SUMMARY_SEARCH in searches:
        rows += _summary_searches(searches[SUMMARY_SEARCH])
    for name, label in SUMMARY_POLICY_GRADIENTS.items():
        if name in played:
            rows.append(_summary_policy_gradient(name, label, played[name]))
    headers = ("system", "environment", "score: mean (each seed)", "optimum", "seeds", "minutes per seed")
    return markdown((*headers, "date, commit"), rows)


def _summary_row(name: str, seeds: Sequence[dict], system: str, score: str) -> list[object]:
    trained = [seed["policies"][TRAINED] for seed in seeds]
    if score == "percent_of_optimal":
        ice = "slippery" if seeds[0]["is_slippery"] else "not slippery"
        where = f"{trained[0]['maps']} maps never seen, {ice}{other_size(seeds[0])}: percent of the optimum"
        scores, optimum = values(trained, score, 1), "100"
    else:
        where = f"{'slippery lake' if seeds[0]['is_slippery'] else 'lake without slip'}: success"
        if score == "success_at_horizon":
            where += f" within {trained[0]['horizon_steps']:.0f} steps"
        best = seeds[0]["policies"][OPTIMAL][score]
        scores, optimum = values(trained, score), f"{best:.4f}"
        if len(trained) > FEW:
            found = np.array([row[score] for row in trained])
            at_optimum = np.sum(100 * found >= OPTIMAL_PERCENT * best)
            scores = f"**{found.mean():.4f}** (the optimum in {at_optimum} of {len(trained)})"
    minutes = f"{np.mean([seed['minutes'] for seed in seeds]):.0f}{on_gpu(seeds)}"
    label = link(system, seeds[0]["study"], name)
    return [label, where, scores, optimum, len(seeds), minutes, made_by(seeds)]


def _summary_baselines(seed: dict) -> list[list[object]]:
    """The untrained model, the best constant action and uniform random choice, on the slippery lake."""
    rows = []
    for beginning in (UNTRAINED, "best constant action", "uniform random"):
        for name, row in seed["policies"].items():
            if name.startswith(beginning):
                label = {UNTRAINED: "untrained model", "uniform random": "uniformly random policy"}.get(name, name)
                success, optimum = f"{row['success_probability']:.4f}", f"{row['optimal_success']:.4f}"
                rows.append([label, "slippery lake: success", success, optimum, "none", "", made_by([seed])])
    return rows


def _summary_searches(seeds: Sequence[dict]) -> list[list[object]]:
    """Policy search in context and hill climbing: success within the step limit, because their episodes have one."""
    where = f"slippery lake: success within {seeds[0]['horizon_steps']} steps"
    optimum = next(row["value"] for name, row in seeds[0]["policies"].items() if name.startswith("optimal"))
    rows = []
    for name in (seeds[0]["searched"], "hill climbing"):
        found = [seed["policies"][name] for seed in seeds if name in seed["policies"]]
        is_searched = name == seeds[0]["searched"]
        label = link(name, SEARCH, SUMMARY_SEARCH) if is_searched else name
        minutes = f"{np.mean([seed['minutes'] for seed in seeds]):.0f}" if is_searched else ""
        rows.append([label, where, values(found, "value"), f"{optimum:.4f}", len(found), minutes, made_by(seeds)])
    return rows


def _summary_policy_gradient(name: str, label: str, seeds: Sequence[dict]) -> list[object]:
    where = f"slippery lake: success within {seeds[0]['horizon_steps']} steps"
    scores = values([seed["policies"][TRAINED] for seed in seeds], "success_at_horizon")
    optimum = f"{seeds[0]['policies']['optimal']['success_at_horizon']:.4f}"
    minutes = f"{np.mean([seed['minutes'] for seed in seeds]):.1f}"
    return [link(label, POLICY_GRADIENT, name), where, scores, optimum, len(seeds), minutes, made_by(seeds)]
