"""What tasks with a table share: an expert's CSV becomes a `Task`.

Axes: P prompts (a state each), A actions, S states.

A task of its own adds the words (`tabular_judge.Words`) and its options; see frozen_lake.py and taxi.py.
"""

import random
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from llm_policy.chat import Reader, fit_to_template
from llm_policy.completions import Reward, action_index, completion_text, tagged, well_formed_rewards
from llm_policy.environments.expert_q import read_expert_csv
from llm_policy.environments.mdp import AGREEMENT_GAMMA, optimal_actions, optimal_q
from llm_policy.environments.table_environment import TableEnvironment
from llm_policy.errors import InputError, check_choices
from llm_policy.grpo.answers import true_thoughts
from llm_policy.grpo.diagnostics import OPTIMAL_LINE
from llm_policy.grpo.warm_start import Lesson
from llm_policy.processes import progress
from llm_policy.run_files import ROOT
from llm_policy.tables import counted
from rewards import REWARD_SHAPES, RewardShaping, reward_functions
from tasks import Task
from tasks.linter import Finding, lint
from tasks.tabular_judge import MAPS_JUDGED, TableJudge, Words


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


class StateLessons(Sequence[Lesson]):
    """A prompt of each state with a reply per action, made when it is asked for: those of many maps are gigabytes."""

    def __init__(self, words: Words, states: Sequence[tuple[TableEnvironment, int]], actions: int) -> None:
        self.words, self.states, self.actions = words, states, actions

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        state = self.states[index]
        return self.words.messages(*state), [self.words.reply(*state, action) for action in range(self.actions)]


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
        replies = (words.reply(*state, longest_name) for state in progress(states, "checking replies"))
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
        lessons=StateLessons(words, states, len(actions)),
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
            f"--test_maps {maps}: {source} has {counted(len(environments), 'map')}, and one must be left to train on; "
            "name fewer, or take more maps (--random_maps)"
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
