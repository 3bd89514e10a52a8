"""Ways of teaching the canonical slippery lake, with a good expert and with flawed ones."""

from collections.abc import Mapping

from llm_policy.report.cells import each, link, listed, markdown, values
from llm_policy.report.dates import made_by
from llm_policy.report.lakes import first_optimum, last_step, trained_greedy, warm_start_rows, write_curves
from llm_policy.report.studies import SAMPLED, SUPERVISION, TRAINED

# Reinforcement first: name of the result -> label
WAYS_OF_TEACHING = {
    "natural_slippery": "natural",
    "canonical_slippery": "expected",
    "ablation_objective_grpo_kl": "GRPO, eight completions, KL .3",
    "cloning_slippery": "cloning",
    "distillation_slippery": "distillation",
}
# Experts with flaws: end of the result's name -> label. Its beginning is the way of teaching
FLAWS = {
    "labels_only": "labels without Q-values",
    "wrong_tenth": "best and worst exchanged in a tenth of the states",
    "noise_tenth": "noise of a tenth of the largest Q-value",
    "few_episodes": "Q-learning stopped after 3,000 steps",
}
TAUGHT = ("natural", "cloning", "distillation")


def supervision_section(results: Mapping[str, list[dict]]) -> str:
    """The ways of teaching beside each other: what they reach, in how many steps and minutes."""
    headers = (
        "way of teaching", "seeds", "learning rate", "success, no step limit", "sampled, within the limit",
        "optimal states", "optimum first reached at step", "steps", "minutes", "date, commit",
    )  # fmt: skip
    rows = []
    for name, label in WAYS_OF_TEACHING.items():
        if name not in results:
            continue
        seeds = results[name]
        trained, states, _ = trained_greedy(seeds)
        sampled = [seed["policies"][SAMPLED] for seed in seeds if SAMPLED in seed["policies"]]
        rows.append(
            [
                link(label, seeds[0]["study"], name),
                len(seeds),
                f"{seeds[0]['metrics'][0]['learning_rate']:g}",  # constant in all of them
                values(trained, "success_probability"),
                values(sampled, "success_at_horizon") if sampled else "",
                states,
                each(seeds, lambda seed: first_optimum(seed["metrics"])),
                each(seeds, last_step),
                each(seeds, lambda seed: f"{seed['minutes']:.1f}"),
                made_by(seeds),
            ]
        )
    for name, seeds, success, _, _, states, *_, made_in in warm_start_rows(results["cloning_slippery"]):
        rows.append([name, seeds, "", success, "", states, "", "", "", made_in])
    return markdown(headers, rows)


def flaws_section(results: Mapping[str, list[dict]]) -> str:
    """Each flawed expert, and what each way of teaching makes of it: success of the greedy policy, each seed's."""
    headers = (
        "expert",
        *(f"{way}: success, no step limit" for way in TAUGHT),
        "optimal states",
        "steps",
        "date, commit",
    )
    rows = []
    for flaw, label in FLAWS.items():
        found = [results[name] for way in TAUGHT if (name := f"{way}_{flaw}") in results]
        if len(found) < len(TAUGHT):
            continue
        greedy = [[seed["policies"][TRAINED] for seed in seeds] for seeds in found]
        cells = [values(trained, "success_probability") for trained in greedy]
        of = f" of {greedy[0][0]['acting_states']:.0f}"
        states = listed([f"{row['optimal_states']:.0f}" for trained in greedy for row in trained], of)
        steps = listed(list(dict.fromkeys(str(last_step(seed)) for seeds in found for seed in seeds)))
        together = [seed for seeds in found for seed in seeds]
        rows.append([link(label, SUPERVISION, f"{TAUGHT[0]}_{flaw}"), *cells, states, steps, made_by(together)])
    return markdown(headers, rows)


def write_supervision_curves(results: Mapping[str, list[dict]]) -> None:
    ways = {label: results[name] for name, label in WAYS_OF_TEACHING.items() if name in results}
    title = "Ways of teaching the canonical slippery lake"
    write_curves(ways, "supervision", title, "optimal_states", "optimal states, of 11", by_steps=True)
