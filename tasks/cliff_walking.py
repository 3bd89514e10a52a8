"""CliffWalking: along a cliff to the goal. The words, and the task that the exact expert teaches."""

from functools import partial

from llm_policy.chat import Messages
from llm_policy.environments.toy_text import CliffWalking
from tasks.tabular import ComputedExpertArguments as Arguments
from tasks.tabular import Words, single_environment_judge, single_environment_task

SYSTEM_PROMPT = (
    "Walk to the goal. S start, . ground, C cliff, G goal, A you. You always move as chosen; the edge of the map stops "
    "you. Each step costs 1. The cliff costs 100 and puts you back on the start. "
    "Reply <think>thought</think><answer>ACTION</answer>, ACTION is UP, RIGHT, DOWN or LEFT."
)


def messages(cliff: CliffWalking, state: int) -> Messages:
    """The prompt of one state: where the agent stands, and the map with the agent as A."""
    row, column = cliff.cell(state)
    rows = cliff.state_text(state).replace("|", "\n")
    user = f"You are at row {row}, column {column}.\n{rows}"
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": user}]


def reply(cliff: CliffWalking, state: int, action: int) -> str:
    """A well-formed reply for the warm start, whatever `action` is: it says where we are and takes it."""
    row, column = cliff.cell(state)
    return f"<think>I am at row {row}, column {column}.</think><answer>{cliff.actions[action]}</answer>"


WORDS = Words(messages, reply)
make_task = partial(single_environment_task, CliffWalking(), WORDS)
make_judge = partial(single_environment_judge, CliffWalking(), WORDS)
__all__ = ["Arguments", "make_judge", "make_task"]
