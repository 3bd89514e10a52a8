import subprocess
import sys
import types

import pytest

from llm_policy import hardware

CPU = "processor : {}\nmodel name\t: AMD EPYC 9R14\nflags\t\t: fpu avx512f {}\npower management:\n\n"
CASES = [
    (CPU.format(0, "avx512_bf16") + CPU.format(1, "avx512_bf16"), "AMD EPYC 9R14, avx512_bf16"),
    (CPU.format(0, "amx_bf16 avx512_bf16"), "AMD EPYC 9R14, avx512_bf16, amx_bf16"),
    (CPU.format(0, "avx512_bf16x"), "AMD EPYC 9R14"),  # another flag
    ("processor : 0\nFeatures : fp bf16\n", "aarch64"),  # ARM names no model
    (None, "aarch64"),  # no Linux
]


@pytest.mark.parametrize(("text", "name"), CASES)
def test_processor_name(text, name, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(hardware, "CPU_INFORMATION", file)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert hardware.processor_name() == name


def test_gpu_name_is_pytorchs(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    assert hardware.processor_name(on_gpu=True) == "NVIDIA H200"


def test_no_pytorch_without_a_gpu():
    code = "import sys; from llm_policy import hardware; hardware.processor_name(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("platform", "expected"), [("linux", [0]), ("darwin", [])])
def test_memory_is_given_back_where_the_c_library_can(platform, expected, monkeypatch):
    calls = []
    library = types.SimpleNamespace(malloc_trim=calls.append)
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(hardware.sys, "platform", platform)
    hardware.give_memory_back()
    del library.malloc_trim  # musl
    hardware.give_memory_back()
    assert calls == expected


QUOTAS = [
    # cpu.max, threads of PyTorch, OMP_NUM_THREADS -> threads afterwards
    ("200000 100000\n", 8, None, 2),
    ("150000 100000\n", 8, None, 2),
    ("5000 100000\n", 8, None, 1),
    ("1600000 100000\n", 8, None, 8),
    ("max 100000\n", 8, None, 8),
    ("", 8, None, 8),
    (None, 8, None, 8),
    ("200000 100000\n", 8, "8", 8),
]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """(quota or None, PyTorch's threads, OMP_NUM_THREADS or None) -> the numbers of threads taken, one by one."""

    def made(quota: str | None, threads: int, by_hand: str | None) -> list[int]:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if by_hand:
            monkeypatch.setenv("OMP_NUM_THREADS", by_hand)
        file = tmp_path / "cpu.max"
        if quota is not None:
            file.write_text(quota)
        monkeypatch.setattr(hardware, "CPU_QUOTA", file)
        taken = [threads]
        monkeypatch.setattr("torch.get_num_threads", lambda: taken[-1])
        monkeypatch.setattr("torch.set_num_threads", taken.append)
        return taken

    return made


@pytest.mark.parametrize(("quota", "threads", "by_hand", "expected"), QUOTAS)
def test_a_containers_quota_bounds_the_threads(quota, threads, by_hand, expected, machine):
    taken = machine(quota, threads, by_hand)
    line = hardware.take_granted_threads()
    assert taken[-1] == expected
    assert line.startswith(f"threads: {expected} instead of {threads}" if expected != threads else "")
    assert bool(line) == (expected != threads)


@pytest.mark.parametrize(
    ("quota", "by_hand", "expected", "reason"),
    [
        (None, None, 1, "more would gain nothing"),
        ("200000 100000", None, 1, "more would gain nothing"),
        (None, "8", 8, ""),
    ],
)
def test_what_is_small_takes_no_more_threads_than_are_useful(quota, by_hand, expected, reason, machine):
    taken = machine(quota, 8, by_hand)
    line = hardware.take_granted_threads(useful=1)
    assert taken[-1] == expected
    assert line == (f"threads: 1 instead of 8, for {reason} (OMP_NUM_THREADS overrides)" if reason else "")
