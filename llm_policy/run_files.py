"""What every run leaves in its folder, and who may write there: resolved configuration, run.json, one lock."""

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import MISSING, fields
from datetime import date
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from llm_policy.errors import OPTION_ERRORS, InputError, writing
from llm_policy.interruption import RESUME
from llm_policy.reading import first_of, parse_json, read_text, read_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
CONFIG_FILE, RUN_FILE, METRICS_FILE = "resolved_config.yaml", "run.json", "metrics.jsonl"
EVALUATION_FILE, RESULT_FILE = "evaluation.json", "result.txt"
OF_EACH_RUN = (CONFIG_FILE, RUN_FILE, METRICS_FILE, RESULT_FILE, EVALUATION_FILE)  # once it has ended
PICTURE_FILE = "policy.png"
OUR_FOLDERS = re.compile(r"checkpoint-\d+|grpo|warm_start|runs")
OUR_SUFFIXES = {".json", ".jsonl", ".txt", ".md", ".png", ".yaml", ".safetensors", ".jinja", ".partial"}
LARGEST_JSON = 100_000_000  # bytes
HANDED_OVER = {"untrained.json", "minutes.txt"}  # by results/run.py, before a run has files of its own
# Fields that a dataclass computes from others and does not take back; what is asked of a call, not of a run
DERIVED = {"generation_batch_size", "resume_from_checkpoint"}
JUDGE_AGAIN = f"delete {EVALUATION_FILE} there to judge it again"
OTHER_RUN = "put the old file back, or name another folder"
DECISIVE = ("task", "env_id", "algorithm", "actor", "proposer")  # options on which other defaults hang
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "gymnasium", "numpy", "pandas")


def resolved_config(*groups) -> dict:
    """Every argument that differs from its dataclass default, in a form that --config reads back."""
    values: dict = {}
    for group in groups:
        for f in fields(group):
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            value = getattr(group, f.name)
            value = value.value if isinstance(value, Enum) else value
            if f.init and f.name not in DERIVED and value != default and _is_plain(value):
                values[f.name] = deepcopy(value)  # what two fields share would be an alias in YAML
    return values


def _is_plain(value) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool | int | float | str)


def write_whole(path: Path, text: str) -> None:
    """Write a file of which no half is ever seen, whenever we are killed."""
    partial = path.with_suffix(".partial")
    if partial.is_symlink():  # to another's file
        partial.unlink()
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def let_umask_decide(file: Path) -> None:
    """Who may read a file that safetensors wrote, which is for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


@contextmanager
def only_process_in(output_dir: Path) -> Iterator[None]:
    """`InputError` where another process is at work in `output_dir`; a kill frees it. Left empty it is removed."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output_dir / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"--output_dir {output_dir}: another process is at work there; wait for it, stop it, or name another "
            f"folder (if there is none, as may be on a disk without locks, delete {output_dir / '.lock'})"
        ) from error
    except OSError as error:
        raise InputError(f"--output_dir {output_dir}: cannot be written ({error}); name another folder") from error
    try:
        yield
    finally:
        (output_dir / ".lock").unlink(missing_ok=True)  # while it is held: who comes later makes another one
        lock.release()
        with suppress(OSError):  # not empty
            output_dir.rmdir()


def check_output_dir(output_dir: Path, resumes: bool, own: Collection[str] = ()) -> None:
    """The gate before any script writes to a folder: nothing is overwritten but what the script itself has written.

    `InputError` for a file, for a folder that holds a run where none is to be resumed, and for one that holds something
    else: a model, another run's checkpoint, files of the user's own. Also for one inside a run's checkpoint, because
    that run deletes it, and for one where a name of ours is of another kind: a folder metrics.jsonl, a pipe.

    Args:
        own: the files of a script that makes no run, which it may write again beside its `EVALUATION_FILE`.
    """
    for parent in (output_dir.absolute(), *output_dir.absolute().parents):
        if re.fullmatch(r"checkpoint-\d+", parent.name) and (parent.parent / CONFIG_FILE).exists():
            raise InputError(
                f"--output_dir {output_dir}: is or lies in a checkpoint of another run; choose another folder"
            )
    if not output_dir.exists():
        return
    if not output_dir.is_dir():
        raise InputError(f"--output_dir {output_dir}: is a file; name a folder")
    names = {path.name for path in output_dir.iterdir()}
    if not resumes and (CONFIG_FILE in names or any(output_dir.glob("checkpoint-*"))):
        resume = "" if own else f", delete it, or resume it with {RESUME}"
        raise InputError(f"--output_dir {output_dir}: holds a run; choose another folder{resume}")
    strange = names - {*(own if EVALUATION_FILE in names else ()), *HANDED_OVER, ".lock"}
    others = sorted(name for name in strange if not name.endswith(".partial"))  # what a killed process was writing
    if others and CONFIG_FILE not in names:
        raise InputError(f"--output_dir {output_dir}: holds {others[0]}, but no run; name a new or an empty folder")
    for path in sorted(output_dir.iterdir()):
        is_folder = OUR_FOLDERS.fullmatch(path.name)
        if not (path.is_dir() if is_folder else path.is_file() or path.suffix not in OUR_SUFFIXES):
            expected = "a folder" if is_folder else "a regular file"
            raise InputError(f"--output_dir {output_dir}: {path.name} is not {expected}; delete it or move it away")


def save_judgement(folder: Path, evaluation: str, picture: "Figure") -> None:
    """A judgement's picture and, last because it marks a finished run, evaluation.json."""
    with writing(f"--output_dir {folder}", "make room, or name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        picture.savefig(folder / PICTURE_FILE, dpi=120)
        write_whole(folder / EVALUATION_FILE, evaluation)


def finished_text(output_dir: Path) -> str:
    """What a finished run printed at its end; `InputError` where that is gone."""
    try:
        if text := read_text(output_dir / RESULT_FILE):
            return f"{output_dir} holds a finished run:\n{text}"
        raise ValueError("is empty")
    except (OSError, ValueError) as error:
        raise InputError(f"{output_dir / RESULT_FILE}: cannot be read ({error}); {JUDGE_AGAIN}") from error


def check_same_run(output_dir: Path, groups: Sequence, may_differ: Collection[str]) -> None:
    """`InputError` where `output_dir` holds a run that was begun with other arguments than `may_differ` allows."""
    file = output_dir / CONFIG_FILE
    if not file.exists():
        if (output_dir / RUN_FILE).exists() or any(output_dir.glob("checkpoint-*")):
            raise InputError(f"{file}: is gone, so that the run there cannot be resumed; choose another folder")
        return
    if any(output_dir.glob("checkpoint-*")) and not (output_dir / RUN_FILE).exists():
        raise InputError(f"{output_dir / RUN_FILE}: is gone, and it says what the run was made from; {OTHER_RUN}")
    begun_by, script = script_of(run_settings(output_dir).get("command", "")), Path(sys.argv[0]).name
    if begun_by != script and all((ROOT / name).is_file() for name in (begun_by, script)):
        raise InputError(f"--output_dir {output_dir}: holds a run of {begun_by}; choose another folder")
    try:
        begun = read_yaml(file)
        if not isinstance(begun, dict) or not all(isinstance(name, str) for name in begun):
            raise ValueError("expected a mapping, `option: value` in each line")
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({' '.join(str(error).split())}); choose another folder") from error
    now = resolved_config(*groups)  # both without what has its default
    names = {*begun, *now} - set(may_differ)
    for name in sorted(names, key=lambda name: (name not in DECISIVE, name)):
        if begun.get(name) != now.get(name):
            raise InputError(
                f"--{name} {now.get(name, '(its default)')}: {output_dir} was begun with "
                f"{begun.get(name, 'the default')}; resume with that, or choose another --output_dir"
            )


def script_of(command: str) -> str:
    """
    >>> script_of("python train_script.py --seed 1")
    'train_script.py'
    """
    return next(iter(command.split()[1:]), ".")


def checksum(content: object) -> str:
    """Of what JSON can say."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_kept(file: Path, asked: str, check: Callable[[Any], object]) -> dict | None:
    """The answers that `write_kept` left there; None where it was asked something else, for damage, and for no file.

    Args:
        asked: `checksum` of all that the answers depend on.
        check: fails for what are no such answers.
    """
    try:
        content = parse_json(read_text(file))
        if content.get("asked", content.get("judge")) == asked:  # the latter in files from before 2026-11-29
            check(content["answers"])
            return content["answers"]
    except (OSError, InputError, *OPTION_ERRORS):
        pass
    return None


def write_kept(file: Path, asked: str, answers: dict) -> None:
    write_whole(file, json.dumps({"asked": asked, "answers": answers}))


def check_made_from(output_dir: Path, made_from: Mapping[str, str], otherwise: str = "choose another folder") -> None:
    """`InputError` where a run was begun with other data or another model than lie there now, under the same names."""
    begun = run_settings(output_dir).get("made_from", {})  # runs from before this was written have none
    for what, now in made_from.items():
        if begun.get(what, now) != now:
            raise InputError(
                f"{output_dir}: the {what} changed since the run was begun; put the old files back, or {otherwise}"
            )


def commit() -> str:
    """The commit that is checked out; "unknown" outside a repository, and where git is not installed."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return found or "unknown"


def source_facts() -> dict[str, str]:
    """Which code and packages this process runs."""
    files = sorted(path for folder in ("llm_policy", "tasks") for path in (ROOT / folder).rglob("*.py"))
    code = checksum([path.read_text(encoding="utf-8") for path in [*files, *sorted(ROOT.glob("*.py"))]])
    return {"code": code} | {name: version(name) for name in PACKAGES}


def write_run_files(
    output_dir: Path, groups: Sequence, config: str, seed: int, settings: dict, device: str,
    resume: str = "the same command", processes: int = 1,
) -> None:  # fmt: skip
    """`resolved_config.yaml` (give it to --config to repeat the run) and `run.json` (seed, versions, commit, ...).

    A resumed run keeps its run.json; date, command, commit and device of the later parts are added to it.

    Args:
        settings: what the script has to say of the run besides.
        device: what it runs on.
        resume: in the error of a folder that cannot be written, what resumes the run once it can.
        processes: how many work on it together.
    """
    with writing(f"--output_dir {output_dir}", f"once it can, {resume} resumes the run"):
        output_dir.mkdir(parents=True, exist_ok=True)
        write_whole(output_dir / CONFIG_FILE, yaml.safe_dump(resolved_config(*groups), sort_keys=False))
        part = {
            "date": date.today().isoformat(),
            "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": commit(),
            "device": device,
            "processes": str(processes),
        }
        file = output_dir / RUN_FILE
        if file.exists():
            run = {**settings, **run_settings(output_dir)}
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


class RunSettings(BaseModel, strict=True, extra="allow"):
    """What scripts read in run.json, if it is there; tasks add what is theirs."""

    command: str = ""
    commit: str = ""
    date: str = ""
    device: str = ""
    processes: str = Field(default="1", pattern=r"^[1-9]\d{0,5}$")
    seed: NonNegativeInt = 0
    task: str = ""
    maps: list[str] = Field(default=[""], min_length=1)
    is_slippery: bool = True
    observation: str = ""
    thought: str = "place"
    horizon_steps: PositiveInt | None = None
    max_completion_length: PositiveInt = 1
    dtype: str = ""
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    on_adapter: bool = False  # until 2026-11-29 also on a shared warm start
    on_shared_warm_start: bool = False
    target: str = ""
    wanted: list[list[int]] = [[0]]
    show_functions: bool = False
    made_from: dict[str, str] = {}
    resumed: list[dict[str, str]] = []


def run_settings(name: str | Path) -> dict:
    """What run.json in the folder `name` says; nothing for what is no run's folder.

    `InputError` for a damaged one, and where the run's other files are there without it.
    """
    path = Path(name) / RUN_FILE
    if not path.exists():
        if (Path(name) / EVALUATION_FILE).exists() and (Path(name) / CONFIG_FILE).exists():
            raise InputError(f"{path}: is gone, and it says what the run is judged on; {OTHER_RUN}")
        return {}
    try:
        found = parse_json(read_text(path, most=LARGEST_JSON))
        RunSettings.model_validate(found)
    except ValidationError as error:
        raise InputError(f"{path}: {first_of(error)}; {OTHER_RUN}") from error
    except ValueError as error:
        raise InputError(f"{path}: is no JSON ({error}); {OTHER_RUN}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error}); {OTHER_RUN}") from error
    return found


def processes_before(output_dir: Path) -> int | None:
    """In how many processes a run was last at work; None where there is no run."""
    settings = run_settings(output_dir)
    parts = [settings, *settings.get("resumed", [])]
    last = parts[-1].get("processes", "1")
    if not last.isdecimal():
        raise InputError(f"{output_dir / RUN_FILE}: processes {last!r}: expected a number; {OTHER_RUN}")
    return int(last) if settings else None
