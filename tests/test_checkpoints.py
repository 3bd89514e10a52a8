import errno
import shutil

import pytest
from safetensors import SafetensorError

from llm_policy.checkpoints import (
    COMPLETE_MARK,
    checkpoint_to_resume_from,
    damage,
    keep_newest,
    latest_checkpoint,
    remove_incomplete,
    written_whole,
)
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
        with written_whole(tmp_path / name):
            (tmp_path / name / "state.json").write_text("{}")
    assert latest_checkpoint(tmp_path) == (tmp_path / expected if expected else None)
    remove_incomplete(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == set(complete) | {name for name in incomplete if not name.removeprefix("checkpoint-").isdecimal()}


DAMAGE = {
    "gone": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"."),
    "changed": lambda file: file.write_bytes(b"?" + file.read_bytes()[1:]),
}
LISTED = ["checkpoint-5/adapter.safetensors", "checkpoint-5/optimizer.pt", "beside/report.json", "log.jsonl"]


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", [*LISTED, f"checkpoint-5/{COMPLETE_MARK}"])
def test_whatever_happens_to_what_it_stands_on_is_found(name, how, tmp_path):
    stands_on = [tmp_path / "beside", tmp_path / "log.jsonl", tmp_path / "never made"]
    stands_on[0].mkdir()
    (stands_on[0] / "report.json").write_text("{}")
    stands_on[1].write_text("a line\n")
    with written_whole(tmp_path / "checkpoint-5", stands_on):
        for file in ("adapter.safetensors", "optimizer.pt"):
            (tmp_path / "checkpoint-5" / file).write_text("whole")
    assert damage(tmp_path / "checkpoint-5") is None
    DAMAGE[how](tmp_path / name)
    found = damage(tmp_path / "checkpoint-5")
    if (name, how) == ("log.jsonl", "longer"):
        assert found is None  # what was logged since
    else:
        words = {"gone": "is gone"}.get(how, "is not as it was written")
        assert found == f"{tmp_path / name}: {'is no list of files' if COMPLETE_MARK in name else words}"


@pytest.mark.parametrize(
    "mark", ["", "{}", "[]", '{"a": 3}', '{"a": [3]}', "null", '{"checkpoint-5/optimizer.pt": [5,']
)
def test_a_list_that_is_none_is_no_whole_checkpoint(mark, tmp_path):
    write(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / COMPLETE_MARK).write_text(mark)
    assert damage(tmp_path / "checkpoint-5").startswith(f"{tmp_path / 'checkpoint-5' / COMPLETE_MARK}: ")


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_taken(tmp_path, capsys):
    for steps in (5, 10, 15):
        write(tmp_path / f"checkpoint-{steps}")
    for steps in (10, 15):
        (tmp_path / f"checkpoint-{steps}/optimizer.pt").unlink()
    assert checkpoint_to_resume_from(tmp_path, "auto") == tmp_path / "checkpoint-5"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{tmp_path}/checkpoint-{n}/optimizer.pt: is gone; checkpoint-{n} is left out" for n in (15, 10)]
    # They count no longer, and are written again when the run gets there
    assert checkpoint_to_resume_from(tmp_path, "auto") == tmp_path / "checkpoint-5"
    assert not (tmp_path / "checkpoint-15").exists()


FOREIGN = {
    # file in a run with the whole checkpoints 5 and 10 -> whether it is the run's
    "checkpoint-99/thesis.txt": False,
    "checkpoint-10/thesis.txt": False,
    "checkpoint-10/nested/run.json": False,
    # deleted in part when the run was killed
    "checkpoint-3/optimizer.pt": True,
    # being written when the run was killed
    "checkpoint-15/COMPLETE.partial": True,
    "checkpoint-5-best/thesis.txt": True,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_no_file_of_others_is_deleted_with_a_checkpoint(name, tmp_path):
    for steps in (5, 10):
        write(tmp_path / f"checkpoint-{steps}")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    if FOREIGN[name]:
        assert checkpoint_to_resume_from(tmp_path, "auto") == tmp_path / "checkpoint-10"
    else:
        with pytest.raises(InputError, match=f"^{tmp_path / name}: is no file of the run.* move it away$"):
            checkpoint_to_resume_from(tmp_path, "auto")
        assert (tmp_path / name).exists()


def test_a_copied_checkpoint_is_checked_by_its_own_files(tmp_path):
    """The list named those of the original."""
    write(tmp_path / "checkpoint-5")
    shutil.copytree(tmp_path / "checkpoint-5", tmp_path / "checkpoint-10")
    assert damage(tmp_path / "checkpoint-10") is None
    (tmp_path / "checkpoint-10/optimizer.pt").write_text("other")
    assert damage(tmp_path / "checkpoint-10") == f"{tmp_path}/checkpoint-10/optimizer.pt: is not as it was written"


def test_where_none_is_whole_nothing_begins_again_by_itself(tmp_path):
    with written_whole(tmp_path / "checkpoint-5"):
        for name in ("optimizer.pt", "trainer_state.json"):
            (tmp_path / "checkpoint-5" / name).write_text("{}")
    (tmp_path / "checkpoint-5/optimizer.pt").write_text("other")
    with pytest.raises(InputError, match=r"none of its checkpoints is whole .*optimizer.pt: is not as it was written"):
        checkpoint_to_resume_from(tmp_path, "auto")
    with pytest.raises(InputError, match=r"checkpoint-5: .*optimizer.pt: is not as it was written; try auto"):
        checkpoint_to_resume_from(tmp_path, str(tmp_path / "checkpoint-5"))


def test_a_finished_run_without_checkpoints_does_not_begin_again(tmp_path):
    """Its adapter would be gone in the end. Who deletes evaluation.json wants it judged, not trained."""
    (tmp_path / COMPLETE_MARK).write_text("{}")
    with pytest.raises(InputError, match=rf"evaluate_policy.py --policies {tmp_path} judges it again"):
        checkpoint_to_resume_from(tmp_path, "auto")


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert latest_checkpoint(tmp_path / "nothing") is None
    remove_incomplete(tmp_path / "nothing")


def test_the_newest_stay_and_copies_of_ones_own(tmp_path):
    for name in ("checkpoint-5", "checkpoint-10", "checkpoint-15", "checkpoint-5-best"):
        write(tmp_path / name)
    (tmp_path / "checkpoint-notes").mkdir()
    (tmp_path / "checkpoint-20").mkdir()  # being written
    keep_newest(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-10", "checkpoint-15", "checkpoint-20", "checkpoint-5-best", "checkpoint-notes"]


def test_a_copy_under_a_name_of_ones_own_is_not_resumed_from(tmp_path):
    """It says nothing of the steps that were taken: a traceback later."""
    write(tmp_path / "checkpoint-5-best")
    (tmp_path / "checkpoint-5-best/trainer_state.json").write_text("{}")
    with pytest.raises(InputError, match="checkpoint-5-best: expected a folder checkpoint-STEPS; try auto"):
        checkpoint_to_resume_from(tmp_path, str(tmp_path / "checkpoint-5-best"))
