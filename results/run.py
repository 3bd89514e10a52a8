"""One reported result: fresh seeds of one configuration. Their small files go to results/STUDY/NAME/.

    python results/run.py --study canonical --name mine --seeds 4 5 6
    python results/run.py --study canonical --name mine_dry --expert "--is_slippery false --rows states" \\
        -- --is_slippery false
    python results/run.py --study ablations --name mine_kl --seeds 1 2 3 -- --beta 0.1
    python results/run.py --study policy_search --name mine_cart_pole --script search_policy.py \\
        -- --env_id CartPole-v1

Everything behind `--` goes to the script. The same command resumes after a kill, and other seeds are added to those
that are there. The runs themselves stay in runs/NAME/seed-N/.

results/STUDY/NAME/command.txt holds the command for all seeds of the result. Each seed-N/ holds run.json (commit,
versions, hardware), the resolved configuration, metrics.jsonl (a search: answers.jsonl), evaluation.json, result.txt,
the picture, and the minutes of the whole process.
"""

import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import prepare

prepare(__name__)

from llm_policy.command_line import EXIT_CODES, option_name, parse_arguments, read_option, take_config
from llm_policy.errors import EXIT_INPUT_ERROR, InputError, check_choices, ended_by, run_script, writing
from llm_policy.reading import read_text
from llm_policy.run_files import EVALUATION_FILE, RUN_FILE

ROOT = Path(__file__).resolve().parent.parent
KEPT = (
    "run.json", "resolved_config.yaml", "metrics.jsonl", "answers.jsonl", "evaluation.json", "result.txt", "policy.png",
    "thoughts.png", "curve.png", "minutes.txt",
)  # fmt: skip
# What each script needs so that it resumes after a kill, and its configuration where none is named
SCRIPTS = {
    "train_script.py": (["--resume_from_checkpoint", "auto"], "configs/laptop.yaml"),
    "search_policy.py": ([], None),
    "train_policy_gradient.py": (["--resume_from_checkpoint", "auto"], None),
    "train_hindsight.py": (["--resume_from_checkpoint", "auto"], None),
}
GREEDY_ALIKE = ("train_script.py", "train_hindsight.py")  # before training, where all seeds are asked the same
PLAIN_WORD = re.compile(r"[A-Za-z0-9_-]{1,100}")
# What this script gives to the other one, or what would leave no result: option -> what to do instead
TAKEN = {
    "seed": "name the seeds with --seeds, before --",
    "output_dir": "the runs are in runs/NAME/seed-N/",
    "h": "ask the script itself",
    "help": "ask the script itself",
    "help_all": "ask the script itself",
}
CODES = EXIT_CODES | {75: "a seed was interrupted (the same command resumes)"}


@dataclass(frozen=True)
class ResultArguments:
    """What makes one result, beside what goes to the script."""

    name: str = field(metadata={"help": "Name of the result: a folder in results/STUDY/ and in runs/."})
    study: str | None = field(
        default=None, metadata={"help": "Folder in results/ that holds it; not needed where it holds it already."}
    )
    script: str = field(default="train_script.py", metadata={"help": f"The script that is run: {', '.join(SCRIPTS)}."})
    expert: str | None = field(
        default=None,
        metadata={
            "help": "Options of llm_policy.environments.expert_q, which then makes an expert's CSV for these runs "
            "alone; it is not committed."
        },
    )
    seeds: list[int] = field(
        default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds to run; take fresh ones, not those of tuning."}
    )
    share_untrained: bool = field(
        default=False,
        metadata={
            "help": "Judge the untrained model in the first seed only, because no seed changes its greedy answers. "
            "A seed that is asked something else (riddles without --split_seed) judges it itself. "
            "The minutes of the other seeds then lack this part."
        },
    )

    def __post_init__(self) -> None:
        check_choices(self, {"script": tuple(SCRIPTS)})


@dataclass(frozen=True)
class Command:
    """A whole call: this script's arguments, and the script's own configuration ("" for its default) and flags."""

    arguments: ResultArguments
    config: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        """As it stands in command.txt."""
        asked, words = self.arguments, ["python", "results/run.py"]
        options = {"study": asked.study, "name": asked.name}
        if asked.script != "train_script.py":
            options["script"] = asked.script
        for option, value in (options | {"config": self.config, "expert": asked.expert}).items():
            is_one_flag = bool(value) and value.startswith("-") and " " not in value  # read back as an option of ours
            words += [f"--{option}={value}"] if is_one_flag else [f"--{option}", value] if value else []
        words += ["--share_untrained"] if asked.share_untrained else []
        words += ["--seeds", *map(str, asked.seeds)]
        return shlex.join(words + (["--", *self.flags] if self.flags else []))

    def with_seeds(self, study: str | None, seeds: Sequence[int]) -> "Command":
        return replace(self, arguments=replace(self.arguments, study=study, seeds=list(dict.fromkeys(seeds))))


def read_command(argv: Sequence[str]) -> Command:
    """The words of a call, without those of Python, -> the call. One-line `InputError`s."""
    argv = list(argv)
    behind = argv.index("--") if "--" in argv else len(argv)
    own, config = take_config(argv[:behind], None)
    try:
        (arguments,), _ = parse_arguments(
            own, (ResultArguments,), description=__doc__, exit_codes=CODES,
            config_help="YAML file for the script. Default of train_script.py on a lake: configs/laptop.yaml.",
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{error}; options of the script go behind --") from error
    flags = tuple(argv[behind + 1 :])
    for flag in flags:
        if flag.startswith("-") and (name := option_name(flag)) in TAKEN:
            raise InputError(f"{flag} behind --: {TAKEN[name]}")
    if arguments.share_untrained and arguments.script not in GREEDY_ALIKE:
        raise InputError(
            f"--share_untrained: what {arguments.script} judges before training depends on the seed; leave it out"
        )
    if read_option(flags, "check", "") == "only":
        raise InputError("--check only behind --: trains nothing; leave it out")
    try:
        shlex.split(arguments.expert or "")
    except ValueError as error:
        raise InputError(f"--expert {arguments.expert!r}: {error}; expected options as in a shell") from error
    return Command(arguments, config, flags).with_seeds(arguments.study, arguments.seeds)


def result_folder(study: str | None, name: str) -> Path:
    """results/STUDY/NAME. Without a study, the one that holds NAME already.

    `InputError` for what is no plain word, for a name without a study, and for a name that another study holds: the
    runs of both would share runs/NAME/.
    """
    for option, value in (("study", study), ("name", name)):
        if value is not None and not PLAIN_WORD.fullmatch(value):
            raise InputError(f"--{option} {value!r}: expected a plain word of letters, digits, _ and -, at most 100")
    results = ROOT / "results"
    holders = sorted(folder.parent.name for folder in results.glob(f"*/{name}") if folder.is_dir())
    if study is None and len(holders) != 1:
        found = f"the studies {' and '.join(holders)} hold it" if holders else "no study holds it yet"
        studies = sorted(folder.name for folder in results.glob("*") if folder.is_dir() and folder.name[0] != "_")
        raise InputError(f"--name {name}: {found}; give --study as well ({', '.join(studies)}, or a new one)")
    if others := [holder for holder in holders if study not in (None, holder)]:
        raise InputError(
            f"--study {study}: {name} belongs to the study {others[0]}; take another --name or that study, or delete "
            f"results/{others[0]}/{name} and runs/{name}"
        )
    return results / (study or holders[0]) / name


def with_kept_seeds(command: Command, command_file: Path) -> Command:
    """The call with the seeds, and the study, of the one that made the result so far.

    `InputError` where that one differs in more than these.
    """
    if not command_file.exists():
        return command
    try:
        words = shlex.split(command_file.read_text())
        kept = read_command(words[2:]) if words[:2] == ["python", "results/run.py"] else None
    except (OSError, ValueError, InputError):  # damaged
        kept = None
    if kept is None or kept.with_seeds(None, []) != command.with_seeds(None, []):
        folder = command_file.parent.relative_to(ROOT)
        raise InputError(
            f"{folder}/{command_file.name}: belongs to another command; take another --name, or delete {folder} and "
            f"runs/{command.arguments.name}"
        )
    asked, before = command.arguments, kept.arguments
    return command.with_seeds(before.study or asked.study, [*before.seeds, *asked.seeds])


def run_to_its_end(command: Sequence[str]) -> int:
    """The exit code of `command`. Signals are handed on, so that the run writes its checkpoint and leaves."""
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)  # or a Ctrl-C would reach it twice
    known = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    handed_on = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's SIGHUP

    def hand_on(number: int, _frame) -> None:  # a terminal that goes is a request to end, which runs know as SIGTERM
        child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    before = {number: signal.signal(number, hand_on) for number in handed_on}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def timed_run(command: Sequence[str], run: Path) -> int:
    """`run_to_its_end`, with the minutes of all parts of an interrupted run added up in minutes.txt.

    `InputError` where it ends well and leaves no evaluation, as with a `check: only` in its configuration.
    """
    started, was_finished = time.perf_counter(), (run / EVALUATION_FILE).exists()
    before, code = minutes_so_far(run / "minutes.txt"), None
    try:
        code = run_to_its_end(command)
    finally:
        has_begun = (run / RUN_FILE).exists()  # what is refused before has taken no time
        if not was_finished and (has_begun or code != EXIT_INPUT_ERROR):
            make_folder(run)
            (run / "minutes.txt").write_text(f"{before + (time.perf_counter() - started) / 60:.2f}\n")
    if code == 0 and not (run / EVALUATION_FILE).exists():
        raise InputError(
            f"{run}: the script ended and left no {EVALUATION_FILE}; look at its options and configuration"
        )
    return code


def minutes_so_far(file: Path) -> float:
    """0 without the file; `InputError` for a damaged one, without which the sum would be too small."""
    try:
        minutes = float(read_text(file))
        if 0 <= minutes < math.inf:
            return minutes
        reason = f"{minutes} minutes"
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError) as error:
        reason = str(error)
    raise InputError(f"{file}: holds no time ({reason}); write the minutes of the earlier parts, or delete it")


def make_folder(folder: Path) -> None:
    with writing(folder, "move what stands in its place"):
        folder.mkdir(parents=True, exist_ok=True)


def keep_files(run: Path, target: Path) -> None:
    """Copy the small files of a finished run."""
    for name in KEPT:
        if (run / name).exists():
            make_folder(target)
            shutil.copy(run / name, target / name)


def refused(target: Path, is_first: bool, code: int) -> int:
    """The exit code; a command whose first call was refused is forgotten, so that the mended one may have its name."""
    if is_first and code == EXIT_INPUT_ERROR:
        (target / "command.txt").unlink()
        with suppress(OSError):  # they hold something else
            target.rmdir()
            target.parent.rmdir()
    return code


def interrupted(what: str, code: int) -> int:
    """A line for a process that a signal ended, and the exit code that a shell has for it."""
    print(f"error: {what} {ended_by(-code)}; the same command resumes", file=sys.stderr)
    return 128 - code


def main(argv: Sequence[str] | None = None) -> int:
    command = read_command(sys.argv[1:] if argv is None else argv)
    arguments = command.arguments
    target = result_folder(arguments.study, arguments.name)
    whole_command = with_kept_seeds(command, target / "command.txt")
    runs = ROOT / "runs" / arguments.name
    if not target.parent.exists():  # or a slip of the pen
        print(f"results/{target.parent.name}: a new study", flush=True)
    for folder in (target, runs):
        make_folder(folder)
    is_new = not (target / "command.txt").exists()
    (target / "command.txt").write_text(f"{whole_command}\n")
    options, config = SCRIPTS[arguments.script]
    if config and read_option(command.flags, "task", "frozen_lake") != "frozen_lake":
        config = None  # the task has its own
    config = command.config or config
    flags = [*options, *(["--config", config] if config else []), *command.flags]

    if arguments.expert:
        expert_csv = runs / "expert.csv"
        print(f"making the expert's CSV, {expert_csv.relative_to(ROOT)}", flush=True)
        make = [sys.executable, "-m", "llm_policy.environments.expert_q", *shlex.split(arguments.expert)]
        code = run_to_its_end([*make, "--output", str(expert_csv), "--overwrite"])
        if code < 0:
            return interrupted("the expert", code)
        if code:
            return refused(target, is_new, code)
        flags += ["--expert_csv", str(expert_csv.relative_to(ROOT))]

    for number, seed in enumerate(arguments.seeds, start=1):
        run = runs / f"seed-{seed}"
        which = f"seed {seed}, {number} of {len(arguments.seeds)}"
        print(f"{which}: {arguments.script} in {run.relative_to(ROOT)}", flush=True)
        if (target / run.name).exists() and not run.exists():
            print(
                f"warning: {(target / run.name).relative_to(ROOT)} holds seed {seed}, and its run is not here: it is "
                "trained again; name the new seeds alone to add them",
                file=sys.stderr,
            )
        files = [runs / f"seed-{other}" / "untrained.json" for other in whole_command.arguments.seeds]
        untrained = next((file for file in files if file.exists()), None)
        if arguments.share_untrained and untrained and not (run / untrained.name).exists():
            make_folder(run)
            shutil.copy(untrained, run)
        output = ["--seed", str(seed), "--output_dir", str(run.relative_to(ROOT))]
        code = timed_run([sys.executable, arguments.script, *output, *flags], run)
        if code < 0:
            return interrupted(f"seed {seed}", code)
        if code:
            return refused(target, is_new and number == 1 and not (run / RUN_FILE).exists(), code)
        keep_files(run, target / run.name)
    print(f"{target.relative_to(ROOT)}: finished {', '.join(f'seed-{seed}' for seed in arguments.seeds)}")
    return 0


if __name__ == "__main__":
    run_script(main)
