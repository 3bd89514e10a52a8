"""Two ways to a goal: what is read, what is refused, and that a letter alone earns what a coin does."""

import json

import pytest
from test_riddles import small_run

import train_script
from llm_policy.errors import InputError
from tasks.piqa import WORDS, Arguments, physical_question, physical_questions
from tasks.questions.data import read_questions
from tasks.questions.judge import QuestionJudge

ROW = {"goal": "Cut bread.", "sol1": "Use a knife.", "sol2": "Use a spoon.", "label": 0}


def read(tmp_path, *rows):
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_questions(str(tmp_path / "mine.jsonl"), tmp_path, physical_question, 0)


@pytest.mark.parametrize(("label", "way"), [(0, "Use a knife."), (1, "Use a spoon."), ("0", "Use a knife.")])
def test_a_label_is_a_way(label, way, tmp_path):
    (question,) = read(tmp_path, ROW | {"label": label})
    assert question.answers[1] == way
    assert question.options["AB".index(question.answers[0])] == way
    system, user = WORDS.messages(question)
    assert system["content"].endswith("ANSWER is A or B.")
    assert user["content"] == f"Cut bread.\nA: {question.options[0]}\nB: {question.options[1]}"


BAD = [
    ({"label": 2}, "column label: 2, expected 0 or 1"),
    ({"label": True}, "column label: True, expected 0 or 1"),
    ({"label": None}, "column label: None, expected 0 or 1"),
    ({"label": "A"}, "column label: 'A', expected 0 or 1"),
    ({"label": 0.5}, "column label: 0.5, expected 0 or 1"),
    ({"sol2": "Use a knife."}, "column sol2: the same as sol1"),
    ({"sol1": ""}, "column sol1: '', expected a text"),
    ({"goal": None}, "column goal: None, expected a text"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_rows(change, message, tmp_path):
    with pytest.raises(InputError) as caught:
        read(tmp_path, ROW, ROW | {"goal": "Another."} | change)
    assert str(caught.value).startswith(f"{tmp_path}/mine.jsonl: line 2: {message}")


def test_bundled_questions_do_not_give_themselves_away():
    trained, judged = physical_questions(Arguments(split_seed=0))
    everything = trained + judged
    assert len(everything) >= 60
    longer = [max(q.options, key=len) == q.answers[1] for q in everything if len(set(map(len, q.options))) == 2]
    assert 0.35 < sum(longer) / len(longer) < 0.65
    letters = [q.answers[0] for q in everything]
    assert 0.3 < letters.count("A") / len(letters) < 0.7
    other = physical_questions(Arguments(split_seed=1))
    assert {q.text for q in other[1]} != {q.text for q in judged}
    chance = QuestionJudge(judged, WORDS, None, {"dataset": "samples"}).baselines()
    assert chance["random option"] == 0.5


def test_nothing_is_left_to_train_on(answering_llama, tmp_path):
    flags = ("--task", "piqa", "--config", "configs/piqa_laptop.yaml", "--test_dataset", "samples")
    with pytest.raises(
        InputError, match=r"^--test_dataset samples: holds every question or answer of --dataset samples, so"
    ):
        train_script.main(small_run(answering_llama, tmp_path / "out", *flags))


@pytest.mark.parametrize("objective", ["grpo", "natural", "cloning"])
def test_it_trains(objective, answering_llama, tmp_path):
    flags = ("--task", "piqa", "--config", "configs/piqa_laptop.yaml", "--objective", objective)
    assert train_script.main(small_run(answering_llama, tmp_path / "out", *flags)) == 0
    names = {row["policy"] for row in json.loads((tmp_path / "out/evaluation.json").read_text())["policies"]}
    assert "trained, greedy" in names


def test_what_is_judged_is_not_trained_on_whatever_the_order_of_the_ways(tmp_path, capsys):
    """Ways are shuffled by the number of the row: the same question stands elsewhere in another file."""
    rows = [ROW | {"goal": f"Goal {n}."} for n in range(40)]
    for name, those in (("all", rows), ("half", rows[20:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, those)))
    files = {"dataset": str(tmp_path / "all.jsonl"), "test_dataset": str(tmp_path / "half.jsonl")}
    trained, judged = physical_questions(Arguments(**files, split_seed=0))
    assert {question.text for question in trained} == {row["goal"] for row in rows[:20]}
    assert len(judged) == 20
    assert capsys.readouterr().out.startswith("20 questions are left out of training: --test_dataset holds")
