"""Curves, bars and grids of digits as matplotlib figures; the caller saves them. For policies see
environments/pictures.py.
"""

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.figure import Figure

LINE_CHARACTERS = 85  # of a title or a label, within the width of a picture
LINE_STYLES = ("-", ":", "--")
PICTURES_PER_ROW = 4
COLORS = (  # of the digits 0 to 9, those of the ARC puzzles
    "#000000", "#0074D9", "#FF4136", "#2ECC40", "#FFDC00", "#AAAAAA", "#F012BE", "#FF851B", "#7FDBFF", "#870C25",
)  # fmt: skip


def curves_figure(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    lines: Mapping[str, float],
    x_label: str,
    y_label: str,
    title: str = "",
) -> Figure:
    """Curves with a legend above them and labelled horizontal reference lines.

    Args:
        curves: label -> x and y values of each seed; seeds share a colour.
        lines: label -> y value.
        title: above the legend. A long one is wrapped, as long labels of curves are.
    """
    title = textwrap.fill(title, LINE_CHARACTERS)
    labels = {label: textwrap.fill(label, LINE_CHARACTERS) for label in curves}
    columns = 2 if len(labels) > 3 and max(map(len, labels)) <= LINE_CHARACTERS // 2 else 1
    text_lines = sum(text.count("\n") + 1 for text in labels.values()) / columns + title.count("\n") + bool(title)
    figure = Figure(figsize=(7.0, 4.0 + 0.2 * text_lines), layout="constrained")
    axes = figure.subplots()
    for number, (label, seeds) in enumerate(curves.items()):
        style = f"C{number}{LINE_STYLES[number // 10 % len(LINE_STYLES)]}"  # there are 10 colours
        for i, (x, y) in enumerate(seeds):
            axes.plot(x, y, style, marker="o", markersize=3, linewidth=1.5, label=None if i else labels[label])
    values = [v for seeds in curves.values() for _, y in seeds for v in y] + list(lines.values())
    label_height = -np.inf
    for i, (label, value) in enumerate(sorted(lines.items(), key=lambda line: line[1])):
        axes.axhline(value, linestyle="--", linewidth=1.0, color=f"{0.25 + 0.15 * (i % 4)}")
        label_height = max(value, label_height + 0.06 * np.ptp(values))  # no label on another
        axes.text(1.0, label_height, f" {label}", va="center", fontsize=8, transform=axes.get_yaxis_transform())
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        # The title stands in the legend: as a title of the figure it would be drawn across it.
        figure.legend(
            loc="outside upper left", ncols=columns, frameon=False, fontsize=8, title=title or None, title_fontsize=9,
            alignment="left",
        )  # fmt: skip
    return figure


def shares_figure(
    shares: Mapping[str, tuple[float, float, float]], lines: Mapping[str, float], x_label: str, title: str = ""
) -> Figure:
    """A bar per label from 0 to 1 with its interval, and labelled vertical reference lines.

    Args:
        shares: label -> share, and the ends of its interval.
        lines: label -> share.
    """
    figure = Figure(figsize=(7.0, 1.6 + 0.4 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for place, (share, low, high) in enumerate(shares.values()):
        axes.barh(place, share, color="C0", height=0.6)
        axes.plot([low, high], [place, place], color="0.2", linewidth=1.5)
    for i, (label, value) in enumerate(lines.items()):
        axes.axvline(value, linestyle="--", linewidth=1.0, color=f"{0.3 + 0.2 * (i % 3)}", label=label)
    axes.set_yticks(range(len(shares)), [textwrap.fill(label, LINE_CHARACTERS // 2) for label in shares])
    axes.invert_yaxis()
    axes.set(xlabel=x_label, xlim=(0, 1), title=title)
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def grids_figure(pictures: Mapping[str, Sequence[Sequence[int]] | None], title: str = "") -> Figure:
    """Pictures of digits side by side, each under its name; an empty frame where there is none."""
    rows = -(-len(pictures) // PICTURES_PER_ROW)
    columns = min(len(pictures), PICTURES_PER_ROW)
    figure = Figure(figsize=(2.4 * columns, 2.6 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    colors = matplotlib.colors.ListedColormap(COLORS)
    frames = figure.subplots(rows, columns, squeeze=False).flatten()
    for frame, (name, grid) in zip(frames, pictures.items(), strict=False):
        frame.set_title(textwrap.fill(name, 24), fontsize=9)
        frame.set_xticks([])
        frame.set_yticks([])
        if grid is None:
            frame.text(0.5, 0.5, "no picture", ha="center", va="center", transform=frame.transAxes)
        else:
            frame.imshow(grid, cmap=colors, vmin=0, vmax=len(COLORS) - 1)
    for frame in frames[len(pictures) :]:
        frame.axis("off")
    return figure
