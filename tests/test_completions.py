"""The parser: tables of completions, each with what it should be read as."""

import time

import pytest

from llm_policy.completions import action_index, completion_text, parse_completion
from llm_policy.environments.frozen_lake import ACTIONS

LEFT, DOWN, RIGHT, UP = range(4)


def reply(thought: str, answer: str) -> str:
    return f"<think>{thought}</think><answer>{answer}</answer>"


CASES = [
    # Well-formed, with an action
    (reply("ice", "LEFT"), True, LEFT),
    (reply("ice", "DOWN"), True, DOWN),
    (reply("ice", "RIGHT"), True, RIGHT),
    (reply("ice", "UP"), True, UP),
    # Upper and lower case are the same in the answer
    (reply("ice", "left"), True, LEFT),
    (reply("ice", "Down"), True, DOWN),
    (reply("ice", "rIgHt"), True, RIGHT),
    # White space around the answer, between the tags and around everything
    (reply("ice", "  UP\t"), True, UP),
    (reply("ice", "\nUP\n"), True, UP),
    ("\n <think>ice</think>\n\n<answer>UP</answer> \r\n", True, UP),
    # The thought may be empty, of several lines, and name other actions
    (reply("", "UP"), True, UP),
    (reply("LEFT is a hole.\nDOWN too.\n\nSo go on.", "RIGHT"), True, RIGHT),
    # ... and may hold what only looks like a tag
    (reply("1 < 2 > 0, <b>bold</b> </ think>", "UP"), True, UP),
    (reply("Eis, 冰, 🧊", "UP"), True, UP),
    # Well-formed, but the answer names no single action
    (reply("ice", ""), True, None),
    (reply("ice", "   "), True, None),
    (reply("ice", "LEFT or UP"), True, None),
    (reply("ice", "LEFT, UP"), True, None),
    (reply("ice", "LEFT LEFT"), True, None),
    (reply("ice", "LEFT."), True, None),
    (reply("ice", '"LEFT"'), True, None),
    (reply("ice", "go LEFT"), True, None),
    (reply("ice", "L"), True, None),
    (reply("ice", "NORTH"), True, None),
    (reply("ice", "LEFTUP"), True, None),
    (reply("ice", "L E F T"), True, None),
    # Numbers are no names, though the CSV uses them
    (reply("ice", "0"), True, None),
    (reply("ice", "3"), True, None),
    (reply("ice", "-1"), True, None),
    # Letters that only look like those of a name
    (reply("ice", "ＬＥＦＴ"), True, None),
    (reply("ice", "UР"), True, None),
    # Text is never evaluated
    (reply("ice", "__import__('os').system('true')"), True, None),
    (reply("ice", "ACTIONS[0]"), True, None),
    (reply("ice", "{LEFT}"), True, None),
    (reply("ice", "LEFT'; DROP TABLE q_values; --"), True, None),
    # Malformed, but one answer can be read
    ("<answer>DOWN</answer>", False, DOWN),
    ("I would go <answer>down</answer>", False, DOWN),
    ("Sure! " + reply("ice", "UP"), False, UP),
    (reply("ice", "UP") + " Good luck!", False, UP),
    ("<answer>UP</answer><think>ice</think>", False, UP),
    ("<think>ice<answer>UP</answer>", False, UP),
    ("ice</think><answer>UP</answer>", False, UP),
    ("<think>one</think><think>two</think><answer>UP</answer>", False, UP),
    ("<think>one<think>two</think></think><answer>UP</answer>", False, UP),
    ("<think>ice</think>, so <answer>UP</answer>", False, UP),
    ("<think>go <answer>UP</answer></think>", False, UP),
    ("<THINK>ice</THINK><answer>UP</answer>", False, UP),
    ("<think>ice</think><answer>UP</answer><answer>", False, UP),
    # Two answers, equal or not: which one is meant?
    (reply("ice", "UP") + "<answer>LEFT</answer>", False, None),
    (reply("ice", "UP") * 2, False, None),
    (reply("<answer>UP</answer>", "UP"), False, None),
    (reply("<answer></answer>", "UP"), False, None),
    # Nested, empty and unclosed
    (reply("ice", "<answer>UP"), False, UP),
    (reply("ice", "<think>UP</think>"), False, None),
    ("<think>ice</think><answer>UP", False, None),
    ("<think>ice</think>UP</answer>", False, None),
    ("<think>ice</think><answer>UP<answer>", False, None),
    ("<think>ice</think></answer>UP<answer>", False, None),
    ("<think>ice</think>", False, None),
    ("<think><answer></think></answer>", False, None),
    # Nothing to read
    ("", False, None),
    ("   \n", False, None),
    ("UP", False, None),
    ("<think></think><ANSWER>UP</ANSWER>", False, None),
    ("\x00\x1b[41mUP\x1b[0m", False, None),
]


@pytest.mark.parametrize(("text", "is_well_formed", "action"), CASES)
def test_parse_completion(text, is_well_formed, action):
    parsed = parse_completion(text)
    assert (parsed.is_well_formed, action_index(parsed.answer, ACTIONS)) == (is_well_formed, action)


def test_the_answer_is_text_and_a_task_says_what_it_means():
    assert parse_completion(reply("2 and 2", " 4 ")).answer == "4"
    assert parse_completion(reply("?", "")).answer == ""
    assert parse_completion("no answer").answer is None
    taxi = ("SOUTH", "NORTH", "EAST", "WEST", "PICKUP", "DROPOFF")
    parsed = parse_completion(reply("at R", "pickup"))
    assert (action_index(parsed.answer, taxi), action_index(parsed.answer, ACTIONS)) == (4, None)


def test_a_long_thought_is_read():
    parsed = parse_completion(reply("ice and again " * 20_000, "UP"))
    assert parsed.is_well_formed
    assert action_index(parsed.answer, ACTIONS) == UP


LONG = [
    "x",
    " ",
    "<",
    "\n",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<think></think>",
    "<answer>UP",
    "<answer></answer>",
    "<think></think><answer>",
    "<think>a</think><answer>UP</answer>",
]


@pytest.mark.parametrize("start", ["", "<think>", "<think>a</think>", "<think>a</think><answer>"])
@pytest.mark.parametrize("repeated", LONG)
def test_time_grows_no_faster_than_the_text(start, repeated):
    """Backtracking over n positions from each of n starts would take hours for 200,000 characters."""
    text = start + repeated * (200_000 // len(repeated))
    started = time.process_time()
    assert not parse_completion(text).is_well_formed
    assert time.process_time() - started < 1.0


def test_completion_text_takes_both_forms_of_trl():
    assert completion_text("UP") == "UP"
    assert completion_text([{"role": "assistant", "content": "UP"}]) == "UP"
