"""tasks/taxi.py: what the model is told of every state, and what the warm start teaches there."""

import re

import numpy as np
import pytest

from llm_policy.chat import Reader
from llm_policy.completions import action_index, parse_completion
from llm_policy.environments.policy_table import best_actions
from llm_policy.environments.toy_text import Taxi
from llm_policy.errors import InputError
from tasks.taxi import OBSERVATIONS, SYSTEM_PROMPT, THOUGHTS, Arguments, make_judge, messages, reply, words

TAXI = Taxi()
PLAIN = words("sides", "place")


def test_words_by_hand():
    waiting, riding = TAXI.state(0, 1, "Y", "B"), TAXI.state(3, 0, "in taxi", "G")
    system, user = PLAIN.messages(TAXI, waiting)
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"] == (
        "The taxi is at row 0, column 1.\nThe passenger waits at Y, row 4, column 0.\n"
        "The destination is B, row 4, column 3.\nSOUTH: free, NORTH: wall, EAST: wall, WEST: free."
    )
    assert PLAIN.messages(TAXI, riding)[1]["content"] == (
        "The taxi is at row 3, column 0.\nThe passenger is in the taxi.\nThe destination is G, row 0, column 4.\n"
        "SOUTH: free, NORTH: free, EAST: wall, WEST: wall."
    )
    assert PLAIN.reply(TAXI, waiting, 4) == (
        "<think>I am at row 0, column 1. The passenger is at Y, the destination is B.</think><answer>PICKUP</answer>"
    )
    assert "The passenger is in the taxi, the destination is G." in PLAIN.reply(TAXI, riding, 0)


def test_the_prompt_names_costs_directions_and_answer_form():
    for told in ("Row 0 is north", "column 0 west", "costs 1", "10", "<think>thought</think><answer>ACTION</answer>"):
        assert told in SYSTEM_PROMPT
    assert all(name in SYSTEM_PROMPT for name in TAXI.actions)


def test_a_wall_is_said_where_the_taxi_cannot_go():
    """By Gymnasium's own table: a step that stays costs 1, too, and so teaches nothing by its reward."""
    for state in TAXI.acting_states:
        said = dict(re.findall(r"(\w+): (free|wall)", PLAIN.messages(TAXI, state)[1]["content"]))
        assert list(said) == ["SOUTH", "NORTH", "EAST", "WEST"]
        for action, name in enumerate(said):
            stays = TAXI.mdp.next_states_SAK[state, action, 0] == state
            assert said[name] == ("wall" if stays else "free")


def test_distinct_states_have_distinct_prompts():
    prompts = {str(PLAIN.messages(TAXI, state)) for state in TAXI.acting_states}
    assert len(prompts) == len(TAXI.acting_states) == 400


@pytest.mark.parametrize("action", range(6))
def test_replies_are_well_formed_and_their_thought_names_no_action(action):
    for state in TAXI.acting_states:
        text = PLAIN.reply(TAXI, state, action)
        parsed = parse_completion(text)
        assert (parsed.is_well_formed, action_index(parsed.answer, TAXI.actions)) == (True, action)
        thought = text.partition("</think>")[0]
        assert not any(name in thought.upper() for name in TAXI.actions)
        # The same whatever the action is: no label can leak through it
        assert thought == PLAIN.reply(TAXI, state, 0).partition("</think>")[0]


def test_thoughts_by_hand():
    """West of a wall with the passenger at R; and in the last row, with the passenger, bound for B."""
    waiting, riding = TAXI.state(3, 0, "R", "B"), TAXI.state(4, 1, "in taxi", "B")

    def thought(state, name):
        return parse_completion(reply(TAXI, state, 0, name)).thought

    assert thought(waiting, "neighbours") == "SOUTH 40: Y, NORTH 20: free, EAST wall, WEST out."
    assert thought(waiting, "search").splitlines() == [
        "To R. 00>10g10 01h01", "g10>20i20 00- 11j11", "h01>11- 00-", "i20>30A30 10- 21k21",
        "A30> 40.SOUTH 20+NORTH",
    ]  # fmt: skip
    lines = thought(riding, "search").splitlines()
    assert lines[:4] == ["To B. 43>33g33 44h44", "g33>43- 23i23 34j34", "h44>34- 43-", "i23>33- 13k13 24l24 22m22"]
    assert lines[-2:] == ["u42>32- 41A41", "A41> 31+NORTH 42+EAST"]


def test_the_room_by_its_cells():
    assert messages(TAXI, TAXI.state(2, 3, "in taxi", "G"), "cells")[1]["content"].splitlines() == [
        "The taxi is at 23.", "The passenger is in the taxi.", "The destination is G.",
        "00:R 01:. | 02:. 03:. 04:G", "10:. 11:. | 12:. 13:. 14:.", "20:. 21:. 22:. 23:. 24:.",
        "30:. | 31:. 32:. | 33:. 34:.", "40:Y | 41:. 42:. | 43:B 44:.",
    ]  # fmt: skip


@pytest.mark.parametrize("thought", THOUGHTS)
def test_every_thought_is_the_same_whatever_is_answered(thought):
    own = words("cells", thought)
    assert len({str(own.messages(TAXI, state)) for state in TAXI.acting_states}) == 400
    for state in TAXI.acting_states[::7]:
        parsed = [parse_completion(own.reply(TAXI, state, action)) for action in range(6)]
        assert all(p.is_well_formed for p in parsed)
        assert len({p.thought for p in parsed}) == 1


def test_a_step_to_where_the_search_has_come_by_is_the_best_one():
    """By Gymnasium's own table."""
    best_SA = best_actions(TAXI)
    for state in TAXI.acting_states:
        last = parse_completion(reply(TAXI, state, 0, "search")).thought.splitlines()[-1]
        nearer = re.findall(r"\d\d\+([A-Z]+)", last)
        best = {TAXI.actions[action] for action in np.flatnonzero(best_SA[state])}
        assert best == set(nearer) if nearer else best in ({"PICKUP"}, {"DROPOFF"})


def test_options_and_judge():
    assert (Arguments().observation, Arguments().thought) == ("sides", "place")
    with pytest.raises(InputError, match=r"--observation 'coordinates': expected one of sides, cells"):
        Arguments(observation="coordinates")
    with pytest.raises(InputError, match=r"--thought 'ways': expected one of place, neighbours, search"):
        Arguments(thought="ways")
    assert make_judge({"thought": "search"}, None, 10, 0).settings == {"thought": "search"}
    with pytest.raises(InputError, match=r"--thought 'ways': expected one of place, neighbours, search"):
        make_judge({"thought": "ways"}, None, 10, 0)
    assert set(OBSERVATIONS) == {"sides", "cells"}


def test_thoughts_of_taxi_are_shown_where_a_picture_has_the_state(monkeypatch, tmp_path):
    """Its pictures show half of the states."""
    judge = make_judge({"observation": "cells", "thought": "search"}, Reader(None), 1, 0)
    monkeypatch.setattr(Reader, "completions", lambda _self, _model, _prompts, _samples, guesses: list(guesses))
    answers = judge.answers(None)
    assert len(answers["shown"]) == 6
    judge.compare({"trained, greedy": answers}).save(tmp_path)
    assert (tmp_path / "thoughts.png").exists()
