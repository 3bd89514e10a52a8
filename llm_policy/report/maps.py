"""Maps never seen in training: how far a policy reaches, where it goes wrong, what an observation holds.

Axes: S states, A actions, K outcomes of an action.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from llm_policy.environments.frozen_lake import ACTIONS, Grid, acting_states, grid_of, lake_mdp, leads_to_goal
from llm_policy.environments.mdp import AGREEMENT_GAMMA, optimal_actions, optimal_q
from llm_policy.plots import curves_figure
from llm_policy.report import files
from llm_policy.report.cells import each, link_to, listed, markdown, values, with_seeds
from llm_policy.report.dates import date_and_commit, made, made_by
from llm_policy.report.lakes import last_step, of_studies, on_gpu, other_size, write_curves
from llm_policy.report.studies import MAPS, TRAINED, WARM_START

OBSERVATION, OBSERVED = "observation_", "random_maps_dry"  # results with another observation, and what they change
THOUGHT = "thought_"  # results in which the model looks the map up itself


def of_maps(results: Mapping[str, list[dict]]) -> dict[str, dict[str, list[dict]]]:
    """Section -> name -> finished seeds: the usual observation, the comparison of observations, thoughts that look."""
    on_maps = of_studies(results, MAPS)
    found: dict[str, dict[str, list[dict]]] = {"maps": {}, "observations": {}, "thoughts": {}}
    for name, seeds in on_maps.items():
        is_observation, is_thought = name.startswith(OBSERVATION), name.startswith(THOUGHT)
        found["observations" if is_observation else "thoughts" if is_thought else "maps"][name] = seeds
    if found["observations"] and OBSERVED in on_maps:
        found["observations"] = {OBSERVED: on_maps[OBSERVED]} | found["observations"]
    return found


def maps_section(results: Mapping[str, list[dict]]) -> str:
    """One row per result: policies on maps never seen in training, in percent of the optimum of the same maps."""
    others = ("untrained", "warm start", "shortest path", "best constant action", "uniform random")
    headers = [
        "result", "observation", "trained, percent of the optimum", *others, "success of the optimum",
        "optimal states per map", f"right where only {', '.join(ACTIONS)} is optimal",
        "maps lost, by their first wrong step", "steps", "minutes", "date, commit",
    ]  # fmt: skip
    rows = []
    for name, seeds in results.items():
        trained = [seed["policies"][TRAINED] for seed in seeds]
        states = each(trained, lambda row: f"{row['optimal_states']:.1f}", f" of {trained[0]['acting_states']:.1f}")
        rows.append(
            [
                link_to(name, seeds),
                seeds[0]["observation"],
                values(trained, "percent_of_optimal", 1),
                *(_percent_of_optimal(seeds, policy) for policy in others),
                f"{np.mean([row['optimal_success'] for row in trained]):.4f}",
                states,
                _right_by_action(seeds),
                _first_wrong_steps(seeds),
                each(seeds, last_step),
                each(seeds, lambda seed: f"{seed['minutes']:.0f}"),
                made_by(seeds),
            ]
        )
    return markdown(headers, rows)


def thoughts_section(results: Mapping[str, list[dict]]) -> str:
    """One row per result: how far the policy comes, how many thoughts are true, and whether the answer follows them."""
    headers = [
        "result", "thought", "tokens", "trained, percent of the optimum", "warm start", "untrained",
        "optimal states per map", "maps lost, by their first wrong step", "true thoughts, warm start",
        "true thoughts, trained", "behind a false thought the answer changes",
        "best by the thought, the prompt, neither", "steps", "seconds per step", "minutes", "date, commit",
    ]  # fmt: skip
    rows = []
    for name, seeds in results.items():
        trained = [seed["policies"][TRAINED] for seed in seeds]
        ice = "slippery" if seeds[0]["is_slippery"] else "not slippery"
        rows.append(
            [
                link_to(name, seeds),
                f"{seeds[0]['thought']}, {ice}{other_size(seeds[0])}",
                f"{np.mean([_tokens(seed) for seed in seeds]):.0f}",
                values(trained, "percent_of_optimal", 1),
                _percent_of_optimal(seeds, WARM_START),
                _percent_of_optimal(seeds, "untrained"),
                each(trained, lambda row: f"{row['optimal_states']:.1f}", f" of {trained[0]['acting_states']:.1f}"),
                _first_wrong_steps(seeds),
                *(_true_thoughts(seeds, policy) for policy in (WARM_START, TRAINED)),
                *_followed(seeds),
                each(seeds, last_step),
                each(seeds, lambda seed: f"{np.median([line['step_time'] for line in seed['metrics']]):.0f}"),
                each(seeds, lambda seed: f"{seed['minutes']:.0f}") + on_gpu(seeds),
                made_by(seeds),
            ]
        )
    return markdown(headers, rows)


def _tokens(seed: dict) -> float:
    """Of a completion, the mean of all steps."""
    return float(np.mean([line["completions/mean_length"] for line in seed["metrics"]]))


def _true_thoughts(seeds: Sequence[dict], policy: str) -> str:
    """Of each seed, and `-` for one in which they were not judged. Empty where the thought looks at nothing."""
    shares = [seed["thoughts"].get(policy, {}).get("true_thoughts") for seed in seeds]
    if not any(share is not None for share in shares):
        return ""
    return each(shares, lambda share: "-" if share is None else f"{100 * share:.1f}", " %")


def _followed(seeds: Sequence[dict]) -> tuple[str, str]:
    """How often a false thought changes the answer, and what the answer is then best by."""
    all_found = [seed["thoughts"].get(TRAINED, {}).get("behind_false_thoughts") for seed in seeds]
    found = [followed for followed in all_found if followed and followed["states"]]
    kinds = ("thought", "prompt", "neither")
    shares = [" / ".join(f"{100 * followed[kind]:.0f}" for kind in kinds) for followed in found]
    if not found:
        return "", ""
    return each(found, lambda followed: f"{100 * followed['changed']:.0f}", " %"), listed(shares, " %")


def _percent_of_optimal(seeds: Sequence[dict], beginning: str) -> str:
    """The mean over those seeds that judged this policy, which need not be all."""
    rows = [row for seed in seeds for name, row in seed["policies"].items() if name.startswith(beginning)]
    return f"{np.mean([row['percent_of_optimal'] for row in rows]):.1f}" if rows else ""


def _judged_maps(seed: dict) -> list[tuple[Grid, str]] | None:
    """Each map and the trained greedy policy's action on it, one letter per state. None in older evaluations."""
    letters = seed["policies"][TRAINED].get("actions")
    if letters is None:
        return None
    return [(grid_of(rows), chosen) for rows, chosen in zip(seed["maps"], letters, strict=True)]


@cache
def _optimal_actions(grid: Grid, is_slippery: bool) -> np.ndarray:
    """Kept, because all results on maps never seen share their maps."""
    return optimal_actions(optimal_q(lake_mdp(grid, is_slippery), AGREEMENT_GAMMA))


def _right_by_action(seeds: Sequence[dict]) -> str:
    """Percent of the states with one optimal action, by that action, in which the trained policy takes it."""
    found, right = Counter(), Counter()
    for seed in seeds:
        judged = _judged_maps(seed)
        if judged is None:
            return ""
        for grid, chosen in judged:
            best_SA = _optimal_actions(grid, seed["is_slippery"])
            for state in acting_states(grid):
                if best_SA[state].sum() == 1:
                    best = ACTIONS[best_SA[state].argmax()]
                    found[best] += 1
                    right[best] += chosen[state] == best[0]
    return each(ACTIONS, lambda action: f"{100 * right[action] / found[action]:.0f} %" if found[action] else "none")


def _first_wrong_steps(seeds: Sequence[dict]) -> str:
    """How many maps are lost, by what the first step that is not optimal leads into. On ice that is not slippery."""
    lost, maps = Counter(), 0
    for seed in seeds:
        judged = _judged_maps(seed)
        if judged is None or seed["is_slippery"]:  # with slip a policy takes no single way
            return ""
        maps += len(judged)
        reasons = (_reason_of_loss(grid, chosen) for grid, chosen in judged)
        lost.update(reason for reason in reasons if reason)
    return ", ".join(f"{kind} {count}" for kind, count in lost.most_common()) + f" of {maps}" * bool(lost)


def _reason_of_loss(grid: Grid, chosen: str) -> str | None:
    """What the first step that is not optimal leads into; None where the goal is reached."""
    lake, letters = lake_mdp(grid, is_slippery=False), "".join(grid)
    best_SA = _optimal_actions(grid, is_slippery=False)
    state, visited, reason = letters.index("S"), set(), None
    while letters[state] not in "HG" and state not in visited:
        visited.add(state)
        action = next((a for a, name in enumerate(ACTIONS) if name[0] == chosen[state]), None)
        if action is None:
            return reason or "no answer"
        reached = int(lake.next_states_SAK[state, action, 0])
        if reason is None and not best_SA[state, action]:
            reason = _leads_into(grid, state, reached)
        state = reached
    return None if letters[state] == "G" else reason


def _leads_into(grid: Grid, left: int, reached: int) -> str:
    """`edge`: the agent stays where it is; `dead end`: the goal is out of reach without a step back; `detour`: not."""
    row, column = divmod(reached, len(grid[0]))
    if reached == left:
        return "edge"
    if grid[row][column] == "H":
        return "hole"
    return "detour" if leads_to_goal(grid, (row, column), without=divmod(left, len(grid[0]))) else "dead end"


def probe_section(file: Path) -> str:
    """What a small network reaches that reads these parts of an observation or a thought."""
    rows = []
    with files.whole(file):
        found = files.read_json(file)["percent_of_optimal"]
        dynamics = list(next(iter(found.values())))
        headers = ["a small network reads", *(f"{name}, percent of the optimum" for name in dynamics), "date, commit"]
        for label, percents in found.items():
            scores = [values([{"percent": value} for value in percents[name]], "percent", 1) for name in dynamics]
            rows.append([label, *scores, date_and_commit(made(file))])
    return markdown(headers, rows)


def write_map_curves(results: Mapping[str, list[dict]]) -> None:
    """Of maps of the usual size and of CPUs, whose minutes compare."""
    found = of_maps(results)

    def compare(seeds: Sequence[dict], is_slippery: bool) -> bool:
        on_cpus = not any(seed["gpu"] for seed in seeds)
        return seeds[0]["is_slippery"] == is_slippery and on_cpus and not other_size(seeds[0])

    for is_slippery, ice in ((False, "dry"), (True, "slippery")):
        title = f"Maps never seen in training, {'slippery' if is_slippery else 'not slippery'}"
        maps, observations, thoughts = (
            {name: seeds for name, seeds in found[kind].items() if compare(seeds, is_slippery)}
            for kind in ("maps", "observations", "thoughts")
        )
        write_curves(maps | thoughts, f"random_maps_{ice}", title, "percent_of_optimal", "percent of the optimum")
        kinds_of_thought = {seeds[0]["thought"] for seeds in thoughts.values()}
        if thoughts and len(observations) + len(kinds_of_thought) > 1:
            write_tokens_picture(observations | thoughts, f"thought_tokens_{ice}", title)


def write_tokens_picture(results: Mapping[str, list[dict]], name: str, title: str) -> None:
    """What a trained policy reaches, against how much it writes: a point per seed."""
    points = {
        with_seeds(label, seeds): [([_tokens(s)], [s["policies"][TRAINED]["percent_of_optimal"]]) for s in seeds]
        for label, seeds in results.items()
    }
    x_label = "tokens of a completion, mean of all steps"
    files.save_picture(curves_figure(points, {"optimal": 100.0}, x_label, "percent of the optimum", title), name)
