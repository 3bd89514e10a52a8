"""One reported result: fresh seeds of one configuration, their small files collected in results/NAME/.

    python results/run.py --name canonical_slippery
    python results/run.py --name dry --expert "--is_slippery false --rows states" -- --is_slippery false
    python results/run.py --name ablation_kl --seeds 1 2 3 -- --beta 0.1
    python results/run.py --name props_cart_pole --script search_policy.py -- --env_id CartPole-v1

Everything behind `--` goes to the script. A killed call goes on where it stopped; a call with other seeds adds them.
results/NAME/command.txt holds the command for all seeds there, seed-N/ holds run.json (commit, versions, hardware),
the resolved configuration, metrics.jsonl (a search: answers.jsonl), evaluation.json, result.txt, the picture and the
minutes of the whole process.
"""

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = (
    "run.json", "resolved_config.yaml", "metrics.jsonl", "answers.jsonl", "evaluation.json", "result.txt", "policy.png",
    "curve.png", "minutes.txt",
)  # fmt: skip
# What each script needs to go on after a kill, and its configuration where none is named
SCRIPTS = {
    "train_script.py": (["--resume_from_checkpoint", "auto"], "configs/laptop.yaml"),
    "search_policy.py": ([], None),
}


def command_line(arguments: argparse.Namespace, seeds: Sequence[int]) -> str:
    """The call that runs all of `seeds`: what stands in command.txt."""
    words = ["python", "results/run.py", "--name", arguments.name]
    if arguments.script != "train_script.py":
        words += ["--script", arguments.script]
    for option in ("config", "expert"):
        if value := getattr(arguments, option):
            words += [f"--{option}", value]
    if arguments.share_untrained:
        words.append("--share_untrained")
    words += ["--seeds", *map(str, seeds)]
    return shlex.join(words + (["--", *arguments.flags] if arguments.flags else []))


def run_to_its_end(command: Sequence[str]) -> int:
    """The exit code of `command`. SIGTERM is handed on: the run writes its checkpoint and leaves."""
    child = subprocess.Popen(command, cwd=ROOT)
    before = signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="folder under results/ and runs/")
    parser.add_argument("--script", choices=tuple(SCRIPTS), default="train_script.py", help="what is run")
    parser.add_argument("--config", help="YAML file for the script (train_script.py: configs/laptop.yaml by default)")
    parser.add_argument("--expert", help="options of llm_policy.environments.expert_q: the run's own CSV, made first, not committed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="fresh seeds, not those of tuning")
    parser.add_argument(
        "--share_untrained", action="store_true",
        help="judge the untrained model in the first seed only: no seed changes its greedy answers. The minutes of the "
        "others lack it",
    )  # fmt: skip
    parser.add_argument("flags", nargs="*", help="after --: flags for the script")
    arguments = parser.parse_args(argv)
    target = ROOT / "results" / arguments.name
    target.mkdir(parents=True, exist_ok=True)
    command_file, seeds = target / "command.txt", arguments.seeds
    if command_file.exists():
        kept = parser.parse_args(shlex.split(command_file.read_text())[2:])
        if vars(kept) | {"seeds": None} != vars(arguments) | {"seeds": None}:
            parser.error(
                f"{command_file}: of another command; take another --name, or delete {target} and runs/{arguments.name}"
            )
        seeds = list(dict.fromkeys([*kept.seeds, *seeds]))
    command_file.write_text(command_line(arguments, seeds) + "\n")
    options, config = SCRIPTS[arguments.script]
    config = arguments.config or config
    flags = [*options, *(["--config", config] if config else []), *arguments.flags]
    if arguments.expert:
        table = ROOT / "runs" / arguments.name / "expert.csv"
        table.parent.mkdir(parents=True, exist_ok=True)
        make = [sys.executable, "-m", "llm_policy.environments.expert_q", *shlex.split(arguments.expert), "--output", str(table)]
        subprocess.run([*make, "--overwrite"], cwd=ROOT, check=True)
        flags += ["--expert_csv", str(table.relative_to(ROOT))]
    for seed in arguments.seeds:
        run = ROOT / "runs" / arguments.name / f"seed-{seed}"
        command = [
            sys.executable, arguments.script, "--seed", str(seed), "--output_dir", str(run.relative_to(ROOT)), *flags,
        ]  # fmt: skip
        untrained = run.parent / f"seed-{seeds[0]}" / "untrained.json"
        if arguments.share_untrained and untrained.exists() and not (run / untrained.name).exists():
            run.mkdir(parents=True, exist_ok=True)
            shutil.copy(untrained, run)
        started, was_finished = time.perf_counter(), (run / "evaluation.json").exists()
        try:
            code = run_to_its_end(command)
        finally:
            if not was_finished:  # minutes of all parts of a run that was interrupted
                run.mkdir(parents=True, exist_ok=True)
                minutes = run / "minutes.txt"
                before = float(minutes.read_text()) if minutes.exists() else 0.0
                minutes.write_text(f"{before + (time.perf_counter() - started) / 60:.2f}\n")
        if code:
            return code
        for name in KEPT:
            if (run / name).exists():
                kept = target / f"seed-{seed}" / Path(name).name
                kept.parent.mkdir(exist_ok=True)
                shutil.copy(run / name, kept)
    print(f"results/{arguments.name}: {len(arguments.seeds)} seeds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
