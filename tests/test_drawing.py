"""Programs that draw: the functions, hostile programs in the sandbox, targets, rewards, the task on a tiny model."""

import itertools
import json
import random
import re
import subprocess
import sys
import time

import psutil
import pytest
from test_train_script import metrics_of

pytest.importorskip("pydantic_monty", reason="requirements-drawing.txt")

import evaluate_policy
import train_script
from llm_policy.chat import Reader
from llm_policy.errors import InputError
from llm_policy.run_files import ROOT
from tasks.drawing import functions
from tasks.drawing import judge as drawing_judge
from tasks.drawing import sandbox as sandbox_module
from tasks.drawing.judge import DrawingJudge
from tasks.drawing.programs import cleaned, share_of_equal_pixels
from tasks.drawing.sandbox import FUNCTIONS, LONGEST_CODE, Sandbox, code_of
from tasks.drawing.targets import empty, plain_program, random_program, read_target, squares, vertical_lines
from tasks.drawing.task import PixelReward, RandomDrawings, keep_best, read_found, scored
from tasks.drawing.words import messages, picture_text, reply


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(2)
    yield box
    box.close()


def drawn(sandbox, body: str, rows: int = 3, columns: int = 4):
    """What a program with these lines makes of an empty picture."""
    code = "\n    ".join(["def task(img):", *body.splitlines(), "return img"]) + "\n"
    return sandbox.run_all([code], empty(rows, columns))[0]


def picture(text: str) -> list[list[int]]:
    return [[int(digit) for digit in line] for line in text.split()]


# The drawing functions ---------------------------------------------------------------------------------------------

DRAWINGS = [
    ("draw_pixel(img, (1, 2), 5)", "0000 0050 0000"),
    ("draw_pixel(img, (1, 4), 5)\ndraw_pixel(img, (-1, 0), 5)\ndraw_pixel(img, (2, 3), 1)", "0000 0000 0001"),
    ("draw_horizontal_line(img, 2, 7)", "0000 0000 7777"),
    ("draw_vertical_line(img, 0, 7)", "7000 7000 7000"),
    ("draw_line(img, (0, 0), (2, 2), 3)", "3000 0300 0030"),
    ("draw_line(img, (2, 2), (0, 0), 3)", "3000 0300 0030"),
    ("draw_line(img, (1, 3), (1, 1), 4)", "0000 0444 0000"),
    ("draw_line(img, (-5, 1), (9, 1), 4)", "0400 0400 0400"),
    ("draw_line(img, (0, 0), (1, 2), 3)", "3300 0030 0000"),
    ("draw_line(img, (0, 2), (2, 0), 1)\nflood_fill(img, (2, 1), 8)", "0018 0188 1888"),
    ("draw_line(img, (0, 0), (2, 2), 1)\nflood_fill(img, (2, 1), 8)", "1000 8100 8810"),
    ("draw_rectangle(img, (1, 1), (2, 2), 6)", "0000 0660 0660"),
    ("draw_rectangle(img, (2, 2), (1, 1), 6)", "0000 0660 0660"),
    ("draw_rectangle(img, (-9, 3), (1, 99), 6)", "0006 0006 0000"),
    ("draw_vertical_line(img, 1, 2)\nflood_fill(img, (0, 3), 8)", "0288 0288 0288"),
    ("flood_fill(img, (9, 9), 8)", "0000 0000 0000"),
    ("flood_fill(img, (0, 0), 0)", "0000 0000 0000"),
    ("img = create_img((2, 3), 4)", "444 444"),
    ("img[0, 1] = 3\nimg[:, 2] = 5\nimg[2] = 6", "0350 0050 6666"),
    ("img[1:3, 2:] = 8\nother = img.copy()\nother[0, 0] = 9\nimg[0, 0] = other[1, 2]", "8000 0088 0088"),
    ("height, width = img.shape\nfor y in range(height):\n    img[y, width - 1] = height", "0003 0003 0003"),
]


@pytest.mark.parametrize(("body", "expected"), DRAWINGS)
def test_the_functions_draw(sandbox, body, expected):
    assert drawn(sandbox, body).grid == picture(expected)


@pytest.mark.parametrize("body", [body for body, _ in DRAWINGS])
def test_they_are_the_same_outside_of_the_sandbox(sandbox, body):
    """The sandbox's interpreter is another one than Python."""
    img = functions.Img(empty(3, 4))
    names = {**vars(functions), "img": img}
    exec(body, names)  # our own lines, of the list above
    assert names["img"].rows == drawn(sandbox, body).grid


@pytest.mark.parametrize(
    ("line", "pixels"),
    [
        ("(0, 0), (0, 10**12)", 4),
        ("(0, 0), (-(10**9), -(10**9))", 1),
        ("(1, 3), (1, -2)", 4),
        ("(-1, -1), (9, 9)", 3),
    ],
)
def test_a_line_out_of_the_picture_ends(sandbox, line, pixels):
    outcome = drawn(sandbox, f"draw_line(img, {line}, 1)")
    assert sum(map(sum, outcome.grid)) == pixels


@pytest.mark.parametrize("body", ["draw_horizontal_line(img, 3, 1)", "draw_vertical_line(img, -1, 1)"])
def test_a_row_or_column_that_is_not_there_is_an_error(sandbox, body):
    outcome = drawn(sandbox, body)
    assert outcome.error == "runtime"
    assert outcome.message.startswith("IndexError: ")


# Hostile programs --------------------------------------------------------------------------------------------------

HOSTILE = {
    # name: (code, kind of failure)
    "syntax": ("def task(img:\n    return img", "parse"),
    "empty": ("", "no_function"),
    "prose": ("Sure! Here is the function.", "parse"),
    "another name": ("def draw(img):\n    return img", "no_function"),
    "a number": ("task = 3", "no_function"),
    "too long": ("#" * (LONGEST_CODE + 1), "parse"),
    "deep brackets": ("x = " + "(" * 5000 + ")" * 5000, "parse"),
    "endless loop": ("def task(img):\n    while True:\n        pass", "timeout"),
    "endless outside": ("while True:\n    pass", "timeout"),
    "endless where the host asks": (
        "def type(x):\n    while True:\n        pass\ndef task(img):\n    return img",
        "timeout",
    ),
    "swallows the limit": (
        "def task(img):\n    while True:\n        try:\n            while True:\n                pass\n"
        "        except BaseException:\n            pass",
        "timeout",
    ),
    "memory": ("def task(img):\n    a = [0]\n    while True:\n        a = a + a", "memory"),
    "long text": ("def task(img):\n    return 'a' * 10**9", "memory"),
    "large number": ("def task(img):\n    return 10**10**8", "memory"),
    "recursion": ("def task(img):\n    return task(img)", "runtime"),
    "prints": ("def task(img):\n    while True:\n        print('x' * 1000)", "memory"),
    "os": ("import os\ndef task(img):\n    os.system('touch /tmp/hostile')\n    return img", "runtime"),
    "files": ("def task(img):\n    return open('/etc/passwd').read()", "runtime"),
    "subclasses": ("def task(img):\n    return ().__class__.__bases__[0].__subclasses__()", "runtime"),
    "import": ("import numpy as np\ndef task(img):\n    return np.zeros((2, 2))", "runtime"),
    "eval": ("def task(img):\n    return eval('1')", "bad_output"),
    "returns nothing": ("def task(img):\n    pass", "bad_output"),
    "text": ("def task(img):\n    return 'abc'", "bad_output"),
    "ragged": ("def task(img):\n    return [[1], [1, 2]]", "bad_output"),
    "no rows": ("def task(img):\n    return []", "bad_output"),
    "too large": ("def task(img):\n    return [[0] * 31]", "bad_output"),
    "color 10": ("def task(img):\n    return [[10]]", "bad_output"),
    "negative": ("def task(img):\n    return [[-1]]", "bad_output"),
    "nan": ("def task(img):\n    return [[float('nan')]]", "bad_output"),
    "truth": ("def task(img):\n    return [[True]]", "bad_output"),
    "long number": ("def task(img):\n    return [[10**5000]]", "bad_output"),
    "long number inside": ("def task(img):\n    return [[[-(10**5000)]]]", "bad_output"),
    "a set of pictures": ("def task(img):\n    return {img}", "bad_output"),
    "a picture as key": ("def task(img):\n    return {(img,): 1}", "bad_output"),
    "shared over and over": (
        "def task(img):\n    a = [1]\n    for _ in range(40):\n        a = [a, a]\n    return a",
        "bad_output",
    ),
    "itself": ("def task(img):\n    return task", "bad_output"),
    "two arguments": ("def task(img, other):\n    return img", "runtime"),
    "raises": ("def task(img):\n    raise ValueError('no')", "runtime"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs(sandbox, name):
    code, kind = HOSTILE[name]
    started = time.perf_counter()
    outcome = sandbox.run_all([code], empty(2, 2))[0]
    assert (outcome.grid, outcome.error) == (None, kind), outcome
    assert time.perf_counter() - started < 10
    assert "\n" not in outcome.message


@pytest.mark.parametrize("last", ["{Img([[1]])}", "{Img([[1]]): 1}", "frozenset([Img([[1]])])"])
def test_the_last_value_of_a_program_is_nobodys(sandbox, last):
    """No host can build it, and it was a traceback in the middle of a training."""
    (outcome,) = sandbox.run_all([f"def task(img):\n    return img\n{last}\n"], empty(2, 3))
    assert outcome.grid == empty(2, 3)


def test_a_program_writes_nothing_on_the_terminal(sandbox, capfd):
    """Not even where the host asks of what type its function is."""
    code = "def type(x):\n    print('error: a line of the trainer')\ndef task(img):\n    return img"
    sandbox.run_all([code], empty(2, 2))
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("feeds_before", range(4))
def test_a_worker_that_dies_under_a_program_is_not_its_failure(feeds_before, monkeypatch):
    """Ctrl-C reaches all processes of a terminal's foreground, the workers among them."""
    box, tried = Sandbox(1), []
    original = sandbox_module._drawn

    class Interrupted:
        def __init__(self, session):
            self.session, self.feeds = session, 0

        def feed_run(self, *arguments, **options):
            if self.feeds == feeds_before:
                for worker in psutil.Process().children():
                    if "monty" in worker.name():
                        worker.kill()
            self.feeds += 1
            return self.session.feed_run(*arguments, **options)

    def drawn(session, code, given):
        tried.append(code)
        return original(Interrupted(session) if len(tried) == 1 else session, code, given)

    monkeypatch.setattr(sandbox_module, "_drawn", drawn)
    try:
        outcome = box.run_all(["def task(img):\n    img[0, 0] = 3\n    return img"], empty(1, 1))[0]
    finally:
        box.close()
    assert (outcome.grid, len(tried)) == ([[3]], 2)


def test_sleep_costs_nothing(sandbox):
    started = time.perf_counter()
    assert drawn(sandbox, "import time\ntime.sleep(1000)").grid == empty(3, 4)
    assert time.perf_counter() - started < 10


def test_a_program_sees_nothing_of_the_one_before(sandbox):
    sandbox.run_all(["left = 5\ndef task(img):\n    img[0, 0] = 1\n    return img"], empty(1, 1))
    outcome = sandbox.run_all(["def task(img):\n    img[0, 0] = left\n    return img"], empty(1, 1))[0]
    assert outcome.error == "runtime"


def test_chance_and_time_are_the_same_for_all(sandbox):
    imports = "import random\nfrom datetime import datetime\n"
    body = f"{imports}img[0, 0] = random.randint(0, 9)\nimg[0, 1] = datetime.now().second % 10"
    first = drawn(sandbox, body).grid
    assert first is not None
    assert first == drawn(sandbox, body).grid


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(workers):
    box, one = Sandbox(workers), Sandbox(1)
    codes = [random_program(f"1 {i}")[0] for i in range(20)] + [
        code for code, kind in HOSTILE.values() if kind != "timeout"
    ]
    try:
        outcomes = box.run_all(codes, empty(6, 6))
        assert outcomes == [one.run_all([code], empty(6, 6))[0] for code in codes]
    finally:
        box.close()
        one.close()


def test_what_is_given_stays_as_it_was(sandbox):
    given = empty(2, 2)
    sandbox.run_all(["def task(img):\n    img[0, 0] = 1\n    return img"], given)
    assert given == empty(2, 2)


def test_no_worker_outlives_its_process():
    """Killed outright: nothing is left that could clean up."""
    code = (
        "import os, signal, subprocess, sys\nsys.path.insert(0, '.')\nfrom tasks.drawing.sandbox import Sandbox\n"
        "sandbox = Sandbox(1)\nsandbox.run_all(['def task(img):\\n    return img'], [[0]])\n"
        "options = ['ps', '--ppid', str(os.getpid()), '-o', 'pid=,comm=']\n"
        "print(subprocess.run(options, capture_output=True, text=True).stdout)\n"
        "sys.stdout.flush()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    workers = [line.split()[0] for line in found.stdout.splitlines() if "monty" in line]
    assert workers, found
    for _ in range(50):
        alive = [
            pid
            for pid in workers
            if subprocess.run(["ps", "-p", pid], capture_output=True, check=False).returncode == 0
        ]
        if not alive:
            return
        time.sleep(0.1)
    raise AssertionError(f"still running: {alive}")


def test_without_the_package_a_line_names_the_file(monkeypatch):
    monkeypatch.setattr("tasks.drawing.sandbox.monty", None)
    with pytest.raises(InputError, match=r"pydantic-monty is missing, .*; pip install -r requirements-drawing\.txt"):
        Sandbox()


# Targets, words, programs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sides", "row"),
    [
        ("9-vertical-lines", (9, 9), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("2-vertical-lines", (2, 2), [1, 2]),
        ("4-squares", (4, 4), [1, 1, 3, 3]),
        ("12-squares", (6, 8), [1, 1, 4, 4, 7, 7, 1, 1]),
        ("16-squares", (8, 8), [1, 1, 5, 5, 9, 9, 4, 4]),
        ("20-squares", (10, 8), [1, 1, 6, 6, 2, 2, 7, 7]),
        ("25-squares", (10, 10), [1, 1, 6, 6, 2, 2, 7, 7, 3, 3]),
        ("1-squares", (2, 2), [1, 1]),
        ("36-squares", (12, 12), [1, 1, 7, 7, 4, 4, 1, 1, 7, 7, 4, 4]),
    ],
)
def test_targets_by_name(name, sides, row):
    target = read_target(name)
    assert (len(target.wanted), len(target.wanted[0])) == sides
    assert target.wanted[0] == target.wanted[1] == row
    assert target.given == empty(*sides)


def test_colors_of_squares_leave_out_the_background():
    assert sorted({color for row in squares(25) for color in row}) == list(range(1, 10))
    assert vertical_lines(4)[3] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "name",
    ["10-vertical-lines", "0-vertical-lines", "5-squares", "256-squares", "lines", "٣-vertical-lines", "a" * 999],
)
def test_unknown_targets(name):
    with pytest.raises(InputError, match=rf"^--target {name}: expected N-vertical-lines \(N 1 to 9\), N-squares"):
        read_target(name)


BAD_FILES = [
    ("12\n\n \n1x\n", r"line 4: '1x', expected digits 0 to 9"),
    ("12\n1٣\n", r"line 2: .*, expected digits 0 to 9"),
    ("12\n123\n", "rows of several lengths"),
    ("", "list, expected rows of colors"),
    ("1" * 31, "1 rows of 31, expected 1 to 30"),
    ("1\n" * 31, "31 rows of 1, expected 1 to 30"),
    ("00\n00\n", "is empty, as the picture to start from is"),
]


@pytest.mark.parametrize(("content", "words"), BAD_FILES)
def test_bad_target_files(tmp_path, content, words):
    file = tmp_path / "target.txt"
    file.write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        read_target(str(file))
    assert "\n" not in str(caught.value)


def test_a_target_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(InputError, match=r"^--target .*picture.png: cannot be read \(.*\); expected lines of digits"):
        read_target(str(tmp_path / "picture.png"))


def test_a_target_from_a_file(tmp_path):
    (tmp_path / "flag.txt").write_text("1 2 3\n\n123\n")
    target = read_target(str(tmp_path / "flag.txt"))
    assert (target.name, target.wanted) == ("flag", [[1, 2, 3], [1, 2, 3]])


def test_the_prompt():
    (message,) = messages(empty(2, 3), [[1, 2, 3], [4, 5, 6]], with_signatures=False)
    shown = "Input 2x3 of 0, Output 2x3, row 0 123, row 1 456, column 0 14, column 1 25, column 2 36"
    assert message["content"].splitlines()[1:] == shown.split(", ")
    (message,) = messages(empty(2, 3), empty(2, 3), with_signatures=True)
    shown = [line for line in message["content"].splitlines() if line.startswith(("draw_", "create_", "flood_"))]
    assert sorted(shown) == sorted(re.findall(r"^def (.*):$", FUNCTIONS, re.MULTILINE))
    assert picture_text([[7]]) == "1x1 of 7"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        (reply("def task(img):\n    return img\n"), "def task(img):\n    return img\n"),
        ("def task(img): pass", "def task(img): pass"),
        ("Sure!\n```py\ndef task(img): pass\n```\nDone. ```def other(): pass```", "def task(img): pass\n"),
        ("I write `def task(img):` now.\n```python\ndef task(img): pass\n```", "def task(img): pass\n"),
        ("It shows\n```\n12\n12\n```\nso\n```python\ndef task(img): pass\n```", "def task(img): pass\n"),
        ("Look:\n```\n12\n```", "12\n"),
        ("``` python\ndef task(img): pass\n```", "def task(img): pass\n"),
        ("````python\ndef task(img): pass\n````", "def task(img): pass\n"),
        ("```python3 \ndef task(img): pass\n```", "def task(img): pass\n"),
        ("```def task(img): pass```", "def task(img): pass"),
        ("```\ndef helper(): pass\n```\nthen\n```\ndef task(img): pass\n```", "def task(img): pass\n"),
        ("```\n```", ""),
        ("", ""),
    ],
)
def test_the_code_of_a_completion(completion, code):
    assert code_of(completion) == code


CLEANED = [
    ("x = 4\ndraw_pixel(img, (0, 0), x)\ny = 2", "x = 4\n    draw_pixel(img, (0, 0), x)\n    return img"),
    ("draw_pixel(img, (0, 0), 3)\ndraw_pixel(img, (0, 0), 4)", "draw_pixel(img, (0, 0), 4)\n    return img"),
    (
        "draw_vertical_line(img, 0, 1)\ndraw_vertical_line(img, 1, 2)",
        "draw_vertical_line(img, 0, 1)\n    draw_vertical_line(img, 1, 2)\n    return img",
    ),
    (
        "if True:\n    draw_pixel(img, (0, 0), 3)\nfor i in range(3):\n    pass",
        "if True:\n        draw_pixel(img, (0, 0), 3)\n    return img",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), CLEANED)
def test_statements_that_change_nothing_are_removed(sandbox, body, expected):
    def draws(code):
        return sandbox.run_all([code], empty(3, 3))[0].grid

    code = "\n    ".join(["def task(img):", *body.splitlines(), "return img"]) + "\n"
    found = cleaned(code, draws)
    assert found == f"def task(img):\n    {expected}\n"
    assert draws(found) == draws(code)


def test_cleaning_ends(sandbox, monkeypatch):
    """A program of many slow statements would hold up a training for an hour."""
    monkeypatch.setattr("tasks.drawing.programs.LONGEST_CLEANING_S", 0.0)
    runs = []
    code = "def task(img):\n    x = 1\n    y = 2\n    return img\n"
    assert cleaned(code, lambda other: runs.append(other) or [[0]]) == code
    assert len(runs) == 2


def test_a_program_that_cannot_be_written_out_again_stays_as_it_is(sandbox):
    code = f"def task(img):\n    return img{'.copy()' * 400}\n"
    assert cleaned(code, lambda other: sandbox.run_all([other], empty(2, 2))[0].grid) == code


@pytest.mark.parametrize(
    ("grid", "share"),
    [([[1, 2], [3, 4]], 1.0), ([[1, 0], [3, 0]], 0.5), ([[1, 2]], 0.0), (None, 0.0), (empty(2, 3), 0.0)],
)
def test_the_share_of_equal_pixels(grid, share):
    assert share_of_equal_pixels(grid, [[1, 2], [3, 4]]) == share


# The task ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_random_drawings_are_true(sandbox, seed):
    drawings = RandomDrawings(sandbox, seed, show_functions=False)
    prompts = set()
    for prompt, (text,) in itertools.islice(drawings, 100):
        assert drawings.is_solved(prompt, text)
        assert not drawings.is_solved(prompt, "def task(img):\n    return img\n")
        prompts.add(prompt[0]["content"])
    assert len(prompts) > 80
    assert drawings[3] == RandomDrawings(sandbox, seed, show_functions=False)[3]
    assert drawings[3] != RandomDrawings(sandbox, seed + 1, show_functions=False)[3]


@pytest.mark.parametrize("seed", range(3))
def test_a_plain_program_draws_its_picture(sandbox, seed):
    draw = random.Random(seed)
    wanted = [[draw.choice((0, 0, 1, 2)) for _ in range(5)] for _ in range(4)]
    (outcome,) = sandbox.run_all([plain_program(wanted)], empty(4, 5))
    assert outcome.grid == wanted


def test_random_rectangles_lie_apart():
    for number in range(300):
        code, _ = random_program(f"0 {number} 0")
        corners = re.findall(r"draw_rectangle\(img, \((\d), (\d)\), \((\d), (\d)\)", code)
        cells = [
            (row, column)
            for top, left, bottom, right in (map(int, found) for found in corners)
            for row in range(top, bottom + 1)
            for column in range(left, right + 1)
        ]
        assert len(cells) == len(set(cells))


def test_the_reward_and_what_it_logs(sandbox, tmp_path):
    reward = PixelReward(read_target("2-vertical-lines"), sandbox, tmp_path / "found.jsonl")
    texts = [
        reply("def task(img):\n    draw_vertical_line(img, 0, 1)\n    return img\n"),
        "no program",
        reply("def task(img):\n    while True:\n        pass\n"),
        reply("def task(img):\n    draw_vertical_line(img, 0, 1)\n    draw_vertical_line(img, 1, 2)\n    return img\n"),
    ]
    logged = {}
    state = type("State", (), {"global_step": 5})
    assert reward(texts, trainer_state=state, log_metric=logged.__setitem__) == [0.5, 0.0, 0.0, 1.0]
    assert (logged["drawing/best"], logged["drawing/generations"]) == (1.0, 4)
    assert logged["drawing/solved"] == logged["drawing/parse"] == logged["drawing/timeout"] == 0.25
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert (found["share"], found["generation"]) == (1.0, 4)
    assert "draw_vertical_line(img, 1, 2)" in found["code"]


def test_the_verdict_says_what_the_training_found(sandbox, tmp_path):
    """The first perfect program ends a run, and the greedy one need not be perfect by then."""
    file = tmp_path / "found.jsonl"
    judge = DrawingJudge(read_target("2-vertical-lines"), Reader(None), sandbox, False, {}, file)
    answers = {"texts": [reply("def task(img):\n    draw_vertical_line(img, 0, 1)\n    return img\n")]}
    now = "0 of 1 programs draw it, the best has 50% of the pixels"
    for share, words in ((None, "not solved"), (0.5, "not solved"), (1.0, "solved by program 7 of the training")):
        if share is not None:
            file.write_text(json.dumps({"share": share, "generation": 7, "code": ""}))
        between = "; now" if share == 1.0 else ":"
        assert judge.judgement(answers).verdict == f"2-vertical-lines {words}{between} {now}"


def test_programs_are_counted_over_processes_and_other_batches(sandbox, tmp_path, monkeypatch):
    """Two processes have two programs each now; the run was begun with batches of three."""
    target, logged = read_target("2-vertical-lines"), {}
    counted = [{"drawing/generations": 3}, {}, {"drawing/generations": 9}, {}]  # not in a step without new programs
    lines = [{"step": step, "seconds": 1.0} | found for step, found in enumerate(counted, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reward = PixelReward(target, sandbox, tmp_path / "found.jsonl")
    own = [reply("def task(img):\n    return img\n"), "no program"]
    perfect = reward.score([reply("def task(img):\n    return [[1, 2], [1, 2]]\n"), own[0]])
    monkeypatch.setattr("tasks.drawing.task.processes.gathered", lambda scores: [*scores, perfect])
    state = type("State", (), {"global_step": 6})
    assert reward(own, trainer_state=state, log_metric=logged.__setitem__) == [0.0, 0.0]
    assert logged["drawing/generations"] == 9 + 4
    assert (logged["drawing/best"], logged["drawing/solved"], logged["drawing/parse"]) == (1.0, 0.25, 0.25)
    assert json.loads((tmp_path / "found.jsonl").read_text())["generation"] == 9 + 3
    reward(own, trainer_state=state, log_metric=logged.__setitem__)
    assert logged["drawing/generations"] == 9 + 4 + 4
    (tmp_path / "found.jsonl").unlink()
    monkeypatch.setattr("tasks.drawing.task.processes.is_main", lambda: False)
    reward(own, trainer_state=state)
    assert not (tmp_path / "found.jsonl").exists()


def test_what_an_older_version_found_is_read(sandbox, tmp_path):
    program = {"share": 0.5, "generation": 7, "code": "def task(img):\n    return img\n"}
    (tmp_path / "found.json").write_text(json.dumps([program]))
    assert read_found(tmp_path / "found.jsonl") == [program]
    code = "def task(img):\n    return [[1, 2]]\n"
    keep_best(tmp_path / "found.jsonl", scored([code], sandbox.run_all([code], [[0, 0]]), [[1, 2]]), 8)
    assert [found["generation"] for found in read_found(tmp_path / "found.jsonl")] == [7, 9]


def test_the_best_program_is_kept(sandbox, tmp_path):
    file, wanted = tmp_path / "found.jsonl", [[1, 2]]

    def draw(grid, before):
        code = f"def task(img):\n    return {grid}\n"
        keep_best(file, scored([code], sandbox.run_all([code], [[0, 0]]), wanted), before)
        return [(found["share"], found["generation"]) for found in read_found(file)]

    grids = ([[1, 0]], [[0, 0]], [[0, 2]], [[1, 2]], [[1, 2]])
    assert [draw(grid, number) for number, grid in enumerate(grids)][-1] == [(0.5, 1), (1.0, 4)]
    # Resumed from before the fourth, which another one stands for now: the first is the best again
    assert draw([[0, 0]], 2) == [(0.5, 1)]
    assert draw([[1, 2]], 4) == [(0.5, 1), (1.0, 5)]


@pytest.mark.parametrize(
    "text",
    ["{}", "[{}]", '{"share": 1', *(
        f'{{"share": {share}, "generation": {generation}, "code": ""}}'
        for share, generation in (('"x"', 1), ("NaN", 1), (7, 1), (0.5, -3), (0.5, "1.5"))
    )],
)  # fmt: skip
def test_a_damaged_record_is_one_line(sandbox, tmp_path, text):
    (tmp_path / "found.jsonl").write_text(text)
    reward = PixelReward(read_target("2-vertical-lines"), sandbox, tmp_path / "found.jsonl")
    with pytest.raises(InputError, match=r"found\.jsonl: is no record of programs \(.*\); delete it") as caught:
        reward(["no program"], trainer_state=type("State", (), {"global_step": 5}))
    assert "\n" not in str(caught.value)


OPTIONS = (
    "--task", "drawing", "--report_to", "none", "--dtype", "float32", "--max_steps", 2, "--save_steps", 1,
    "--evaluate_steps", 1, "--per_device_train_batch_size", 4, "--num_generations", 4, "--warm_start_steps", 2,
    "--warm_start_prompts", 2, "--samples_per_state", 2, "--max_completion_length", 16, "--check", "warn",
)  # fmt: skip


def test_a_run_on_a_tiny_model(answering_llama, tmp_path, capfd):
    shared = tmp_path / "warm_start"
    options = [*OPTIONS, "--model_name_or_path", answering_llama, "--warm_start_folder", shared]
    argv = [*map(str, options), "--output_dir", str(tmp_path / "one"), "--target", "2-vertical-lines"]
    assert train_script.main(argv) == 0
    printed = capfd.readouterr().out
    assert "2-vertical-lines, 2 x 2: share of equal pixels" in printed
    assert "verdict: 2-vertical-lines not solved" in printed
    assert [line["step"] for line in metrics_of(tmp_path / "one")] == [1, 2]
    assert metrics_of(tmp_path / "one")[0]["drawing/best"] == 0.0
    content = json.loads((tmp_path / "one/evaluation.json").read_text())
    assert content["baselines"] == {"nothing drawn": 0.0, "one color (1)": 0.5}
    assert (tmp_path / "one/policy.png").stat().st_size > 1000
    listed = json.loads((tmp_path / "one/checkpoint-2/COMPLETE").read_text())
    assert {"../found.jsonl", "../metrics.jsonl"} <= set(listed), "what a resumed run needs"
    # A second run of the seed stands on the same warm start
    argv[argv.index("--output_dir") + 1] = str(tmp_path / "two")
    assert train_script.main([*argv[:-1], "4-squares"]) == 0
    assert f"warm start: taken from {shared / 'seed-0'}" in capfd.readouterr().out
    # Another one's is refused
    argv[argv.index("--output_dir") + 1] = str(tmp_path / "three")
    with pytest.raises(InputError, match=r"seed-0: was made with another model, .*choose another --warm_start_folder"):
        train_script.main([*argv, "--warm_start_steps", "3"])
    # And it is judged again
    assert evaluate_policy.main(["--policies", str(tmp_path / "one"), "constant:1"]) == 0
    printed = capfd.readouterr().out
    assert "2-vertical-lines, 2 x 2" in printed
    assert re.search(r"constant:1 +50%", printed)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    with pytest.raises(InputError, match=r"one, .*two: these runs were judged on different target; judge them one by"):
        evaluate_policy.main(["--policies", one, two])


def test_a_run_without_a_warm_start_takes_none_that_is_shared(answering_llama, tmp_path, capfd):
    argv = [*map(str, OPTIONS), "--model_name_or_path", str(answering_llama), "--warm_start_folder", str(tmp_path)]
    assert train_script.main([*argv, "--output_dir", str(tmp_path / "one")]) == 0
    assert (tmp_path / "seed-0" / "adapter_config.json").exists()
    assert train_script.main([*argv, "--output_dir", str(tmp_path / "two"), "--warm_start", "never"]) == 0
    printed = capfd.readouterr().out
    assert "warm start: taken from" not in printed
    assert "(warm start 0 steps" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--logging_strategy", "no"], "--logging_strategy no: drawing counts its programs in every step's line"),
        (["--reward_weights", "2"], r"--reward_weights \[2.0\]: drawing has one reward; leave its weight out"),
        (
            ["--gradient_accumulation_steps", "8", "--steps_per_generation", "4"],
            r"--gradient_accumulation_steps 8: drawing counts one batch .*; at most 4 here",
        ),
    ],
)
def test_what_drawing_does_not_count_is_refused(more, message, answering_llama, tmp_path):
    options = [*OPTIONS, "--model_name_or_path", answering_llama, "--target", "2-vertical-lines"]
    with pytest.raises(InputError, match=f"^{message}"):
        train_script.main([*map(str, options), *more, "--output_dir", str(tmp_path / "out")])


def test_best_ends_a_run(answering_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(PixelReward, "__call__", lambda _self, completions, **_: [0.0, 1.0, 0.0, 0.0])
    argv = [*map(str, OPTIONS), "--model_name_or_path", str(answering_llama), "--max_steps", "5"]
    assert train_script.main([*argv, "--output_dir", str(tmp_path / "one"), "--warm_start", "never"]) == 0
    assert len(metrics_of(tmp_path / "one")) == 1
    more = ("--warm_start", "never", "--stop_when", "mean", "--max_steps", "2")
    assert train_script.main([*argv, "--output_dir", str(tmp_path / "two"), *more]) == 0
    assert len(metrics_of(tmp_path / "two")) == 2


def test_random_programs_draw_in_order_of_the_columns_and_then_of_the_rows():
    for number in range(300):
        code, _ = random_program(f"0 {number} 0")
        lines = re.findall(r"_line\(img, (\d), \d\)", code)
        points = [point[::-1] for point in re.findall(r"(?:pixel|rectangle)\(img, \((\d), (\d)\)", code)]
        assert (lines, points) == (sorted(lines), sorted(points))


def test_what_the_training_found_is_told_and_drawn(sandbox, tmp_path, monkeypatch):
    file, shown, draw = tmp_path / "found.jsonl", {}, drawing_judge.grids_figure
    monkeypatch.setattr(
        drawing_judge, "grids_figure", lambda pictures, title: shown.update(pictures) or draw(pictures, title)
    )
    perfect = "def task(img):\n    return [[1, 2], [1, 2]]\n"
    file.write_text(json.dumps({"share": 1.0, "generation": 1234, "code": perfect}))
    judge = DrawingJudge(read_target("2-vertical-lines"), None, sandbox, False, {}, file)
    half = {"texts": [reply("def task(img):\n    draw_vertical_line(img, 0, 1)\n    return img\n"), "no program"]}
    assert judge.judgement(half).metrics == {"best": 0.5, "mean": 0.25, "solved": 0.0, "failed": 0.5}
    comparison = judge.compare({"greedy": half})
    assert "While training the first perfect program was number 1,234." in comparison.text
    comparison.save(tmp_path / "out")
    assert shown == {"target": [[1, 2], [1, 2]], "found, 100%": [[1, 2], [1, 2]], "greedy, 50%": [[1, 0], [1, 0]]}
