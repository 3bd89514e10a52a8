"""What is right, which questions are read, and on which side of the split they stand."""

import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

from llm_policy.errors import InputError
from llm_policy.run_files import ROOT
from tasks.questions.data import Question, asked, held_out, matches, normalised, read_questions, with_options
from tasks.riddles import riddle

# What is right -------------------------------------------------------------------------------------------------

SAME = [
    ("A map.", "map"), ("the piano", "piano"), ("maps", "map"), ("MAP", "map"), ("  a  map ", "map"),
    ("boxes", "box"), ("cherries", "cherry"), ("a spider's web", "spiders web"), ("glasses", "glass"),
    ("ice-cream", "ice cream"), ("Éclair!", "éclair"),
]  # fmt: skip
OTHER = [("a", ""), ("the", ""), ("bus", "bu"), ("glass", "glas"), ("news", "new york"), ("maple", "map"), ("an", "a")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_texts_that_are_the_same(one, other):
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_texts_that_are_not(one, other):
    assert normalised(one) != normalised(other)


@pytest.mark.parametrize("file", ["riddles", "kinds"])
def test_every_bundled_answer_equals_its_plural(file):
    for question in read_questions(f"data/samples/{file}.jsonl", Path(), riddle, 0):
        word = question.answers[0].split()[-1]
        if word.endswith("s"):
            continue  # no singular
        ending = "es" if word.endswith(("x", "ch", "sh", "o")) else "s"
        plural = f"{word[:-1]}ies" if re.search("[^aeiou]y$", word) else word + ending
        assert normalised(plural) == normalised(word), word


def test_a_sign_and_a_point_belong_to_a_number():
    assert normalised("4") != normalised("-4") == normalised("−4")
    assert normalised("3.5") != normalised("3 5")
    assert normalised("It is 4.") == normalised("it is 4")
    assert normalised("(7)-3") == normalised("7 3")
    assert normalised(".5") == normalised("0.5") != normalised("5")
    assert normalised("-.5") == normalised("-0.5") != normalised("-5")
    assert normalised("No.5") == normalised("no 5")


@settings(derandomize=True)
@given(text=strategies.text())
def test_what_is_normalised_has_single_spaces(text):
    assert not re.search(r"^\s|\s$|\s\s", normalised(text))


def test_the_same_question_is_told_by_its_first_answer_and_its_signs(tmp_path):
    def questions_of(*rows):
        file = tmp_path / "mine.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_questions(str(file), Path(), riddle, 0)

    one = {"question": "It has cities.", "answer": "map", "aliases": ["chart"]}
    assert len(questions_of(one, one | {"aliases": []})) == 1
    with pytest.raises(InputError, match="asks again what had the answer 'map', now 'globe'"):
        questions_of(one, one | {"answer": "globe"})
    added = {"question": "What is 7 + 3?", "answer": "10"}
    assert len(questions_of(added, {"question": "What is 7 - 3?", "answer": "4"})) == 2


def test_other_scripts_keep_their_marks():
    assert not matches("\u0915\u093e\u0932", ["\u0915\u0940\u0932"])  # two words that differ in a vowel sign
    assert matches("Schlüssel", [unicodedata.normalize("NFD", "Schlüssel")])


def test_half_a_character_is_named(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "Half \\ud83d?", "answer": "map"}\n')
    with pytest.raises(InputError, match=r"line 1: column question: .*, holds half a character"):
        read_questions(str(file), Path(), riddle, 0)


def test_a_letter_and_its_words_are_one_option():
    question = Question("Which?", ("B", "a long stick"), ("a rope", "a long stick"), by_letter=True)
    for answer, option in (
        ("B", 1),
        ("b.", 1),
        ("(A)", 0),
        ("long sticks", 1),
        ("C", None),
        ("A or B", None),
        ("", None),
    ):
        assert question.chosen(answer) == option
        assert question.is_right(answer) == (option == 1)
    assert question.chosen(None) is None
    assert not question.is_right(None)


def test_options_are_shuffled_with_their_letter():
    places = set()
    for seed in range(20):
        question = with_options("Which?", ["right", "wrong", "worse"], 0, random.Random(seed))
        assert sorted(question.options) == ["right", "worse", "wrong"]
        assert question.options["ABC".index(question.answers[0])] == question.answers[1] == "right"
        places.add(question.answers[0])
    assert places == set("ABC")


# Data ------------------------------------------------------------------------------------------------------------


def write(tmp_path, name: str, text: str | bytes) -> str:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(tmp_path / name)


GOOD = '{"question": "I have keys.", "answer": "piano"}\n'
BAD = {
    # what is wrong: file, what stands behind its name in the error
    "no row": ("a.jsonl", "", "holds no question"),
    "only a header": ("a.csv", "question,answer\n", "holds no question"),
    "a column is missing": ("a.jsonl", '{"question": "?"}', "line 1: column answer is missing; found question"),
    "another header": ("a.csv", "riddle,answer\nx,y\n", "line 2: column question is missing; found riddle, answer"),
    "a row is short": ("a.csv", "question,answer\nx\n", "line 2: column answer: None, expected a text"),
    "an empty answer": ("a.jsonl", GOOD + '{"question": "?", "answer": " "}', "line 2: column answer: ' ', expected"),
    "no word": ("a.jsonl", '{"question": "?", "answer": "!"}', "line 1: column answer: ('!',), expected words"),
    "a number": ("a.jsonl", '{"question": 3, "answer": "x"}', "line 1: column question: 3, expected a text"),
    "no object": ("a.jsonl", "[1]", "line 1: '[1]', expected an object in braces"),
    "too many fields": (
        "a.csv", "question,answer\nI have keys, and locks,piano\n", "line 2: has more fields than the first line has",
    ),
    "one option": ("a.jsonl", '{"question": "?", "answer": "x", "options": ["x"]}', "column options: 1 of them"),
    "nine options": (
        "a.jsonl", json.dumps({"question": "?", "answer": "a", "options": list("abcdefghi")}), "column options: 9 of",
    ),
    "no JSON": ("a.jsonl", GOOD + "{", "line 2: cannot be read ("),
    "not UTF-8": ("a.jsonl", b'{"question": "\xff"}', "is not UTF-8"),
    "another answer": ("a.jsonl", GOOD + GOOD.replace("piano", "lock"), "line 2: asks again what had"),
    "aliases of another kind": ("a.jsonl", '{"question": "?", "answer": "x", "aliases": [1]}', "column aliases: [1]"),
    "no right option": (
        "a.jsonl", '{"question": "?", "answer": "x", "options": ["y", "z"]}', "column options: y, z: expected 'x' once",
    ),
    "the right option twice": (
        "a.jsonl", '{"question": "?", "answer": "x", "options": ["x", "X"]}', "column options: x, X: expected 'x' once",
    ),
    "nested": ("a.jsonl", "[" * 100_000, "cannot be read ("),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_line(case, tmp_path):
    name, text, message = BAD[case]
    file = write(tmp_path, name, text)
    with pytest.raises(InputError) as caught:
        read_questions(file, tmp_path, riddle, 0)
    assert message in str(caught.value)
    assert file in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["none.jsonl", "/dev/zero.csv"])
def test_a_file_that_is_not_there(name, tmp_path):
    with pytest.raises(InputError, match=f"^dataset {name}: no such file"):
        read_questions(name, tmp_path, riddle, 0)


def test_what_no_hub_gives(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^dataset owner/none: neither a .jsonl or .csv file nor a dataset that"):
        read_questions("owner/none", tmp_path, riddle, 0)


def test_rows_of_the_hub_that_cannot_be_asked_are_left_out(monkeypatch, tmp_path, capsys):
    rows = [
        {"question": "I have keys.", "answer": ""},
        {"question": "I have keys.", "answer": "piano"},
        {"question": "I have keys.", "answer": "map"},
        {"question": "I have cities.", "answer": "map"},
    ]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows)
    assert [question.answers for question in read_questions("owner/some", tmp_path, riddle, 0)] == [
        ("piano",),
        ("map",),
    ]
    said = capsys.readouterr().out
    assert said.startswith("owner/some: 2 rows are left out, the first is owner/some: row 0: column answer: ''")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows[:1])
    with pytest.raises(InputError, match=r"^owner/some: row 0: column answer: ''"):
        read_questions("owner/some", tmp_path, riddle, 0)


def test_a_hub_dataset_by_configuration_and_split(monkeypatch, tmp_path):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return [{"question": "I have keys.", "answer": "piano"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for name in ("owner/name", "owner/name/part:test"):
        assert read_questions(name, tmp_path, riddle, 0) == [Question("I have keys.", ("piano",))]
    assert asked == [(("owner/name",), {"split": "train"}), (("owner/name", "part"), {"split": "test"})]


def test_csv_and_jsonl_hold_the_same(tmp_path, capsys):
    row = {"question": "Flat\nand wide, I show the way.", "answer": "map", "aliases": ["atlas", "chart"]}
    csv_file = write(
        tmp_path, "a.csv", '﻿question,answer,aliases,note\r\n"Flat\nand wide, I show the way.",map,atlas|chart,x\r\n'
    )
    jsonl_file = write(tmp_path, "a.jsonl", json.dumps(row) + "\n\n" + json.dumps(row | {"answer": "Maps"}))
    expected = [Question(row["question"], ("map", "atlas", "chart"))]
    assert read_questions(csv_file, tmp_path, riddle, 0) == expected
    assert read_questions(jsonl_file, tmp_path, riddle, 0) == [Question(row["question"], ("map", "atlas", "chart"))]
    assert "1 questions are there twice and count once" in capsys.readouterr().out


def test_unusual_line_ends_are_no_line_ends(tmp_path):
    text = "Flat\u2028and\x0bwide"
    file = write(tmp_path, "a.csv", f'question,answer\n"{text}",map\n')
    assert read_questions(file, tmp_path, riddle, 0) == [Question(text, ("map",))]


# Split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_stands_on_both_sides(seed):
    words = [f"word{i % 12}" for i in range(40)]
    questions = [Question(f"{i}?", (word, f"alias{i % 7}")) for i, word in enumerate(words)]
    questions += [Question(f"alone {i}?", (f"alone{i}",)) for i in range(40)]
    trained, judged = held_out(questions, 0.25, seed)
    assert sorted(trained + judged, key=lambda q: q.text) == sorted(questions, key=lambda q: q.text)
    sides = [{normalised(answer) for q in side for answer in q.answers} for side in (trained, judged)]
    assert not sides[0] & sides[1]


def test_seeds_split_otherwise_and_the_same_seed_the_same():
    questions = [Question(f"{i}?", (f"answer{i}",)) for i in range(40)]
    assert held_out(questions, 0.25, 1) == held_out(questions, 0.25, 1) != held_out(questions, 0.25, 2)
    assert [len(side) for side in held_out(questions, 0.25, 1)] == [30, 10]


def test_the_order_of_a_split_does_not_hang_on_how_strings_are_hashed():
    """One riddle joins two groups, whose numbers collide in a small set of integers."""
    program = (
        "from tasks.questions.data import Question, held_out\n"
        "words = ['key', 'tree', 'cup', 'hat', 'map', 'pen', 'bed', 'jar', 'lock']\n"
        "questions = [Question(f'{w}?', (w,)) for w in words] + [Question('all?', ('door', 'key', 'lock'))]\n"
        "print([q.text for side in held_out(questions, 0.25, 0) for q in side])"
    )
    said = {
        subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "2", "3", "4")
    }
    assert len(said) == 1


def test_a_goal_with_its_letter_stands_on_one_side():
    questions = [Question(f"Goal {i % 10}", ("A", "right"), ("right", f"wrong {i}"), by_letter=True) for i in range(40)]
    questions += [Question(f"goal  {i % 10}", ("B", "right"), ("no", "right"), by_letter=True) for i in range(10)]
    trained, judged = held_out(questions, 0.25, 0)
    assert not {asked(q.text) for q in trained} & {asked(q.text) for q in judged}


def test_few_answers_make_a_split_that_says_so(capsys):
    held_out([Question(f"{i}?", ("yes" if i % 2 else "no",)) for i in range(100)], 0.25, 0)
    assert "--test_share 0.25: 50 of 100 are held out" in capsys.readouterr().out


def test_letters_do_not_tie_questions_together():
    questions = [Question(f"{i}?", ("A", "yes"), ("yes", "no"), by_letter=True) for i in range(8)]
    assert [len(side) for side in held_out(questions, 0.25, 0)] == [6, 2]


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_split_needs_both_sides(share):
    questions = [Question("one?", ("x",)), Question("two?", ("x",))]
    with pytest.raises(InputError, match="expected some of both"):
        held_out(questions, share, 0)


@pytest.mark.parametrize(
    ("options", "answer", "option"),
    [
        (("fly", "robin"), "A: robin", None),  # no article, and the words of another option
        (("fly", "robin"), "A: fly", 0),
        (("fly", "robin"), "B. a robin", 1),
        (("B", "A"), "A", 0),  # the letter, not the words
        (("+", "-"), "", None),
        (("+", "5"), "", None),
        (("Cut the box", "Cut the boxes"), "cut the box", 0),  # as it is shown
        (("Cut the box", "Cut the boxes"), "cut a box", None),
        *[(("fly", "robin"), said, None) for said in ("A - robin", "A, robin", "A; robin", "A (robin)", "A\nrobin")],
        *[(("fly", "robin"), said, 1) for said in ("B - robin", "B, robin", "B (robin)", "B\nrobin", "**B** robin")],
        (("A.M.", "E. coli"), "E. coli", 1),
        (("A.M.", "E. coli"), "A.M.", 0),
        (("Cut the box", "Cut the boxes"), "b", 1),
        (("-3", "3"), "A: -3", 0),  # its sign is its own
        (("-3", "3"), "B: -3", None),
        (("50%", "50"), "A: 50%", 0),
        (("Co", "CO"), "B: CO", 1),
    ],
)
def test_a_letter_and_words_name_one_option(options, answer, option):
    for right, letter in enumerate("AB"):
        question = Question("Which?", (letter, options[right]), options, by_letter=True)
        assert question.chosen(answer) == option
        assert question.is_right(answer) == (option == right)
