"""Files of a user's: whole and of a bounded size, or one line that says why not."""

import os

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies

from llm_policy.command_line import parse_arguments
from llm_policy.environments.expert_q import read_expert_csv
from llm_policy.environments.frozen_lake import read_grid
from llm_policy.errors import InputError
from llm_policy.policy_search.answer_log import read_log
from llm_policy.reading import check_texts, read_text, read_yaml

READERS = {"CSV": read_expert_csv, "map": read_grid, "answers": read_log}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "too large"])
def test_what_has_no_end_is_refused_before_it_is_read(reader, kind, tmp_path):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "too large":
        with path.open("wb") as file:
            file.truncate(10**12)  # without taking the disk
    else:
        path = "/dev/zero"
    with pytest.raises(InputError, match=r"is no regular file|has 1000000 MB, and at most 500 are read"):
        READERS[reader](path)


BAD_YAML = {
    "twice": ("seed: 1\nseed: 2\n", "line 2: seed stands there twice"),
    "twice inside": ("a: {b: 1, b: 2}\n", "line 1: b stands there twice"),
    "alias": ("a: &x [1]\nb: *x\n", "line 2: .x: write the value out instead"),
    "aliases of aliases": ("".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9 if i else 1}]\n" for i in range(30)), "write the"),
    "deep": ("[" * 100_000, "is nested too deeply"),
    "a name of no kind": ("? [a]\n: 1\n", "unhashable key"),
    "no YAML": ("a: [1\nb: }", "expected"),
    "no text": ("a: \x00", "unacceptable character"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_that_is_no_table_of_options(case, tmp_path):
    text, message = BAD_YAML[case]
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_yaml(tmp_path / "options.yaml")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="cannot be read") as caught:
        parse_arguments(["--config", str(tmp_path / "options.yaml")], [], description="")


VALUES = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.floats(allow_nan=False)
    | strategies.integers()
    | strategies.text(),
    lambda values: strategies.lists(values) | strategies.dictionaries(strategies.text(), values),
)


@settings(max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=strategies.dictionaries(strategies.text(), VALUES))
def test_it_reads_what_yaml_writes(options, tmp_path):
    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data):
            return True

    (tmp_path / "options.yaml").write_text(yaml.dump(options, Dumper=Plain))
    assert read_yaml(tmp_path / "options.yaml") == options


@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=strategies.text())
def test_any_text_is_read_or_refused_in_one_line(text, tmp_path):
    (tmp_path / "options.yaml").write_bytes(text.encode(errors="surrogatepass"))
    try:
        read_yaml(tmp_path / "options.yaml")
    except ValueError as error:
        assert error.args  # noqa: PT017


def test_a_byte_order_mark_is_no_part_of_a_map(tmp_path):
    (tmp_path / "map.txt").write_bytes(b"\xef\xbb\xbfSG\n")
    assert read_text(tmp_path / "map.txt", encoding="utf-8-sig") == "SG\n"


def test_a_map_whose_solution_exceeds_memory(tmp_path):
    (tmp_path / "map.txt").write_text("\n".join(["S" + "F" * 199, *["F" * 200] * 198, "F" * 199 + "G"]))
    with pytest.raises(InputError, match="40000 cells, expected at most 4096: exact solutions take their square"):
        read_grid(tmp_path / "map.txt")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("output_dir", "runs/a\0b", r"--output_dir 'runs/a\x00b': holds a zero byte"),
        ("env_id", "\0", r"--env_id '\x00': holds a zero byte"),
        ("model_name", "a\udcff", r"--model_name 'a\udcff': holds a byte that is no UTF-8"),
        ("map", "", "--map '': names nothing; leave the option out for its default"),
        ("output_dir", f"runs/{'x' * 256}/a", "--output_dir runs/xxxxxxxxxxxxxxx...: a name of 256 bytes, at most 240"),
        (
            "expert_csv",
            "/tmp" + "/a" * 2600,
            "--expert_csv /tmp/a/a/a/a/a/a/a/a...: a path of 5204 bytes, at most 3800",
        ),
        ("model_name_or_path", "~nosuchuser/x", "--model_name_or_path ~nosuchuser/x: no such user's home; write the"),
        ("output_dir", "runs/\udcff", r"--output_dir 'runs/\udcff': holds a byte that is no UTF-8; rename it"),
        ("policies", ["random", "loop"], "--policies loop: is a link that leads to itself"),
        (
            "policies",
            ["random", "é" * 128],
            "--policies éééééééééééééééééééé...: a name of 256 bytes",
        ),
    ],
)
def test_names_that_no_disk_holds(name, text, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError) as caught:
        check_texts({name: text})
    assert str(caught.value).startswith(line)


def test_names_that_a_disk_holds_and_long_texts_that_are_none():
    check_texts({"output_dir": "x" * 240, "env_options": "x" * 1000, "policies": ["a/" * 500], "map": None, "seed": 3})
    check_texts({"env_id": "é ☃", "answer_prefix": ""})
