"""Pictures: a policy on its map, curves over time. Everything returns a matplotlib figure; the caller saves it."""

from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.figure import Figure

from llm_policy.environments.frozen_lake import Grid, acting_states

_CELL_COLOURS = {"S": "#d7e8f7", "F": "#eef5fb", "H": "#2d3a4a", "G": "#f5c542"}
_ARROWS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # (x, y) of LEFT, DOWN, RIGHT, UP; y grows downwards


def policy_figure(panels: Sequence[tuple[str, Grid, np.ndarray, np.ndarray]]) -> Figure:
    """One lake per panel: an arrow's length is its action's probability, green where the action is optimal.

    Args:
        panels: title, map, `policy_SA` and `optimal_SA` (bool, actions that are optimal) of each.
    """
    widest = max(len(grid[0]) / len(grid) for _, grid, _, _ in panels)
    figure = Figure(figsize=(3.0 * len(panels) * max(1.0, widest), 3.7), layout="constrained")
    for axes, (title, grid, policy_SA, optimal_SA) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        rows, columns = len(grid), len(grid[0])
        for row in range(rows):
            for column in range(columns):
                letter = grid[row][column]
                axes.add_patch(
                    matplotlib.patches.Rectangle(
                        (column, row), 1, 1, facecolor=_CELL_COLOURS[letter], edgecolor="white"
                    )
                )
                axes.text(column + 0.08, row + 0.24, letter, fontsize=8, color="white" if letter == "H" else "#56708a")
        for state in acting_states(grid):
            row, column = divmod(state, columns)
            for action, (x, y) in enumerate(_ARROWS):
                if policy_SA[state, action] < 0.02:
                    continue
                length = 0.38 * policy_SA[state, action]
                colour = "#1a8a4a" if optimal_SA[state, action] else "#c0392b"
                axes.arrow(
                    column + 0.5, row + 0.5, x * length, y * length, color=colour, width=0.03,
                    head_width=0.13, head_length=min(0.1, length), length_includes_head=True,
                )  # fmt: skip
        axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
        axes.set_title(title, fontsize=9)
    return figure


def curves_figure(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    lines: Mapping[str, float],
    x_label: str,
    y_label: str,
) -> Figure:
    """Curves with labelled horizontal reference lines.

    Args:
        curves: label -> x and y values of each seed; seeds share a colour.
        lines: label -> y value.
    """
    figure = Figure(figsize=(7.0, 4.0 + 0.2 * len(curves)), layout="constrained")
    axes = figure.subplots()
    for number, (label, seeds) in enumerate(curves.items()):
        for i, (x, y) in enumerate(seeds):
            axes.plot(x, y, f"C{number}", marker="o", markersize=3, linewidth=1.5, label=None if i else label)
    values = [v for seeds in curves.values() for _, y in seeds for v in y] + list(lines.values())
    label_height = -np.inf
    for i, (label, value) in enumerate(sorted(lines.items(), key=lambda line: line[1])):
        axes.axhline(value, linestyle="--", linewidth=1.0, color=f"{0.25 + 0.15 * (i % 4)}")
        label_height = max(value, label_height + 0.06 * np.ptp(values))  # no label on another
        axes.text(1.0, label_height, f" {label}", va="center", fontsize=8, transform=axes.get_yaxis_transform())
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        figure.legend(loc="outside upper left", frameon=False, fontsize=8)
    return figure
