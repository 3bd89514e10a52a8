"""tasks/cliff_walking.py: what the model is told of every state, and what the warm start teaches there."""

import pytest
from tiny_models import tiny_tokenizer
from trl import GRPOConfig

from llm_policy.chat import reply_token_ids
from llm_policy.completions import action_index, parse_completion
from llm_policy.environments.toy_text import CliffWalking
from llm_policy.errors import InputError
from tasks.cliff_walking import (
    OBSERVATIONS,
    SYSTEM_PROMPT,
    THOUGHTS,
    Arguments,
    make_judge,
    make_task,
    messages,
    reply,
    words,
)

CLIFF = CliffWalking()
PLAIN = words("coordinates", "place")


def test_words_by_hand():
    system, user = PLAIN.messages(CLIFF, 25)
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"] == "You are at row 2, column 1.\n............\n............\n.A..........\nSCCCCCCCCCCG"
    assert PLAIN.reply(CLIFF, 25, 1) == "<think>I am at row 2, column 1.</think><answer>RIGHT</answer>"
    assert PLAIN.messages(CLIFF, 36)[1]["content"].splitlines()[-1] == "ACCCCCCCCCCG"


def test_the_prompt_names_letters_costs_and_answer_form():
    for told in ("S start", "C cliff", "G goal", "A you", "costs 1", "costs 100", "UP, RIGHT, DOWN or LEFT"):
        assert told in SYSTEM_PROMPT
    assert "<think>thought</think><answer>ACTION</answer>" in SYSTEM_PROMPT
    assert all(name in SYSTEM_PROMPT for name in CLIFF.actions)


def test_distinct_states_have_distinct_prompts():
    prompts = {str(PLAIN.messages(CLIFF, state)) for state in CLIFF.acting_states}
    assert len(prompts) == len(CLIFF.acting_states) == 37


@pytest.mark.parametrize("action", range(4))
def test_replies_are_well_formed_and_their_thought_names_no_action(action):
    for state in CLIFF.acting_states:
        text = PLAIN.reply(CLIFF, state, action)
        parsed = parse_completion(text)
        assert (parsed.is_well_formed, action_index(parsed.answer, CLIFF.actions)) == (True, action)
        thought = text.partition("</think>")[0]
        assert not any(name in thought.upper() for name in CLIFF.actions)
        # The same whatever the action is: no label can leak through it
        assert thought == PLAIN.reply(CLIFF, state, 0).partition("</think>")[0]


THINKING = {
    "neighbours": "LEFT 20: ground, DOWN 31: cliff, RIGHT 22: ground, UP 11: ground.",
    "ways": "LEFT 20: ground (out, 30: ground, 10: ground) 2 on. DOWN 31: cliff. "
    "RIGHT 22: ground (32: cliff, 23: ground, 12: ground) 2 on. "
    "UP 11: ground (10: ground, 12: ground, 01: ground) 3 on.",
}


@pytest.mark.parametrize("thought", THINKING)
def test_thoughts_by_hand(thought):
    assert THOUGHTS is not None
    assert parse_completion(reply(CLIFF, 25, 1, thought)).thought == THINKING[thought]


def test_a_search_comes_from_the_goal_in_the_maps_letters():
    def thought(state):
        return parse_completion(reply(CLIFF, state, 1, "search")).thought.splitlines()

    assert thought(35) == ["3b>3aC 2bA2b", "A2b> 2a.LEFT 3b+DOWN 1b.UP"]
    assert thought(34) == ["3b>3aC 2bg2b", "g2b>2aA2a 3b- 1bh1b", "A2a> 29.LEFT 3a!DOWN 2b+RIGHT 1a.UP"]


def test_cells_are_named():
    assert messages(CLIFF, 25, "cells")[1]["content"].splitlines()[::3] == [
        "You are at 21.",
        "20:. 21:A 22:. 23:. 24:. 25:. 26:. 27:. 28:. 29:. 2a:. 2b:.",
    ]


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("thought", THOUGHTS)
def test_every_thought_is_the_same_whatever_is_answered(observation, thought):
    own = words(observation, thought)
    assert len({str(own.messages(CLIFF, state)) for state in CLIFF.acting_states}) == 37
    for state in CLIFF.acting_states:
        parsed = [parse_completion(own.reply(CLIFF, state, action)) for action in range(4)]
        assert all(p.is_well_formed for p in parsed)
        assert len({p.thought for p in parsed}) == 1
        assert not {"hole", "ice"} & set(parsed[0].thought.replace(":", " ").replace(".", " ").split())


def test_a_judge_knows_the_words_of_its_run():
    judge = make_judge({"observation": "cells", "thought": "ways"}, None, 10, 0)
    assert judge.settings == {"observation": "cells", "thought": "ways"}
    assert "21:A" in judge.words.messages(CLIFF, 25)[1]["content"]
    assert make_judge({}, None, 10, 0).settings == {}
    with pytest.raises(InputError, match=r"--observation 'sides': expected one of coordinates, cells"):
        make_judge({"observation": "sides"}, None, 10, 0)
    with pytest.raises(InputError, match=r"--thought 'deep': expected one of place, neighbours, ways, search"):
        Arguments(thought="deep")


def cliff_task(folder, max_completion_length: int = 64, **options):
    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", max_completion_length=max_completion_length
    )
    return make_task(Arguments(**options), config, tiny_tokenizer("llama", 384, True))


@pytest.mark.parametrize("thought", ["place", "ways"])
def test_a_thought_that_looks_has_to_be_true(thought, tmp_path):
    """Else the warm start would end as soon as the form is right, whatever is said in it."""
    task = cliff_task(tmp_path, observation="cells", thought=thought)
    assert (task.is_reply is None) == (thought == "ways")


def test_the_longest_name_of_an_action_has_to_fit(tmp_path):
    tokenizer = tiny_tokenizer("llama", 384, True)
    replies = [reply for _, replies in cliff_task(tmp_path).lessons for reply in replies]
    longest = max(len(reply_token_ids(reply, tokenizer)) for reply in replies)
    found = [cliff_task(tmp_path, length).lint(2048) for length in (longest, longest - 1)]
    assert ["cut replies" in {finding.rule for finding in findings} for findings in found] == [False, True]


def test_a_judge_has_the_step_limit_that_it_is_asked_for():
    assert make_judge({"horizon_steps": 12}, None, 10, 0).horizon_steps == 12
    assert make_judge({}, None, 10, 0).horizon_steps is None
