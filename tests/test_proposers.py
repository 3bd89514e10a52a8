"""Who proposes: a tiny local model, searches without one, recorded answers."""

import json

import pytest
import torch
from tiny_models import build_tiny_model

from llm_policy.errors import InputError
from llm_policy.models import load_model, load_tokenizer
from llm_policy.policy_search.answer_log import AnswerLog
from llm_policy.policy_search.parameters import PolicySpace, search_problem
from llm_policy.policy_search.proposers import (
    Answer,
    HillClimbingProposer,
    LocalProposer,
    RandomProposer,
    RecordedProposer,
)
from llm_policy.policy_search.search import History, Request, SearchSettings, search

LAKE = search_problem("FrozenLake-v1")
SETTINGS = SearchSettings(iterations=3, episodes=2, warm_up=2)
GOOD = "parameters: " + ", ".join("1" * 16)


def request(iteration: int = 1, attempt: int = 0) -> Request:
    turns = [{"role": "system", "content": "optimise"}, {"role": "user", "content": "go"}]
    return Request(turns, History(), iteration, attempt)


# Local model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma"])
def tiny(request, tmp_path_factory):
    folder = build_tiny_model(tmp_path_factory.mktemp("tiny") / request.param, request.param)
    return load_model(folder, dtype="float32"), load_tokenizer(folder)


def test_a_local_answer_follows_its_seed_and_attempt(tiny):
    proposer, other = LocalProposer(*tiny, 12, seed=0), LocalProposer(*tiny, 12, seed=1)
    first = proposer.propose(request())
    torch.rand(3)  # what the rest of the process draws does not matter
    assert proposer.propose(request()).text == first.text
    assert len({p.propose(request(i, a)).text for p in (proposer, other) for i in (1, 2) for a in (0, 1)}) > 4
    assert 1 <= first.tokens_out <= 12
    assert first.tokens_in == len(proposer.prompt_tokens(request().messages))
    assert first.seconds > 0


def test_the_prefix_belongs_to_prompt_and_answer(tiny):
    plain, prefixed = LocalProposer(*tiny, 4), LocalProposer(*tiny, 4, answer_prefix="parameters:")
    begin, longer = (p.prompt_tokens(request().messages) for p in (plain, prefixed))
    assert longer[: len(begin)] == begin
    assert tiny[1].decode(longer[len(begin) :]) == "parameters:"
    assert prefixed.propose(request()).text.startswith("parameters:")


def test_a_line_break_ends_an_answer_of_one_line(tiny):
    tokenizer = tiny[1]
    one_line, free = LocalProposer(*tiny, 4, is_one_line=True), LocalProposer(*tiny, 4)
    ends = set(one_line.generation_config.eos_token_id) - set(free.generation_config.eos_token_id)
    assert tokenizer.encode("\n", add_special_tokens=False)[0] in ends
    assert all("\n" in tokenizer.decode([token]) for token in ends)


def test_greedy_and_cut(tiny):
    answers = {LocalProposer(*tiny, 5, temperature=0, seed=seed).propose(request()).text for seed in (0, 1)}
    assert len(answers) == 1
    assert LocalProposer(*tiny, 1, temperature=0).propose(request()).is_cut


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CartPole-v1", "CliffWalking-v1"])
@pytest.mark.parametrize("is_one_line", [True, False])
def test_constrained_answers_are_well_formed(tiny, env_id, is_one_line):
    space = search_problem(env_id).space
    proposer = LocalProposer(*tiny, 400, 3.0, answer_prefix="parameters:", is_one_line=is_one_line, space=space)
    found = {space.read_answer(proposer.propose(request(i)).text) for i in (1, 2, 3)}
    assert len(found) == 3  # the model does choose


def test_the_last_value_may_have_two_digits(tiny):
    space = PolicySpace(is_tabular=True, inputs=2, outputs=12)
    proposer = LocalProposer(*tiny, 40, answer_prefix="parameters:", space=space)
    reply = tiny[1].encode(" 3, 1", add_special_tokens=False)
    pieces = {proposer._pieces[token] for token in proposer._allowed(reply)}
    assert "\n" in pieces
    assert {"0", "1"} <= pieces
    assert "2" not in pieces


# Without a model -----------------------------------------------------------------------------------------------


def test_hill_climbing_asks_a_lucky_policy_again():
    lucky, other = tuple([1] * 16), tuple([2] * 16)
    proposer = HillClimbingProposer(LAKE.space, 0)

    def proposed(history: History) -> tuple:
        return LAKE.space.read_answer(proposer.propose(Request([], history, 9, 0)).text)

    history = History()
    history.add(1, other, [0.0])
    history.add(2, lucky, [1.0])
    assert proposed(history) == lucky
    history.add(3, lucky, [0.5])
    assert sum(a != b for a, b in zip(proposed(history), lucky, strict=True)) == 1
    # Among equals there is no luck: it continues from the latest
    history.add(4, other, [1.5])
    assert sum(a != b for a, b in zip(proposed(history), other, strict=True)) == 1


# Recorded ------------------------------------------------------------------------------------------------------


def test_recorded_answers_give_the_same_run(tmp_path):
    first, again = (AnswerLog(tmp_path / name) for name in ("first", "again"))
    steps = search(LAKE, RandomProposer(LAKE.space, 0), SETTINGS, log=first)[1]
    assert search(LAKE, RecordedProposer(tmp_path / "first"), SETTINGS, log=again)[1] == steps
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()


def test_too_few_recorded_answers(tmp_path):
    search(LAKE, RandomProposer(LAKE.space, 0), SETTINGS, log=AnswerLog(tmp_path / "first"))
    longer = SearchSettings(iterations=4, episodes=2, warm_up=2)
    with pytest.raises(
        InputError, match="iteration 1, attempt 0 was asked otherwise; give the settings of the recorded"
    ):
        search(LAKE, RecordedProposer(tmp_path / "first"), longer)
    lines = [line for line in (tmp_path / "first").read_text().splitlines() if '"iteration": 3' not in line]
    (tmp_path / "short").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(InputError, match="holds no answer for iteration 3, attempt 0"):
        search(LAKE, RecordedProposer(tmp_path / "short"), SETTINGS)


def test_a_replay_tells_that_an_answer_was_cut(tmp_path):
    """What is wrong with an answer stands in the next prompt: without it the replay would ask otherwise."""

    class Cut:
        def propose(self, request):
            return Answer("parameters: 1, 2", 9, 5, 0.1, is_cut=request.attempt == 0)

    first, again = AnswerLog(tmp_path / "first"), AnswerLog(tmp_path / "again")
    search(LAKE, Cut(), SETTINGS, log=first)
    search(LAKE, RecordedProposer(tmp_path / "first"), SETTINGS, log=again)
    assert "(the answer was cut after 5 tokens)" in (tmp_path / "first").read_text()
    assert (tmp_path / "again").read_text() == (tmp_path / "first").read_text()


def test_no_recorded_answers(tmp_path):
    for name in ("nowhere", "."):
        with pytest.raises(InputError, match="cannot be read"):
            RecordedProposer(tmp_path / name)
    (tmp_path / "poem").write_text(json.dumps({"kind": "poem"}) + "\n")
    with pytest.raises(InputError, match="poem: line 1 is no record"):
        RecordedProposer(tmp_path / "poem")


def test_hill_climbing_asks_nothing_again_where_repeats_are_not_pooled():
    """A second line of its own would not lower the lucky one: it would be asked for ever."""
    history, lucky = History(pool_duplicates=False), (1,) * 16
    history.add(1, (2,) * 16, [0.0])
    history.add(2, lucky, [1.0])
    text = HillClimbingProposer(LAKE.space, 0).propose(Request([], history, 9, 0)).text
    assert sum(a != b for a, b in zip(LAKE.space.read_answer(text), lucky, strict=True)) == 1
