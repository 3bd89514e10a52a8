"""What a judge of questions counts, beside chance, and how it says whether a change is one."""

import json

import pytest
from test_completions import reply

from llm_policy.errors import InputError
from llm_policy.grpo.stages import kept_answers
from llm_policy.run_files import checksum
from llm_policy.statistics import mcnemar_p, wilson_interval
from tasks.questions.data import Question
from tasks.questions.judge import QuestionJudge, changes
from tasks.riddles import WORDS

FREE = [Question("keys?", ("piano",)), Question("flat?", ("map", "atlas")), Question("flat again?", ("map",))]
CHOICE = [
    Question("one?", (letter, word), ("red", "green", "blue"), by_letter=True)
    for letter, word in (("A", "red"), ("C", "blue"), ("C", "blue"), ("B", "green"))
]


def judge(questions) -> QuestionJudge:
    return QuestionJudge(questions, WORDS, None, {"dataset": "mine"})


def said(*answers: str) -> dict:
    return {"texts": [reply("x", answer) for answer in answers]}


def test_greedy_answers_in_words():
    score = judge(FREE).score(said("the piano", "atlas", "a big globe"))
    assert score.right_P.tolist() == [1, 1, 0]
    assert score.accuracy == pytest.approx(2 / 3)
    assert score.words == pytest.approx((2 + 1 + 3) / 3)
    assert (score.readable, score.well_formed) == (1, 1)
    assert score.said == {"the piano": 1, "atlas": 1, "a big globe": 1}


def test_samples_of_one_question_are_no_further_questions():
    answers = {"texts": [reply("x", "piano")] * 2 + ["piano", ""] + [reply("x", "map"), "<answer>sea</answer>"]}
    score = judge(FREE).score(answers)
    assert score.right_P.tolist() == [1, 0, 0.5]
    assert score.interval == wilson_interval(1.5, 3)
    assert score.readable == pytest.approx(4 / 6)
    assert score.well_formed == pytest.approx(3 / 6)


def test_a_histogram_of_letters():
    found = judge(CHOICE).judgement(said("A", "c", "green", "red or blue"))
    assert found.metrics["accuracy"] == 0.5
    assert found.metrics["readable"] == 0.75
    assert [found.metrics[f"answers/{letter}"] for letter in "ABC"] == pytest.approx([1 / 3] * 3)
    assert found.verdict.startswith("2 of 4 held-out questions are right (50%, 95 % interval 15% to 85%)")
    assert not found.is_optimal
    assert judge(CHOICE).judgement(said("A", "C", "C", "B")).is_optimal


def test_kept_answers_to_other_questions_are_not_taken(tmp_path, monkeypatch):
    """results/run.py --share_untrained hands them over, and another seed may hold out others, as many."""
    file = tmp_path / "untrained.json"
    one = QuestionJudge(FREE, WORDS, None, {"held_out": "one"})
    other = QuestionJudge(FREE[::-1], WORDS, None, {"held_out": "other"})
    answers = {"one": said("piano", "map", "map"), "other": said("map", "map", "piano")}
    monkeypatch.setattr(QuestionJudge, "answers", lambda judge, _model: answers[judge.settings["held_out"]])
    assert kept_answers("untrained", None, one, file) == said("piano", "map", "map")
    assert kept_answers("untrained", None, other, file) == said("map", "map", "piano")
    monkeypatch.setattr(QuestionJudge, "answers", None)  # kept
    assert kept_answers("untrained", None, other, file) == said("map", "map", "piano")


def test_kept_answers_of_an_older_version_stay_as_they_are(tmp_path):
    """A checkpoint has them in its list."""
    file, one = tmp_path / "untrained.json", QuestionJudge(FREE, WORDS, None, {"held_out": "one"})
    kept = {"judge": checksum(one.settings), "answers": said("piano", "map", "map")}
    file.write_text(json.dumps(kept))
    assert kept_answers("untrained", None, one, file) == kept["answers"]
    assert json.loads(file.read_text()) == kept


def test_one_answer_to_everything_is_said():
    assert judge(CHOICE).judgement(said(*"CCCC")).verdict.startswith("one answer to all questions, C: 2 of 4")
    assert judge(FREE).judgement(said(*["map"] * 3)).verdict.startswith("one answer to all questions, map: 2 of 3")


def test_baselines_read_no_question():
    assert judge(CHOICE).baselines() == {"random option": pytest.approx(1 / 3), "always C": 0.5}
    assert judge(FREE).baselines() == {"best constant answer (map)": pytest.approx(2 / 3)}
    mixed = judge(CHOICE)
    assert mixed.score(mixed.baseline_answers("constant:C")).accuracy == 0.5
    random = mixed.score(mixed.baseline_answers("random"))
    assert random.readable == 1
    for name in ("expert", "constant:", "shortest-path"):
        with pytest.raises(InputError, match=r"expected a run folder, a model, constant:WORDS or, for options, random"):
            mixed.baseline_answers(name)
    with pytest.raises(InputError, match="for options, random"):
        judge(FREE).baseline_answers("random")


def test_table_and_files(tmp_path, capsys):
    answers_of = {"untrained, greedy": said("A", "A", "A", "A"), "trained, greedy": said("A", "C", "C", "B")}
    answers_of["trained, sampled"] = {"texts": said(*"AACCCCBB")["texts"]}
    comparison = judge(CHOICE).compare(answers_of)
    assert comparison.text.split() == capsys.readouterr().out.split()
    for shown in ("random option", "33.3%", "always C", "50.0%", "A 25%, B 25%, C 50%", "100.0%"):
        assert shown in comparison.text
    assert (
        "trained, greedy against untrained, greedy: 3 questions are right only after, 0 only before" in comparison.text
    )
    assert "sampled against" not in comparison.text
    comparison.save(tmp_path / "new")
    content = json.loads((tmp_path / "new/evaluation.json").read_text())
    assert [row["accuracy"] for row in content["policies"]] == [0.25, 1.0, 1.0]
    assert content["questions"][1]["completions"]["trained, greedy"] == reply("x", "C")
    assert (tmp_path / "new/policy.png").stat().st_size > 1000


CHANGES = [(0, 0, 1.0), (0, 5, 0.0625), (5, 0, 0.0625), (5, 5, 1.0), (2, 12, 0.01294), (1, 20, 2.098e-5)]


@pytest.mark.parametrize(("before", "after", "p"), CHANGES)
def test_mcnemar(before, after, p):
    """scipy.stats.binomtest(after, before + after).pvalue"""
    assert mcnemar_p(before, after) == pytest.approx(p, rel=1e-3)


def test_one_policy_alone_has_changed_nothing():
    assert changes({"only": judge(FREE).score(said("a", "b", "c"))}) == []


def test_the_best_constant_answer_counts_whatever_is_right():
    """An alias and a plural are right as well: "shoes" twice, "hole" once."""
    questions = [Question("A?", ("hole",)), Question("B?", ("boots", "shoes")), Question("C?", ("shoe",))]
    assert judge(questions).baselines() == {"best constant answer (shoes)": 2 / 3}
