"""tasks/taxi.py: what the model is told of every state, and what the warm start teaches there."""

import re

import pytest

from llm_policy.completions import action_index, parse_completion
from llm_policy.environments.toy_text import Taxi
from tasks.taxi import SYSTEM_PROMPT, WORDS, messages, reply

TAXI = Taxi()


def test_words_by_hand():
    waiting, riding = TAXI.state(0, 1, "Y", "B"), TAXI.state(3, 0, "in taxi", "G")
    system, user = messages(TAXI, waiting)
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"] == (
        "The taxi is at row 0, column 1.\nThe passenger waits at Y, row 4, column 0.\n"
        "The destination is B, row 4, column 3.\nSOUTH: free, NORTH: wall, EAST: wall, WEST: free."
    )
    assert messages(TAXI, riding)[1]["content"] == (
        "The taxi is at row 3, column 0.\nThe passenger is in the taxi.\nThe destination is G, row 0, column 4.\n"
        "SOUTH: free, NORTH: free, EAST: wall, WEST: wall."
    )
    assert reply(TAXI, waiting, 4) == (
        "<think>I am at row 0, column 1. The passenger is at Y, the destination is B.</think><answer>PICKUP</answer>"
    )
    assert "The passenger is in the taxi, the destination is G." in reply(TAXI, riding, 0)


def test_the_prompt_names_costs_directions_and_answer_form():
    for words in ("Row 0 is north", "column 0 west", "costs 1", "10", "<think>thought</think><answer>ACTION</answer>"):
        assert words in SYSTEM_PROMPT
    assert all(name in SYSTEM_PROMPT for name in TAXI.actions)


def test_a_wall_is_said_where_the_taxi_cannot_go():
    """By Gymnasium's own table: a step that stays costs 1, too, and so teaches nothing by its reward."""
    for state in TAXI.acting_states:
        said = dict(re.findall(r"(\w+): (free|wall)", messages(TAXI, state)[1]["content"]))
        assert list(said) == ["SOUTH", "NORTH", "EAST", "WEST"]
        for action, name in enumerate(said):
            stays = TAXI.mdp.next_states_SAK[state, action, 0] == state
            assert said[name] == ("wall" if stays else "free")


def test_distinct_states_have_distinct_prompts():
    prompts = {str(WORDS.messages(TAXI, state)) for state in TAXI.acting_states}
    assert len(prompts) == len(TAXI.acting_states) == 400


@pytest.mark.parametrize("action", range(6))
def test_replies_are_well_formed_and_their_thought_names_no_action(action):
    for state in TAXI.acting_states:
        text = WORDS.reply(TAXI, state, action)
        parsed = parse_completion(text)
        assert (parsed.is_well_formed, action_index(parsed.answer, TAXI.actions)) == (True, action)
        thought = text.partition("</think>")[0]
        assert not any(name in thought.upper() for name in TAXI.actions)
        # The same whatever the action is: no label can leak through it
        assert thought == WORDS.reply(TAXI, state, 0).partition("</think>")[0]
