"""CliffWalking: along a cliff to the goal. The words, and the task that the exact expert teaches."""

from dataclasses import dataclass, field
from functools import partial

from llm_policy.chat import Messages
from llm_policy.environments.toy_text import CliffWalking
from prompts import THOUGHTS, map_rows, named_cells, named_position, position, think_search, thought_text
from tasks.tabular import ComputedExpertArguments, single_environment_judge, single_environment_task
from tasks.tabular_judge import Words

SYSTEM_PROMPT = (
    "Walk to the goal. S start, . ground, C cliff, G goal, A you. You always move as chosen; the edge of the map stops "
    "you. Each step costs 1. The cliff costs 100 and puts you back on the start. "
    "Reply <think>thought</think><answer>ACTION</answer>, ACTION is UP, RIGHT, DOWN or LEFT."
)
# To the lake's other thoughts the map is a lake, with other words
AS_LAKE, AS_CLIFF = str.maketrans({".": "F", "C": "H"}), {"hole": "cliff", "ice": "ground"}


# Parts of an observation, (grid, state) -> text: the lake's
OBSERVATIONS = {"coordinates": (position, map_rows), "cells": (named_position, named_cells)}


@dataclass
class Arguments(ComputedExpertArguments):
    """Options of CliffWalking."""

    observations, thoughts = OBSERVATIONS, THOUGHTS

    observation: str = field(
        default="coordinates", metadata={"help": f"What the model sees: {', '.join(OBSERVATIONS)} (each by its name)."}
    )
    thought: str = field(
        default="place", metadata={"help": f"What the warm start teaches it to think: {', '.join(THOUGHTS)}."}
    )


def messages(cliff: CliffWalking, state: int, observation: str) -> Messages:
    """The prompt of one state: where the agent stands, and the map."""
    user = "\n".join(part(cliff.grid, state) for part in OBSERVATIONS[observation])
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]


def reply(cliff: CliffWalking, state: int, action: int, thought: str) -> str:
    """A well-formed reply for the warm start, whatever `action` is: it says what is so and takes it."""
    if thought == "search":
        text = think_search(cliff.grid, state, hole="C")
    else:
        text = thought_text(tuple(row.translate(AS_LAKE) for row in cliff.grid), state, thought)
        for of_lake, of_cliff in AS_CLIFF.items():
            text = text.replace(of_lake, of_cliff)
    return f"<think>{text}</think><answer>{cliff.actions[action]}</answer>"


def words(observation: str, thought: str) -> Words:
    telling = frozenset({"cliff", "goal"}) if thought in ("neighbours", "ways") else frozenset()
    return Words(partial(messages, observation=observation), partial(reply, thought=thought), telling=telling)


make_task = partial(single_environment_task, CliffWalking(), words)
JUDGE_OPTIONS = ("observation", "thought", "horizon_steps", "episodes", "max_completion_length")
make_judge = partial(single_environment_judge, CliffWalking(), words, Arguments)
