"""The endpoint proposer against a real server: `transformers serve` on loopback with a tiny model.

.venv/bin/pip install -r requirements-endpoint.txt
.venv/bin/python -m pytest -m slow tests/test_search_endpoint.py
SERVED_MODEL=data/models/SmolLM2-135M-Instruct .venv/bin/python -m pytest -m slow tests/test_search_endpoint.py
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_models import build_tiny_model

from llm_policy.errors import InputError
from llm_policy.policy_search.answer_log import read_log
from llm_policy.run_files import ROOT
from search_policy import main

START_SECONDS = 180
NEEDED = ("openai", "fastapi", "uvicorn")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="pip install -r requirements-endpoint.txt"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server's URL and the name of its model; stopped afterwards."""
    folder = os.environ.get("SERVED_MODEL")
    model = Path(folder).resolve() if folder else build_tiny_model(tmp_path_factory.mktemp("served") / "tiny")
    if not folder:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--host", "127.0.0.1"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    with log.open("w") as output:
        server = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, env=offline, stdout=output, stderr=output)
    try:
        for _ in range(START_SECONDS):
            assert server.poll() is None, log.read_text()[-2000:]
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail(f"no server after {START_SECONDS} s: {log.read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}/v1", str(model)
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


def test_two_iterations(served, tmp_path, monkeypatch):
    base_url, model = served
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    options = {
        "proposer": "endpoint", "base_url": base_url, "model_name": model, "iterations": 2, "episodes": 4, "warm_up": 3,
        "max_completion_tokens": 64, "output_dir": tmp_path / "out",
    }  # fmt: skip
    arguments = [str(text) for name, value in options.items() for text in (f"--{name}", value)]
    assert main(arguments) == 0
    answers = [record for record in read_log(tmp_path / "out/answers.jsonl") if record["kind"] == "answer"]
    assert {record["iteration"] for record in answers} == {1, 2}
    assert all(record["tokens_in"] > 100 and 1 <= record["tokens_out"] <= 64 for record in answers)
    assert all(record["seconds"] > 0 for record in answers)
    cost = json.loads((tmp_path / "out/evaluation.json").read_text())["cost"]
    assert cost["calls"] == len(answers)
    assert cost["tokens_out"] == sum(record["tokens_out"] for record in answers)


def test_a_model_that_is_not_served(served, tmp_path):
    base_url, _ = served
    flags = ["--proposer", "endpoint", "--base_url", base_url, "--model_name", "nobody/nothing", "--iterations", "1"]
    with pytest.raises(InputError, match=r"status [45]"):
        main([*flags, "--endpoint_retries", "0", "--output_dir", str(tmp_path / "out")])
