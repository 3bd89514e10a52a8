"""Files that a user names: names that a disk can hold, text and YAML that are whole and of a bounded size."""

import errno
import json
import os
import re
import stat
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llm_policy.errors import InputError

LARGEST_TEXT, LARGEST_YAML = 500_000_000, 1_000_000  # bytes
PATHS = re.compile(r"(config|dir|folder|path|file|csv|output|map|checkpoint|policies|answers|source|dataset|target)$")
LONGEST_NAME = 240  # bytes, of one file or folder: 255 less what is appended while one is written
LONGEST_PATH = 3800  # bytes: 4095 less a name in it


def check_texts(values: Mapping) -> None:
    """`InputError` for an option that holds a zero byte or no Unicode, or names a file as no disk can."""
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            if "\0" in text:
                raise InputError(f"--{name} {text!r}: holds a zero byte")
            try:
                length = len(text.encode())
            except UnicodeEncodeError as error:
                raise InputError(f"--{name} {text!r}: holds a byte that is no UTF-8; rename it") from error
            if PATHS.search(name) and not text:
                raise InputError(f"--{name} '': names nothing; leave the option out for its default")
            if PATHS.search(name):
                _check_path(name, text, length)


def _check_path(option: str, text: str, length: int) -> None:
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > LONGEST_NAME:
        raise InputError(f"--{option} {text[:20]}...: a name of {longest} bytes, at most {LONGEST_NAME} are one")
    if length > LONGEST_PATH:
        raise InputError(f"--{option} {text[:20]}...: a path of {length} bytes, at most {LONGEST_PATH} are one")
    if os.path.expanduser(text).startswith("~"):
        raise InputError(f"--{option} {text}: no such user's home; write the path out")
    try:
        os.stat(os.path.expanduser(text))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"--{option} {text}: is a link that leads to itself") from error


def expand_home(options: object) -> None:
    """`~` in every option that names files, because a shell expands it in some places only."""
    values = vars(options)  # written to directly: some dataclasses are frozen
    for name, value in values.items():
        if PATHS.search(name) and isinstance(value, str):
            values[name] = os.path.expanduser(value)
        elif PATHS.search(name) and isinstance(value, list):
            values[name] = [os.path.expanduser(text) for text in value]


def read_text(path: str | Path, encoding: str = "utf-8", most: int = LARGEST_TEXT) -> str:
    """The text of a regular file. A pipe would wait for ever, and a device such as /dev/zero has no end.

    Raises `OSError`, or `ValueError` for what is no regular file, no text or larger than `most` bytes.
    """
    check_regular(path, most)
    return Path(path).read_text(encoding=encoding)


def check_regular(path: str | Path, most: int = LARGEST_TEXT) -> None:
    """`ValueError` for what `read_text` does not read; `OSError` for what is not there."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ValueError("is no regular file")
    if status.st_size > most:
        raise ValueError(f"has {status.st_size / 1e6:.0f} MB, and at most {most / 1e6:.0f} are read")


class _PlainLoader(yaml.SafeLoader):
    """YAML as a table of options needs it: each name once, every value written out."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):  # a few lines of these make a value of any size
            mark = self.peek_event().start_mark
            raise ValueError(f"line {mark.line + 1}: *{self.peek_event().anchor}: write the value out instead")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        names = [self.construct_object(name, deep=True) for name, _ in node.value]
        seen = set()
        for name, (key, _) in zip(names, node.value, strict=True):
            if isinstance(name, Hashable):  # the loader itself refuses what is not
                if name in seen:
                    raise ValueError(f"line {key.start_mark.line + 1}: {name} stands there twice")
                seen.add(name)
        return super().construct_mapping(node, deep)


def parse_json(text: str) -> Any:
    """What a JSON text holds. Raises `ValueError` for what is none, or is nested some thousand deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def read_yaml(path: str | Path) -> object:
    """What a YAML file holds. Raises `OSError`, or `ValueError` for what is none, or no table of options."""
    text = read_text(path, most=LARGEST_YAML)
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def first_of(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, in one line: where, what stands there, and what was expected."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    found = "" if first["type"] == "missing" else f" {first['input']!r:.80}"
    return f"{where}{found}: {first['msg']}".lstrip()
