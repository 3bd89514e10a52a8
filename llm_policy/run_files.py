"""What every script does with its arguments and its folder: command line + YAML, resolved configuration, run.json."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from enum import Enum
from importlib.metadata import version
from pathlib import Path

import torch
import yaml
from filelock import FileLock, Timeout
from trl import TrlParser

from llm_policy.errors import InputError
from llm_policy.models import ROOT

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
CONFIG_FILE, RUN_FILE, EVALUATION_FILE = "resolved_config.yaml", "run.json", "evaluation.json"
DERIVED = {"generation_batch_size"}  # fields that a dataclass computes from others and does not take back
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "gymnasium", "numpy", "pandas")


def parse_config(argv: Sequence[str], groups: Sequence[type], default: Path | None = None) -> tuple[list, str]:
    """Command line and YAML file -> one instance of each dataclass in `groups`, and the file's path ("" for none).

    Flags win over the file. `default` is taken where no --config is named. `InputError`, one line, for unknown flags,
    unusable values and a file that is none.
    """
    argv = list(argv)
    script = Path(sys.argv[0]).name
    for i, argument in enumerate(argv):
        if argument.startswith("--config="):
            argv[i : i + 1] = argument.split("=", 1)
    while argv.count("--config") > 1:  # the last one counts, as for every other option
        del argv[argv.index("--config") : argv.index("--config") + 2]
    if "--config" not in argv and default is not None:
        argv = ["--config", str(default), *argv]
    config = ""
    if "--config" in argv:
        index = argv.index("--config") + 1
        if index == len(argv):
            raise InputError("--config: expected the path of a YAML file after it")
        config = argv[index]

    class Parser(TrlParser):
        def error(self, message: str):
            raise InputError(f"{message}; see python {script} --help")

    try:
        return list(Parser(tuple(groups)).parse_args_and_config(argv)), config
    except FileNotFoundError as error:
        raise InputError(f"--config {config}: no such file; configs/ holds the ones that come with this") from error
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        message = " ".join(str(error).split()).replace(
            "Some specified arguments are not used by the HfArgumentParser", "unknown"
        )
        where = f"{config} and the command line: " if config else ""
        raise InputError(f"{where}{message}; see python {script} --help") from error


def resolved_config(*groups) -> dict:
    """Every argument that differs from its dataclass default, in a form that --config reads back."""
    values: dict = {}
    for group in groups:
        for f in fields(group):
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            value = getattr(group, f.name)
            value = value.value if isinstance(value, Enum) else value
            if f.init and f.name not in DERIVED and value != default and _is_plain(value):
                values[f.name] = value
    return values


def _is_plain(value) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool | int | float | str)


def write_whole(path: Path, text: str) -> None:
    """Write a file of which no half is ever seen, whenever we are killed."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


@contextmanager
def only_process_in(output_dir: Path) -> Iterator[None]:
    """`InputError` where another process is at work in `output_dir`; a kill frees it. Left empty it is removed."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output_dir / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"--output_dir {output_dir}: another process is at work there; wait for it, stop it, or name another folder"
        ) from error
    except OSError as error:
        raise InputError(f"--output_dir {output_dir}: cannot be written ({error}); name another folder") from error
    try:
        yield
    finally:
        lock.release()
        (output_dir / ".lock").unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            output_dir.rmdir()


def check_same_run(output_dir: Path, groups: Sequence, may_differ: Collection[str]) -> None:
    """`InputError` where `output_dir` holds a run that was begun with other arguments than `may_differ` allows."""
    file = output_dir / CONFIG_FILE
    if not file.exists():
        return
    begun, now = yaml.safe_load(file.read_text()), resolved_config(*groups)  # both less what has its default
    for name in sorted({*begun, *now} - set(may_differ)):
        if begun.get(name) != now.get(name):
            raise InputError(
                f"--{name} {now.get(name, '(its default)')}: {output_dir} was begun with "
                f"{begun.get(name, 'the default')}; go on with that, or choose another --output_dir"
            )


def write_run_files(
    output_dir: Path, groups: Sequence, config: str, seed: int, settings: dict, resume: str = "the same command",
    on_gpu: bool = False,
) -> None:  # fmt: skip
    """`resolved_config.yaml` (give it to --config to repeat the run) and `run.json` (seed, versions, commit, ...).

    A run that is gone on with keeps its run.json; command, commit and device of the later parts are added to it.
    `resume` names, in the error of a folder that cannot be written, what goes on once it can.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_whole(output_dir / CONFIG_FILE, yaml.safe_dump(resolved_config(*groups), sort_keys=False))
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        part = {
            "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": commit or "unknown",
            "device": torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads",
        }
        file = output_dir / RUN_FILE
        if file.exists():
            run = {**settings, **json.loads(file.read_text())}
            run["resumed"] = [*run.get("resumed", []), part]
        else:
            run = part | {
                "config": Path(config).name,
                "seed": seed,
                "python": platform.python_version(),
                "versions": {name: version(name) for name in PACKAGES},
                **settings,
            }
        write_whole(file, json.dumps(run, indent=1) + "\n")
    except OSError as error:
        raise InputError(
            f"--output_dir {output_dir}: cannot be written ({error}); once it can, {resume} goes on"
        ) from error
