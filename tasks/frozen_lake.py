"""FrozenLake: cross slippery ice to the goal. The words and rewards are in prompts.py and rewards.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pandas as pd
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from llm_policy.chat import Reader
from llm_policy.environments.frozen_lake import (
    MOVES,
    Cell,
    FrozenLake,
    Grid,
    check_grid,
    grid_of,
    random_grids,
    read_grid,
    shortest_path_policy,
)
from llm_policy.environments.policy_table import best_actions
from llm_policy.errors import InputError, check_choices
from prompts import OBSERVATIONS, THOUGHTS, format_example, policy_messages
from tasks import Task
from tasks.tabular import ExpertArguments, exact_expert, held_out, read_expert, table_task
from tasks.tabular_judge import TableJudge, Words

JUDGE_OPTIONS = (
    "map", "is_slippery", "observation", "thought", "horizon_steps", "episodes", "max_completion_length",
)  # fmt: skip
JUDGED_ON = ("maps", "is_slippery")


@dataclass
class Arguments(ExpertArguments):
    """Options of the lake."""

    rare: ClassVar[tuple[str, ...]] = ("map_size", "test_map_seed")

    is_slippery: bool = field(default=True, metadata={"help": "The dynamics; those of the CSV."})
    observation: str = field(
        default="coordinates", metadata={"help": f"What the model sees: {', '.join(OBSERVATIONS)}."}
    )
    thought: str = field(
        default="place",
        metadata={"help": f"What the warm start teaches it to think: {', '.join(THOUGHTS)}."},
    )
    random_maps: int = field(default=0, metadata={"help": "So many random maps, exact Q-values; no CSV."})
    map_size: int = field(default=4, metadata={"help": "Rows and columns of the random maps."})
    test_maps: int = field(default=0, metadata={"help": "Hold out so many of the maps to judge on."})
    test_map_seed: int = field(default=1, metadata={"help": "Seed of the draw of test maps."})

    def __post_init__(self) -> None:
        check_choices(self, {"observation": tuple(OBSERVATIONS), "thought": tuple(THOUGHTS)})
        super().__post_init__()
        if self.test_map_seed != type(self).test_map_seed and not self.test_maps:
            raise InputError(f"--test_map_seed {self.test_map_seed}: is of maps that are held out; give --test_maps")
        if self.map_size != type(self).map_size and not self.draws_maps:
            raise InputError(f"--map_size {self.map_size}: is of maps that are drawn; give --random_maps, and no CSV")

    @property
    def draws_maps(self) -> bool:
        """Whether the maps are random ones: a CSV that is named stands above them."""
        return bool(self.random_maps) and self.expert_csv == ExpertArguments.expert_csv


def lake_words(observation: str, thought: str = "place") -> Words:
    return Words(
        messages=lambda lake, state: policy_messages(lake.grid, state, lake.is_slippery, observation),
        reply=lambda lake, state, action: format_example(lake.grid, state, action, thought, lake.is_slippery),
        exchanged=None if thought == "place" else exchanged,
        telling=frozenset({"hole", "goal"}) if thought in ("neighbours", "ways") else frozenset(),
    )


def exchanged(lake: FrozenLake, state: int) -> FrozenLake | None:
    """The lake with hole and ice exchanged on one cell beside the agent, so that none of its best actions stays best.

    None where no such exchange does that.
    """
    best_A = best_actions(lake)[state]
    row, column = divmod(state, len(lake.grid[0]))
    for down, right in MOVES:
        there = row + down, column + right
        other = FrozenLake(with_other_ice(lake.grid, there), lake.is_slippery)
        if other.grid != lake.grid and not (best_A & best_actions(other)[state]).any():
            return other
    return None


def with_other_ice(grid: Grid, cell: Cell) -> Grid:
    """`grid` with a hole in place of ice, or ice in place of a hole, at `cell`; another cell leaves it as it is.

    >>> with_other_ice(("SF", "HG"), (1, 0))
    ('SF', 'FG')
    """
    row, column = cell
    if not (0 <= row < len(grid) and 0 <= column < len(grid[0])):
        return grid
    letters = list(grid[row])
    letters[column] = {"F": "H", "H": "F"}.get(letters[column], letters[column])
    return (*grid[:row], "".join(letters), *grid[row + 1 :])


def make_task(arguments: Arguments, training: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The lakes of the CSV, or random ones, some of them held out."""
    if arguments.draws_maps:
        source = f"--random_maps {arguments.random_maps}"
        grids = random_grids(arguments.random_maps, arguments.map_size)
        expert = pd.concat([exact_expert(FrozenLake(grid, arguments.is_slippery)) for grid in grids], ignore_index=True)
        print(f"{source}: exact Q-values of {len(expert)} states", flush=True)
    else:
        source = arguments.expert_csv
        if arguments.random_maps:
            print(f"--random_maps {arguments.random_maps}: not used, because --expert_csv is given", flush=True)
        expert = read_expert(arguments, FrozenLake, is_slippery=arguments.is_slippery)
    expert, lakes = held_out(expert, arguments.test_maps, arguments.test_map_seed, source)
    if arguments.test_maps:
        print(f"{arguments.test_maps} maps held out, {len(expert)} states to train on")
    words = lake_words(arguments.observation, arguments.thought)
    reader = Reader(tokenizer, training.max_completion_length)
    shortest = {"shortest path": [shortest_path_policy(lake.grid) for lake in lakes]} if arguments.test_maps else {}
    settings = settings_of(lakes, arguments.observation, arguments.thought)
    judge = TableJudge(lakes, words, reader, settings, arguments.episodes, training.seed, named_policies=shortest)
    thoughts_count = arguments.thought != "place"
    return table_task(
        arguments, training, tokenizer, words, expert, source, judge, thoughts_count, is_computed=arguments.draws_maps
    )


def make_judge(settings: Mapping, reader: Reader, episodes: int, seed: int) -> TableJudge:
    """The judge of a run by its settings; without any, the canonical slippery lake.

    Args:
        settings: `maps` (rows joined by "|") or `map` (a name or a file), `is_slippery`, `observation`,
            `thought`, `horizon_steps`.
    """
    is_slippery = settings.get("is_slippery", True)
    grids = [check_grid(grid_of(rows), "run.json: maps") for rows in settings.get("maps", [])]
    grids = grids or [read_grid(settings.get("map") or "4x4")]
    lakes = [FrozenLake(grid, is_slippery) for grid in grids]
    observation, thought = settings.get("observation", "coordinates"), settings.get("thought", "place")
    for name, value, known in (("observation", observation, OBSERVATIONS), ("thought", thought, THOUGHTS)):
        if value not in known:
            raise InputError(f"--{name} {value!r}: expected one of {', '.join(known)}")
    return TableJudge(
        lakes, lake_words(observation, thought), reader, settings_of(lakes, observation, thought), episodes, seed,
        settings.get("horizon_steps"),
    )  # fmt: skip


def settings_of(lakes: list[FrozenLake], observation: str, thought: str) -> dict:
    maps = [str(lake) for lake in lakes]
    taught = {} if thought == "place" else {"thought": thought}  # as runs from before there was a choice
    return {"maps": maps, "is_slippery": lakes[0].is_slippery, "observation": observation} | taught
