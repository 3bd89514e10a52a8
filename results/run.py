"""One reported result: fresh seeds of one configuration. Their small files go to results/STUDY/NAME/.

    python results/run.py --study canonical --name canonical_slippery --seeds 4 5 6
    python results/run.py --study canonical --name dry --expert "--is_slippery false --rows states" \\
        -- --is_slippery false
    python results/run.py --study ablations --name ablation_kl --seeds 1 2 3 -- --beta 0.1
    python results/run.py --study policy_search --name props_cart_pole --script search_policy.py \\
        -- --env_id CartPole-v1

Everything behind `--` goes to the script. The same command resumes after a kill, and other seeds are added to those
that are there. The runs themselves stay in runs/NAME/seed-N/.

results/STUDY/NAME/command.txt holds the command for all seeds of the result. Each seed-N/ holds run.json (commit,
versions, hardware), the resolved configuration, metrics.jsonl (a search: answers.jsonl), evaluation.json, result.txt,
the picture, and the minutes of the whole process.

exit codes: 0 done, 2 the input cannot be used (one line says why), else that of the seed that ended early
(75: interrupted, the same command resumes)
"""

import argparse
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.errors import InputError, run_script

ROOT = Path(__file__).resolve().parent.parent
KEPT = (
    "run.json", "resolved_config.yaml", "metrics.jsonl", "answers.jsonl", "evaluation.json", "result.txt", "policy.png",
    "curve.png", "minutes.txt",
)  # fmt: skip
# What each script needs so that it resumes after a kill, and its configuration where none is named
SCRIPTS = {
    "train_script.py": (["--resume_from_checkpoint", "auto"], "configs/laptop.yaml"),
    "search_policy.py": ([], None),
}
PLAIN_WORD = re.compile(r"[A-Za-z0-9_-]+")
MAY_DIFFER = {"study": None, "seeds": None}  # between two calls that belong to one result


class Parser(argparse.ArgumentParser):
    """Its errors are an `InputError` of one line, without the usage."""

    def error(self, message: str):
        raise InputError(f"{message}; see --help, options of the script go behind --")


def make_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--study", help="folder in results/ that holds the result; not needed where it holds it already"
    )
    parser.add_argument("--name", required=True, help="name of the result: a folder in results/STUDY/ and in runs/")
    parser.add_argument("--script", choices=tuple(SCRIPTS), default="train_script.py", help="the script that is run")
    parser.add_argument(
        "--config", help="YAML file for the script (train_script.py has configs/laptop.yaml by default)"
    )
    parser.add_argument(
        "--expert",
        help="options of llm_policy.environments.expert_q; it first makes an expert's CSV for these runs alone, which "
        "is not committed",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds to run; take fresh ones, not those of tuning"
    )
    parser.add_argument(
        "--share_untrained", action="store_true",
        help="judge the untrained model in the first seed only, because no seed changes its greedy answers. The "
        "minutes of the other seeds then lack this part",
    )  # fmt: skip
    parser.add_argument("flags", nargs="*", help="after --: options for the script")
    return parser


def command_line(arguments: argparse.Namespace) -> str:
    """The call that has these arguments: the content of command.txt."""
    words = ["python", "results/run.py"]
    for option in ("study", "name"):
        if value := getattr(arguments, option):
            words += [f"--{option}", value]
    if arguments.script != "train_script.py":
        words += ["--script", arguments.script]
    for option in ("config", "expert"):
        if value := getattr(arguments, option):
            words += [f"--{option}", value]
    if arguments.share_untrained:
        words.append("--share_untrained")
    words += ["--seeds", *map(str, arguments.seeds)]
    return shlex.join(words + (["--", *arguments.flags] if arguments.flags else []))


def result_folder(study: str | None, name: str) -> Path:
    """results/STUDY/NAME. Without a study, the one that holds NAME already.

    `InputError` for what is no plain word, for a name without a study, and for a name that another study holds: the
    runs of both would share runs/NAME/.
    """
    for option, value in (("study", study), ("name", name)):
        if value is not None and not PLAIN_WORD.fullmatch(value):
            raise InputError(f"--{option} {value!r}: expected a plain word of letters, digits, _ and -")
    results = ROOT / "results"
    holders = sorted(folder.parent.name for folder in results.glob(f"*/{name}") if folder.is_dir())
    if study is None and len(holders) != 1:
        found = f"the studies {' and '.join(holders)} hold it" if holders else "no study holds it yet"
        studies = sorted(folder.name for folder in results.glob("*") if folder.is_dir() and folder.name[0] != "_")
        raise InputError(f"--name {name}: {found}; give --study as well ({', '.join(studies)}, or a new one)")
    if others := [holder for holder in holders if study not in (None, holder)]:
        raise InputError(f"--study {study}: {name} belongs to the study {others[0]}; take another --name or that study")
    return results / (study or holders[0]) / name


def with_kept_seeds(arguments: argparse.Namespace, command_file: Path) -> argparse.Namespace:
    """The arguments with the seeds, and the study, of the command that made the result so far.

    `InputError` where that command differs in more than these.
    """
    if not command_file.exists():
        return arguments
    words = shlex.split(command_file.read_text())
    kept = make_parser().parse_args(words[2:]) if words[:2] == ["python", "results/run.py"] else None
    if kept is None or vars(kept) | MAY_DIFFER != vars(arguments) | MAY_DIFFER:
        folder = command_file.parent.relative_to(ROOT)
        raise InputError(
            f"{folder}/{command_file.name}: belongs to another command; take another --name, or delete {folder} and "
            f"runs/{arguments.name}"
        )
    seeds = list(dict.fromkeys([*kept.seeds, *arguments.seeds]))
    return argparse.Namespace(**vars(arguments) | {"seeds": seeds, "study": kept.study or arguments.study})


def run_to_its_end(command: Sequence[str]) -> int:
    """The exit code of `command`. SIGTERM is handed on, so that the run writes its checkpoint and leaves."""
    child = subprocess.Popen(command, cwd=ROOT)
    before = signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def timed_run(command: Sequence[str], run: Path) -> int:
    """`run_to_its_end`, with the minutes of all parts of an interrupted run added up in minutes.txt."""
    started, was_finished = time.perf_counter(), (run / "evaluation.json").exists()
    try:
        return run_to_its_end(command)
    finally:
        if not was_finished:
            run.mkdir(parents=True, exist_ok=True)
            minutes = run / "minutes.txt"
            before = float(minutes.read_text()) if minutes.exists() else 0.0
            minutes.write_text(f"{before + (time.perf_counter() - started) / 60:.2f}\n")


def keep_files(run: Path, target: Path) -> None:
    """Copy the small files of a finished run."""
    for name in KEPT:
        if (run / name).exists():
            target.mkdir(exist_ok=True)
            shutil.copy(run / name, target / name)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    arguments.seeds = list(dict.fromkeys(arguments.seeds))
    target = result_folder(arguments.study, arguments.name)
    all_seeds = with_kept_seeds(arguments, target / "command.txt")
    target.mkdir(parents=True, exist_ok=True)
    (target / "command.txt").write_text(command_line(all_seeds) + "\n")
    options, config = SCRIPTS[arguments.script]
    config = arguments.config or config
    flags = [*options, *(["--config", config] if config else []), *arguments.flags]
    runs = ROOT / "runs" / arguments.name

    if arguments.expert:
        expert_csv = runs / "expert.csv"
        runs.mkdir(parents=True, exist_ok=True)
        print(f"making the expert's CSV, {expert_csv.relative_to(ROOT)}", flush=True)
        make = [sys.executable, "-m", "llm_policy.environments.expert_q", *shlex.split(arguments.expert)]
        if code := run_to_its_end([*make, "--output", str(expert_csv), "--overwrite"]):
            return code
        flags += ["--expert_csv", str(expert_csv.relative_to(ROOT))]

    for number, seed in enumerate(arguments.seeds, start=1):
        run = runs / f"seed-{seed}"
        which = f"seed {seed}, {number} of {len(arguments.seeds)}"
        print(f"{which}: {arguments.script} in {run.relative_to(ROOT)}", flush=True)
        untrained = runs / f"seed-{all_seeds.seeds[0]}" / "untrained.json"
        if arguments.share_untrained and untrained.exists() and not (run / untrained.name).exists():
            run.mkdir(parents=True, exist_ok=True)
            shutil.copy(untrained, run)
        output = ["--seed", str(seed), "--output_dir", str(run.relative_to(ROOT))]
        if code := timed_run([sys.executable, arguments.script, *output, *flags], run):
            return code
        keep_files(run, target / run.name)
    print(f"{target.relative_to(ROOT)}: finished {', '.join(f'seed-{seed}' for seed in arguments.seeds)}")
    return 0


if __name__ == "__main__":
    run_script(main)
