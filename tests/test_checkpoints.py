import errno

import pytest
from safetensors import SafetensorError

from llm_policy.checkpoints import COMPLETE_MARK, latest_checkpoint, remove_incomplete, written_whole
from llm_policy.errors import InputError


def write(checkpoint, failure=None) -> None:
    with written_whole(checkpoint):
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "adapter.safetensors").write_text("half")
        if failure:
            raise failure
        (checkpoint / "optimizer.pt").write_text("whole")


# What the disk's refusal looks like
FAILURES = {
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
    "no permission": PermissionError(errno.EACCES, "Permission denied"),
    "torch's": RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
    "safetensors'": SafetensorError("Error while serializing: IoError"),
    # torch adds a stack trace in C++
    "of several lines": RuntimeError("PytorchStreamWriter failed writing file data/1:\n file write failed\n frame #0"),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("earlier", [True, False])
def test_a_failing_write_leaves_the_checkpoints_before_it_and_one_line(case, earlier, tmp_path):
    if earlier:
        write(tmp_path / "checkpoint-5")
    with pytest.raises(InputError) as error:
        write(tmp_path / "checkpoint-10", FAILURES[case])
    message = str(error.value)
    assert "checkpoint-10" in message
    assert "--resume_from_checkpoint auto" in message
    assert ("checkpoint-5 survives" if earlier else "no earlier one") in message
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == (["checkpoint-5"] if earlier else [])
    assert latest_checkpoint(tmp_path) == (tmp_path / "checkpoint-5" if earlier else None)


def test_errors_of_our_own_are_not_blamed_on_the_disk(tmp_path):
    with pytest.raises(KeyError):
        write(tmp_path / "checkpoint-5", KeyError("state"))
    with pytest.raises(RuntimeError, match="out of memory"):
        write(tmp_path / "checkpoint-5", RuntimeError("CUDA out of memory"))
    assert latest_checkpoint(tmp_path) is None  # half written, not marked


def test_an_interruption_leaves_a_folder_that_does_not_count(tmp_path):
    write(tmp_path / "checkpoint-5")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "checkpoint-10", KeyboardInterrupt())
    assert (tmp_path / "checkpoint-10").exists()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    remove_incomplete(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_a_checkpoint_written_again_is_incomplete_until_the_end(tmp_path):
    write(tmp_path / "checkpoint-5")
    with written_whole(tmp_path / "checkpoint-5"):
        assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-5"


# (complete folders, incomplete ones, the latest)
FOLDERS = {
    "none": ([], [], None),
    "numbers, not letters": (["checkpoint-9", "checkpoint-10", "checkpoint-100"], [], "checkpoint-100"),
    "the latest is incomplete": (["checkpoint-9"], ["checkpoint-10"], "checkpoint-9"),
    "other folders": (["warm_start"], ["completions"], None),
    # a copy that the user made
    "a name of one's own": (["checkpoint-9", "checkpoint-9-best"], ["checkpoint-8-copy"], "checkpoint-9"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_latest_checkpoint(case, tmp_path):
    complete, incomplete, expected = FOLDERS[case]
    for name in complete + incomplete:
        (tmp_path / name).mkdir()
    for name in complete:
        (tmp_path / name / COMPLETE_MARK).touch()
    assert latest_checkpoint(tmp_path) == (tmp_path / expected if expected else None)
    remove_incomplete(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == set(complete) | {name for name in incomplete if not name.removeprefix("checkpoint-").isdecimal()}


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert latest_checkpoint(tmp_path / "nothing") is None
    remove_incomplete(tmp_path / "nothing")
