"""What is to be drawn: pictures by name, pictures from a file, and random drawings to learn the functions from."""

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from llm_policy.errors import InputError
from llm_policy.reading import read_text
from tasks.drawing.sandbox import COLORS, LONGEST_SIDE, Grid, grid_problem

SIDE_OF_SQUARE, MOST_LINES = 2, 9
MOST_SQUARES = LONGEST_SIDE // SIDE_OF_SQUARE  # side by side
# Rows and columns of squares
SQUARES = {12: (3, 4), 20: (5, 4)} | {side * side: (side, side) for side in range(1, MOST_SQUARES + 1)}
NAMES = (
    f"N-vertical-lines (N 1 to {MOST_LINES}), N-squares (N 12, 20, or k times k up to {MOST_SQUARES**2}), "
    "or a text file"
)
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
    if not os.path.isfile(name):  # with pathlib a folder that may not be read is an error
        raise InputError(f"--target {name}: expected {NAMES}")
    wanted = read_picture(Path(name))
    given = empty(len(wanted), len(wanted[0]))
    if given == wanted:
        raise InputError(f"--target {name}: is empty, as the picture to start from is; draw something")
    return Target(Path(name).stem, given, wanted)


def read_picture(file: Path) -> Grid:
    """Lines of digits, all of one length; spaces between them are left out."""
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--target {file}: cannot be read ({reason}); expected lines of digits") from error
    lines = ["".join(line.split()) for line in text.splitlines()]
    for number, line in enumerate(lines, start=1):
        if line and not (line.isascii() and line.isdigit()):
            raise InputError(f"{file}: line {number}: {line!r:.60}, expected digits 0 to 9")
    rows = [[int(digit) for digit in line] for line in lines if line]
    if problem := grid_problem(rows):
        raise InputError(f"{file}: {problem}; expected lines of digits, 1 to {LONGEST_SIDE} of them, all of one length")
    return rows


def plain_program(wanted: Grid) -> str:
    """Draws a picture with one `draw_rectangle` for each rectangle of one color: seldom the shortest program.

    >>> print(plain_program([[1, 1, 0], [1, 1, 2]]), end="")
    def task(img):
        draw_rectangle(img, (0, 0), (1, 1), 1)
        draw_rectangle(img, (1, 2), (1, 2), 2)
        return img
    """
    left = [list(row) for row in wanted]
    height, width = len(left), len(left[0])
    calls = []
    for column, row in product(range(width), range(height)):
        if not (color := left[row][column]):
            continue
        bottom, right = row, column
        while bottom + 1 < height and left[bottom + 1][column] == color:
            bottom += 1
        while right + 1 < width and all(left[y][right + 1] == color for y in range(row, bottom + 1)):
            right += 1
        for y in range(row, bottom + 1):
            left[y][column : right + 1] = [0] * (right + 1 - column)
        calls.append(f"draw_rectangle(img, {(row, column)}, {(bottom, right)}, {color})")
    return "\n    ".join(["def task(img):", *calls, "return img"]) + "\n"


# Random drawings ----------------------------------------------------------------------------------------------------

SIDES = (2, 6)
CALLS = (1, 1, 2, 3, 4)  # each as often as the others
FAMILIES = {"vertical": 6, "horizontal": 3, "rectangle": 8, "pixel": 2, "any": 1}  # how often


def random_program(seed: str) -> tuple[str, tuple[int, int]]:
    """A program of one to four calls of the drawing functions, and the sides of the picture that it is for.

    Most programs call one function, in order of the columns and then of the rows, and nothing is drawn over: such a
    program can be told from its picture.
    """
    draw = random.Random(seed)
    height, width = draw.randint(*SIDES), draw.randint(*SIDES)
    count = draw.choice(CALLS)
    (family,) = draw.choices(list(FAMILIES), list(FAMILIES.values()))
    columns, rows = range(width), range(height)
    places = [(row, column) for column in columns for row in rows]

    def color() -> int:
        return draw.randint(1, COLORS - 1)

    def some(things: Sequence) -> list:
        return [things[i] for i in sorted(draw.sample(range(len(things)), min(count, len(things))))]

    if family == "vertical":
        calls = [f"draw_vertical_line(img, {column}, {color()})" for column in some(columns)]
    elif family == "horizontal":
        calls = [f"draw_horizontal_line(img, {row}, {color()})" for row in some(rows)]
    elif family == "pixel":
        calls = [f"draw_pixel(img, {place}, {color()})" for place in some(places)]
    elif family == "rectangle":
        calls = [f"draw_rectangle(img, {one}, {other}, {color()})" for one, other in _apart(draw, places, count)]
    else:
        one, other = draw.choice(places), draw.choice(places)
        more = [f"draw_vertical_line(img, {draw.choice(columns)}, {color()})"] * draw.randint(0, 1)
        last = draw.choice((f"draw_line(img, {one}, {other}, {color()})", f"flood_fill(img, {one}, {color()})"))
        calls = [*more, last]
    return "\n    ".join(["def task(img):", *calls, "return img"]) + "\n", (height, width)


Point = tuple[int, int]


def _apart(draw: random.Random, places: Sequence[Point], count: int) -> list[tuple[Point, Point]]:
    """Corners (top left, bottom right) of up to `count` rectangles that do not touch each other's pixels, in order."""
    found: list[tuple[Point, Point]] = []
    for _ in range(4 * count):
        (y, x), (y2, x2) = draw.choice(places), draw.choice(places)
        one, other = (min(y, y2), min(x, x2)), (max(y, y2), max(x, x2))
        is_free = all(
            other[0] < top or bottom < one[0] or other[1] < left or right < one[1]
            for (top, left), (bottom, right) in found
        )
        if is_free and len(found) < count:
            found.append((one, other))
    return sorted(found, key=lambda corners: corners[0][::-1])
