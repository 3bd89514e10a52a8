"""How good a policy of a table's states is: a model's answers become policy tables, exact scores and a picture.

Axes: P prompts (a state each), G samples, A actions, S states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from llm_policy.chat import Messages, Reader
from llm_policy.completions import common_words, parse_completion
from llm_policy.environments.judge import (
    BASELINES,
    THOUGHTS_FILE,
    baseline_policy,
    evaluate_policies,
    evaluation_table,
    mutual_information,
    policy_verdict,
    save_evaluation,
)
from llm_policy.environments.mdp import OPTIMAL_PERCENT
from llm_policy.environments.pictures import ShownThought, policy_figure, states_drawn, thoughts_figure
from llm_policy.environments.policy_table import best_actions, score_policy, uniform_policy
from llm_policy.environments.table_environment import TableEnvironment
from llm_policy.errors import InputError, writing
from llm_policy.grpo.answers import (
    answer_weights,
    answers_as_read,
    answers_behind,
    mean_answers,
    sampled_answers,
    true_thoughts,
    words_said,
)
from llm_policy.grpo.diagnostics import Judgement
from llm_policy.tables import show
from tasks import Comparison

PARTS = 4  # of sampled thoughts, to show how much is left to chance
MAPS_JUDGED = 20  # of many maps, in the evaluations between steps (of the CSV's own, at the end too)
THOUGHTS_SHOWN = 6
MOST_EXCHANGED = 500  # states whose thought is exchanged: at 16 x 16 twenty maps would have thousands
TRUTH = ("true_thoughts", "true_words", "telling_words")


@dataclass(frozen=True)
class Words:
    """What a model is told of a state, and what the warm start teaches it to say.

    Attributes:
        messages: (environment, state) -> the prompt.
        reply: (environment, state, action) -> a well-formed reply that names that action. Its thought must not depend
            on the action, so that no label is taught.
        exchanged: (environment, state) -> an environment that differs in one thing beside the agent, so that other
            actions are best, or None. Its thought, put into the model's mouth, shows whether the answer follows it.
        telling: words of a thought that say what is rare on a map, to be counted apart.
    """

    messages: Callable[[Any, int], Messages]  # each task knows its own kind of environment
    reply: Callable[[Any, int, int], str]
    exchanged: Callable[[Any, int], Any] | None = None
    telling: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TableJudge:
    """Asks a model for its action in every acting state, and judges the policy table exactly (`tasks.Judge`).

    Attributes:
        environments: the maps to judge on.
        settings: what run.json says of them.
        named_policies: baselines of the task beside those that `evaluate_policies` always shows.
    """

    environments: Sequence[TableEnvironment]
    words: Words
    reader: Reader
    settings: dict
    episodes: int = 1000
    seed: int = 0
    horizon_steps: int | None = None
    named_policies: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)

    def answers(self, model: PreTrainedModel, samples: int = 0) -> dict:
        """`policies`: a table per environment; `format_validity`: share of well-formed completions with an action.

        A completion that names no action counts as a uniformly random one: the agent has to move somehow. With
        `samples` the thoughts are sampled and their answers exact (llm_policy/grpo/answers.py). `success_of_parts` then
        holds the success within the limit by each quarter of the thoughts alone: how much is left to chance. Without,
        `true_thoughts`, `true_words`, `telling_words` say how far thoughts are as the warm start would teach them,
        `behind_false_thoughts` says what the answer follows behind the thought of another map (`follows`), and
        `shown` holds completions for the picture: number of the state among all of `_pairs`, the text, and what would
        have been true.
        """
        actions = self.environments[0].actions
        pairs = self._pairs()
        prompts = [self.words.messages(self.environments[m], state) for m, state in pairs]
        guesses = [self.words.reply(self.environments[m], state, 0) for m, state in pairs]
        if samples:
            is_fixed = "thought" not in self.settings
            exact_PA, rest_PGA, valid = sampled_answers(
                self.reader, model, prompts, actions, samples, guesses, is_fixed
            )
            rows_PGA = answer_weights(exact_PA, rest_PGA)
        else:
            texts = self.reader.completions(model, prompts, 0, guesses)
            rows_PGA, valid = answers_as_read(texts, actions)
        found = {"policies": self._tables(pairs, mean_answers(rows_PGA)), "format_validity": valid}
        if not samples:
            found["true_thoughts"], found["true_words"] = true_thoughts(texts, guesses)
            if self.words.telling:
                found["telling_words"] = words_said(texts, guesses, self.words.telling)
            if self.words.exchanged:
                found["behind_false_thoughts"] = self.follows(model)
            if "thought" in self.settings:
                drawn = [states_drawn(environment) for environment in self.environments]
                candidates = [i for i, (m, state) in enumerate(pairs) if state in drawn[m]]
                count = min(THOUGHTS_SHOWN, len(candidates))
                places = [candidates[(2 * i + 1) * len(candidates) // (2 * count)] for i in range(count)]
                found["shown"] = [(i, texts[i], guesses[i]) for i in places]
        if samples >= PARTS:
            rests = np.array_split(rest_PGA, PARTS, axis=1)
            parts = [mean_answers(answer_weights(exact_PA, part_PGA)) for part_PGA in rests]
            found["success_of_parts"] = [self._success_at_horizon(self._tables(pairs, rows_PA)) for rows_PA in parts]
        return found

    def follows(self, model: PreTrainedModel) -> dict[str, float]:
        """What the answer follows behind a thought that is true of the `exchanged` environment, not of the prompt's.

        Over acting states of the first `MAPS_JUDGED` environments in which no action is best in both, at most
        `MOST_EXCHANGED` of them. `thought`, `prompt` and `neither` are the shares of the answers that are best in the
        one, in the other, in none. `changed` is the share that differs from the answer behind the true thought: 0 where
        the thought has no say. `states` says how many there are.
        """
        kept = [
            (own, other, state)
            for own in self.environments[:MAPS_JUDGED]
            for state in own.acting_states
            if (other := self.words.exchanged(own, state)) is not None
        ]
        if not kept:
            return {"states": 0}
        kept = kept[:: -(-len(kept) // MOST_EXCHANGED)]
        prompts = [self.words.messages(own, state) for own, _, state in kept]
        actions = self.environments[0].actions

        def chosen(replies: list[str]) -> np.ndarray:
            return answers_behind(self.reader, model, prompts, replies, actions).argmax(axis=1)

        before = chosen([self.words.reply(own, state, 0) for own, _, state in kept])
        behind_false = chosen([self.words.reply(other, state, 0) for _, other, state in kept])
        answers = list(zip(kept, behind_false, strict=True))
        counts = {
            "thought": sum(best_actions(other)[state, action] for (_, other, state), action in answers),
            "prompt": sum(best_actions(own)[state, action] for (own, _, state), action in answers),
        }
        counts["neither"] = len(kept) - counts["thought"] - counts["prompt"]
        shares = {name: int(count) / len(kept) for name, count in counts.items()}
        return shares | {"changed": float((behind_false != before).mean()), "states": len(kept)}

    def _pairs(self) -> list[tuple[int, int]]:
        """(Number of the environment, state) of all acting states."""
        return [(m, state) for m, environment in enumerate(self.environments) for state in environment.acting_states]

    def _tables(self, pairs: Sequence[tuple[int, int]], rows_PA: np.ndarray) -> list[list[list[float]]]:
        """A policy table per environment from a row per acting state; uniform where no action is chosen."""
        policies = [uniform_policy(*environment.mdp.rewards_SA.shape) for environment in self.environments]
        for (m, state), row_A in zip(pairs, rows_PA, strict=True):
            policies[m][state] = row_A
        return [policy.tolist() for policy in policies]

    def _success_at_horizon(self, policies: Sequence[Sequence[Sequence[float]]]) -> float:
        """Mean over the environments."""
        pairs = zip(self.environments, policies, strict=True)
        scores = [score_policy(environment, np.array(policy), self.horizon_steps) for environment, policy in pairs]
        return float(np.mean([score.success_at_horizon for score in scores]))

    def first_prompt(self) -> list[int]:
        """Token ids of one prompt, to check its length before all are asked."""
        first = self.environments[0]
        return self.reader.prompt(self.words.messages(first, first.acting_states[0]))

    def baseline_answers(self, name: str) -> dict:
        """A baseline's policies by its name; `InputError` for one that these environments do not have."""
        found = [baseline_policy(name, environment, self.seed) for environment in self.environments]
        policies = [policy for policy in found if policy is not None]
        if len(policies) < len(found):
            raise InputError(
                f"--policies {name!r}: expected a run folder, a model or one of {', '.join(BASELINES)}, with an "
                f"action of {', '.join(self.environments[0].actions)}; shortest-path is for lakes"
            )
        return {"policies": [policy.tolist() for policy in policies]}

    def judgement(self, answers: Mapping) -> Judgement:
        policies_SA = [np.array(policy) for policy in answers["policies"]]
        environments = self.environments
        scores = [
            score_policy(environment, policy_SA, self.horizon_steps, answers["format_validity"])
            for environment, policy_SA in zip(environments, policies_SA, strict=True)
        ]
        names = ["success_probability", "success_at_horizon", "percent_of_optimal"]
        names += [] if environments[0].pays_success else ["return_at_horizon"]
        means = {name: float(np.mean([getattr(score, name) for score in scores])) for name in names}
        verdict = policy_verdict(policies_SA, environments, scores)

        def draw(title: str):
            first = environments[0]
            return policy_figure([(f"{title}: {verdict}", first, policies_SA[0], best_actions(first))])

        return Judgement(
            metrics={
                **means,
                "optimal_states": sum(score.optimal_states for score in scores),
                "format_validity": answers["format_validity"],
                "mutual_information": mutual_information(policies_SA, environments),
                **{name: answers[name] for name in TRUTH if name in answers},
            },
            verdict=verdict,
            # As good as the optimum, or as the expert, whose discount may ask for other actions
            is_optimal=all(
                score.percent_of_optimal >= OPTIMAL_PERCENT or score.optimal_states == score.acting_states
                for score in scores
            ),
            draw=draw,
        )

    def compare(self, answers_of: Mapping[str, Mapping]) -> Comparison:
        named = {name: [np.array(p) for p in answers["policies"]] for name, answers in answers_of.items()}
        evaluated = evaluate_policies(
            {**named, **self.named_policies},
            self.environments,
            validities={
                name: answers["format_validity"] for name, answers in answers_of.items() if "format_validity" in answers
            },
            horizon_steps=self.horizon_steps,
            episodes=self.episodes,
            seed=self.seed,
        )
        about = {key: self.settings[key] for key in ("maps", "is_slippery") if key in self.settings}
        kind = {True: ", slippery", False: ", not slippery", None: ""}[about.get("is_slippery")]
        where = f"{len(self.environments)} maps" if len(self.environments) > 1 else str(self.environments[0])
        env_id = self.environments[0].env_id
        title = f"{env_id}{'' if where == env_id else f' {where}'}{kind}"
        table, ceiling = evaluation_table(evaluated, title)
        spreads = [
            f"{name}: exact answers behind sampled thoughts; a quarter of the thoughts gives {min(parts):.4f} to "
            f"{max(parts):.4f} within the limit."
            for name, answers in answers_of.items()
            if (parts := answers.get("success_of_parts"))
        ]
        thoughts = [
            f"{name}: {answers['true_thoughts']:.1%} of thoughts are true, {answers['true_words']:.1%} of their words"
            + (
                f", {answers['telling_words']:.1%} of those that say what is rare on a map."
                if "telling_words" in answers
                else "."
            )
            for name, answers in answers_of.items()
            if "shown" in answers  # its thoughts look at something
        ]
        followed = [
            f"{name}: behind a thought of another map the answer changes in {found['changed']:.0%} of "
            f"{found['states']} states. It is best on the thought's map in {found['thought']:.0%}, on the prompt's in "
            f"{found['prompt']:.0%}, on neither in {found['neither']:.0%}."
            for name, answers in answers_of.items()
            if (found := answers.get("behind_false_thoughts")) and found["states"]
        ]
        if any("shown" in answers for answers in answers_of.values()):
            kept = (*TRUTH, "behind_false_thoughts")
            about["thoughts"] = {
                name: {key: answers[key] for key in kept if key in answers} for name, answers in answers_of.items()
            }
        text = show(table, ceiling, *spreads, *thoughts, *followed)

        def save(folder: Path) -> None:
            if shown := [(name, answers) for name, answers in answers_of.items() if answers.get("shown")]:
                self._save_thoughts(*shown[-1], folder)
            save_evaluation(evaluated, self.environments, {"env_id": env_id} | about, folder)

        return Comparison(text, save)

    def _save_thoughts(self, name: str, answers: Mapping, folder: Path) -> None:
        """`thoughts.png`: some states, what the policy thought there, and what it chose."""
        pairs, shown = self._pairs(), []
        for number, *texts in answers["shown"]:
            m, state = pairs[number]
            environment = self.environments[m]
            said, true = (parse_completion(text).thought.split() for text in texts)
            kept = {place for place, _ in common_words(said, true)}
            words = [(word, place in kept) for place, word in enumerate(said)]
            action_A = np.array(answers["policies"][m][state])
            shown.append(ShownThought(environment, state, action_A, best_actions(environment)[state], words))
        title = f"{name}: {answers['true_thoughts']:.1%} of {len(pairs):,} thoughts are true; false words are red"
        figure = thoughts_figure(shown, title)
        with writing(f"--output_dir {folder}", "make room, or name another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / THOUGHTS_FILE, dpi=120)
