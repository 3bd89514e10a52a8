"""What is to be drawn: pictures by name, pictures from a file, and random drawings to learn the functions from."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from llm_policy.errors import InputError
from llm_policy.reading import read_text
from tasks.drawing.sandbox import COLORS, LONGEST_SIDE, Grid, grid_problem

SQUARES = {4: (2, 2), 9: (3, 3), 12: (3, 4), 16: (4, 4), 20: (5, 4), 25: (5, 5)}  # rows and columns of squares
SIDE_OF_SQUARE = 2
MOST_LINES = 9
NAMES = f"N-vertical-lines (N 1 to {MOST_LINES}), N-squares (N {', '.join(map(str, SQUARES))}), or a text file"
EMPTY = 0


@dataclass(frozen=True)
class Target:
    """A picture to start from and the one to end with."""

    name: str
    given: Grid
    wanted: Grid


def empty(rows: int, columns: int) -> Grid:
    return [[EMPTY] * columns for _ in range(rows)]


def vertical_lines(count: int) -> Grid:
    """Each column in a color of its own: column x has x + 1.

    >>> vertical_lines(3)
    [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    """
    return [list(range(1, count + 1)) for _ in range(count)]


def squares(count: int) -> Grid:
    """Squares of 2 x 2, down each column before the next one, colors 1 to 9 over and over.

    >>> squares(4)
    [[1, 1, 3, 3], [1, 1, 3, 3], [2, 2, 4, 4], [2, 2, 4, 4]]
    """
    high, wide = SQUARES[count]
    size = SIDE_OF_SQUARE

    def color(row: int, column: int) -> int:
        return (column // size * high + row // size) % (COLORS - 1) + 1

    return [[color(row, column) for column in range(wide * size)] for row in range(high * size)]


def read_target(name: str) -> Target:
    """The target of that name, on an empty picture, or from a file. `InputError` for one that is not there."""
    if match := re.fullmatch(r"(\d+)-(vertical-lines|squares)", name, re.ASCII):
        count = int(match[1])
        if match[2] == "vertical-lines" and 1 <= count <= MOST_LINES:
            wanted = vertical_lines(count)
            return Target(name, empty(count, count), wanted)
        if match[2] == "squares" and count in SQUARES:
            wanted = squares(count)
            return Target(name, empty(len(wanted), len(wanted[0])), wanted)
        raise InputError(f"--target {name}: expected {NAMES}")
    if not Path(name).is_file():
        raise InputError(f"--target {name}: expected {NAMES}")
    wanted = read_picture(Path(name))
    given = empty(len(wanted), len(wanted[0]))
    if given == wanted:
        raise InputError(f"--target {name}: is empty, as the picture to start from is; draw something")
    return Target(Path(name).stem, given, wanted)


def read_picture(file: Path) -> Grid:
    """Lines of digits, all of one length; spaces between them are left out."""
    lines = [line.replace(" ", "") for line in read_text(file).splitlines() if line.strip()]
    for number, line in enumerate(lines, start=1):
        if not (line.isascii() and line.isdigit()):
            raise InputError(f"{file}: line {number}: {line!r:.60}, expected digits 0 to 9")
    rows = [[int(digit) for digit in line] for line in lines]
    if problem := grid_problem(rows):
        raise InputError(f"{file}: {problem}; expected lines of digits, 1 to {LONGEST_SIDE} of them, all of one length")
    return rows


# Random drawings ----------------------------------------------------------------------------------------------------

SIDES = (2, 6)
MOST_CALLS = 3


def random_program(seed: str) -> tuple[str, tuple[int, int]]:
    """A program of one to three calls of the drawing functions, and the sides of the picture that it is for."""
    draw = random.Random(seed)
    height, width = draw.randint(*SIDES), draw.randint(*SIDES)

    def point() -> str:
        return f"({draw.randrange(height)}, {draw.randrange(width)})"

    def call() -> str:
        color = draw.randint(1, COLORS - 1)
        kind = draw.choice(("horizontal", "vertical", "vertical", "rectangle", "rectangle", "line", "pixel", "fill"))
        return {
            "horizontal": f"draw_horizontal_line(img, {draw.randrange(height)}, {color})",
            "vertical": f"draw_vertical_line(img, {draw.randrange(width)}, {color})",
            "rectangle": f"draw_rectangle(img, {point()}, {point()}, {color})",
            "line": f"draw_line(img, {point()}, {point()}, {color})",
            "pixel": f"draw_pixel(img, {point()}, {color})",
            "fill": f"flood_fill(img, {point()}, {color})",
        }[kind]

    calls = [call() for _ in range(draw.randint(1, MOST_CALLS))]
    return "\n    ".join(["def task(img):", *calls, "return img"]) + "\n", (height, width)
