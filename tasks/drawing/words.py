"""How a drawing task is asked: pictures as rows and columns of digits, the functions, the reply."""

from llm_policy.chat import Messages
from tasks.drawing.sandbox import Grid

TASK = "Write a Python function task(img) that turns the input into the output."
SIGNATURES = """It may call:
create_img(shape, color)
draw_pixel(img, point, color)
draw_line(img, point1, point2, color)
draw_rectangle(img, point1, point2, color)
draw_horizontal_line(img, row, color)
draw_vertical_line(img, column, color)
flood_fill(img, point, color)
Points are (row, column) and count from 0. They draw in place and return nothing; create_img returns a picture."""
OPENING = "```python\n"


def picture_text(grid: Grid) -> str:
    """Its sides, then its rows and its columns, each behind its number; a picture of one color in one line.

    A model finds what it needs for a call by its number in the row or in the column.

    >>> print(picture_text([[0, 1, 2], [3, 4, 5]]))
    2x3
    row 0 012
    row 1 345
    column 0 03
    column 1 14
    column 2 25
    >>> picture_text([[0, 0, 0]] * 9)
    '9x3 of 0'
    """
    if len(colors := {color for row in grid for color in row}) == 1:
        return f"{len(grid)}x{len(grid[0])} of {colors.pop()}"
    rows = [f"row {number} {''.join(map(str, row))}" for number, row in enumerate(grid)]
    columns = [f"column {number} {''.join(map(str, column))}" for number, column in enumerate(zip(*grid, strict=True))]
    return "\n".join([f"{len(grid)}x{len(grid[0])}", *rows, *columns])


def messages(given: Grid, wanted: Grid, with_signatures: bool) -> Messages:
    parts = [TASK, *([SIGNATURES] if with_signatures else [])]
    parts += [f"Input {picture_text(given)}", f"Output {picture_text(wanted)}"]
    return [{"role": "user", "content": "\n".join(parts)}]


def reply(code: str) -> str:
    return f"{OPENING}{code}```"
