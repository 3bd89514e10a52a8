"""tasks/cliff_walking.py: what the model is told of every state, and what the warm start teaches there."""

import pytest

from llm_policy.completions import action_index, parse_completion
from llm_policy.environments.toy_text import CliffWalking
from tasks.cliff_walking import SYSTEM_PROMPT, WORDS, messages, reply

CLIFF = CliffWalking()


def test_words_by_hand():
    system, user = messages(CLIFF, 25)
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"] == "You are at row 2, column 1.\n............\n............\n.A..........\nSCCCCCCCCCCG"
    assert reply(CLIFF, 25, 1) == "<think>I am at row 2, column 1.</think><answer>RIGHT</answer>"
    assert messages(CLIFF, 36)[1]["content"].splitlines()[-1] == "ACCCCCCCCCCG"


def test_the_prompt_names_letters_costs_and_answer_form():
    for words in ("S start", "C cliff", "G goal", "A you", "costs 1", "costs 100", "UP, RIGHT, DOWN or LEFT"):
        assert words in SYSTEM_PROMPT
    assert "<think>thought</think><answer>ACTION</answer>" in SYSTEM_PROMPT
    assert all(name in SYSTEM_PROMPT for name in CLIFF.actions)


def test_distinct_states_have_distinct_prompts():
    prompts = {str(WORDS.messages(CLIFF, state)) for state in CLIFF.acting_states}
    assert len(prompts) == len(CLIFF.acting_states) == 37


@pytest.mark.parametrize("action", range(4))
def test_replies_are_well_formed_and_their_thought_names_no_action(action):
    for state in CLIFF.acting_states:
        text = WORDS.reply(CLIFF, state, action)
        parsed = parse_completion(text)
        assert (parsed.is_well_formed, action_index(parsed.answer, CLIFF.actions)) == (True, action)
        thought = text.partition("</think>")[0]
        assert not any(name in thought.upper() for name in CLIFF.actions)
        # The same whatever the action is: no label can leak through it
        assert thought == WORDS.reply(CLIFF, state, 0).partition("</think>")[0]
