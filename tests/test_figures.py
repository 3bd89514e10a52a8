"""benchmarks/figures.py: what a benchmark writes, and what it leaves alone."""

import json
import sys
from pathlib import Path

import pytest

from llm_policy.errors import InputError
from llm_policy.hardware import device_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from figures import check_output, save_figures


def test_figures_come_with_their_machine_and_replace_older_ones(tmp_path, monkeypatch):
    file = tmp_path / "new/figures.json"
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--output", str(file)])
    for ratio in (2.0, 3.0):
        check_output(str(file))
        save_figures(str(file), {"ratio": ratio})
    content = json.loads(file.read_text())
    assert (content["ratio"], content["device"]) == (3.0, device_text())
    assert content["command"] == ["--output", str(file)]


@pytest.mark.parametrize("content", ["", "mine", "[1]", "3", '{"device": "mine"}', "\xff", None])
def test_a_file_of_others_is_left_alone(content, tmp_path):
    file = tmp_path / "file"
    file.mkdir() if content is None else file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=f"^--output {file}: holds no figures of a benchmark; name another file"):
        check_output(str(file))


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"^--output {tmp_path}/file/figures.json: cannot be written"):
        save_figures(f"{tmp_path}/file/figures.json", {})
