"""What tasks with a table share: an expert's CSV becomes a `Task`, a model's answers become policy tables and scores.

Axes: P prompts (a state each), G samples, A actions, S states.

A task of its own adds the words (`Words`) and its options; see frozen_lake.py and taxi.py.
"""

import random
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig

from llm_policy.chat import Messages, Reader, fit_to_template
from llm_policy.completions import (
    Reward,
    action_index,
    common_words,
    completion_text,
    parse_completion,
    tagged,
    well_formed_rewards,
)
from llm_policy.environments.expert_q import read_expert_csv
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
from llm_policy.environments.mdp import AGREEMENT_GAMMA, OPTIMAL_PERCENT, optimal_actions, optimal_q
from llm_policy.environments.pictures import ShownThought, policy_figure, states_drawn, thoughts_figure
from llm_policy.environments.policy_table import best_actions, score_policy, uniform_policy
from llm_policy.environments.table_environment import TableEnvironment
from llm_policy.errors import InputError, check_choices, writing
from llm_policy.grpo.answers import (
    answer_weights,
    answers_as_read,
    answers_behind,
    mean_answers,
    sampled_answers,
    true_thoughts,
    words_said,
)
from llm_policy.grpo.diagnostics import OPTIMAL_LINE, Judgement
from llm_policy.run_files import ROOT
from llm_policy.tables import show
from rewards import REWARD_SHAPES, RewardShaping, reward_functions
from tasks import Comparison, Task
from tasks.linter import Finding, lint

PARTS = 4  # of sampled thoughts, to show how much is left to chance
MAPS_JUDGED = 20  # of many maps, in the evaluations between steps (of the CSV's own, at the end too)
THOUGHTS_SHOWN = 6
MOST_EXCHANGED = 500  # states whose thought is exchanged: at 16 x 16 twenty maps would have thousands
TRUTH = ("true_thoughts", "true_words", "telling_words")


@dataclass
class ExpertArguments:
    """Options of every task that an expert's Q-values teach."""

    expert_csv: str = field(
        default=str(ROOT / "expert_demos_batched_avg_q.csv"),
        metadata={"help": "The expert's Q-values (environments/expert_q.py)."},
    )
    reward_shape: str = field(default="minmax", metadata={"help": f"Q-values to rewards: {', '.join(REWARD_SHAPES)}."})
    optimal_bonus: float = field(default=0.2, metadata={"help": "Added to the reward of an optimal action."})
    cap_bonus: bool = field(default=True, metadata={"help": "Cut reward + bonus at 1, as the original did."})
    balance_actions: float = field(
        default=0.0,
        metadata={"help": "Share of states drawn so that each action is best equally often."},
    )
    episodes: int = field(default=1000, metadata={"help": "Simulated episodes beside the exact figures."})

    def __post_init__(self) -> None:
        check_choices(self, {"reward_shape": tuple(REWARD_SHAPES)})


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


# Judge ---------------------------------------------------------------------------------------------------------


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

        Over acting states of the first `MAPS_JUDGED` environments in which no action is best in both, `MOST_EXCHANGED`
        of them. `thought`, `prompt` and `neither` are the shares of the answers that are best in the one, in the other,
        in none. `changed` is the share that differs from the answer behind the true thought: 0 where the thought has no
        say. `states` says how many there are.
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


# Task ----------------------------------------------------------------------------------------------------------


def table_task(
    arguments: ExpertArguments,
    training: GRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    words: Words,
    expert: pd.DataFrame,
    source: str,
    judge: TableJudge,
    thoughts_count: bool = False,
    is_computed: bool = False,
) -> Task:
    """A task from the expert's table.

    Args:
        expert: from `read_expert_csv`, one row per state to train on.
        source: where it is from, for the linter's lines.
        judge: of the maps of the last table.
        thoughts_count: the warm start goes on until the thoughts are true, and not only well-formed.
        is_computed: the Q-values follow from the environments. Processors, and numbers of threads, round them
            otherwise, and a run may be resumed on another one.
    """
    actions = expert["environment"].iloc[0].actions
    shaping = RewardShaping(arguments.reward_shape, arguments.optimal_bonus, arguments.cap_bonus)
    states = list(zip(expert["environment"], expert["state"], strict=True))
    prompts = [fit_to_template(words.messages(*state), tokenizer) for state in states]
    rows = [
        {"prompt": prompt, "q_values": q_values, "state": state, "map": str(environment), "row": row}
        for row, ((environment, state), q_values, prompt) in enumerate(
            zip(states, expert["q_values"], prompts, strict=True)
        )
    ]
    all_rows, rows = rows, drawn_rows(rows, training, arguments.balance_actions)
    functions = reward_functions(shaping, actions)
    logged = list(functions)

    def action_rewards(rows: list[dict], weights: Sequence[float]) -> np.ndarray:
        return well_formed_rewards(functions, weights, rows, actions)

    def reward_lines(weights: Sequence[float]) -> dict[str, float]:
        rewards_PA = action_rewards(rows, weights)
        constant = int(rewards_PA.mean(axis=0).argmax())
        return {
            f"reward/always {actions[constant]}": float(rewards_PA[:, constant].mean()),
            "reward/uniform policy": float(rewards_PA.mean()),
            OPTIMAL_LINE: float(rewards_PA.max(axis=1).mean()),
        }

    is_tagged = tagged(lambda answer: action_index(answer, actions) is not None)
    if thoughts_count:
        logged[0] = logging_truth(functions[0], lambda row: words.reply(*states[row], 0))
    longest_name = max(range(len(actions)), key=lambda action: len(actions[action]))

    def findings(context_tokens: int) -> list[Finding]:
        replies = [words.reply(*state, longest_name) for state in states]
        found = lint(expert, prompts, tokenizer, shaping, context_tokens, training.max_completion_length, replies)
        return [replace(finding, source=source) for finding in found]

    return Task(
        rows=rows,
        reward_functions=logged,
        judge=judge,
        judge_between=replace(
            judge, environments=judge.environments[:MAPS_JUDGED], words=replace(words, exchanged=None)
        ),
        is_reply=None if thoughts_count else is_tagged,
        actions=actions,
        action_rewards=action_rewards,
        lessons=[
            (words.messages(*state), [words.reply(*state, action) for action in range(len(actions))])
            for state in states
        ],
        guess=lambda row: words.reply(*states[row["row"]], 0),
        reward_lines=reward_lines,
        shown={
            "policy/success_probability": "success",
            "policy/optimal_states": "optimal states",
            "sampled/true_thoughts": "true thoughts",
        },
        source=[{**row, "q_values": "exact"} for row in all_rows] if is_computed else all_rows,
        lint=findings,
    )


def logging_truth(reward: Reward, true_reply: Callable[[int], str]) -> Reward:
    """`reward`, which also logs how true the thoughts of the sampled completions are.

    Args:
        true_reply: number of the row of a completion -> a reply with the true thought.
    """

    def logged(completions: Sequence, row: Sequence[int], log_metric=None, **columns) -> list[float]:
        if log_metric is not None:
            true = [true_reply(number) for number in row]
            whole, words = true_thoughts([completion_text(completion) for completion in completions], true)
            log_metric("sampled/true_thoughts", whole)
            log_metric("sampled/true_words", words)
        return reward(completions, row=row, log_metric=log_metric, **columns)

    logged.__name__ = reward.__name__
    return logged


@dataclass
class ComputedExpertArguments(ExpertArguments):
    """Options of an environment without maps: its exact expert need not be read from a file.

    A task that has several observations or thoughts names them, and gives both options their defaults.
    """

    observations: ClassVar[Collection[str]] = ("plain",)
    thoughts: ClassVar[Collection[str]] = ("plain",)

    expert_csv: str = field(default="", metadata={"help": "The expert's Q-values. Default: exact ones, computed."})
    observation: str = field(default="plain", metadata={"help": "What the model sees: this task has one way."})
    thought: str = field(default="plain", metadata={"help": "What the warm start teaches it to think: one way, too."})

    def __post_init__(self) -> None:
        check_choices(self, {"observation": tuple(self.observations), "thought": tuple(self.thoughts)})
        super().__post_init__()

    def words_settings(self) -> dict[str, str]:
        """What run.json says of the words: what is not the default, as runs from before there was a choice."""
        default = type(self)()
        names = ("observation", "thought")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}


WordsOf = Callable[[str, str], Words]
"""Observation and thought, by their names -> the words."""


def single_environment_task(
    environment: TableEnvironment, words_of: WordsOf, arguments: ComputedExpertArguments, training: GRPOConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Task:  # fmt: skip
    """The task of an environment without maps: trained and judged on all its acting states."""
    if arguments.expert_csv:
        source, expert = arguments.expert_csv, read_expert(arguments, type(environment))
    else:
        source, expert = str(environment), exact_expert(environment)
        print(f"{environment}: exact Q-values of {len(expert)} states", flush=True)
    reader = Reader(tokenizer, training.max_completion_length)
    words, settings = words_of(arguments.observation, arguments.thought), arguments.words_settings()
    judge = TableJudge([environment], words, reader, settings, arguments.episodes, training.seed)
    thoughts_count = "thought" in settings
    is_computed = not arguments.expert_csv
    return table_task(
        arguments, training, tokenizer, words, expert, source, judge, thoughts_count, is_computed=is_computed
    )


def single_environment_judge(
    environment: TableEnvironment, words_of: WordsOf, arguments_of: type[ComputedExpertArguments], settings: Mapping,
    reader: Reader, episodes: int, seed: int,
) -> TableJudge:  # fmt: skip
    """The judge of an environment without maps.

    `settings` may have `horizon_steps`, `observation` and `thought`; `InputError` for one of another environment.
    """
    chosen = arguments_of(**{name: settings[name] for name in ("observation", "thought") if name in settings})
    words, own = words_of(chosen.observation, chosen.thought), chosen.words_settings()
    return TableJudge([environment], words, reader, own, episodes, seed, settings.get("horizon_steps"))


def exact_expert(environment: TableEnvironment) -> pd.DataFrame:
    """As `read_expert_csv`, from exact Q-values (discount `AGREEMENT_GAMMA`): one row per acting state."""
    q_SA = optimal_q(environment.mdp, AGREEMENT_GAMMA)
    states = environment.acting_states
    return pd.DataFrame(
        {
            "state_str": [environment.state_text(state) for state in states],
            "environment": pd.Series([environment] * len(states), dtype=object),
            "state": states,
            "action": optimal_actions(q_SA[states]).argmax(axis=1),
            "q_values": pd.Series(q_SA[states].tolist(), dtype=object),
            "count": 1,
        }
    )


def read_expert(arguments: ExpertArguments, kind: type, **options) -> pd.DataFrame:
    """The expert's table, and a line that says what is in it."""
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        expert = read_expert_csv(arguments.expert_csv, kind, **options)
    for remark in remarks:
        print(f"warning: {remark.message}", flush=True)
    maps = expert["environment"].nunique()
    rows, of_maps = expert["count"].sum(), f", {maps} map{'s' * (maps > 1)}"
    print(f"{arguments.expert_csv}: {rows} rows, {len(expert)} states{of_maps}", flush=True)
    return expert


def held_out(expert: pd.DataFrame, maps: int, seed: int, source: str = "the CSV") -> tuple[pd.DataFrame, list]:
    """Rows to train on and `maps` environments to judge on whose rows are left out; 0: all rows, its first maps."""
    environments = list(dict.fromkeys(expert["environment"]))
    if not maps:
        if len(environments) > MAPS_JUDGED:
            print(f"the first {MAPS_JUDGED} of {len(environments)} maps are judged; --test_maps N holds N out to judge")
        return expert, environments[:MAPS_JUDGED]
    if maps >= len(environments):
        raise InputError(
            f"--test_maps {maps}: {source} has {len(environments)} maps, and one must be left to train on; name fewer, "
            "or take more maps (--random_maps)"
        )
    tested = random.Random(seed).sample(environments, maps)
    return expert[~expert["environment"].isin(tested)].reset_index(drop=True), tested


def balancing_weights(q_values_PA: np.ndarray) -> np.ndarray:
    """Weights (P,) that sum to 1: in draws with them each action is the best one equally often, ties aside.

    With three states where LEFT is best and one where UP is: 1/6, 1/6, 1/6, 1/2. A state with several best actions
    weighs their mean, one where all are best (the goal out of reach) nothing, because it teaches nothing.
    """
    best_PA = optimal_actions(q_values_PA)
    share_PA = best_PA / best_PA.sum(axis=1, keepdims=True)
    if not best_PA.all():
        share_PA[best_PA.all(axis=1)] = 0.0
    how_often_A = np.maximum(share_PA.sum(axis=0), np.finfo(float).tiny)  # 0: an action that is best nowhere
    weights_P = (share_PA / how_often_A).sum(axis=1)
    return weights_P / weights_P.sum()


def drawn_rows(rows: list[dict], training: GRPOConfig, balanced_share: float) -> list[dict]:
    """The rows; with a `balanced_share` above 0 as many are drawn, that share of them with `balancing_weights`."""
    if not balanced_share:
        return rows
    balanced_P = balancing_weights(np.array([row["q_values"] for row in rows]))
    weights_P = balanced_share * balanced_P + (1 - balanced_share) / len(rows)
    prompts_per_batch = training.generation_batch_size // training.num_generations
    draws = max(len(rows), prompts_per_batch * training.max_steps)  # in a short table each state often enough
    drawn = np.random.default_rng(training.seed).choice(len(rows), size=draws, p=weights_P)
    return [rows[row] for row in drawn]
