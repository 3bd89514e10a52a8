"""Science questions: what is read, which letter a reply comes to, and, with lm-eval, the whole table."""

import json
import re
from types import SimpleNamespace

import pytest
from test_completions import reply
from test_riddles import small_run
from tiny_models import build_tiny_model

import evaluate_policy
import train_script
from llm_policy.errors import InputError
from tasks.arc import REGIMES, ArcJudge, make_judge, said_letter, science_question
from tasks.questions.data import Question, read_questions

ROW = {
    "question": "What is ice?",
    "choices": {"text": ["water", "air", "iron", "wood"], "label": ["A", "B", "C", "D"]},
    "answerKey": "A",
}


def read(tmp_path, *rows) -> list[Question]:
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_questions(str(tmp_path / "mine.jsonl"), tmp_path, science_question, 0)


def choices(text, label) -> dict:
    return {"choices": {"text": text, "label": label}}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("labels", ["ABCDE", "12345"])
def test_letters_and_numbers(labels, count, tmp_path):
    texts = [f"option {i}" for i in range(count)]
    row = ROW | choices(texts, list(labels[:count])) | {"answerKey": labels[count - 1]}
    (question,) = read(tmp_path, row)
    assert question.answers == ("ABCDE"[count - 1], texts[-1])
    assert question.options == tuple(texts)


BAD = [
    ({"answerKey": "E"}, "column answerKey: 'E', expected one of A, B, C, D"),
    ({"answerKey": 1}, "column answerKey: 1, expected a text"),
    ({"choices": "water"}, "column choices: expected {'text': [...], 'label': [...]}, two lists of one length"),
    ({"choices": {"text": ["a"]}}, "column choices: expected {'text': [...], 'label': [...]}, two lists"),
    (choices(["a", "b"], ["A"]), "column choices: expected {'text': [...], 'label': [...]}, two lists"),
    (choices(["a"], ["A"]), "column choices: 1 options, expected 2 to 8"),
    (choices(["a", " "], ["A", "B"]), "column choices: 2 options, expected 2 to 8, all of them texts"),
    (choices(["a", "b \ud83d"], ["A", "B"]), "column choices: 'b \\ud83d', holds half a character"),
    (choices(["a", "b"], ["B", "A"]), "column choices: labels ['B', 'A'], expected A, B, C, ... or 1, 2, 3, ..."),
    (choices(["a", "b"], ["0", "1"]), "column choices: labels ['0', '1'], expected A, B, C"),
    ({"question": ""}, "column question: '', expected a text"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_rows(change, message, tmp_path):
    with pytest.raises(InputError) as caught:
        read(tmp_path, ROW, ROW | {"question": "Another?"} | change)
    assert str(caught.value).startswith(f"{tmp_path}/mine.jsonl: line 2: {message}")


QUESTION = Question("?", ("B", "a cell"), ("a star", "a cell", "a rock", "a wave"), by_letter=True)
SAID = [
    # regime, reply -> letter
    ("likelihood", [(-4.0, False), (-3.0, False), (-9.0, False), (-5.0, True)], "B"),
    ("letter", [" B"], "B"), ("letter", [" B."], "B"), ("letter", [" b \n"], "B"), ("letter", [" B because"], None),
    ("letter", ["**B**"], "B"), ("letter", ["(B)"], "B"), ("letter", ["[B],"], "B"),
    ("letter", [" a cell"], None), ("letter", [""], None), ("letter", [" E"], None),
    ("answer tags", [reply("x", "B")], "B"), ("answer tags", [reply("x", "The cell.")], "B"),
    ("answer tags", ["<answer>A</answer><answer>D</answer>"], "D"), ("answer tags", ["The answer is B."], None),
    ("answer tags", [reply("x", "A or B")], None),
]  # fmt: skip


@pytest.mark.parametrize(("regime", "replies", "letter"), SAID)
def test_letters_of_replies(regime, replies, letter):
    assert said_letter(regime, QUESTION, replies) == letter


def test_bundled_questions():
    questions = make_judge({}, None, 0, 0).questions
    assert len(questions) >= 60
    letters = [question.answers[0] for question in questions]
    assert {letter: letters.count(letter) for letter in "ABCD"} == dict.fromkeys("ABCD", len(letters) // 4)
    longest = [max(q.options, key=len) == q.answers[1] for q in questions]
    assert sum(longest) / len(longest) < 0.4


def test_it_is_judged_and_not_trained():
    with pytest.raises(InputError, match=r"^--task arc: is judged and not trained; `python evaluate_policy.py"):
        train_script.main(["--task", "arc"])
    with pytest.raises(InputError, match=r"^--policies runs/ppo: --task arc judges language models; leave it out"):
        evaluate_policy.shared_settings({"runs/ppo": {"algorithm": "ppo"}}, SimpleNamespace(task="arc"))
    with pytest.raises(InputError, match=r"^--policies 'random': --task arc judges models"):
        make_judge({}, None, 0, 0).baseline_answers("random")


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"^--task arc: the package lm-eval is missing .*requirements-arc.txt"):
        ArcJudge([QUESTION], None, {}).answers(None)


@pytest.mark.parametrize("architecture", ["llama", "gemma"])  # with a system turn in the template, and without
def test_the_whole_table(architecture, taught, tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="requirements-arc.txt")
    model = taught(architecture)
    run = tmp_path / "riddles"
    assert train_script.main(small_run(model, run, "--evaluate_steps", 0, "--samples_per_state", 0)) == 0
    rows = [ROW | {"question": f"{i}?", "answerKey": "ABCD"[i % 4]} for i in range(4)]
    rows.append(ROW | {"question": "Three?"} | choices(["a", "b", "c"], ["1", "2", "3"]) | {"answerKey": "2"})
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    arguments = ["--task", "arc", "--policies", str(model), str(run), "--test_dataset", str(tmp_path / "mine.jsonl")]
    assert evaluate_policy.main([*arguments, "--dtype", "float32", "--output_dir", str(out)]) == 0
    content = json.loads((out / "evaluation.json").read_text())
    assert len(content["policies"]) == 2
    for answers in content["policies"].values():
        found = {(r["regime"], r["system_prompt"]): r for r in answers["results"]}
        assert set(found) == {(regime, prompt) for regime in REGIMES for prompt in ("with", "without")}
        assert {key[0]: r["questions"] for key, r in found.items()} == {"likelihood": 5, "letter": 4, "answer tags": 5}
        for result in found.values():
            readable = sum(result["letters"].values()) / result["questions"]
            assert result["unreadable"] == pytest.approx(1 - readable)
        assert found["likelihood", "with"]["unreadable"] == 0
    printed = capsys.readouterr().out
    assert "compare within one only" in printed
    rows = re.findall(rf"({'|'.join(REGIMES)}) +(with|without) +\d", printed)
    assert sorted(rows) == sorted(
        (regime, prompt) for regime in REGIMES for prompt in ("with", "without") for _ in "12"
    )


def test_likelihoods_are_those_of_the_options(tmp_path):
    """Beside a sum over the option's tokens by hand."""
    pytest.importorskip("lm_eval", reason="requirements-arc.txt")
    import torch

    from llm_policy.chat import Reader
    from llm_policy.models import load_model, load_tokenizer

    folder = build_tiny_model(tmp_path / "model")
    model, tokenizer = load_model(folder, "float32"), load_tokenizer(folder)
    questions = [
        Question(f"question {i}", ("A", "x"), ("water", "some air", "iron", "wood"), by_letter=True) for i in range(3)
    ]
    results = ArcJudge(questions, Reader(tokenizer), {}).answers(model)["results"]
    letters = []
    for question in questions:
        chat = [{"role": "user", "content": f"Question: {question.text}\nAnswer:"}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        sums = []
        for option in question.options:
            start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            ids = torch.tensor([tokenizer(prompt + option, add_special_tokens=False)["input_ids"]])
            with torch.no_grad():
                log_p = model(ids).logits[0].log_softmax(-1)
            sums.append(sum(log_p[t - 1, ids[0, t]].item() for t in range(start, ids.shape[1])))
        letters.append("ABCD"[sums.index(max(sums))])
    assert results[0]["letters"] == {letter: letters.count(letter) for letter in sorted(set(letters))}


def test_the_hubs_questions_are_the_test_split_of_the_challenge(monkeypatch):
    loaded = []

    def load_dataset(*arguments, **options):
        loaded.append((arguments, options))
        return [ROW]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert make_judge({"test_dataset": "allenai/ai2_arc"}, None, 0, 0).settings == {"test_dataset": "allenai/ai2_arc"}
    assert loaded == [(("allenai/ai2_arc", "ARC-Challenge"), {"split": "test"})]


def test_an_option_of_one_character_is_no_letter():
    of_numbers = Question("?", ("B", "4"), ("2", "4", "6", "8"), by_letter=True)
    assert said_letter("letter", of_numbers, [" 4."]) is None
    assert said_letter("letter", of_numbers, [" B."]) == "B"


def test_accuracy_has_its_standard_error_and_stands_beside_chance():
    of_three = Question("?", ("C", "c"), ("a", "b", "c"), by_letter=True)
    asks = ArcJudge([QUESTION, QUESTION, QUESTION, of_three], None, {"test_dataset": "mine"})
    replies = (" B", " B.", " A", " because")
    samples = [{"doc": {"number": number}, "resps": [[text]]} for number, text in enumerate(replies)]
    found = asks._result("letter", "with", samples)
    assert (found["accuracy"], found["unreadable"], found["letters"]) == (0.5, 0.25, {"A": 1, "B": 2})
    assert found["right"] == [True, True, False, False]
    assert found["standard_error"] == pytest.approx((0.5 * 0.5 / 3) ** 0.5)
    text = asks.compare({"m, greedy": {"results": [found]}}).text
    for row in (r"random option .* 27\.1%", r"always B .* 75\.0%", r"m .* 50\.0% ± 28\.9%"):
        assert re.search(row, text), row
