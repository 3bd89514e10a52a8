"""The JSON file of a benchmark's figures: what it measured, and on which machine."""

import json
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch

from llm_policy.errors import InputError, writing
from llm_policy.hardware import device_text
from llm_policy.run_files import commit, write_whole

MACHINE = ("command", "date", "commit", "device", "torch")


def check_output(path: str | None) -> None:
    """`InputError` where `path` cannot take figures: a folder, or a file that no benchmark wrote."""
    if path is None or not Path(path).exists():
        return
    try:
        is_ours = {"device", "torch"} <= set(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, TypeError):
        is_ours = False
    if not is_ours:
        raise InputError(f"--output {path}: holds no figures of a benchmark; name another file")


def save_figures(path: str, figures: Mapping, on_gpu: bool = False) -> None:
    """Write `figures` and what computed them; figures of an earlier call are replaced."""
    machine = (sys.argv[1:], date.today().isoformat(), commit(), device_text(on_gpu))
    content = dict(zip(MACHINE, (*machine, torch.__version__), strict=True)) | figures
    with writing(f"--output {path}", "name a file that can be"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(path), json.dumps(content, indent=1) + "\n")
