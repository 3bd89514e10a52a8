"""Riddles: the bundled ones, their options, the command on a tiny model, and its judgement again."""

import importlib.util
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_train_script import metrics_of

import evaluate_policy
import train_script
from llm_policy.errors import InputError
from llm_policy.models import load_tokenizer
from tasks.questions.data import normalised
from tasks.questions.judge import QuestionJudge
from tasks.riddles import PYRIDDLE, WORDS, Arguments, make_judge, make_task, read_riddles, riddle, riddles

TASK = ("--task", "riddles", "--config", "configs/riddles_laptop.yaml", "--report_to", "none")


def small_run(model, output_dir, *more) -> list[str]:
    options = {
        "model_name_or_path": model, "output_dir": output_dir, "dtype": "float32", "max_steps": 2, "save_steps": 1,
        "evaluate_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4, "warm_start": "always",
        "warm_start_steps": 2, "warm_start_prompts": 2, "samples_per_state": 2, "max_completion_length": 64,
    }  # fmt: skip
    return [*TASK, *(str(text) for name, value in options.items() for text in (f"--{name}", value)), *map(str, more)]


def asked(**options) -> Arguments:
    return Arguments(**({"split_seed": 0} | options))


def test_bundled_riddles():
    trained, judged = riddles(asked())
    assert len(trained) + len(judged) >= 60
    assert len(judged) == pytest.approx(0.25 * (len(trained) + len(judged)), abs=1)
    for question in trained + judged:
        said = normalised(question.text).split()
        assert not any(normalised(answer) in said for answer in question.answers), question


@pytest.mark.parametrize("seed", [0, 1])
def test_options_are_answers_of_the_same_side(seed):
    trained, judged = riddles(asked(options=4, split_seed=seed))
    sides = [{normalised(option) for q in side for option in q.options} for side in (trained, judged)]
    assert not sides[0] & sides[1]
    for question in trained + judged:
        assert len({*map(normalised, question.options)}) == 4
        assert [question.is_right(option) for option in question.options].count(True) == 1
    places = [question.chosen(question.answers[0]) for question in trained]
    assert all(places.count(place) > len(places) / 8 for place in range(4))


def test_letters():
    words, letters = (riddles(asked(options=3, by_letter=by_letter))[0] for by_letter in (False, True))
    for one, other in zip(words, letters, strict=True):
        assert other.options == one.options
        assert other.legal == ("A", "B", "C")
        assert other.options["ABC".index(other.answers[0])] == one.answers[0]
    assert WORDS.messages(letters[0])[1]["content"].splitlines()[-3:] == [
        f"{letter}: {option}" for letter, option in zip("ABC", letters[0].options, strict=True)
    ]


def test_what_the_model_reads():
    question = riddle({"question": "I have keys.", "answer": "piano"}, random.Random(0))
    system, user = WORDS.messages(question)
    assert system["content"].endswith(
        "Reply <think>thought</think><answer>ANSWER</answer>, ANSWER is one or two words."
    )
    assert user["content"] == "I have keys."
    _, user = WORDS.messages(replace(question, options=("map", "piano")))
    assert user["content"] == "I have keys.\nOptions: map, piano"


def test_an_alias_among_the_options_is_the_answer():
    record = {"question": "x", "answer": "map", "aliases": ["globe"], "options": ["sea", "globe"]}
    question = riddle(record, random.Random(0))
    assert question.answers == ("globe", "map", "globe")
    assert question.options[question.chosen(question.answers[0])] == "globe"


def test_options_of_a_file_stand_in_an_order_of_the_split_seed(tmp_path):
    record = {"question": "x", "answer": "map", "options": ["map", "sea", "fox", "ink"]}
    rows = [json.dumps(record | {"question": f"{number}?"}) for number in range(40)]
    (tmp_path / "first.jsonl").write_text("\n".join(rows))

    def read(seed: int) -> list[tuple[str, ...]]:
        return [question.options for question in read_riddles(str(tmp_path / "first.jsonl"), seed)]

    assert read(1) == read(1) != read(2)
    assert {options.index("map") for options in read(1)} == {0, 1, 2, 3}
    assert {tuple(sorted(options)) for options in read(1)} == {("fox", "ink", "map", "sea")}


def test_a_share_beside_a_test_file_would_be_read_by_nobody():
    with pytest.raises(InputError, match=r"--test_share 0.5: nothing of --dataset is held out beside --test_dataset"):
        make_task(asked(test_dataset="mine.jsonl", test_share=0.5), SimpleNamespace(seed=0), None)


def test_riddles_with_an_answer_of_the_test_file_are_left_out(tmp_path, capsys):
    for name, lines in {"own": [("1?", "yes"), ("2?", "no")], "test": [("3?", "Yes")]}.items():
        rows = [json.dumps({"question": question, "answer": answer}) for question, answer in lines]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    files = {"dataset": str(tmp_path / "own.jsonl"), "test_dataset": str(tmp_path / "test.jsonl")}
    trained, judged = riddles(asked(**files))
    assert [question.text for question in trained + judged] == ["2?", "3?"]
    said = "1 questions are left out of training: --test_dataset holds their text or their answer\n"
    assert capsys.readouterr().out == said


BAD = [
    (asked(by_letter=True), "--by_letter true: a riddle has no options"),
    (
        asked(dataset=PYRIDDLE),
        "--dataset pyriddle: the package is missing; pip install -r requirements-riddles.txt",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_cannot_be_asked(arguments, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"^{message}"):
        riddles(arguments)


def test_more_options_than_answers(tmp_path):
    lines = [json.dumps({"question": f"{i}?", "answer": f"word{i}"}) for i in range(8)]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"^--options 8: only 5 other answers to choose from; take fewer"):
        riddles(asked(dataset=str(tmp_path / "few.jsonl"), options=8))


def test_the_package_with_386_riddles():
    pytest.importorskip(PYRIDDLE, reason="requirements-riddles.txt")
    trained, judged = riddles(asked(dataset=PYRIDDLE, options=4))
    assert len(trained) + len(judged) == 386


# The command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--options", 4), ("--options", 4, "--by_letter", "true")], ids=str)
def test_it_trains_and_is_judged_again(more, answering_llama, tmp_path, capsys):
    out = tmp_path / "out"
    assert train_script.main(small_run(answering_llama, out, *more)) == 0
    (one, two) = metrics_of(out)
    for name in ("question_reward", "correct_reward", "short_reward", "soft_format_reward"):
        assert f"rewards/{name}/mean" in two
    assert one["reward"] == pytest.approx(
        sum(one[f"rewards/{name}/mean"] for name in ("correct_reward", "short_reward", "soft_format_reward"))
    )
    assert {"policy/accuracy", "policy/readable", "policy/answer_words"} <= set(two)
    assert ("policy/answers/D" in two) == bool(more)
    assert (out / "policy.png").stat().st_size > 1000
    content = json.loads((out / "evaluation.json").read_text())
    names = [row["policy"] for row in content["policies"]]
    assert names == ["untrained, greedy", "warm start, greedy", "trained, greedy", "trained, sampled"]

    judged = ["--policies", str(out), "constant:piano", "--samples_per_state", "0"]
    assert evaluate_policy.main([*judged, "--output_dir", str(tmp_path / "judged")]) == 0
    again = json.loads((tmp_path / "judged/evaluation.json").read_text())
    assert again["policies"][0]["right"] == content["policies"][2]["right"]
    assert [q["question"] for q in again["questions"]] == [q["question"] for q in content["questions"]]
    assert "held-out questions of samples" in capsys.readouterr().out


def test_a_run_is_judged_on_the_questions_that_it_was_asked(answering_llama, tmp_path):
    """Of its own file, split and order of options, whatever the seed of the judgement; two splits in no one table."""
    kinds = ("--dataset", "data/samples/kinds.jsonl", "--samples_per_state", 0, "--warm_start", "never")
    outs = [tmp_path / name for name in ("one", "two")]
    for seed, out in enumerate(outs, start=1):
        assert train_script.main(small_run(answering_llama, out, *kinds, "--max_steps", 1, "--seed", seed)) == 0
    judged = ["--samples_per_state", "0", "--output_dir", str(tmp_path / "judged"), "--policies", "constant:dog"]
    assert evaluate_policy.main([*judged, str(outs[0])]) == 0
    own, again = (json.loads((folder / "evaluation.json").read_text()) for folder in (outs[0], tmp_path / "judged"))
    asked, before = ([(q["question"], q["options"]) for q in content["questions"]] for content in (again, own))
    assert asked == before
    assert again["baselines"] == own["baselines"]
    with pytest.raises(InputError, match=r"one, .*two: these runs were judged on different questions; judge them one"):
        evaluate_policy.main([*judged, *map(str, outs)])


def test_two_runs_are_asked_the_same_of_another_file(answering_llama, tmp_path, monkeypatch):
    """In one order of options, and all of it, whatever each of them held out."""
    outs = [tmp_path / name for name in ("one", "two")]
    for seed, out in enumerate(outs, start=1):
        kinds = ("--dataset", "data/samples/kinds.jsonl", "--by_letter", "true", "--samples_per_state", 0)
        more = ("--warm_start", "never", "--max_steps", 1, "--seed", seed, "--test_questions", 3 * seed)
        assert train_script.main(small_run(answering_llama, out, *kinds, *more)) == 0
    seen = []
    answers = QuestionJudge.answers

    def spying(judge, *arguments):
        seen.append(judge.questions)
        return answers(judge, *arguments)

    monkeypatch.setattr(QuestionJudge, "answers", spying)
    judged = ["--samples_per_state", "0", "--test_dataset", "data/samples/kinds.jsonl", "--policies"]
    assert evaluate_policy.main([*judged, *map(str, outs), "--output_dir", str(tmp_path / "judged")]) == 0
    one, two = seen
    assert one == two
    asked = json.loads((tmp_path / "judged/evaluation.json").read_text())["questions"]
    assert [q["options"] for q in asked] == [list(question.options) for question in one]
    assert len(one) > 6


def test_a_reply_is_one_of_its_own_question(answering_llama, tmp_path):
    """Of a file in which some questions have options, and others any word for an answer."""
    rows = [{"question": f"What is {i}?", "answer": f"word{i}"} for i in range(12)]
    rows += [
        {"question": f"Who flies, {i}?", "answer": f"robin {i}", "options": [f"robin {i}", f"oak {i}"]}
        for i in range(12)
    ]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    training, tokenizer = SimpleNamespace(seed=0, max_completion_length=64), load_tokenizer(answering_llama)
    task = make_task(asked(dataset=str(tmp_path / "mixed.jsonl")), training, tokenizer)
    assert all(task.is_reply(prompt, text) for prompt, replies in task.lessons for text in replies)
    free, chosen = ([p for p, _ in task.lessons if word in p[-1]["content"]] for word in ("What", "Who"))
    assert task.is_reply(free[0], WORDS.reply("anything"))
    assert not task.is_reply(chosen[0], WORDS.reply("anything"))
    assert not task.is_reply(free[0], "robin")


def test_a_supervised_objective_needs_letters(answering_llama, tmp_path):
    with pytest.raises(InputError, match="--objective natural: --task riddles knows no reward for every legal answer"):
        train_script.main(small_run(answering_llama, tmp_path / "out", "--objective", "natural"))
    more = ("--options", 2, "--by_letter", "true", "--objective", "natural", "--samples_per_state", 0)
    assert train_script.main(small_run(answering_llama, tmp_path / "out", *more)) == 0


def test_other_questions_than_those_that_were_judged(tmp_path):
    lines = [json.dumps({"question": f"{i}?", "answer": f"word{i}"}) for i in range(8)]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines))
    settings = make_judge({"dataset": str(file)}, None, 0, 0).settings
    assert make_judge(settings, None, 0, 0).settings == settings
    file.write_text("\n".join(line.replace("word", "other") for line in lines))
    with pytest.raises(InputError, match="has other questions than when the run was judged; put the old file back"):
        make_judge(settings, None, 0, 0)
    with pytest.raises(InputError, match=r"^run.json: test_share 'x': Input should be a valid number"):
        make_judge(settings | {"test_share": "x"}, None, 0, 0)


def test_judging_on_another_file(answering_llama, tmp_path, capsys):
    out = tmp_path / "out"
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "I have keys.", "answer": "piano"}))
    assert train_script.main(small_run(answering_llama, out, "--test_questions", 3)) == 0
    assert "3 held-out questions of samples" in capsys.readouterr().out
    judged = ["--policies", str(out), "constant:piano", "--samples_per_state", "0"]
    assert evaluate_policy.main([*judged, "--test_dataset", str(tmp_path / "mine.jsonl")]) == 0
    assert "constant:piano" in (printed := capsys.readouterr().out)
    assert "1 questions of" in printed  # not held out: another run may have been trained on it


def test_the_warm_start_teaches_no_label(answering_llama):
    training, tokenizer = SimpleNamespace(seed=0, max_completion_length=64), load_tokenizer(answering_llama)
    task = make_task(asked(options=3, by_letter=True), training, tokenizer)
    assert {tuple(replies) for _, replies in task.lessons} == {tuple(map(WORDS.reply, "ABC"))}
    task = make_task(asked(), training, tokenizer)
    pairs = list(zip(task.rows, task.lessons, strict=True))
    assert all(len(set(replies)) == 4 for _, (_, replies) in pairs)
    assert sum(WORDS.reply(row["answers"][0]) in replies for row, (_, replies) in pairs) < len(pairs) / 3


def test_the_lines_of_the_reward_are_chance_and_the_most(answering_llama):
    training, tokenizer = SimpleNamespace(seed=0, max_completion_length=64), load_tokenizer(answering_llama)
    task = make_task(asked(options=4), training, tokenizer)
    assert task.reward_lines([1, 0, 0, 0]) == {"reward/random option": 1.5, "reward/all right": 3.0}
    assert task.reward_lines([0, 1, 0, 2]) == {"reward/random option": 1.5, "reward/all right": 3.0}


def test_a_run_that_was_judged_on_few_questions_is_judged_on_those_again():
    found = make_judge({"test_questions": 3}, None, 0, 0)
    assert len(found.questions) == len(make_judge(found.settings, None, 0, 0).questions) == 3
