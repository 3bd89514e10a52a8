"""Arrows, letters, legend and titles of policy pictures, as drawn."""

import io

import matplotlib
import numpy as np
import pytest
from PIL import Image

from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, FrozenLake
from llm_policy.environments.gym_table import GymTable
from llm_policy.environments.mdp import AGREEMENT_GAMMA, greedy_policy, optimal_actions, optimal_q
from llm_policy.environments.pictures import (
    CELL_COLOURS,
    ShownThought,
    _lines_of_words,
    policy_figure,
    thoughts_figure,
)
from llm_policy.environments.policy_table import best_actions
from llm_policy.environments.table_environment import Drawing
from llm_policy.environments.toy_text import CliffWalking, Taxi, gym_tables

LEFT, DOWN, RIGHT, UP = range(4)
GREEN, RED = (matplotlib.colors.to_rgb(colour) for colour in ("#1a8a4a", "#c0392b"))
LAKE, LARGE_LAKE = (FrozenLake(CANONICAL_GRIDS[size]) for size in ("4x4", "8x8"))
LONG_TITLE = (
    "step 40: learned nothing yet: 13.9 % of the optimal success, 4 of 11 states optimal; collapsed: 100 % unanimous "
    "groups since step 12"
)
FOLDER_TITLE = "runs/a_study_with_a_long_name/seed-4/checkpoint-" + "W" * 60 + ", greedy\nsuccess 0.824"


def panel(title, environment, policy_SA=None):
    q_SA = optimal_q(environment.mdp, AGREEMENT_GAMMA)
    return title, environment, greedy_policy(q_SA) if policy_SA is None else policy_SA, optimal_actions(q_SA)


def uniform_policy(environment) -> np.ndarray:
    return np.full_like(environment.mdp.rewards_SA, 1 / len(environment.actions))


def test_arrows_point_where_the_policy_goes():
    optimal_SA = np.eye(4, dtype=bool)[[RIGHT, RIGHT, LEFT]]
    figure = policy_figure([("a lake", FrozenLake(("SFG",)), np.eye(4)[[RIGHT, DOWN, LEFT]], optimal_SA)])
    *_, right, down = figure.axes[0].patches
    assert right.get_xy()[:, 0].max() == pytest.approx(0.88)
    assert right.get_xy()[:, 1].max() < 0.6
    assert down.get_xy()[:, 1].max() == pytest.approx(0.88), "y grows downwards"
    assert (right.get_facecolor()[:3], down.get_facecolor()[:3]) == (GREEN, RED)


def arrows(axes) -> list[np.ndarray]:
    return [patch.get_xy() for patch in axes.patches if not isinstance(patch, matplotlib.patches.Rectangle)]


@pytest.mark.parametrize("environment", [LAKE, CliffWalking(), Taxi()], ids=lambda e: e.env_id)
def test_an_arrow_ends_in_the_cell_in_which_the_step_does(environment):
    """Each action alone, certain: the tip lies from the middle of its cell towards the next one."""
    for action, (x, y) in environment.arrows.items():
        constant_SA = np.eye(len(environment.actions))[np.full(len(environment.mdp.terminal_S), action)]
        figure = policy_figure([panel("", environment, constant_SA)])
        assert len(figure.axes) == len(environment.drawings())
        for axes, drawing in zip(figure.axes, environment.drawings(), strict=True):
            drawn = arrows(axes)
            assert len(drawn) == len(drawing.state_of)
            for corners, (row, column) in zip(drawn, drawing.state_of, strict=True):
                centre = np.array([column + 0.5, row + 0.5])
                along = (corners - centre) @ [x, y]
                assert along.max() == pytest.approx(0.38)
                assert along.min() == pytest.approx(0, abs=0.02)


def test_length_is_probability_and_what_is_rare_is_left_out():
    policy_SA = np.tile([0.5, 0.0, 0.49, 0.01], (3, 1))
    figure = policy_figure([("", FrozenLake(("SFG",)), policy_SA, policy_SA > 0.1)])
    left, right, *_ = drawn = arrows(figure.axes[0])
    assert len(drawn) == 2 * 2
    assert 0.5 - left[:, 0].min() == pytest.approx(0.38 * 0.5)
    assert right[:, 0].max() - 0.5 == pytest.approx(0.38 * 0.49)


def action_letters(axes) -> dict[tuple[int, int], list]:
    """Cell -> bold letters in it."""
    found: dict = {}
    for text in axes.texts:
        if text.get_weight() == "bold":
            x, y = text.get_position()
            found.setdefault((int(y), int(x)), []).append(text)
    return found


def test_actions_without_direction_are_letters():
    taxi = Taxi()
    best, certain, random = (
        policy_figure([panel("", taxi, policy_SA)])
        for policy_SA in (None, np.eye(6)[np.full(500, 4)], uniform_policy(taxi))
    )
    # The optimum picks the passenger up at R, and puts them down at the destination
    (here,) = action_letters(best.axes[0]).items()
    assert here[0] == (0, 0)
    (pickup,) = here[1]
    assert (pickup.get_text(), matplotlib.colors.to_rgb(pickup.get_color())) == ("P", GREEN)
    assert pickup.get_position()[0] == pytest.approx(0.5)
    ((place, (dropoff,)),) = action_letters(best.axes[7]).items()
    assert (place, dropoff.get_text()) == ((4, 3), "D")

    everywhere = action_letters(certain.axes[0])
    assert len(everywhere) == 25
    assert matplotlib.colors.to_rgb(everywhere[2, 2][0].get_color()) == RED
    two = action_letters(random.axes[0])[2, 2]
    assert [text.get_text() for text in two] == ["P", "D"]
    assert two[0].get_position()[0] < 2.4 < 2.6 < two[1].get_position()[0]
    assert two[0].get_fontsize() < 0.6 * everywhere[2, 2][0].get_fontsize()


def test_letters_without_a_colour_stand_on_ground():
    class WithKey(CliffWalking):
        def drawings(self):
            return [Drawing("", ("K..", "..G"), {(0, 0): 0})]

    (axes,) = policy_figure([panel("", WithKey())]).axes
    grounds = [patch.get_facecolor() for patch in axes.patches if isinstance(patch, matplotlib.patches.Rectangle)]
    assert grounds[:5] == [matplotlib.colors.to_rgba(CELL_COLOURS["."])] * 5
    assert grounds[5] == matplotlib.colors.to_rgba(CELL_COLOURS["G"])
    assert "K" in {text.get_text() for text in axes.texts}
    assert gym_tables()["CliffWalking-v1"] is CliffWalking


def test_a_table_without_a_picture_of_its_own_shows_its_states_by_number():
    (drawing,) = GymTable.drawings(CliffWalking())
    assert (len(drawing.cells), len(drawing.cells[0])) == (6, 7)  # 37 states
    assert [drawing.state_of[cell] for cell in ((0, 0), (1, 0), (5, 1))] == [0, 7, 36]
    assert drawing.labels[5, 1] == "36"


def test_walls_and_places_of_the_taxi():
    axes = policy_figure([panel("", Taxi())]).axes[0]
    walls = {(min(line.get_ydata()), line.get_xdata()[0] - 1) for line in axes.lines}
    assert walls == {(0, 1), (1, 1), (3, 0), (3, 2), (4, 0), (4, 2)}
    labels = [text.get_text() for text in axes.texts if text.get_weight() != "bold"]
    assert sorted(filter(None, labels)) == ["B", "G", "R", "Y"]


# Legend, titles, size ------------------------------------------------------------------------------------------

FIGURES = {
    "one lake": [panel(LONG_TITLE, LAKE)],
    "five lakes": [panel(title, LAKE) for title in ("optimal\nsuccess 0.824", "b", FOLDER_TITLE, LONG_TITLE, "e")],
    "a large lake": [panel("step 3: $5 or $6, 100 %_of", LARGE_LAKE)],
    "a tall lake": [panel(LONG_TITLE, FrozenLake(("S", "F", "F", "G")))],
    "a wide lake": [panel(LONG_TITLE, FrozenLake(("SFFFFG",)))] * 2,
    "cliff": [panel(LONG_TITLE, CliffWalking()), panel(FOLDER_TITLE, CliffWalking())],
    "taxi": [panel(LONG_TITLE * 2, Taxi()), panel(FOLDER_TITLE, Taxi(), uniform_policy(Taxi()))],
}


@pytest.mark.parametrize("dpi", [100, 120])
@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_and_nothing_lies_on_anything_else(name, dpi):
    figure = policy_figure(FIGURES[name])
    figure.set_dpi(dpi)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.texts if text.get_text()]
    boxes += [axes.get_window_extent() for axes in figure.axes] + [figure.legends[0].get_window_extent()]
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


@pytest.mark.parametrize("name", FIGURES)
def test_titles_are_whole(name):
    shown = ["".join(text.get_text().split()) for text in policy_figure(FIGURES[name]).texts]
    for title, environment, _, _ in FIGURES[name]:
        assert "".join(title.split()) in shown
        assert all("".join(drawing.title.split()) in shown for drawing in environment.drawings())


def test_titles_break_between_words_and_folders():
    figure = policy_figure([panel("runs/a_study_with_a_long_name/seed-4/checkpoint-200, greedy", LAKE)] * 3)
    titles = {text.get_text() for text in figure.texts}
    assert titles == {"", "runs/a_study_with_a_long_name/seed-4/\ncheckpoint-200, greedy"}


def test_legend():
    def entries(environment):
        return [text.get_text() for text in policy_figure([panel("", environment)]).legends[0].get_texts()]

    assert entries(LAKE) == entries(CliffWalking()) == ["optimal action", "not optimal", "length: probability"]
    assert entries(Taxi()) == ["optimal action", "not optimal", "length or size: probability", "PICKUP", "DROPOFF"]
    handles = policy_figure([panel("", LAKE)]).legends[0].legend_handles
    assert [matplotlib.colors.to_rgb(handle.get_color()) for handle in handles[:2]] == [GREEN, RED]


def test_sizes():
    """Lakes stand side by side, 3 inches each; wide and many drawings one below the other."""

    def inches(environment, count):
        return tuple(policy_figure([panel("two\nlines", environment)] * count).get_size_inches())

    assert [inches(LAKE, count) for count in (1, 2, 5)] == [(4.0, 3.7), (6.0, 3.7), (15.0, 3.7)]
    assert inches(LARGE_LAKE, 3) == (9.0, 3.7)
    assert inches(CliffWalking(), 1) == (9.0, 3.7)
    assert inches(CliffWalking(), 2) == pytest.approx((9.0, 3.7 + 3.34))
    assert inches(Taxi(), 1)[0] == pytest.approx(8 * 1.8)


def test_a_picture_is_a_picture():
    file = io.BytesIO()
    policy_figure([panel("a lake", LAKE)]).savefig(file, dpi=120)
    with Image.open(file) as picture:
        assert picture.size == (480, 444)
        assert len(set(picture.convert("RGB").resize((200, 200)).getdata())) > 20, "an empty picture"


def test_the_agents_cell_is_framed_and_false_words_are_red():
    words = [("LEFT", True), ("hole.", False)]
    shown = ShownThought(LAKE, 1, np.eye(4)[2], best_actions(LAKE)[1], words)  # row 0, column 1
    figure = thoughts_figure([shown], "a title")
    frames = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert [frame.get_xy() for frame in frames] == [(1, 0)]
    colours = {text.get_text(): matplotlib.colors.to_rgb(text.get_color()) for text in figure.texts}
    assert (colours["LEFT"] == RED, colours["hole."] == RED) == (False, True)


def test_a_thought_is_broken_into_lines():
    words = [("LEFT", True), ("ice.", True), ("UP", True), ("ice.", False)]
    assert _lines_of_words(words, 9) == [words[:2], words[2:]]
    assert _lines_of_words([], 20) == [[("(no thought)", False)]]
