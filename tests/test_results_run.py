import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llm_policy.errors import InputError

SPEC = importlib.util.spec_from_file_location("results_run", Path(__file__).parent.parent / "results" / "run.py")
results_run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results_run)

COMMANDS = sorted(  # without those of benchmarks
    path.parent
    for path in (Path(__file__).parent.parent / "results").glob("*/*/command.txt")
    if "results/run.py" in path.read_text()
)
KL = ["--study", "ablations", "--name", "kl", "--seeds", "4", "5", "--", "--beta", "0.1"]


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
    return commands


def test_each_seed_is_run_and_its_files_kept(started, tmp_path, capsys):
    assert results_run.main(KL) == 0
    assert capsys.readouterr().out.splitlines() == [
        "results/ablations: a new study",
        "seed 4, 1 of 2: train_script.py in runs/kl/seed-4",
        "seed 5, 2 of 2: train_script.py in runs/kl/seed-5",
        "results/ablations/kl: finished seed-4, seed-5",
    ]
    assert [command[command.index("--seed") + 1] for command in started] == ["4", "5"]
    assert all(command[-2:] == ["--beta", "0.1"] for command in started)
    target = tmp_path / "results/ablations/kl"
    kept = {path.relative_to(target).as_posix() for path in target.rglob("*.*")}
    assert kept == {"command.txt"} | {f"seed-{s}/{name}" for s in (4, 5) for name in ("evaluation.json", "minutes.txt")}


def test_other_seeds_are_added_to_the_command(started, tmp_path):
    results_run.main(KL)
    results_run.main(["--name", "kl", "--seeds", "6", "4", "--", "--beta", "0.1"])
    command = (tmp_path / "results/ablations/kl/command.txt").read_text()
    assert command == "python results/run.py --study ablations --name kl --seeds 4 5 6 -- --beta 0.1\n"
    assert len(started) == 4


def test_a_seed_whose_result_came_without_its_run_is_said_to_be_trained_again(started, tmp_path, capsys):
    results_run.main(KL)
    assert not capsys.readouterr().err
    shutil.rmtree(tmp_path / "runs/kl/seed-5")
    results_run.main(KL)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: results/ablations/kl/seed-5 holds seed 5, and its run is not here")
    assert [command[command.index("--seed") + 1] for command in started] == ["4", "5", "4", "5"]


def test_a_command_whose_first_call_is_refused_leaves_its_name_free(started, tmp_path, monkeypatch):
    codes = iter([2, 75, 2])
    with monkeypatch.context() as patch:
        patch.setattr(results_run, "run_to_its_end", lambda command: next(codes))
        assert results_run.main([*KL[:-2], "--betta", "0.1"]) == 2
        assert not (tmp_path / "results/ablations").exists(), "another study may take the name, too"
        assert results_run.main(KL) == 75  # begun: the name is taken
        assert results_run.main(KL) == 2
    assert (tmp_path / "results/ablations/kl/command.txt").exists()
    assert results_run.main(KL) == 0


def test_an_expert_of_one_word_is_read_back(started):
    words = ["--name", "kl", "--study", "ablations", "--expert=--rows=states", "--seeds", "4"]
    assert results_run.main(words) == results_run.main(words) == 0


def test_a_refused_call_takes_no_minutes(started, tmp_path, monkeypatch):
    monkeypatch.setattr(results_run, "run_to_its_end", lambda command: 2)
    assert results_run.main(KL) == 2
    assert not list(tmp_path.glob("runs/kl/*/minutes.txt"))


def test_a_run_that_fails_after_hours_keeps_its_minutes_and_its_command(started, tmp_path, monkeypatch):
    """A full disk or an endpoint that is gone ends with the code of a refusal, too."""

    def fail(command):
        folder = tmp_path / command[command.index("--output_dir") + 1]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text("{}")
        return 2

    monkeypatch.setattr(results_run, "run_to_its_end", fail)
    assert results_run.main(KL) == 2
    assert len(list(tmp_path.glob("runs/kl/seed-4/minutes.txt"))) == 1
    assert (tmp_path / "results/ablations/kl/command.txt").exists()


def test_a_run_that_is_killed_is_named(started, monkeypatch, capsys):
    monkeypatch.setattr(results_run, "run_to_its_end", lambda command: -9)
    assert results_run.main(KL) == 137
    ended = "was ended by SIGKILL, mostly for want of memory; the same command resumes\n"
    assert capsys.readouterr().err.endswith(f"error: seed 4 {ended}")
    assert results_run.main([*KL[:3], "other", "--expert", "--rows states"]) == 137
    assert capsys.readouterr().err.endswith(f"error: the expert {ended}")


def test_another_command_does_not_go_into_the_same_folder(started, tmp_path):
    results_run.main(KL)
    expected = (
        r"^results/ablations/kl/command\.txt: belongs to another command; take another --name, or delete results/"
    )
    with pytest.raises(InputError, match=expected):
        results_run.main(["--name", "kl", "--seeds", "6", "--", "--beta", "0.3"])
    assert len(started) == 2
    benchmark = tmp_path / "results/speed/step_time/command.txt"
    benchmark.parent.mkdir(parents=True)
    benchmark.write_text("python benchmarks/step_time.py --output results/step_time/embedded_11x8.json\n")
    with pytest.raises(InputError, match=r"results/speed/step_time/command\.txt: belongs to another command"):
        results_run.main(["--name", "step_time"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # a new result has no study yet
        (["--name", "new"], r"--name new: no study holds it yet; give --study as well \(ablations, or a new one\)"),
        # runs/kl is the folder of one result only
        (["--study", "other", "--name", "kl"], "--study other: kl belongs to the study ablations; take another --name"),
        (
            ["--study", "ablations", "--name", "../x"],
            "--name '../x': expected a plain word of letters, digits, _ and -",
        ),
        (["--study", "a/b", "--name", "x"], "--study 'a/b': expected a plain word"),
        (["--study", "..", "--name", "x"], r"--study '\.\.': expected a plain word"),
        (["--study", "", "--name", "x"], "--study '': expected a plain word"),
        (["--name", "x\n"], "expected a plain word"),
        (["--name", "*"], "expected a plain word"),
        (["--name", "x" * 300], "expected a plain word of letters, digits, _ and -, at most 100"),
        # what this script gives itself
        ([*KL, "--seed", "7"], "--seed behind --: name the seeds with --seeds, before --"),
        ([*KL, "--seed=7"], "--seed=7 behind --: name the seeds"),
        ([*KL, "--output-dir", "elsewhere"], "--output-dir behind --: the runs are in runs/NAME/seed-N/"),
        ([*KL, "--help"], "--help behind --: ask the script itself"),
        ([*KL, "-h"], "-h behind --: ask the script itself"),
        ([*KL, "--check", "only"], "--check only behind --: trains nothing"),
        ([*KL[:4], "--expert", "--rows 'x"], '--expert "--rows \'x": No closing quotation'),
    ],
)
def test_what_is_no_result_of_a_study_is_refused(arguments, expected, started, tmp_path):
    results_run.main(KL)
    with pytest.raises(InputError, match=f"^{expected}" if expected.startswith("--") else expected):
        results_run.main(arguments)
    assert len(started) == 2
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["ablations"]


@pytest.mark.parametrize("place", ["runs/kl", "results/ablations", "results/ablations/kl"])
def test_a_file_in_the_place_of_a_folder(place, started, tmp_path):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("mine")
    with pytest.raises(InputError, match=rf"{place}\S*: cannot be written \(.*\); move what stands in its place"):
        results_run.main(KL)
    assert started == []


def test_a_folder_in_the_place_of_the_command(started, tmp_path):
    (tmp_path / "results/ablations/kl/command.txt").mkdir(parents=True)
    with pytest.raises(InputError, match=r"command\.txt: belongs to another command"):
        results_run.main(KL)


@pytest.mark.parametrize("text", ["nan", "-1", "inf", "x", ""])
def test_damaged_minutes_do_not_go_into_results(text, started, tmp_path):
    (tmp_path / "runs/kl/seed-4").mkdir(parents=True)
    (tmp_path / "runs/kl/seed-4/minutes.txt").write_text(text)
    with pytest.raises(InputError, match=r"runs/kl/seed-4/minutes\.txt: holds no time \(.*\); write the minutes"):
        results_run.main(KL)
    assert started == []


def test_a_run_that_leaves_no_evaluation_is_no_result(started, tmp_path, monkeypatch):
    monkeypatch.setattr(results_run, "run_to_its_end", lambda command: 0)
    with pytest.raises(InputError, match=r"runs/kl/seed-4: the script ended and left no evaluation\.json"):
        results_run.main(KL)
    assert not (tmp_path / "results/ablations/kl/seed-4").exists()


def test_the_study_is_needed_where_two_hold_the_name(started, tmp_path):
    for study in ("a", "b"):
        (tmp_path / "results" / study / "x").mkdir(parents=True)
    with pytest.raises(InputError, match=r"^--name x: the studies a and b hold it; give --study as well"):
        results_run.main(["--name", "x"])


def test_an_error_is_one_line_and_help_stays_short():
    script = str(Path(__file__).parent.parent / "results" / "run.py")
    call = [sys.executable, script, "--name", "../x"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --name '../x': expected a plain word of letters, digits, _ and -, at most 100\n"
    with pytest.raises(
        InputError, match=r"^unknown arguments: --beta 0\.1; see --help; options of the script go behind --"
    ):
        results_run.main(["--study", "ablations", "--name", "kl", "--beta", "0.1"])
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "exit codes: 0 done, 2 " in done.stdout
    assert len(done.stdout.splitlines()) < 60


def test_the_command_says_all_that_was_asked_for(started, tmp_path):
    options = ["--name", "maps", "--config", "c.yaml", "--expert", "--random_maps 9 --rows states", "--share_untrained"]
    options = ["--study", "maps_never_seen", *options]
    results_run.main([*options, "--seeds", "1", "2", "1"])
    command = (tmp_path / "results/maps_never_seen/maps/command.txt").read_text()
    assert results_run.shlex.split(command) == ["python", "results/run.py", *options, "--seeds", "1", "2"]
    assert started[0][1:5] == ["-m", "llm_policy.environments.expert_q", "--random_maps", "9"]
    results_run.main([*options, "--seeds", "3"])
    judged = [(tmp_path / f"runs/maps/seed-{seed}/untrained.json").read_text() for seed in (2, 3)]
    assert judged == ["judged by seed-1"] * 2
    (tmp_path / "runs/maps/seed-1/untrained.json").unlink()  # made elsewhere
    results_run.main([*options, "--seeds", "4"])
    assert (tmp_path / "runs/maps/seed-4/untrained.json").read_text() == "judged by seed-1"


def test_untrained_policies_that_depend_on_the_seed_are_not_shared():
    with pytest.raises(
        InputError, match=r"--share_untrained: what train_policy_gradient\.py judges .* on the seed; leave it out"
    ):
        results_run.main(["--study", "a", "--name", "b", "--script", "train_policy_gradient.py", "--share_untrained"])


@pytest.mark.parametrize("folder", COMMANDS, ids=[folder.name for folder in COMMANDS])
def test_the_committed_commands_run_their_seeds_again(folder, started, tmp_path):
    """Also the old ones, which name no study: it is the one that holds the result."""
    command = results_run.shlex.split((folder / "command.txt").read_text())
    kept = tmp_path / "results" / folder.parent.name / folder.name / "command.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text((folder / "command.txt").read_text())
    assert results_run.main(command[2:]) == 0
    assert sorted(results_run.shlex.split(kept.read_text())) == sorted(command)
    seeds = {path.name for path in folder.glob("seed-*")}
    runs = [call for call in started if "--output_dir" in call]  # the others make an expert
    assert {call[call.index("--output_dir") + 1].split("/")[-1] for call in runs} == seeds
    assert {path.parent for path in (tmp_path / "results").rglob("evaluation.json")} == {kept.parent / s for s in seeds}


def test_old_commands_without_a_study_are_among_the_committed_ones():
    assert any("--study" not in (folder / "command.txt").read_text() for folder in COMMANDS)


def test_where_the_experts_csv_cannot_be_made_no_seed_begins(started, monkeypatch):
    monkeypatch.setattr(results_run, "run_to_its_end", lambda command: 2)
    assert results_run.main([*KL[:4], "--expert", "--rows nonsense"]) == 2
    assert started == []


def test_the_minutes_of_a_part_that_was_interrupted_count(started, tmp_path, monkeypatch):
    def interrupted(_command):
        raise KeyboardInterrupt

    monkeypatch.setattr(results_run, "run_to_its_end", interrupted)
    clock = iter([0.0, 90.0])
    monkeypatch.setattr(results_run.time, "perf_counter", lambda: next(clock))
    with pytest.raises(KeyboardInterrupt):
        results_run.main(KL)
    assert (tmp_path / "runs/kl/seed-4/minutes.txt").read_text() == "1.50\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_the_run_which_ends_as_it_wants(number, tmp_path):
    ready = tmp_path / "ready"
    known = signal.SIGTERM if number == signal.SIGHUP else number  # no run takes SIGHUP
    child = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal({int(known)}, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)\n"
    )

    def terminate_when_ready():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=terminate_when_ready).start()
    assert results_run.run_to_its_end([sys.executable, "-c", child]) == 75


def test_a_signal_that_nohup_ignores_stays_ignored(monkeypatch):
    taken = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(results_run.signal, "signal", lambda number, _: taken.append(number) or signal.SIG_DFL)
        assert results_run.run_to_its_end([sys.executable, "-c", ""]) == 0
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGTERM in taken
    assert signal.SIGHUP not in taken


def test_a_run_resumes_in_its_scripts_configuration_with_its_own_expert(started):
    results_run.main([*KL[:4], "--seeds", "4", "--expert", "--rows states"])
    _, command = started
    assert dict(zip(command[2::2], command[3::2], strict=True)) == {
        "--seed": "4", "--output_dir": "runs/kl/seed-4", "--resume_from_checkpoint": "auto",
        "--config": "configs/laptop.yaml", "--expert_csv": "runs/kl/expert.csv",
    }  # fmt: skip


def test_another_task_has_its_own_configuration(started):
    results_run.main(["--study", "other_games", "--name", "cliff", "--seeds", "4", "--", "--task", "cliff_walking"])
    assert "--config" not in started[0]


def test_minutes_of_all_parts_add_up_and_a_finished_run_takes_no_more(started, tmp_path, monkeypatch):
    minutes, clock = tmp_path / "runs/kl/seed-4/minutes.txt", itertools.count(0, 90)
    minutes.parent.mkdir(parents=True)
    minutes.write_text("1.50\n")
    monkeypatch.setattr(results_run.time, "perf_counter", lambda: next(clock))
    for _ in range(2):
        results_run.main([*KL[:4], "--seeds", "4"])
        assert minutes.read_text() == "3.00\n"
