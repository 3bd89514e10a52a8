"""bfloat16 or float32: what this machine computes faster, found by measuring a small product in both.

A processor without bfloat16 instructions (most laptops; AMD before Zen 4) takes some 27 times as long with bfloat16.

Axes: R rows, I inputs, O outputs.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from llm_policy.command_line import asks_for_help, read_option
from llm_policy.reading import read_yaml
from llm_policy.run_files import CONFIG_FILE

FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS, INPUTS, OUTPUTS = 32, 576, 1536  # a layer of the embedded model
SECONDS = 0.1  # of measuring
DEFAULT = "float32"  # of TRL, which a resolved configuration leaves out
SLOW = 1.5  # so many times slower than the other format is worth a line
CLEAR = 1.25  # float32 has to be so many times as fast to be taken, so that equal times always give bfloat16


@cache
def product_seconds() -> dict[str, float]:
    """Format -> seconds of one small product, forward and backward, on one CPU thread: the best within a tenth second.

    One thread, because several wait for each other where other programs run, and then both formats look alike. By
    turns, because what another program takes in between would else be one format's loss.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        products = {name: _product(dtype) for name, dtype in FORMATS.items()}
        for product in products.values():  # the first one sets up the library
            product()
        best = {name: product() for name, product in products.items()}
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            best = {name: min(best[name], product()) for name, product in products.items()}
        return best
    finally:
        torch.set_num_threads(threads)


def _product(dtype: torch.dtype) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    inputs_RI = torch.randn(ROWS, INPUTS, generator=generator).to(dtype)
    weights_OI = torch.randn(OUTPUTS, INPUTS, generator=generator).to(dtype)
    weights_OI.requires_grad_()

    def product() -> float:
        started = time.perf_counter()
        torch.autograd.grad(linear(inputs_RI, weights_OI).sum(), weights_OI)
        return time.perf_counter() - started

    return product


def faster_format(on_gpu: bool) -> tuple[str, str]:
    """The format and a line that says why."""
    if on_gpu:
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
        return dtype, f"number format: {dtype}, by what the GPU has instructions for"
    bfloat16, float32 = (product_seconds()[dtype] for dtype in ("bfloat16", "float32"))
    dtype, times = ("float32", bfloat16 / float32) if bfloat16 > CLEAR * float32 else ("bfloat16", float32 / bfloat16)
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    if times < 1:
        return (
            dtype,
            f"number format: {dtype}; {other} is hardly faster on this processor (measured) and takes more memory",
        )
    return dtype, f"number format: {dtype}, {times:.1f} times as fast as {other} on this processor (measured)"


def cost_of(dtype: str, on_gpu: bool) -> str | None:
    """A line for a format that was named by hand and is much the slower one; None else."""
    if on_gpu or dtype not in FORMATS:
        return None
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    times = product_seconds()[dtype] / product_seconds()[other]
    if times < SLOW:
        return None
    slower = f"{times:.0f} times as slow as {other} on this processor (measured)"
    return f"--dtype {dtype}: {slower}; --dtype auto takes {other}"


NOT_SET = ("", "false", "no", "f", "n", "0")  # of an option that is true or false, as argparse reads it


def is_unset(value: str) -> bool:
    """Of an option that is true or false, before it is parsed."""
    return value.lower() in NOT_SET


def number_format(argv: Sequence[str], default_config: Path | None, has_bf16: bool = True) -> tuple[list[str], str]:
    """What `--dtype auto` and a missing --bf16 come to, as further flags; and a line on what was chosen or costs time.

    A run that is resumed keeps its format, because another one makes another adapter.

    Args:
        has_bf16: whether the script has that option.
    """
    if asks_for_help(argv):
        return [], ""
    given = partial(read_option, argv, default="", default_config=default_config)
    flag = partial(given, bare="true")
    on_gpu = torch.cuda.is_available() and is_unset(flag("use_cpu"))
    dtype, chosen, line = given("dtype"), [], None
    if dtype == "auto":
        begun = begun_with(Path(given("output_dir")).expanduser()) if given("resume_from_checkpoint") else None
        dtype, line = (begun, f"number format: {begun}, as the run began") if begun else faster_format(on_gpu)
        chosen += ["--dtype", dtype]
    line = cost_of(dtype, on_gpu) or line
    is_named = flag("bf16") or not is_unset(flag("fp16"))
    if has_bf16 and not is_named:  # it follows the weights
        chosen += ["--bf16", str((dtype or DEFAULT) == "bfloat16").lower()]
    return chosen, line or ""


def begun_with(output_dir: Path) -> str | None:
    """The format of the run in this folder; None where there is none."""
    try:
        return str(dict(read_yaml(output_dir / CONFIG_FILE) or {}).get("dtype", DEFAULT))
    except (OSError, ValueError, TypeError):
        return None  # no run, or one that check_same_run refuses
