"""Which number format is taken, whatever the processor: the seconds are given, or compared with a margin."""

from functools import partial

import pytest
import torch

from llm_policy import number_format
from llm_policy.number_format import cost_of, faster_format


@pytest.fixture
def seconds(monkeypatch):
    def given(bfloat16: float, float32: float) -> None:
        monkeypatch.setattr(number_format, "product_seconds", lambda: {"bfloat16": bfloat16, "float32": float32})

    return given


def test_where_float32_is_hardly_faster_bfloat16_stays_and_no_line_claims_speed(seconds):
    seconds(bfloat16=1.2, float32=1.0)
    assert faster_format(on_gpu=False) == (
        "bfloat16",
        "number format: bfloat16; float32 is hardly faster on this processor (measured) and takes more memory",
    )


@pytest.mark.parametrize(
    ("bfloat16", "float32", "dtype", "words"),
    [(1.0, 4.0, "bfloat16", "4.0 times as fast as float32"), (27.0, 1.0, "float32", "27.0 times as fast as bfloat16")],
)
def test_the_faster_one_is_taken_and_said(bfloat16, float32, dtype, words, seconds):
    seconds(bfloat16, float32)
    taken, line = faster_format(on_gpu=False)
    assert taken == dtype
    assert line.startswith(f"number format: {dtype}, {words}")


def test_what_a_slow_one_costs_is_said_where_it_is_named(seconds):
    seconds(bfloat16=27.0, float32=1.0)
    line = cost_of("bfloat16", on_gpu=False)
    assert line.startswith("--dtype bfloat16: 27 times as slow as float32")
    assert "--dtype auto takes float32" in line
    assert cost_of("float32", on_gpu=False) is None
    assert cost_of("bfloat16", on_gpu=True) is None
    assert cost_of("float16", on_gpu=False) is None
    seconds(bfloat16=1.2, float32=1.0)
    assert cost_of("bfloat16", on_gpu=False) is None


def test_measuring_takes_a_moment_and_leaves_threads_and_random_numbers_alone():
    number_format.product_seconds.cache_clear()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = number_format.product_seconds()
    assert list(found) == ["bfloat16", "float32"]
    assert all(0 < seconds < 5 for seconds in found.values())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


CONFIGS = {
    # file, further arguments -> the flags that are added; on a processor where bfloat16 is 27 times as slow
    "auto": ("dtype: auto\n", [], ["--dtype", "float32", "--bf16", "false"]),
    "named on the command line": ("dtype: auto\n", ["--dtype", "bfloat16"], ["--bf16", "true"]),
    "mixed precision named": ("dtype: auto\n", ["--bf16", "true"], ["--dtype", "float32"]),
    "nothing named": ("seed: 1\n", [], ["--bf16", "false"]),  # TRL's weights are float32, its bf16 true
    "mixed precision in the file": ("dtype: float32\nbf16: false\n", [], []),
    "mixed precision named at the end of the line": ("dtype: float32\n", ["--bf16"], []),
    "the other mixed precision there": ("dtype: float32\n", ["--fp16"], []),
    "help": ("dtype: auto\n", ["--help"], []),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_flags(case, seconds, tmp_path):
    text, argv, expected = CONFIGS[case]
    seconds(bfloat16=27.0, float32=1.0)
    (tmp_path / "config.yaml").write_text(f"use_cpu: true\n{text}")
    assert number_format.number_format(argv, tmp_path / "config.yaml")[0] == expected


def test_use_cpu_at_the_end_of_the_line_is_heard_beside_a_gpu(seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    seconds(bfloat16=27.0, float32=1.0)
    (tmp_path / "config.yaml").write_text("dtype: auto\n")
    given = partial(number_format.number_format, default_config=tmp_path / "config.yaml")
    assert given(["--use_cpu"])[0] == given(["--use_cpu", "true"])[0] == ["--dtype", "float32", "--bf16", "false"]
    assert given(["--use_cpu", "false"])[0] == ["--dtype", "bfloat16", "--bf16", "true"]


@pytest.mark.parametrize(("begun", "dtype"), [("dtype: bfloat16\n", "bfloat16"), ("seed: 1\n", "float32")])
def test_a_resumed_run_keeps_its_format(begun, dtype, seconds, tmp_path):
    """Also where the other one would be faster here, because it would make another adapter."""
    seconds(bfloat16=1.0 if dtype == "float32" else 27.0, float32=1.0 if dtype == "bfloat16" else 27.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/resolved_config.yaml").write_text(begun)
    (tmp_path / "config.yaml").write_text("use_cpu: true\ndtype: auto\n")
    argv = ["--output_dir", str(tmp_path / "run")]
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    assert number_format.number_format(argv, tmp_path / "config.yaml")[0][1] == other
    flags, line = number_format.number_format([*argv, "--resume_from_checkpoint", "auto"], tmp_path / "config.yaml")
    assert flags[1] == dtype
    assert "27 times as slow" in line


def test_a_first_run_that_is_asked_to_resume_takes_the_faster_format(seconds, tmp_path):
    """As `make train` asks: there is no run yet whose format could be kept."""
    seconds(bfloat16=1.0, float32=4.0)
    (tmp_path / "config.yaml").write_text("use_cpu: true\ndtype: auto\n")
    argv = ["--output_dir", str(tmp_path / "run"), "--resume_from_checkpoint", "auto"]
    flags, _ = number_format.number_format(argv, tmp_path / "config.yaml")
    assert flags == ["--dtype", "bfloat16", "--bf16", "true"]
