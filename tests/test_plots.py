"""Curves with a title and a legend that stand inside the picture, one above the other."""

import pytest

from llm_policy.plots import curves_figure

CURVE = [([0.0, 1.0, 2.0], [0.1, 0.2, 0.3])]
LONG = 'FrozenLake-v1 {"desc": ["SFFFFFFF", "SFFFFFFF", "SFFFFFFF", "FFFFFFFG"], "is_slippery": false}, seed 11 ' * 2
FIGURES = [
    # labels of the curves, title
    (["ours"], ""),
    (["ours", "random search", "hill climbing"], "FrozenLake-v1, seed 11"),
    (["ours, " + LONG, "random search"], LONG),
    ([f"PPO, actor {number} (3 seeds)" for number in range(12)], "FrozenLake-v1"),
    (["ours, " + LONG, *"abcd"], ""),
]


@pytest.mark.parametrize(("labels", "title"), FIGURES)
def test_title_legend_and_curves_are_whole(labels, title):
    figure = curves_figure(dict.fromkeys(labels, CURVE), {"optimal": 0.74}, "minutes", "return", title)
    figure.savefig("/dev/null", format="png")
    (legend,) = figure.legends
    box, axes_box = legend.get_window_extent(), figure.axes[0].get_window_extent()
    assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == [label.strip() for label in labels]
    assert legend.get_title().get_text().replace("\n", " ") == title.strip()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert axes_box.y1 <= box.y0 < box.y1 <= figure.bbox.height
    assert axes_box.height > 200


def test_seeds_share_a_colour_and_a_label():
    axes = curves_figure({"ours": CURVE * 3, "theirs": CURVE}, {}, "minutes", "return").axes[0]
    first, *others, last = [line.get_color() for line in axes.get_lines()]
    assert others == [first] * 2
    assert last != first
    assert [line.get_label() for line in axes.get_lines() if not line.get_label().startswith("_")] == ["ours", "theirs"]


def test_no_two_curves_look_the_same():
    axes = curves_figure({str(number): CURVE for number in range(21)}, {}, "minutes", "return").axes[0]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 21


@pytest.mark.parametrize(("labels", "columns"), [(3, 1), (4, 2)])
def test_many_short_labels_stand_in_two_columns(labels, columns):
    figure = curves_figure({f"number {number}": CURVE for number in range(labels)}, {}, "minutes", "return")
    figure.savefig("/dev/null", format="png")
    (legend,) = figure.legends
    assert len({round(text.get_window_extent().x0) for text in legend.get_texts()}) == columns
