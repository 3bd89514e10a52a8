"""Taxi: fetch a passenger, bring them to their destination. The words, and the task that the exact expert teaches."""

from dataclasses import dataclass, field
from functools import partial

from llm_policy.chat import Messages
from llm_policy.environments.frozen_lake import Cell
from llm_policy.environments.toy_text import TAXI_CELLS, TAXI_SIZE, Taxi
from prompts import search_text
from tasks.tabular import ComputedExpertArguments, single_environment_judge, single_environment_task
from tasks.tabular_judge import Words

SYSTEM_PROMPT = (
    "Drive the taxi: fetch the passenger, bring them to the destination. Row 0 is north, column 0 west. Each step "
    "costs 1, PICKUP or DROPOFF where it is not possible 10. Walls stop you. "
    "Reply <think>thought</think><answer>ACTION</answer>, "
    "ACTION is SOUTH, NORTH, EAST, WEST, PICKUP or DROPOFF."
)


# Parts of an observation: (environment, state) -> text ------------------------------------------------------------


def places(taxi: Taxi, state: int) -> str:
    """Where taxi, passenger and destination are, by rows and columns."""
    row, column, passenger, destination = taxi.parts(state)
    where = f"waits at {_place(taxi, passenger)}" if passenger in taxi.places else "is in the taxi"
    return (
        f"The taxi is at row {row}, column {column}.\nThe passenger {where}.\n"
        f"The destination is {_place(taxi, destination)}."
    )


def sides(taxi: Taxi, state: int) -> str:
    """Where a wall is beside the taxi."""
    row, column, *_ = taxi.parts(state)
    open_or_wall = [
        f"{taxi.actions[action]}: {'free' if _is_open(taxi, (row, column), arrow) else 'wall'}"
        for action, arrow in taxi.arrows.items()
    ]
    return f"{', '.join(open_or_wall)}."


def letters(taxi: Taxi, state: int) -> str:
    """Where taxi, passenger and destination are, by names that the map has."""
    row, column, passenger, destination = taxi.parts(state)
    where = f"waits at {passenger}" if passenger in taxi.places else "is in the taxi"
    return f"The taxi is at {row}{column}.\nThe passenger {where}.\nThe destination is {destination}."


def cells(taxi: Taxi, state: int) -> str:
    """The room, every cell behind its name, walls as bars."""
    letter_of = {cell: letter for letter, cell in taxi.places.items()}

    def named(row: int, column: int) -> str:
        return f"{row}{column}:{letter_of.get((row, column), '.')}{' |' * ((row, column) in taxi.walls)}"

    return "\n".join(" ".join(named(row, column) for column in range(TAXI_SIZE)) for row in range(TAXI_SIZE))


OBSERVATIONS = {"sides": (places, sides), "cells": (letters, cells)}


# Thoughts: (environment, state) -> text; the same whatever is answered ----------------------------------------------


def think_place(taxi: Taxi, state: int) -> str:
    """Where all are."""
    row, column, passenger, destination = taxi.parts(state)
    where = f"at {passenger}" if passenger in taxi.places else "in the taxi"
    return f"I am at row {row}, column {column}. The passenger is {where}, the destination is {destination}."


def think_neighbours(taxi: Taxi, state: int) -> str:
    """What lies around the taxi: each cell by its name, then what it is."""
    row, column, *_ = taxi.parts(state)
    letter_of = {cell: letter for letter, cell in taxi.places.items()}
    parts = []
    for action, (right, down) in taxi.arrows.items():
        cell = row + down, column + right
        what = f"{cell[0]}{cell[1]}: {letter_of.get(cell, 'free')}"
        is_open = _is_open(taxi, (row, column), (right, down))
        parts.append(f"{taxi.actions[action]} {what if is_open else 'wall' if cell in TAXI_CELLS else 'out'}")
    return f"{', '.join(parts)}."


def think_search(taxi: Taxi, state: int) -> str:
    """A search from where the taxi has to go next, up to the taxi's own cell (`search_text`)."""
    row, column, passenger, destination = taxi.parts(state)
    goal = destination if passenger == taxi.in_taxi else passenger
    letter_of = {cell: letter for letter, cell in taxi.places.items()}

    def around(cell: Cell) -> list[tuple[str, Cell, str]]:
        beside = [
            (taxi.actions[action], (cell[0] + down, cell[1] + right))
            for action, (right, down) in taxi.arrows.items()
            if _is_open(taxi, cell, (right, down))
        ]
        return [(action, near, letter_of.get(near, ".")) for action, near in beside]

    return f"To {goal}. {search_text([taxi.places[goal]], (row, column), around, lambda cell: f'{cell[0]}{cell[1]}')}"


THOUGHTS = {"place": think_place, "neighbours": think_neighbours, "search": think_search}


@dataclass
class Arguments(ComputedExpertArguments):
    """Options of Taxi."""

    observations, thoughts = OBSERVATIONS, THOUGHTS

    observation: str = field(
        default="sides", metadata={"help": f"What the model sees: {', '.join(OBSERVATIONS)} (each by its name)."}
    )
    thought: str = field(
        default="place", metadata={"help": f"What the warm start teaches it to think: {', '.join(THOUGHTS)}."}
    )


def messages(taxi: Taxi, state: int, observation: str) -> Messages:
    """The prompt of one state."""
    user = "\n".join(part(taxi, state) for part in OBSERVATIONS[observation])
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]


def reply(taxi: Taxi, state: int, action: int, thought: str) -> str:
    """A well-formed reply for the warm start, whatever `action` is: it says what is so and takes it."""
    return f"<think>{THOUGHTS[thought](taxi, state)}</think><answer>{taxi.actions[action]}</answer>"


def _place(taxi: Taxi, letter: str) -> str:
    row, column = taxi.places[letter]
    return f"{letter}, row {row}, column {column}"


def _is_open(taxi: Taxi, cell: Cell, arrow: Cell) -> bool:
    """Whether the taxi can leave `cell` in the direction (x, y), y downwards."""
    (row, column), (right, down) = cell, arrow
    is_inside = 0 <= row + down < TAXI_SIZE and 0 <= column + right < TAXI_SIZE
    return is_inside and not (right and (row, column + min(right, 0)) in taxi.walls)


def words(observation: str, thought: str) -> Words:
    telling = frozenset({"wall", *"RGYB"}) if thought == "neighbours" else frozenset()
    return Words(partial(messages, observation=observation), partial(reply, thought=thought), telling=telling)


make_task = partial(single_environment_task, Taxi(), words)
JUDGE_OPTIONS = ("observation", "thought", "horizon_steps", "episodes", "max_completion_length")
make_judge = partial(single_environment_judge, Taxi(), words, Arguments)
