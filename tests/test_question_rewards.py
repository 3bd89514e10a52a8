"""What each completion earns, one by one, and what every letter would."""

import pytest
from test_completions import reply

from llm_policy.completions import well_formed_rewards
from tasks.questions.rewards import (
    REWARDS,
    correct_reward,
    question_reward,
    short_reward,
    soft_format_reward,
)

MAP, PIANO = ["map", "atlas"], ["piano"]

REWARDED = [
    # completion, right answers: correct, short, format
    (reply("flat", "A map."), MAP, 2.0, 0.5, 0.5),
    (reply("flat", "atlas"), MAP, 2.0, 0.5, 0.5),  # an alias
    (reply("keys", "the piano"), PIANO, 2.0, 0.5, 0.5),
    (reply("flat", "maps"), MAP, 2.0, 0.5, 0.5),
    (reply("flat", "map, globe, chart, plan, book"), MAP, 0.0, 0.4, 0.5),  # five guesses
    (reply("It has cities.\n\nNo houses.\n", "map"), MAP, 2.0, 0.5, 0.5),  # a thought of several lines
    (reply("flat", "\nmap\n"), MAP, 2.0, 0.5, 0.5),
    (reply("flat", "word " * 2000), MAP, 0.0, 0.0, 0.5),
    (reply("flat", ""), MAP, 0.0, 0.0, 0.5),  # nothing said is not short
    (reply("flat", "   "), MAP, 0.0, 0.0, 0.5),
    (reply("", "map"), MAP, 2.0, 0.5, 0.5),
    ("<THINK>flat</THINK><ANSWER>map</ANSWER>", MAP, 0.0, 0.0, 0.0),  # the tags are in lower case
    ("<think>flat</think><answer>globe</answer><answer>map</answer>", MAP, 2.0, 0.5, 0.5),  # the last one counts
    ("<think>flat</think><answer>map</answer><answer>globe</answer>", MAP, 0.0, 0.5, 0.5),
    ("Well, <think>flat</think>\n<answer>map</answer> of course", MAP, 2.0, 0.5, 0.5),
    ("<answer>map</answer>", MAP, 2.0, 0.5, 0.0),
    ("<answer>map</answer><think>flat</think>", MAP, 2.0, 0.5, 0.0),
    ("map", MAP, 0.0, 0.0, 0.0),
    ("", MAP, 0.0, 0.0, 0.0),
    (reply("keys", "one two three four"), PIANO, 0.0, 0.45, 0.5),
]


@pytest.mark.parametrize("as_chat", [False, True])
@pytest.mark.parametrize(("text", "right", "correct", "short", "form"), REWARDED)
def test_rewards(text, right, correct, short, form, as_chat):
    completion = [{"role": "assistant", "content": text}] if as_chat else text
    found = [reward([completion], answers=[right], row=[0])[0] for reward in REWARDS]
    assert found == pytest.approx([correct + short + form, correct, short, form])


def test_rewards_of_a_batch_keep_their_order():
    texts = [reply("flat", answer) for answer in ("map", "globe", "map")]
    assert correct_reward(texts, [MAP, MAP, PIANO]) == [2.0, 0.0, 0.0]
    assert question_reward([], answers=[]) == []
    assert short_reward([]) == soft_format_reward([]) == []


@pytest.mark.parametrize("weights", [[1, 0, 0, 0], [0, 1, 0, 2]])
def test_every_legal_letter_has_its_reward(weights):
    rows = [{"answers": [right], "lettered": ["x", "y"]} for right in "AB"]
    assert well_formed_rewards(REWARDS, weights, rows, "AB").tolist() == [[3, 1], [1, 3]]


def test_the_letter_of_another_option_is_wrong_whatever_words_follow():
    replies = [reply("wings", answer) for answer in ("B: robin", "A: robin", "robin", "B", "A")]
    columns = {"answers": [["B", "robin"]] * 5, "lettered": [["fly", "robin", "cow"]] * 5}
    assert correct_reward(replies, **columns) == [2.0, 0.0, 2.0, 2.0, 0.0]
