"""The loop, its history and its log: what a model is told, what is counted, and a kill at any moment."""

import json
import re

import numpy as np
import pytest

from llm_policy.environments.gym_env import make_gym_environment, seed_of
from llm_policy.errors import InputError
from llm_policy.policy_search.answer_log import AnswerLog, read_log
from llm_policy.policy_search.parameters import PolicySpace, search_problem
from llm_policy.policy_search.progress import cost_of, progress_line
from llm_policy.policy_search.prompts import DESCRIPTIONS, environment_description
from llm_policy.policy_search.proposers import HillClimbingProposer, RandomProposer
from llm_policy.policy_search.search import (
    Answer,
    History,
    Request,
    SearchSettings,
    longest_prompt,
    prompt_of,
    search,
)

LAKE = search_problem("FrozenLake-v1")
A, B, C = (0,) * 16, (1,) * 16, (2,) * 16


def settings(**changes) -> SearchSettings:
    return SearchSettings(**({"iterations": 4, "episodes": 3, "warm_up": 2} | changes))


class Scripted:
    """Says `texts` one after another and remembers what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.requests = list(texts), []

    def propose(self, request: Request) -> Answer:
        self.requests.append(request)
        return Answer(self.texts[len(self.requests) - 1], tokens_in=7, tokens_out=3, seconds=0.5)


def line(parameters) -> str:
    return f"parameters: {LAKE.space.text(parameters)}"


# History -------------------------------------------------------------------------------------------------------


def test_repeated_policies_are_pooled():
    history = History()
    for iteration, parameters, returns in ((1, A, [0.0, 1.0]), (2, B, [0.5, 0.5]), (3, A, [1.0, 1.0])):
        history.add(iteration, parameters, returns)
    first = history.tried[0]
    assert (first.mean, first.returns, first.last_iteration) == (0.75, [0, 1, 1, 1], 3)
    assert first.standard_error == pytest.approx(np.std([0, 1, 1, 1], ddof=1) / 2)
    assert (len(history.tried), history.episodes, history.best.parameters) == (2, 6, A)


def test_the_published_history_keeps_every_line():
    history = History(pool_duplicates=False)
    for iteration, returns in ((1, [0.0]), (2, [1.0])):
        history.add(iteration, A, returns)
    assert [tried.mean for tried in history.tried] == [0.0, 1.0]
    assert history.best.mean == 1.0
    assert history.tried[0].standard_error is None


def test_equal_returns_go_to_more_episodes_then_to_the_earlier():
    history = History()
    for iteration, parameters in ((1, A), (2, B), (3, C), (4, B)):
        history.add(iteration, parameters, [0.5])
    assert history.best.parameters == B
    history.add(5, A, [0.5])
    assert history.best.parameters == A


def test_best_and_recent():
    history = History()
    returns = [0.9, 0.1, 0.8, 0.2, 0.3, 0.0]
    for iteration, value in enumerate(returns):
        history.add(iteration, (iteration % 4, *A[1:15], iteration // 4), [value])
    chosen = settings(history_best=2, history_recent=2)
    assert [tried.mean for tried in history.shown(chosen)] == [0.0, 0.3, 0.8, 0.9]  # the best last
    assert [tried.mean for tried in history.shown(settings(history_best=6, history_recent=3))] == sorted(returns)
    assert [tried.mean for tried in history.shown(settings(history="whole"))] == returns
    assert history.shown(settings(history_best=0, history_recent=0)) == []


# Prompt --------------------------------------------------------------------------------------------------------


def user_text(optimum=None, description=None, **changes) -> str:
    history = History()
    history.add(0, A, [0.0, 1.0])
    return prompt_of(LAKE.space, history, settings(**changes), 3, optimum, description)[1]["content"]


def description_of(env_id: str, options: dict | None = None) -> str:
    return environment_description(make_gym_environment(env_id, options))


def test_prompt_says_what_is_needed():
    text = user_text()
    for words in ("16 integers from 0 to 3", "iteration 3 of 4", "return: 0.5 +- 0.5", line(A), "3 episodes"):
        assert words in text, words
    for words in ("best possible return", "slippery", "reason"):
        assert words not in text, words


def test_prompt_options():
    assert "The best possible return is about 0.7442." in user_text(optimum=0.74424)
    assert "return: 0.5\n" in user_text(pool_duplicates=False)
    assert "reason" in user_text(ask_reason=True)
    described = user_text(description=environment_description(LAKE.environment))
    assert "8 by 8 cells" in environment_description(make_gym_environment("FrozenLake8x8-v1"))
    assert "SFFF|FHFH|FFFH|HFFG" in described
    assert "Slippery" in described
    assert "Not slippery" in description_of("FrozenLake-v1", {"is_slippery": False})


def test_prompt_of_linear_policies():
    def first_prompt(space: PolicySpace) -> str:
        return prompt_of(space, History(), settings(), 1, None, None)[1]["content"]

    text = first_prompt(search_problem("MountainCarContinuous-v0").space)
    assert "3 numbers from -6.0 to 6.0 with one decimal: the 1 x 2 matrix W" in text
    assert "cut at their bounds" in text
    assert "Nothing was tried so far." in text
    assert "index, from 0, of the largest" in first_prompt(search_problem("CartPole-v1").space)


def test_descriptions():
    for env_id in ("CliffWalking-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0"):
        assert "{" not in description_of(env_id)
    assert {"InvertedPendulum-v5", "Swimmer-v5", "Hopper-v5"} < set(DESCRIPTIONS)
    for env_id, options in (("Acrobot-v1", {}), ("FrozenLake-v1", {"success_rate": 0.5})):
        with pytest.raises(InputError, match="--description_file"):
            description_of(env_id, options)


@pytest.mark.parametrize("history", ["whole", "best_and_recent"])
def test_no_prompt_is_longer_than_the_longest(history):
    chosen = settings(iterations=30, history=history, ask_reason=True)
    texts = [line((3,) * 15) if i % 3 == 1 else line(LAKE.space.draw(np.random.default_rng(i))) for i in range(60)]
    model = Scripted(*texts)
    search(LAKE, model, chosen)
    lengths = [sum(len(message["content"]) for message in request.messages) for request in model.requests]
    longest = longest_prompt(LAKE.space, chosen, None, None, line(A))
    assert max(lengths) <= sum(len(message["content"]) for message in longest) <= 1.5 * max(lengths)


# Loop ----------------------------------------------------------------------------------------------------------


def test_a_search_by_hand():
    model = Scripted(line(A), "nonsense", line(B), "", "too short: 1", line(B))
    chosen = settings(retries=1)
    history, steps = search(LAKE, model, chosen, log=(log := AnswerLog(None)))
    assert [step.iteration for step in steps] == [-1, 0, 1, 2, 3, 4]
    assert [step.returns is None for step in steps] == [False, False, False, False, True, False]
    assert [step.is_repeat for step in steps[2:]] == [False, False, False, True]
    assert [step.episodes for step in steps] == [3, 6, 9, 12, 12, 15], "a failed iteration spends no episode"
    assert history.episodes == 15
    assert steps[4].error == "no lines begin with `parameters:`, expected one"
    assert len(log.answers) == 6
    # The error was told, with the answer that it is about, and only to the next attempt
    _, _, retry, third, *_ = (request.messages for request in model.requests)
    assert [message["role"] for message in retry] == ["system", "user", "assistant", "user"]
    assert retry[2]["content"] == "nonsense"
    assert "no lines begin with `parameters:`" in retry[3]["content"]
    assert len(third) == 2
    assert model.requests[4].messages[2]["content"] == "(nothing)", "some servers refuse an empty turn"
    assert [(r.iteration, r.attempt) for r in model.requests] == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)]


def test_what_was_tried_is_told_in_the_next_prompt():
    model = Scripted(line(A), line(B))
    search(LAKE, model, settings(iterations=2))
    assert line(A) not in model.requests[0].messages[1]["content"]
    assert line(A) in model.requests[1].messages[1]["content"]


@pytest.mark.parametrize("kind", [RandomProposer, HillClimbingProposer])
def test_same_seed_same_run_other_seed_another(kind):
    def run(seed):
        return search(LAKE, kind(LAKE.space, seed), settings(seed=seed, iterations=20))[1]

    assert run(0) == run(0) != run(1)


def test_seeds_differ():
    arguments = [(s, p, i, a) for s in (0, 1) for p in ("episodes", "judge") for i in (-1, 0, 1) for a in (0, 1)]
    assert len({seed_of(*given) for given in arguments}) == len(arguments)


def test_hill_climbing_crosses_a_plateau():
    """On a dry strip S F G only RIGHT, twice, earns anything: two values have to change before one of them pays."""
    strip = search_problem("FrozenLake-v1", {"desc": ["SFG"], "is_slippery": False}, 10)
    chosen = settings(iterations=60, episodes=1)
    history, _ = search(strip, HillClimbingProposer(strip.space, 0), chosen)
    assert (history.best.mean, history.best.parameters[:2]) == (1.0, (2, 2))


# Log and resume ------------------------------------------------------------------------------------------------

TEXTS = (line(A), "nonsense", line(B), "", "", line(B))


@pytest.fixture(scope="module")
def whole_log(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    result = search(LAKE, Scripted(*TEXTS), settings(), log=AnswerLog(path))
    return path.read_bytes(), result[1]


def test_the_log_holds_everything(whole_log, tmp_path):
    (tmp_path / "log").write_bytes(whole_log[0])
    records = read_log(tmp_path / "log")
    kinds = [record["kind"] for record in records]
    assert (kinds.count("answer"), kinds.count("rollout")) == (6, 5)
    first = next(record for record in records if record["kind"] == "answer")
    assert first["prompt"][0]["role"] == "system"
    assert (first["answer"], first["parameters"], first["error"]) == (line(A), list(A), None)
    assert (first["tokens_in"], first["tokens_out"], first["seconds"]) == (7, 3, 0.5)
    assert all(len(record["returns"]) == 3 for record in records if record["kind"] == "rollout")


def test_a_kill_at_any_moment_costs_no_answer(whole_log, tmp_path):
    """After each line, and in the middle of each: a resumed run asks only what was not answered and ends the same."""
    content, steps = whole_log
    path = tmp_path / "answers.jsonl"
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in sorted({0, *ends, *(end - 5 for end in ends)}):
        path.write_bytes(content[:cut])
        known = sum(json.loads(text)["kind"] == "answer" for text in content[:cut].splitlines(True) if b"\n" in text)
        model = Scripted(*TEXTS[known:])
        assert search(LAKE, model, settings(), log=AnswerLog(path))[1] == steps
        assert len(model.requests) == len(TEXTS) - known
        assert path.read_bytes() == content


def test_an_interrupted_question_is_asked_again(tmp_path):
    class Dies(Scripted):
        def propose(self, request):
            if len(self.requests) == 2:
                raise KeyboardInterrupt
            return super().propose(request)

    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(LAKE, Dies(*TEXTS), settings(), log=AnswerLog(path))
    rest = Scripted(*TEXTS[2:])
    search(LAKE, rest, settings(), log=AnswerLog(path))
    assert rest.requests[0].attempt == 1


@pytest.mark.parametrize("changes", [{"seed": 1}, {"iterations": 5}, {"history_best": 1, "history_recent": 0}])
def test_another_runs_log_is_refused(changes, whole_log, tmp_path):
    (tmp_path / "answers.jsonl").write_bytes(whole_log[0])
    with pytest.raises(InputError, match="was recorded by another run"):
        search(LAKE, Scripted(*TEXTS), settings(**changes), log=AnswerLog(tmp_path / "answers.jsonl"))


def test_a_record_that_does_not_fit_its_own_answer_is_refused(whole_log, tmp_path):
    """Other parameters than the text names, or fewer episodes than are played."""
    records = [json.loads(line) for line in whole_log[0].splitlines()]
    first_answer = next(i for i, r in enumerate(records) if r["kind"] == "answer" and r["parameters"] is not None)
    first_rollout = next(i for i, r in enumerate(records) if r["kind"] == "rollout")
    for number, changes in ((first_answer, {"parameters": [1.0]}), (first_rollout, {"returns": [0.5]})):
        changed = [record | (changes if i == number else {}) for i, record in enumerate(records)]
        (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in changed))
        with pytest.raises(InputError, match="was recorded by another run"):
            search(LAKE, Scripted(*TEXTS), settings(), log=AnswerLog(tmp_path / "answers.jsonl"))


ROLLOUT = {"kind": "rollout", "iteration": 0, "parameters": [1], "returns": [0.5]}
REPLY = {
    "kind": "answer", "iteration": 1, "attempt": 0, "prompt": [], "answer": "", "error": None, "parameters": None,
    "tokens_in": 0, "tokens_out": 0, "seconds": 0.5,
}  # fmt: skip
DAMAGED = [
    *({**ROLLOUT, **change} for change in ({"returns": "x"}, {"returns": []}, {"iteration": [1]})),
    *({**REPLY, **change} for change in ({"seconds": "x"}, {"answer": 5}, {"answer": None}, {"seconds": float("nan")})),
]
NO_LOGS = ["{}", "[]", '{"kind": "rollout"}', "not json", '{"kind": "poem"}', "", *map(json.dumps, DAMAGED)]


def test_a_log_of_these_records_is_whole(tmp_path):
    (tmp_path / "answers.jsonl").write_text(f"{json.dumps(ROLLOUT)}\n{json.dumps(REPLY)}\n")
    assert AnswerLog(tmp_path / "answers.jsonl").answers == [REPLY]


@pytest.mark.parametrize("text", [f"{text}\n" for text in NO_LOGS])
def test_a_damaged_log_is_named(text, tmp_path):
    (tmp_path / "answers.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"answers.jsonl: line 1 is no record"):
        AnswerLog(tmp_path / "answers.jsonl")


def test_a_log_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        search(LAKE, Scripted(*TEXTS), settings(), log=AnswerLog(tmp_path / "nowhere/answers.jsonl"))


BAD_SETTINGS = [
    ({"history": "some"}, "--history 'some': expected one of whole, best_and_recent"),
    ({"optimum_hint": "high"}, "--optimum_hint 'high': expected none, exact or a number"),
    ({"optimum_hint": "nan"}, "--optimum_hint 'nan'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS)
def test_bad_settings(changes, message):
    with pytest.raises(InputError, match=message):
        settings(**changes)


def test_progress_and_cost_by_hand():
    chosen, log, lines = settings(retries=1), AnswerLog(None), []
    model = Scripted(line(A), "nonsense", line(B), "", "too short: 1", line(B))
    _, steps = search(LAKE, model, chosen, log=log, on_step=lambda step: lines.append(progress_line(step, chosen, log)))
    assert lines[0] is None
    assert lines[1].startswith("warm-up: 2 random policies, best mean return ")
    assert re.fullmatch(r"iteration 1/4: return \S+; best \S+; 1 call, 3 tokens out, 0\.5 s", lines[2])
    assert re.fullmatch(r"iteration 2/4: return .*; 2 calls, 6 tokens out, 1\.0 s", lines[3])
    assert lines[4].startswith("iteration 3/4: failed, no lines begin with `parameters:`, expected one; best ")
    assert "(repeated policy); best " in lines[5]
    assert cost_of(log, steps, chosen, 12.34) == {
        "calls": 6, "tokens_in": 42, "tokens_out": 18, "answer_seconds": 3.0, "seconds": 12.3, "episodes": 15,
        "unusable_answers": 3, "failed_iterations": 1, "repeated_policies": 1, "iterations": 4,
    }  # fmt: skip
