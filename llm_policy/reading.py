"""Text and YAML from files that a user names: whole and of a bounded size, or a `ValueError` that says why not."""

import os
import stat
from pathlib import Path

import yaml

LARGEST_TEXT, LARGEST_YAML = 500_000_000, 1_000_000  # bytes


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
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"line {node.value[i][0].start_mark.line + 1}: {name} stands there twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> object:
    """What a YAML file holds. Raises `OSError`, or `ValueError` for what is none, or no table of options."""
    text = read_text(path, most=LARGEST_YAML)
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
