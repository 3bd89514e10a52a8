"""Hindsight replay: what is taught, in which order, and train_hindsight.py on a tiny model."""

import itertools
import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_train_script import metrics_of
from tiny_policies import adapter_weights, add_random_adapter, random_policy, tokenizer_of

pytest.importorskip("pydantic_monty", reason="requirements-drawing.txt")

import train_hindsight
from llm_policy import hindsight
from llm_policy.chat import Reader
from llm_policy.errors import EXIT_INTERRUPTED, InputError
from llm_policy.grpo import stages, warm_start
from llm_policy.hindsight import Attempt, HindsightLearner, HindsightSettings
from llm_policy.interruption import Interruption
from tasks.drawing import task as drawing_task
from tasks.drawing.sandbox import ERRORS, code_of
from tasks.drawing.task import Arguments, make_task
from tasks.drawing.words import messages, reply

SETTINGS = HindsightSettings(
    samples=4, temperature=0.9, sure_samples=2, sure_temperature=0.1, learning_rate=0.01, batch_size=2
)
QUESTION = [{"role": "user", "content": "Which?"}]


def learner() -> HindsightLearner:
    model = add_random_adapter(random_policy("llama"), r=4)
    return HindsightLearner(model, Reader(tokenizer_of("llama"), 8), QUESTION, SETTINGS)


def attempt(outcome, reward, text="x") -> Attempt:
    return Attempt(reward, outcome, QUESTION, text)


def test_the_shortest_of_equals_and_the_furthest_first():
    taught = learner().lessons(
        [
            attempt("a", 0.9, "long"),
            attempt("b", 0.1, "x"),
            Attempt(0.0),
            attempt("a", 0.9, "y"),
            attempt("c", 0.5, "z"),
        ]
    )
    assert [(lesson.outcome, lesson.reply) for lesson in taught] == [("b", "x"), ("c", "z"), ("a", "y")]


def test_what_was_seen_is_not_taught_again():
    pupil = learner()
    assert len(pupil.lessons([attempt("a", 0.5)])) == 1
    assert [lesson.outcome for lesson in pupil.lessons([attempt("a", 0.5), attempt("b", 0.2)])] == ["b"]


def test_the_loss_falls_and_the_base_model_stays():
    pupil = learner()
    base = {name: p.clone() for name, p in pupil.model.named_parameters() if not p.requires_grad}
    before = adapter_weights(pupil.model)
    lessons = [attempt("a", 0.5, "yes"), attempt("b", 0.6, "no"), attempt("c", 0.7, "maybe")]
    losses = [pupil.learn(lessons) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    assert pupil.learn([]) is None
    assert all(torch.equal(p, base[name]) for name, p in pupil.model.named_parameters() if name in base)
    after = adapter_weights(pupil.model)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_samples_are_counted_and_some_are_sure():
    pupil = learner()
    torch.manual_seed(0)
    texts = pupil.sample()
    assert len(texts) == pupil.generations == 6
    pupil.learn([attempt("a", 0.5, "yes")])
    assert len(pupil.sample()) == 6
    assert pupil.generations == 12


def test_sure_samples_have_a_temperature_of_their_own(monkeypatch):
    seen, config = [], hindsight.sampling_config

    def spy(model, tokenizer, length, temperature):
        seen.append(temperature)
        return config(model, tokenizer, length, temperature)

    monkeypatch.setattr(hindsight, "sampling_config", spy)
    learner().sample()
    assert seen == [0.9, 0.1]


def test_a_learner_comes_back(tmp_path):
    one, other = learner(), learner()
    torch.manual_seed(0)
    one.sample()
    one.lessons([attempt("a", 0.5)])
    one.learn([attempt("a", 0.5, "yes")])
    one.epoch = 3
    one.save(tmp_path / "checkpoint-3", [], seconds=12.5)
    expected = one.sample(), one.learn([attempt("b", 0.5, "no")])
    assert other.restore(tmp_path / "checkpoint-3") == 12.5
    assert (other.epoch, other.generations, other.seen) == (3, 6, {"a"})
    assert (other.sample(), other.learn([attempt("b", 0.5, "no")])) == expected


def test_a_weight_that_is_no_number_ends_the_run(monkeypatch):
    pupil = learner()

    def no_number(model, *_):
        sum(p.sum() * torch.nan for p in model.parameters() if p.requires_grad).backward()
        return torch.tensor(torch.nan), torch.tensor(torch.nan)

    monkeypatch.setattr(hindsight, "add_gradient", no_number)
    with pytest.raises(InputError, match=r"epoch 0: the weight .* is no number .*Lower --learning_rate"):
        pupil.learn([attempt("a", 0.5)])


def test_programs_of_a_batch_are_taught_some_at_a_time(monkeypatch):
    """However many pass through the model together: memory is bounded, and what is learnt is the same."""
    lessons = [attempt(str(i), 0.5, "yes " * (1 + i)) for i in range(5)]
    passes = []
    pack_groups = warm_start.pack_groups

    def spying(prompts, *others, **options):
        passes.append(len(prompts))
        return pack_groups(prompts, *others, **options)

    monkeypatch.setattr(warm_start, "pack_groups", spying)

    def learnt(tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
        monkeypatch.setattr(warm_start, "TOKENS_PER_PASS", tokens)
        pupil = learner()
        passes.clear()
        loss = pupil.learn(lessons)
        return loss, {name: p for name, p in pupil.model.named_parameters() if p.requires_grad}

    loss, weights = learnt(10_000)
    assert passes == [3, 2, 2, 1]  # compared with plain rows, then batch by batch
    loss_in_parts, weights_in_parts = learnt(1)
    assert passes == [3, 1, 1, 1, 1, 1]
    assert loss_in_parts == pytest.approx(loss, rel=1e-3)
    for name, weight in weights.items():
        torch.testing.assert_close(weights_in_parts[name], weight, rtol=1e-2, atol=2e-4)


# On drawings -------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawing(tmp_path):
    def make(target, **options):
        script = train_hindsight.HindsightArguments(output_dir=str(tmp_path))
        return make_task(Arguments(target=target, **options), script, tokenizer_of("llama"))

    return make


def program(*calls) -> str:
    return "\n    ".join(["def task(img):", *calls, "return img"]) + "\n"


def test_what_was_drawn_becomes_the_task(drawing):
    task = drawing("2-vertical-lines")
    line = "draw_vertical_line(img, 1, 7)"
    texts = [reply(program("x = 3", line)), reply(program()), "nothing", reply(program("img[0, 0] = 1"))]
    attempts = task.attempts(texts, 0)
    assert [a.reward for a in attempts] == [0.0, 0.0, 0.0, 0.25]
    assert attempts[1].outcome is attempts[2].outcome is None, "an empty picture and a failure teach nothing"
    assert attempts[0].prompt == messages([[0, 0], [0, 0]], [[0, 7], [0, 7]], with_signatures=False)
    assert attempts[0].reply == reply(program(line))
    for found in (attempts[0], attempts[3]):
        ran = task.judge.sandbox.run_all([code_of(found.reply)], [[0, 0], [0, 0]])[0]
        assert ran.grid == json.loads(found.outcome)


@pytest.mark.parametrize("show_functions", [True, False])
def test_the_functions_are_shown_everywhere_or_nowhere(show_functions, drawing):
    task = drawing("2-vertical-lines", show_functions=show_functions)
    (attempt,) = task.attempts([reply(program("draw_pixel(img, (0, 0), 1)"))], 0)
    prompts = [task.judge.prompt, task.lessons[0][0], attempt.prompt]
    assert ["draw_line(img" in prompt[-1]["content"] for prompt in prompts] == [show_functions] * 3


def test_a_picture_is_learnt_when_all_programs_draw_it(drawing):
    judge, perfect = drawing("2-vertical-lines").judge, reply(program("return [[1, 2], [1, 2]]"))
    half = judge.judgement({"texts": [perfect, "no program"]})
    assert half.metrics == {"best": 1.0, "mean": 0.5, "solved": 0.5, "failed": 0.5}
    assert not half.is_optimal
    assert judge.judgement({"texts": [perfect] * 2}).is_optimal


def test_what_the_task_cannot_do_is_refused(drawing, tmp_path):
    script = train_hindsight.HindsightArguments(output_dir=str(tmp_path))
    script.logging_steps = 5
    with pytest.raises(InputError, match="--logging_steps 5"):
        make_task(Arguments(), script, tokenizer_of("llama"))
    with pytest.raises(InputError, match="wanted"):
        drawing_task.make_judge({"wanted": [[10]]}, None, 0, 0)


class Scripted(HindsightLearner):
    """Knows one function: draws each line that there is, later two at a time of those that were taught last."""

    def __init__(self, task) -> None:
        self.seen, self.epoch, self.generations, self.best = set(), 0, 0, 0.0
        self.lines = [f"draw_vertical_line(img, {x}, {color})" for x in range(2) for color in range(1, 10)]
        self.per_program = 1

    def sample(self):
        texts = [reply(program(*lines)) for lines in itertools.combinations(self.lines, self.per_program)]
        self.generations += len(texts)
        return texts

    def learn(self, lessons):
        self.lines = [lesson.reply.splitlines()[2].strip() for lesson in lessons[-2:]]
        self.per_program = 2
        return 0.0

    def save(self, *_):
        pass


def test_a_learner_that_knows_one_function_solves_two_lines_in_three_epochs(drawing, tmp_path):
    task = drawing("2-vertical-lines")
    script = train_hindsight.HindsightArguments(epochs=3, output_dir=str(tmp_path))
    stop = Interruption("the epoch")
    pupil = Scripted(task)
    train_hindsight.replay(pupil, task, script, tmp_path, None, stop, [])
    assert pupil.epoch <= 3
    assert [line["drawing/best"] for line in metrics_of(tmp_path)] == [0.5, 1.0]
    assert json.loads((tmp_path / "found.jsonl").read_text().splitlines()[-1])["generation"] == 18 + 1


@pytest.mark.parametrize(("stop_when", "epochs"), [("best", 1), ("never", 3)])
def test_a_perfect_program_ends_a_run_unless_it_never_ends(stop_when, epochs, drawing, tmp_path):
    task = drawing("2-vertical-lines")
    script = train_hindsight.HindsightArguments(epochs=3, stop_when=stop_when, output_dir=str(tmp_path))
    pupil = Scripted(task)
    pupil.sample = lambda: [reply(program("return [[1, 2], [1, 2]]"))]
    pupil.learn = lambda lessons: None
    train_hindsight.replay(pupil, task, script, tmp_path, None, Interruption("the epoch"), [])
    assert pupil.epoch == epochs


# The script --------------------------------------------------------------------------------------------------------

OPTIONS = (
    "--target", "2-vertical-lines", "--dtype", "float32", "--epochs", 3, "--samples", 6, "--sure_samples", 2,
    "--warm_start_steps", 2, "--warm_start_prompts", 2, "--samples_per_state", 2, "--max_completion_length", 256,
)  # fmt: skip


@pytest.fixture
def lucky(monkeypatch):
    """Whatever the tiny model writes, it has drawn something new, so that there are lessons."""

    def attempts(texts, before):
        return [
            Attempt(0.1, f"{before + i}", messages([[0]], [[(before + i) % 9 + 1]], False), f"{text} {i}")
            for i, text in enumerate(texts)
        ]

    monkeypatch.setattr(drawing_task, "make_task", lambda *given: replace(make_task(*given), attempts=attempts))


def arguments_of(model, shared, output_dir, *more) -> list[str]:
    folders = ["--model_name_or_path", model, "--warm_start_folder", shared, "--output_dir", output_dir]
    return [*map(str, [*OPTIONS, *folders, *more])]


def test_a_run_and_its_files(answering_llama, tmp_path, capfd):
    argv = arguments_of(answering_llama, tmp_path / "shared", tmp_path / "run")
    assert train_hindsight.main(argv) == 0
    printed = capfd.readouterr().out
    assert "epoch 3/3  best 0  mean 0  lessons 0  0." in printed, "no loss where nothing was taught"
    assert "verdict: 2-vertical-lines not solved" in printed
    assert "(warm start 2 steps, hindsight 3 epochs)" in printed
    lines = metrics_of(tmp_path / "run")
    assert [line["drawing/generations"] for line in lines] == [8, 16, 24]
    assert all(sum(line[f"drawing/{kind}"] for kind in ERRORS) == 1 for line in lines), "all programs fail"
    assert all(line["drawing/mean"] == line["drawing/solved"] == 0 and "loss" not in line for line in lines)
    settings = json.loads((tmp_path / "run/run.json").read_text())
    assert (settings["task"], settings["learner"], settings["seed"]) == ("drawing", "hindsight", 0)
    assert (tmp_path / "run/policy.png").stat().st_size > 1000
    # The same command again shows the result, and another one is refused
    assert train_hindsight.main([*argv, "--resume_from_checkpoint", "auto"]) == 0
    assert "holds a finished run" in capfd.readouterr().out
    with pytest.raises(InputError, match="holds a run"):
        train_hindsight.main(argv)
    with pytest.raises(InputError, match=r"--samples 7: .* was begun with 6"):
        train_hindsight.main([*argv, "--resume_from_checkpoint", "auto", "--samples", "7"])
    with pytest.raises(InputError, match=r"--epochs 9: .* was begun with 3"):  # it has ended
        train_hindsight.main([*argv, "--resume_from_checkpoint", "auto", "--epochs", "9"])


@pytest.mark.usefixtures("lucky")
def test_the_control_samples_and_learns_nothing(answering_llama, tmp_path, capfd):
    argv = arguments_of(answering_llama, tmp_path / "shared", tmp_path / "run", "--learning_rate", 0)
    assert train_hindsight.main(argv) == 0
    lines = metrics_of(tmp_path / "run")
    assert [line["drawing/generations"] for line in lines] == [8, 16, 24]
    assert [line["lessons"] for line in lines] == [0, 0, 0]
    assert json.loads((tmp_path / "run/run.json").read_text())["learner"] == "none"
    assert "(warm start 2 steps, nothing learnt, 3 epochs)" in capfd.readouterr().out


def test_a_run_says_how_its_weights_were_quantised(drawing, answering_llama, tmp_path):
    argv = arguments_of(answering_llama, tmp_path, tmp_path / "run", "--load_in_4bit", "true")
    options, task = train_hindsight.read_options(argv), drawing("2-vertical-lines")
    reader = Reader(tokenizer_of("llama"), 8)
    job = stages.Job(task, options.script, options.model, reader, 0, options.output_dir)
    assert job.judge_settings("drawing", [])["load_in_4bit"] is True


@pytest.mark.usefixtures("lucky")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_resumed_run_is_the_uninterrupted_one(answering_llama, tmp_path, capfd, monkeypatch, number):
    def arguments(name, *more):
        return arguments_of(answering_llama, tmp_path / "shared", tmp_path / name, *more)

    assert train_hindsight.main(arguments("whole")) == 0
    write = hindsight.HindsightLog.write
    copy = tmp_path / "cut/checkpoint-1-copy"  # the user's own

    def interrupted(self, epoch, *rest):
        write(self, epoch, *rest)
        if epoch == 1:
            copy.mkdir()
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train_hindsight.HindsightLog, "write", interrupted)
    with pytest.raises(SystemExit) as left:
        train_hindsight.main(arguments("cut"))
    assert left.value.code == EXIT_INTERRUPTED
    assert "checkpoint of epoch 1 written; --resume_from_checkpoint auto resumes" in capfd.readouterr().out
    monkeypatch.setattr(train_hindsight.HindsightLog, "write", write)
    assert train_hindsight.main(arguments("cut", "--resume_from_checkpoint", "auto")) == 0
    whole, cut = (tmp_path / name / "adapter_model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    assert (tmp_path / "whole/evaluation.json").read_text() == (tmp_path / "cut/evaluation.json").read_text()
    one, other = ([line | {"seconds": 0} for line in metrics_of(tmp_path / name)] for name in ("whole", "cut"))
    assert one == other
    assert one[0]["lessons"] == 8
    checkpoints = {path.name for path in (tmp_path / "cut").glob("checkpoint-*")}
    assert checkpoints == {"checkpoint-3", copy.name}


def test_what_was_found_behind_the_checkpoint_is_none_of_a_resumed_run(answering_llama, tmp_path):
    """A kill while an epoch is taught leaves its best program in the log, and the run may be shortened to the last."""
    argv = arguments_of(answering_llama, tmp_path / "shared", tmp_path / "run", "--epochs", "1")
    assert train_hindsight.main(argv) == 0
    for name in ("evaluation.json", "COMPLETE"):
        (tmp_path / "run" / name).unlink()
    log = tmp_path / "run/found.jsonl"
    before = log.read_text()
    log.write_text(before + json.dumps({"share": 1.0, "generation": 99, "code": ""}) + "\nx")
    assert train_hindsight.main([*argv, "--resume_from_checkpoint", "auto"]) == 0
    assert log.read_text() == before
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["found"]["generation"] < 99


@pytest.mark.parametrize(("most", "is_refused"), [(3, True), (4, False), (9, False), (-1, False)])
def test_a_run_does_not_end_before_its_checkpoint(most, is_refused, tmp_path):
    check = partial(train_hindsight.lifecycle.check_length, "epochs", most)
    check(None)
    if is_refused:
        with pytest.raises(InputError, match=r"^--epochs 3: .*checkpoint-4 has taken 4 already; give at least that$"):
            check(tmp_path / "checkpoint-4")
    else:
        check(tmp_path / "checkpoint-4")


def test_a_run_that_was_solved_and_then_killed_is_only_judged(answering_llama, tmp_path, monkeypatch):
    def attempts(texts, before):
        return [Attempt(1.0 if before else 0.0) for _ in texts]  # in the second epoch

    monkeypatch.setattr(drawing_task, "make_task", lambda *given: replace(make_task(*given), attempts=attempts))
    argv = arguments_of(answering_llama, tmp_path / "shared", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(train_hindsight.stages.Job, "judged_again", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_hindsight.main(argv)
    shorter = ("--samples_per_state", "1")  # of the last table alone, so it may differ
    assert train_hindsight.main([*argv, *shorter, "--resume_from_checkpoint", "auto"]) == 0
    assert [line["drawing/best"] for line in metrics_of(tmp_path / "run")] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--target", "10-squares"], "--target 10-squares: expected N-vertical-lines"),
        (["--warm_start", "none"], "--warm_start 'none': expected one of auto, always, never"),
        (["--stop_when", "soon"], "--stop_when 'soon': expected one of best, never"),
        (["--samples", "0"], "--samples 0: expected an integer of at least 1"),
        (["--use_peft", "false"], "--use_peft false: what is trained and saved here is a LoRA adapter"),
        (["--max_completion_length", "4000"], "exceed the model's context"),
        (["--attn_implementation", "flex_attention"], "--attn_implementation flex_attention: rows of several"),
        (["--epoch", "3"], r"unknown arguments: --epoch 3 \(did you mean --epochs\?\)"),
    ],
)
def test_bad_input_is_one_line(answering_llama, tmp_path, more, words):
    with pytest.raises(InputError, match=words) as caught:
        train_hindsight.main(arguments_of(answering_llama, tmp_path / "shared", tmp_path / "run", *more))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
