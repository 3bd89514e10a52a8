"""What several test modules need: one thread (tiny matrices gain nothing from more), and a tiny model that answers."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from tiny_models import build_tiny_model

from llm_policy.chat import Reader, reply_token_ids
from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, acting_states
from llm_policy.errors import run_script
from llm_policy.models import load_model, load_tokenizer
from prompts import format_example, policy_messages

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("untimed")


def taught_model(folder: Path, architecture: str, steps: int = 120, **options) -> Path:
    """A tiny model whose answers are well-formed, with any action: groups have variance and runs have gradients."""
    build_tiny_model(folder, architecture, **options)
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    reader, grid = Reader(tokenizer), CANONICAL_GRIDS["4x4"]
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    states = acting_states(grid)
    for _ in range(steps):
        texts = []
        for action in range(len(ACTIONS)):
            state = states[int(torch.randint(len(states), (1,), generator=generator))]
            reply = reply_token_ids(format_example(grid, state, action), tokenizer)
            texts.append((reader.prompt(policy_messages(grid, state, is_slippery=True)), reply))
        length = max(len(prompt) + len(reply) for prompt, reply in texts)
        ids = torch.full((len(texts), length), tokenizer.pad_token_id)
        labels = torch.full((len(texts), length), -100)
        for i, (prompt, reply) in enumerate(texts):
            ids[i, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            labels[i, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    return folder


def at_call(owner, name: str, number: int, act: Callable[..., None]) -> Callable[[], None]:
    """What makes call `number` (from 1) of `owner.name` begin with `act(*arguments of the call)`."""

    def sabotage() -> None:
        original, calls = getattr(owner, name), 0

        def counted(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                act(*arguments)
            return original(*arguments, **options)

        setattr(owner, name, counted)

    return sabotage


def forked(work: Callable[[], int | None], log: Path, before: Callable[[], None] = lambda: None) -> int:
    """Number of a forked child that calls `before` and runs `work` as a script; what it says is added to `log`."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            before()
            try:
                run_script(work)
            except SystemExit as leaving:
                code = int(leaving.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return child


class Interrupted(Exception):
    pass


def interrupted_at_step(number: int, train: Callable[[], object]) -> None:
    """`train`, until it asks the optimiser for step `number`: as a kill there, in this process."""

    def interrupt(*_) -> None:
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", torch.optim.AdamW.step)  # it is put back at the end
        at_call(torch.optim.AdamW, "step", number, interrupt)()
        with pytest.raises(Interrupted):
            train()


def pytest_configure():
    """Under nohup, or put aside with &, these are ignored, and so in every process that a test starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def signal_handlers():
    """A training run in this process sets its own and leaves them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def taught(tmp_path_factory) -> Callable[..., Path]:
    """(architecture, further arguments of `build_tiny_model`) -> a taught model's folder, made once."""

    @functools.cache
    def get(architecture: str, **options) -> Path:
        return taught_model(tmp_path_factory.mktemp("taught") / architecture, architecture, **options)

    return get


@pytest.fixture(scope="session")
def answering_llama(taught) -> Path:
    return taught("llama")
