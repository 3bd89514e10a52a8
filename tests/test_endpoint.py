"""Policies from an endpoint: a stub with all its moods."""

import socket
import sys

import pytest
from stub_endpoint import stub_endpoint

import llm_policy.policy_search.endpoint
from llm_policy.errors import InputError
from llm_policy.policy_search.answer_log import AnswerLog
from llm_policy.policy_search.endpoint import KEY_VARIABLE, EndpointProposer
from llm_policy.policy_search.parameters import search_problem
from llm_policy.policy_search.search import History, Request, SearchSettings, search

LAKE = search_problem("FrozenLake-v1")
SETTINGS = SearchSettings(iterations=3, episodes=2, warm_up=2)
GOOD = "parameters: " + ", ".join("1" * 16)
KEY = "sk-secret-0123456789"


def request() -> Request:
    turns = [{"role": "system", "content": "optimise"}, {"role": "user", "content": "go"}]
    return Request(turns, History(), 1, 0)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def endpoint(base_url: str, **changes) -> EndpointProposer:
    pytest.importorskip("openai", reason="requirements-endpoint.txt")
    return EndpointProposer("model-1", base_url, **({"retries": 2, "timeout_seconds": 5.0} | changes))


def test_an_endpoints_answer():
    with stub_endpoint(GOOD) as server:
        answer = endpoint(server.base_url, temperature=0.5, max_completion_tokens=33).propose(request())
    assert (answer.text, answer.tokens_in, answer.tokens_out, answer.is_cut) == (GOOD, 100, 10, False)
    ((headers, body),) = server.requests
    assert headers["authorization"] == f"Bearer {KEY}"
    assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("model-1", 0.5, 33)
    assert body["messages"] == request().messages
    assert 0 <= body["seed"] < 2**31


RECOVERIES = [
    # replies before the answer, requests in all
    ((429,), 2),
    ((500, 503), 3),
    ((429, 500), 3),
    ((408, 409), 3),
]


@pytest.mark.parametrize(("troubles", "requests"), RECOVERIES)
def test_passing_troubles_are_waited_for(troubles, requests):
    with stub_endpoint(*troubles, GOOD) as server:
        assert endpoint(server.base_url).propose(request()).text == GOOD
    assert len(server.requests) == requests


LASTING = [
    # reply, requests until it is given up, what the line says
    (429, 3, "status 429, rate-limited after at most 2 more tries; the history is kept"),
    (500, 3, "status 500 after at most 2 more tries"),
    (401, 1, "status 401, refuses the key; check OPENAI_API_KEY"),
    (403, 1, "status 403, refuses the key"),
    (404, 1, "status 404; check --base_url and --model_name model-1"),
    (400, 1, "status 400"),
    (422, 1, "status 422"),
    ({"hello": 1}, 1, 'with no chat completion ({"hello": 1}); does --base_url end in /v1?'),
    ({"choices": []}, 1, "with no chat completion"),
    ({"choices": [{"message": {"content": 3}}]}, 1, "with no chat completion"),
    ({"choices": [{"message": None}]}, 1, "with no chat completion"),
    ({"choices": "none"}, 1, "with no chat completion"),
    ({"choices": [{"message": {}}], "usage": {"prompt_tokens": "many"}}, 1, "with no chat completion"),
    (b"<html>\n<body>sign in</body></html>", 1, "with no chat completion (<html> <body>sign in</body></html>)"),
    (b"", 1, "with no chat completion ()"),
    (b'{"choices": [', 1, "with no chat completion"),
    (b"\xff\xfe", 1, "with no chat completion"),
    (f"{KEY}".encode(), 1, "with no chat completion (***)"),
]


@pytest.mark.parametrize(("reply", "requests", "message"), LASTING)
def test_lasting_troubles_are_one_line_without_the_key(reply, requests, message):
    with stub_endpoint(reply) as server, pytest.raises(InputError) as error:
        endpoint(server.base_url).propose(request())
    assert len(server.requests) == requests
    assert message in str(error.value)
    assert server.base_url in str(error.value)
    assert KEY not in str(error.value)
    assert "\n" not in str(error.value)


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(InputError, match="cannot be reached after 1 more tries; the history is kept"):
        endpoint(f"http://127.0.0.1:{port}/v1", retries=1).propose(request())


def test_nobody_answers():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        with pytest.raises(InputError, match="no answer in time after 0 more tries"):
            endpoint(url, retries=0, timeout_seconds=0.3).propose(request())


def test_a_server_that_drips_for_ever():
    """Each byte comes in time."""
    with stub_endpoint(0.05) as server, pytest.raises(InputError, match="no answer in time after 0 more tries"):
        endpoint(server.base_url, retries=0, timeout_seconds=0.5).propose(request())


def test_a_body_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(llm_policy.policy_search.endpoint, "LARGEST_REPLY", 20)
    with stub_endpoint(0.01) as server, pytest.raises(InputError, match="answers, but with no chat completion"):
        endpoint(server.base_url, retries=0, timeout_seconds=5).propose(request())


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_answer_is_told_and_counted(content, tmp_path):
    with stub_endpoint(content, GOOD) as server:
        log = AnswerLog(tmp_path / "answers.jsonl")
        history, steps = search(LAKE, endpoint(server.base_url), SETTINGS, log=log)
    assert [r["error"] for r in log.answers] == ["the answer is empty", None, None, None]
    assert "the answer is empty" in server.requests[1][1]["messages"][-1]["content"]
    assert KEY not in (tmp_path / "answers.jsonl").read_text()
    assert [step.is_repeat for step in steps[2:]] == [False, True, True]
    assert len(history.tried[-1].returns) == 3 * SETTINGS.episodes


def test_the_history_survives_an_endpoint_that_goes_down(tmp_path):
    with stub_endpoint(GOOD, 500) as server, pytest.raises(InputError, match="status 500"):
        search(LAKE, endpoint(server.base_url), SETTINGS, log=AnswerLog(tmp_path / "answers.jsonl"))
    with stub_endpoint(GOOD) as server:
        log = AnswerLog(tmp_path / "answers.jsonl")
        search(LAKE, endpoint(server.base_url), SETTINGS, log=log)
    assert (len(server.requests), len(log.answers)) == (2, 3)


BAD_URLS = [
    ("127.0.0.1:8000", "expected a URL such as"),
    ("ftp://127.0.0.1/v1", "expected a URL such as"),
    ("http://[::1", "^--base_url: ValueError: Invalid IPv6 URL$"),
    ("http://127.0.0.1:x/v1", "^--base_url: InvalidURL: Invalid port"),
    ("http://127.0.0.1\t/v1", "^--base_url: InvalidURL: Invalid non-printable"),
    ("http://☃.x/v1", "^--base_url: InvalidURL: Invalid IDNA hostname"),
    (f"http://user:{KEY}@127.0.0.1/v1", "holds a user, password or query"),
    (f"http://127.0.0.1/v1?key={KEY}", "holds a user, password or query"),
]


@pytest.mark.parametrize(("url", "message"), BAD_URLS)
def test_bad_urls(url, message):
    with pytest.raises(InputError, match=message) as error:
        endpoint(url)
    assert KEY not in str(error.value)


@pytest.mark.parametrize("host", ["...", "a" * 300])
def test_hosts_that_cannot_be_looked_up(host):
    with pytest.raises(InputError, match=rf"^endpoint http://{host}/v1: .*; the history is kept"):
        endpoint(f"http://{host}/v1", retries=0).propose(request())


def test_a_key_that_no_header_takes(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "k\xe9")
    with pytest.raises(
        InputError, match=r"^OPENAI_API_KEY: holds a character that no HTTP header takes; set it again$"
    ):
        endpoint("http://127.0.0.1:9/v1")


def test_without_a_key(monkeypatch):
    pytest.importorskip("openai", reason="requirements-endpoint.txt")
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InputError, match="set OPENAI_API_KEY in the environment, or give --base_url"):
        EndpointProposer("model-1")
    with stub_endpoint(GOOD) as server:  # a server of one's own needs none
        assert endpoint(server.base_url).propose(request()).text == GOOD


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(InputError, match=r"openai is missing; pip install -r requirements-endpoint\.txt"):
        EndpointProposer("model-1", "http://127.0.0.1:1/v1")


def test_each_question_has_a_seed_of_its_own_and_a_cut_answer_is_told():
    cut = {"choices": [{"message": {"content": "parameters: 1"}, "finish_reason": "length"}]}
    with stub_endpoint(cut) as server:
        for seed, iteration, attempt in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 1, 0)):
            request = Request([{"role": "user", "content": "go"}], History(), iteration, attempt)
            assert endpoint(server.base_url, seed=seed).propose(request).is_cut
    *seeds, again = (body["seed"] for _, body in server.requests)
    assert len(set(seeds)) == 4
    assert again == seeds[0]
