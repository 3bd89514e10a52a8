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
