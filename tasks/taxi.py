"""Taxi: fetch a passenger, bring them to their destination. The words, and the task that the exact expert teaches."""

from functools import partial

from llm_policy.chat import Messages
from llm_policy.environments.frozen_lake import Cell
from llm_policy.environments.toy_text import TAXI_SIZE, Taxi
from tasks.tabular import ComputedExpertArguments as Arguments
from tasks.tabular import Words, single_environment_judge, single_environment_task

SYSTEM_PROMPT = (
    "Drive the taxi: fetch the passenger, bring them to the destination. Row 0 is north, column 0 west. Each step "
    "costs 1, PICKUP or DROPOFF in a wrong place 10. Walls stop you. "
    "Reply <think>thought</think><answer>ACTION</answer>, "
    "ACTION is SOUTH, NORTH, EAST, WEST, PICKUP or DROPOFF."
)


def messages(taxi: Taxi, state: int) -> Messages:
    """The prompt of one state: where taxi, passenger and destination are, and where a wall is beside the taxi."""
    row, column, passenger, destination = taxi.parts(state)
    where = f"waits at {_place(taxi, passenger)}" if passenger in taxi.places else "is in the taxi"
    sides = [
        f"{taxi.actions[action]}: {'free' if _is_open(taxi, (row, column), arrow) else 'wall'}"
        for action, arrow in taxi.arrows.items()
    ]
    user = (
        f"The taxi is at row {row}, column {column}.\nThe passenger {where}.\n"
        f"The destination is {_place(taxi, destination)}.\n{', '.join(sides)}."
    )
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]


def reply(taxi: Taxi, state: int, action: int) -> str:
    """A well-formed reply for the warm start, whatever `action` is: it says where all are and takes it."""
    row, column, passenger, destination = taxi.parts(state)
    where = f"at {passenger}" if passenger in taxi.places else "in the taxi"
    thought = f"I am at row {row}, column {column}. The passenger is {where}, the destination is {destination}."
    return f"<think>{thought}</think><answer>{taxi.actions[action]}</answer>"


def _place(taxi: Taxi, letter: str) -> str:
    row, column = taxi.places[letter]
    return f"{letter}, row {row}, column {column}"


def _is_open(taxi: Taxi, cell: Cell, arrow: Cell) -> bool:
    """Whether the taxi can leave `cell` in the direction (x, y), y downwards."""
    (row, column), (right, down) = cell, arrow
    is_inside = 0 <= row + down < TAXI_SIZE and 0 <= column + right < TAXI_SIZE
    return is_inside and not (right and (row, column + min(right, 0)) in taxi.walls)


WORDS = Words(messages, reply)
make_task = partial(single_environment_task, Taxi(), WORDS)
make_judge = partial(single_environment_judge, Taxi(), WORDS)
__all__ = ["Arguments", "make_judge", "make_task"]
