"""Tables: whole in files and pipes, as wide as the terminal on a terminal, and complete everywhere."""

import re

import pytest
from rich.table import Table

from llm_policy.tables import show

TITLE = "FrozenLake SFFF|FHFH|FFFH|HFFG, slippery, with a title that is longer than eighty characters, at least a bit"
COLUMNS = ("success", "in 100 steps", "% of optimal", "regret", "optimal states", "well-formed", "simulated")
NUMBERS = ("0.8235", "0.7402", "100.0", "0.0000", "11/11", "100 %", "0.713-0.768")
NAMES = ("optimal", "best constant action (DOWN)", "runs/[bold]/a_long_name_without_any_space-135M, sampled")


def wide_table() -> Table:
    table = Table("policy", title=TITLE)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name in NAMES:
        table.add_row(name, *NUMBERS)
    return table


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of so many columns in the place of standard output."""

    def set_columns(columns: int) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))

    return set_columns


def table_lines(printed: str) -> list[str]:
    return re.sub(r"\x1b\[[\d;]*m", "", printed).split(TITLE + "\n")[1].split("\nnote 1\n")[0].splitlines()


def test_a_pipe_and_a_file_get_the_whole_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = show(wide_table(), "note 1", "note 2")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == text.splitlines()
    lines = text.splitlines()
    assert lines[0] == TITLE
    assert lines[1].split() == " ".join(("policy", *COLUMNS)).split()
    assert set(lines[2]) == {"─"}
    for line, name in zip(lines[3:6], NAMES, strict=True):
        assert re.split(r" {2,}", line) == [name, *NUMBERS]
    assert lines[6:] == ["", "note 1", "note 2"]
    assert text == "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("kind", ["dumb", "xterm-256color"])
def test_a_terminal_gets_a_table_of_its_width_with_every_character(columns, kind, terminal, capsys, monkeypatch):
    monkeypatch.setenv("TERM", kind)
    terminal(columns)
    whole = show(wide_table(), "note 1")
    lines = table_lines(capsys.readouterr().out)
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)

    def characters(lines):
        return sorted("".join(lines).replace(" ", "").replace("─", ""))

    assert characters(lines) == characters(table_lines(whole))
    assert len(whole.splitlines()) == 3 + len(NAMES) + 2, "the file does not follow the terminal"


def test_at_80_columns_headers_wrap_and_numbers_do_not(terminal, capsys):
    terminal(80)
    show(wide_table(), "note 1")
    lines = table_lines(capsys.readouterr().out)
    for line in lines:
        if "0.8235" in line:
            assert line.split()[-8:] == " ".join(NUMBERS).split()
    assert sum("0.8235" in line for line in lines) == len(NAMES)
    assert "100 %" in "".join(lines)
    assert any("% of" in line and "% of optimal" not in line for line in lines)


def test_a_table_that_fits_is_the_same_on_a_terminal(terminal, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    terminal(80)
    table = Table("policy", "success")
    table.add_row("optimal", "0.8235")
    text = show(table)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == text.splitlines()


def test_the_callers_table_stays_as_it_was():
    table = wide_table()
    before = (table.title, table.box, table.padding, [column.max_width for column in table.columns])
    show(table)
    assert (table.title, table.box, table.padding, [column.max_width for column in table.columns]) == before
