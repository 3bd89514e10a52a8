"""Pictures of policies: every action in the cell in which it is chosen. The caller saves the figure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

from llm_policy.environments.table_environment import Drawing, TableEnvironment

Panel = tuple[str, TableEnvironment, np.ndarray, np.ndarray]

CELL_COLOURS = {"S": "#d7e8f7", "F": "#eef5fb", ".": "#eef5fb", "H": "#2d3a4a", "C": "#2d3a4a", "G": "#f5c542"}
DARK_CELLS = "HC"
LETTER_COLOUR, DARK_COLOUR = "#56708a", "#2d3a4a"
OPTIMAL_COLOUR, OTHER_COLOUR = "#1a8a4a", "#c0392b"
LEAST_PROBABILITY = 0.02  # what is drawn; less would be a dot

TITLE_POINTS = 9
LINE_INCHES = 0.17
LEGEND_INCHES = 0.36
MARGIN_INCHES = 0.06
NARROWEST_INCHES = 4.0  # what the legend needs

THOUGHTS_PER_ROW, THOUGHT_SIDE, THOUGHT_POINTS = 3, 2.4, 7  # maps side by side, inches, size of the letters
LETTER_WIDTH = 0.602  # of DejaVu Sans Mono, in its size


def policy_figure(panels: Sequence[Panel]) -> Figure:
    """One policy per panel: longer arrows are more probable actions, green ones optimal.

    An action without a direction is its initial, larger where it is more probable. Panels stand side by side, wide
    ones and those of several drawings one below the other.

    Args:
        panels: title, environment, `policy_SA` and `optimal_SA` (bool, actions that are optimal) of each.
    """
    drawings = [environment.drawings() for _, environment, _, _ in panels]
    has_many = max(map(len, drawings)) > 1
    side = 1.8 if has_many else 3.0  # inches
    panel_width = max(sum(_width(drawing, side) for drawing in row) for row in drawings)
    is_stacked = has_many or panel_width > 1.5 * side
    rows, columns = (len(panels), 1) if is_stacked else (1, len(panels))
    panel_width = max(panel_width, NARROWEST_INCHES / columns)

    # Drawn in pixels a line is some percent wider than its outline.
    titles = [_wrapped(title, 0.95 * panel_width - 2 * MARGIN_INCHES) for title, *_ in panels]
    title_lines = max(2, *(title.count("\n") + 1 for title in titles)) + has_many
    panel_height = side + LINE_INCHES * title_lines
    figure = Figure(figsize=(columns * panel_width, round(rows * panel_height + LEGEND_INCHES, 2)))
    for number, (title, panel, row) in enumerate(zip(titles, panels, drawings, strict=True)):
        column, panels_below = (0, rows - 1 - number) if is_stacked else (number, 0)
        middle = (column + 0.5) * panel_width
        bottom = LEGEND_INCHES + panels_below * panel_height
        left = middle - sum(_width(drawing, side) for drawing in row) / 2
        for drawing in row:
            axes = _add_axes(figure, left, bottom, _width(drawing, side), side)
            _draw(axes, drawing, panel, cell_points=72 * side / len(drawing.cells))
            _add_title(figure, drawing.title, left + _width(drawing, side) / 2, bottom + side, TITLE_POINTS - 1)
            left += _width(drawing, side)
        _add_title(figure, title, middle, bottom + side + LINE_INCHES * has_many, TITLE_POINTS)
    _add_legend(figure, [environment for _, environment, _, _ in panels])
    return figure


@dataclass(frozen=True)
class ShownThought:
    """What a policy thought in one state, word by word and whether it is true, and its answer's probabilities (A,)."""

    environment: TableEnvironment
    state: int
    action_A: np.ndarray
    optimal_A: np.ndarray
    words: Sequence[tuple[str, bool]]


def thoughts_figure(shown: Sequence[ShownThought], title: str) -> Figure:
    """A map per thought, with the agent's cell framed and its answer as an arrow; below it the thought.

    Words that are not true are red. The states are such that a picture shows (`states_drawn`).
    """
    columns = min(THOUGHTS_PER_ROW, len(shown))
    letters_per_line = int(72 * (THOUGHT_SIDE - 2 * MARGIN_INCHES) / (LETTER_WIDTH * THOUGHT_POINTS))
    texts = [_lines_of_words(one.words, letters_per_line) for one in shown]
    text_inches = LINE_INCHES * (0.5 + max(len(lines) for lines in texts))
    row_inches = THOUGHT_SIDE + text_inches
    rows = -(-len(shown) // columns)
    title = _wrapped(title, 0.95 * columns * THOUGHT_SIDE)
    height = rows * row_inches + LEGEND_INCHES + LINE_INCHES * (title.count("\n") + 2)
    figure = Figure(figsize=(max(columns * THOUGHT_SIDE, NARROWEST_INCHES), round(height, 2)))
    for number, (one, lines) in enumerate(zip(shown, texts, strict=True)):
        left = number % columns * THOUGHT_SIDE
        bottom = LEGEND_INCHES + (rows - 1 - number // columns) * row_inches + text_inches
        drawing = next(d for d in one.environment.drawings() if one.state in d.state_of.values())
        cell = next(cell for cell, state in drawing.state_of.items() if state == one.state)
        policy_SA = np.zeros(one.environment.mdp.rewards_SA.shape)
        policy_SA[one.state] = one.action_A
        optimal_SA = np.zeros(policy_SA.shape, dtype=bool)
        optimal_SA[one.state] = one.optimal_A
        axes = _add_axes(figure, left, bottom, THOUGHT_SIDE, THOUGHT_SIDE)
        _draw(axes, drawing, ("", one.environment, policy_SA, optimal_SA), 72 * THOUGHT_SIDE / len(drawing.cells))
        frame = Rectangle((cell[1], cell[0]), 1, 1, fill=False, edgecolor=LETTER_COLOUR, linewidth=2.5)
        axes.add_patch(frame)
        _write_words(figure, lines, left + MARGIN_INCHES, bottom)
    _add_title(figure, title, columns * THOUGHT_SIDE / 2, rows * row_inches + LEGEND_INCHES, TITLE_POINTS)
    _add_legend(figure, [one.environment for one in shown])
    return figure


def states_drawn(environment: TableEnvironment) -> set[int]:
    """The states that its pictures show: not all of Taxi's."""
    return {state for drawing in environment.drawings() for state in drawing.state_of.values()}


def _lines_of_words(words: Sequence[tuple[str, bool]], letters: int) -> list[list[tuple[str, bool]]]:
    """The words in lines that are no longer than so many letters."""
    lines: list[list[tuple[str, bool]]] = [[]]
    for word, is_true in words or [("(no thought)", False)]:
        if lines[-1] and sum(len(w) + 1 for w, _ in lines[-1]) + len(word) > letters:
            lines.append([])
        lines[-1].append((word[:letters], is_true))
    return lines


def _write_words(figure: Figure, lines: Sequence[Sequence[tuple[str, bool]]], left: float, top: float) -> None:
    """Lines below (left, top), in inches."""
    width, height = figure.get_size_inches()
    for number, line in enumerate(lines, start=1):
        letters = 0
        for word, is_true in line:
            x = left + letters * LETTER_WIDTH * THOUGHT_POINTS / 72
            figure.text(
                x / width, (top - number * LINE_INCHES) / height, word, fontsize=THOUGHT_POINTS, family="monospace",
                color=DARK_COLOUR if is_true else OTHER_COLOUR, weight="normal" if is_true else "bold",
                parse_math=False,
            )  # fmt: skip
            letters += len(word) + 1


def _width(drawing: Drawing, side: float) -> float:
    return side * max(1.0, len(drawing.cells[0]) / len(drawing.cells))


def _wrapped(title: str, inches: float) -> str:
    """`title` with line breaks after spaces and slashes, or anywhere in longer words: no line wider than `inches`."""
    lines = []
    for line in title.splitlines():
        words = re.split(r"(?<=[ /])", line)
        current = ""
        for piece in (piece for word in words for piece in ([word] if _inches(word) <= inches else word)):
            if current and _inches(current + piece.rstrip()) > inches:
                lines.append(current.rstrip())
                current = ""
            current += piece
        lines.append(current.rstrip())
    return "\n".join(lines)


def _inches(text: str) -> float:
    points, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=TITLE_POINTS), ismath=False)
    return points / 72


def _add_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes in a box given in inches, with a margin around them."""
    whole_width, whole_height = figure.get_size_inches()
    inner = left + MARGIN_INCHES, bottom + MARGIN_INCHES, width - 2 * MARGIN_INCHES, height - 2 * MARGIN_INCHES
    return figure.add_axes(tuple(np.array(inner) / (whole_width, whole_height, whole_width, whole_height)))


def _add_title(figure: Figure, title: str, x: float, y: float, points: int) -> None:
    """`title` above the axes whose box ends at (x, y), in inches. A dollar sign does not begin a formula."""
    width, height = figure.get_size_inches()
    left, bottom = x / width, (y - MARGIN_INCHES / 2) / height
    figure.text(left, bottom, title, fontsize=points, ha="center", va="bottom", parse_math=False)


def _draw(axes: Axes, drawing: Drawing, panel: Panel, cell_points: float) -> None:
    _, environment, policy_SA, optimal_SA = panel
    rows, columns = len(drawing.cells), len(drawing.cells[0])
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
    for row, letters in enumerate(drawing.cells):
        for column, letter in enumerate(letters):
            ground = CELL_COLOURS.get(letter, CELL_COLOURS["."])
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=ground, edgecolor="white"))
            label = drawing.labels.get((row, column), letter.strip("."))
            colour = "white" if letter in DARK_CELLS else LETTER_COLOUR
            axes.text(column + 0.08, row + 0.24, label, fontsize=min(8, 0.24 * cell_points), color=colour)
    for row, column in drawing.walls:
        axes.plot([column + 1, column + 1], [row, row + 1], color=DARK_COLOUR, linewidth=2.5, solid_capstyle="butt")
    without_arrow = _actions_without_arrow(environment)
    for (row, column), state in drawing.state_of.items():
        for action in np.flatnonzero(policy_SA[state] >= LEAST_PROBABILITY).tolist():
            probability = float(policy_SA[state, action])
            colour = OPTIMAL_COLOUR if optimal_SA[state, action] else OTHER_COLOUR
            if action in environment.arrows:
                _add_arrow(axes, column + 0.5, row + 0.5, environment.arrows[action], probability, colour)
            else:
                # Several letters stand beside each other, a certain one in the middle.
                aside = without_arrow.index(action) - (len(without_arrow) - 1) / 2
                x = column + 0.5 + 0.5 * aside * (1 - probability)
                points = cell_points * (0.2 + 0.3 * probability)
                _add_letter(axes, x, row + 0.58, environment.actions[action][0], points, colour)


def _actions_without_arrow(environment: TableEnvironment) -> list[int]:
    return [action for action in range(len(environment.actions)) if action not in environment.arrows]


def _add_arrow(axes: Axes, x: float, y: float, direction: tuple[int, int], probability: float, colour: str) -> None:
    length = 0.38 * probability
    axes.arrow(
        x, y, direction[0] * length, direction[1] * length, color=colour, width=0.03,
        head_width=0.13, head_length=min(0.1, length), length_includes_head=True,
    )  # fmt: skip


def _add_letter(axes: Axes, x: float, y: float, letter: str, points: float, colour: str) -> None:
    axes.text(x, y, letter, fontsize=points, weight="bold", color=colour, ha="center", va="center_baseline")


def _add_legend(figure: Figure, environments: Sequence[TableEnvironment]) -> None:
    letters = dict.fromkeys(e.actions[action] for e in environments for action in _actions_without_arrow(e))
    entries = {
        "optimal action": OPTIMAL_COLOUR,
        "not optimal": OTHER_COLOUR,
        "length or size: probability" if letters else "length: probability": LETTER_COLOUR,
    }
    handles = [
        Line2D([], [], color=colour, linewidth=2.5, marker=">", markevery=[1], label=label)
        for label, colour in entries.items()
    ]
    for name in letters:
        marker = rf"$\mathbf{{{name[0]}}}$"
        handles.append(Line2D([], [], color=LETTER_COLOUR, linestyle="", marker=marker, label=name))
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8, columnspacing=1.2
    )  # fmt: skip
