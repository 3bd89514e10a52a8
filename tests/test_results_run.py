import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("results_run", Path(__file__).parent.parent / "results" / "run.py")
results_run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results_run)

COMMANDS = sorted(  # without those of benchmarks
    path.parent
    for path in (Path(__file__).parent.parent / "results").glob("*/command.txt")
    if "results/run.py" in path.read_text()
)
KL = ["--name", "kl", "--seeds", "4", "5", "--", "--beta", "0.1"]


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Commands that were started; each leaves an evaluation, as a finished run does."""
    commands = []

    def run(command):
        commands.append(command)
        if "--output_dir" in command:
            folder = tmp_path / command[command.index("--output_dir") + 1]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "evaluation.json").write_text("{}")
            if not (folder / "untrained.json").exists():
                (folder / "untrained.json").write_text(f"judged by {folder.name}")
        return 0

    monkeypatch.setattr(results_run, "ROOT", tmp_path)
    monkeypatch.setattr(results_run, "run_to_its_end", run)
    monkeypatch.setattr(results_run.subprocess, "run", lambda command, **_: run(command))  # the expert's CSV
    return commands


def test_each_seed_is_run_and_its_files_kept(started, tmp_path):
    assert results_run.main(KL) == 0
    assert [command[command.index("--seed") + 1] for command in started] == ["4", "5"]
    assert all(command[-2:] == ["--beta", "0.1"] for command in started)
    kept = {path.relative_to(tmp_path / "results/kl").as_posix() for path in (tmp_path / "results/kl").rglob("*.*")}
    assert kept == {"command.txt"} | {f"seed-{s}/{name}" for s in (4, 5) for name in ("evaluation.json", "minutes.txt")}


def test_other_seeds_are_added_to_the_command(started, tmp_path):
    results_run.main(KL)
    results_run.main(["--name", "kl", "--seeds", "6", "4", "--", "--beta", "0.1"])
    command = (tmp_path / "results/kl/command.txt").read_text()
    assert command == "python results/run.py --name kl --seeds 4 5 6 -- --beta 0.1\n"
    assert len(started) == 4


def test_another_command_does_not_go_into_the_same_folder(started, tmp_path, capsys):
    results_run.main(KL)
    with pytest.raises(SystemExit):
        results_run.main(["--name", "kl", "--seeds", "6", "--", "--beta", "0.3"])
    assert "results/kl/command.txt: of another command" in capsys.readouterr().err
    assert len(started) == 2


def test_the_command_says_all_that_was_asked_for(started, tmp_path):
    options = ["--name", "maps", "--config", "c.yaml", "--expert", "--random_maps 9 --rows states", "--share_untrained"]
    results_run.main([*options, "--seeds", "1", "2"])
    command = (tmp_path / "results/maps/command.txt").read_text()
    assert results_run.shlex.split(command) == ["python", "results/run.py", *options, "--seeds", "1", "2"]
    assert started[0][1:5] == ["-m", "llm_policy.environments.expert_q", "--random_maps", "9"]
    results_run.main([*options, "--seeds", "3"])
    judged = [(tmp_path / f"runs/maps/seed-{seed}/untrained.json").read_text() for seed in (2, 3)]
    assert judged == ["judged by seed-1"] * 2


@pytest.mark.parametrize("folder", COMMANDS, ids=[folder.name for folder in COMMANDS])
def test_the_committed_commands_run_their_seeds_again(folder, started, tmp_path):
    command = results_run.shlex.split((folder / "command.txt").read_text())
    kept = tmp_path / "results" / folder.name / "command.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text((folder / "command.txt").read_text())
    assert results_run.main(command[2:]) == 0
    assert sorted(results_run.shlex.split(kept.read_text())) == sorted(command)
    seeds = {path.name for path in folder.glob("seed-*")}
    assert {call[call.index("--output_dir") + 1].split("/")[-1] for call in started if "--seed" in call} == seeds


def test_the_minutes_of_a_part_that_was_interrupted_count(started, tmp_path, monkeypatch):
    def interrupted(_command):
        raise KeyboardInterrupt

    monkeypatch.setattr(results_run, "run_to_its_end", interrupted)
    clock = iter([0.0, 90.0])
    monkeypatch.setattr(results_run.time, "perf_counter", lambda: next(clock))
    with pytest.raises(KeyboardInterrupt):
        results_run.main(KL)
    assert (tmp_path / "runs/kl/seed-4/minutes.txt").read_text() == "1.50\n"


def test_sigterm_reaches_the_run_which_ends_as_it_wants(tmp_path):
    ready = tmp_path / "ready"
    child = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)\n"
    )

    def terminate_when_ready():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate_when_ready).start()
    assert results_run.run_to_its_end([sys.executable, "-c", child]) == 75
