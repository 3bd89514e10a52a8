"""Tables and counts on the terminal and in files."""

import shutil
import sys
from collections.abc import Collection, Sequence
from copy import copy
from io import StringIO
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Column, Table

NATURAL = 10_000  # wider than any table here: nothing is cut or wrapped


def new_table(title: str, first: str, columns: Sequence[str], left: Collection[str] = ()) -> Table:
    """A table without rows; all columns but the first, and those in `left`, have their text on the right."""
    table = Table(first, title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def show(table: Table, *notes: str) -> str:
    """Print a table, a blank line and the lines that belong below; returns the same text for a file.

    On a terminal the table is as wide as the terminal: columns move together, then headers wrap, then cells, and every
    character is still there. In a pipe, and in the returned text, the table has its full width. Title and notes are
    lines of their own and never wrapped here.
    """
    before = f"{table.title}\n" if table.title else ""
    after = "".join(f"{line}\n" for line in ("", *notes)) if notes else ""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else NATURAL
    print(before, end="")
    _console(width).print(_styled(table, width))
    print(after, end="", flush=True)

    file = StringIO()
    _console(NATURAL, file).print(_styled(table, NATURAL))
    rows = "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
    return before + rows + after


def _console(width: int, file: TextIO | None = None) -> Console:
    """A console that takes texts as they are (a policy may be called "[bold]") and has exactly this width."""
    # Without a height rich takes 80 columns for a terminal that it does not know.
    return Console(file=file, width=width, height=25, markup=False, highlight=False, emoji=False)


def _styled(table: Table, width: int) -> Table:
    """The table in this project's style, with its columns closer together where it is wider than `width`."""
    styled = copy(table)
    styled.title, styled.box, styled.show_edge, styled.pad_edge = None, box.SIMPLE_HEAD, False, False
    styled.padding = (0, 1, 0, 0)
    styled.columns = [copy(column) for column in table.columns]
    is_too_wide = _console(NATURAL).measure(styled).maximum > width
    if is_too_wide:
        styled.padding = (0, 0, 0, 0)
    for column in styled.columns:
        column.no_wrap, column.overflow = False, "fold"  # rich's own choice is an ellipsis
        if is_too_wide:
            column.max_width = _width_of_words(column)
    return styled


def _width_of_words(column: Column) -> int:
    """What a column needs if its header is wrapped between words and its cells are not wrapped."""
    return max(len(text) for text in (*str(column.header).split(), *map(str, column.cells), ""))


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "call"), counted(2, "call")
    ('1 call', '2 calls')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def number_text(value: float | None, standard_error: float | None = None) -> str:
    """A probability or a small return with four decimals, a large return with one; "" for none."""
    if value is None:
        return ""
    shown = f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"
    return shown if standard_error is None else f"{shown} +- {standard_error:.2g}"
