"""The processor: its name, without which seconds mean little, and its threads; memory that goes back to it."""

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_INFORMATION = Path("/proc/cpuinfo")  # Linux; elsewhere the platform module knows a little
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of processor time that a container has, and the period
EMULATION = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # make a processor behave like an older one
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")  # matrix products in bfloat16 are several times faster with them


def processor_name(on_gpu: bool = False) -> str:
    """`AMD EPYC 9R14, avx512_bf16`: the CPU's name and its bfloat16 instructions; with `on_gpu` the GPU's name."""
    if on_gpu:
        import torch  # scripts without a model need no PyTorch

        return torch.cuda.get_device_name()
    lines = CPU_INFORMATION.read_text().splitlines() if CPU_INFORMATION.exists() else []
    entries = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = entries.get("model name") or platform.processor() or platform.machine()
    return ", ".join([name, *(flag for flag in BFLOAT16_FLAGS if flag in entries.get("flags", "").split())])


def this_device() -> "torch.device":
    """The GPU, if there is one, and else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_text(on_gpu: bool = False) -> str:
    """What run.json says of a run's hardware: the GPU's name, or the CPU's and how many threads PyTorch takes."""
    if on_gpu:
        return processor_name(on_gpu)
    import torch

    settings = [f"{name}={os.environ[name]}" for name in EMULATION if name in os.environ]
    return ", ".join([f"{torch.get_num_threads()} CPU threads", processor_name(), *settings])


def take_granted_threads(useful: int | None = None) -> str:
    """Lower PyTorch's threads to what the container is granted; a line that says so, "" where nothing changes.

    PyTorch counts the processor's cores, and threads beyond the quota wait for each other. OMP_NUM_THREADS decides by
    hand.

    Args:
        useful: lower them to so many in any case. What is computed is too small for more, and beside other programs
            idle threads only wait for a core.
    """
    import torch

    threads, granted = torch.get_num_threads(), granted_threads()
    limits = {granted: "this container is granted no more", useful: "more would gain nothing"}
    most = min((limit for limit in limits if limit is not None), default=threads)
    if most >= threads or "OMP_NUM_THREADS" in os.environ:
        return ""
    torch.set_num_threads(most)
    return f"threads: {most} instead of {threads}, for {limits[most]} (OMP_NUM_THREADS overrides)"


def granted_threads() -> int | None:
    """Of the container's quota of processor time, rounded up; None where there is no quota."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup of version 2; "max"
        return None


def cuda_random_states() -> list:
    """Of each GPU that PyTorch sees, for a checkpoint; [] without any."""
    import torch  # scripts without a model need no PyTorch

    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def restore_cuda_random_states(states: list) -> None:
    """The inverse, where there are as many GPUs as then."""
    import torch

    if states and torch.cuda.is_available() and len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)


def give_memory_back() -> None:
    """Hand freed memory back to the system, which glibc keeps: over a run that grows to more than what is in use.

    Not for every step: to take it again costs a fifth of a step (LOG.md). Elsewhere than on Linux nothing happens.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
        if trim is not None:
            trim(0)
