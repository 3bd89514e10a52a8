"""Only the form of an answer is taught: the loss, the lessons without labels, and what a run makes of it."""

import math
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel
from tiny_policies import adapter_weights, add_random_adapter, random_policy, tokenizer_of
from trl import ModelConfig

from llm_policy.chat import Reader, reply_token_ids
from llm_policy.checkpoints import COMPLETE_MARK
from llm_policy.completions import action_index, parse_completion, tagged
from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, acting_states
from llm_policy.errors import InputError
from llm_policy.grpo import stages, warm_start
from llm_policy.grpo.arguments import ScriptArguments
from llm_policy.grpo.warm_start import sampled_format_validity, teach_format
from prompts import format_example, policy_messages

GRID = CANONICAL_GRIDS["4x4"]
LESSONS = [
    (policy_messages(GRID, state, True), [format_example(GRID, state, action) for action in range(len(ACTIONS))])
    for state in acting_states(GRID)
]


IS_REPLY = tagged(lambda answer: action_index(answer, ACTIONS) is not None)


def student(architecture: str = "llama"):
    """An adapted model, its tokenizer and the reader of its answers."""
    tokenizer = tokenizer_of(architecture)
    return add_random_adapter(random_policy(architecture), r=8), tokenizer, Reader(tokenizer, max_completion_tokens=8)


def taught(architecture="llama", seed=0, **options):
    """The report and the adapter after at most six steps, the sampled check left out."""
    model, _, reader = student(architecture)
    settings = {"max_steps": 4, "prompts_per_step": 4, "learning_rate": 0.01, "threshold": 2.0, "seed": seed}
    report = teach_format(model, reader, LESSONS, IS_REPLY, **(settings | options))
    return report, adapter_weights(model)


def test_a_row_of_its_own_has_the_loss_of_a_packed_one():
    model, _, reader = student()
    batch = [(prompt, reply) for prompt, replies in LESSONS[:2] for reply in replies]
    warm_start.add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
    model.eval()
    losses = [warm_start.reply_loss(model, reader, batch, packed).item() for packed in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("wrong", ["raises", "differs"])
def test_where_packing_is_wrong_replies_are_taught_in_rows_of_their_own(wrong, monkeypatch, capsys):
    """LFM2 mixes neighbouring tokens, and would see other branches; others take no such mask."""
    packed_log_probabilities = warm_start.packed_log_probabilities

    def broken(*arguments):
        if wrong == "raises":
            raise ValueError("too many values to unpack")
        values, entropies = packed_log_probabilities(*arguments)
        return values - 0.3, entropies

    monkeypatch.setattr(warm_start, "packed_log_probabilities", broken)
    report, _ = taught(max_steps=1)
    assert report["loss"] > 0
    said = {"raises": "packed, too many values to unpack", "differs": "packed, their losses differ by 0.3"}[wrong]
    assert f"replies are taught in rows of their own, which is slower: {said}" in capsys.readouterr().out


@pytest.fixture
def batches(monkeypatch):
    """What each pass was taught: (prompts, completions) as token ids."""
    seen = []
    pack_groups = warm_start.pack_groups

    def spying(prompts, completions, **options):
        seen.append((prompts, completions))
        return pack_groups(prompts, completions, **options)

    monkeypatch.setattr(warm_start, "pack_groups", spying)
    return seen


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_loss_falls(architecture):
    before, _ = taught(architecture, max_steps=1)
    after, _ = taught(architecture, max_steps=12)
    assert after["steps"] == 12
    assert after["loss"] < before["loss"] / 2


def test_the_rate_falls_over_the_second_half(monkeypatch):
    rates, step = [], torch.optim.AdamW.step

    def spying(self, *arguments):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", spying)
    taught(max_steps=8, learning_rate=0.01)
    assert rates == pytest.approx([0.01] * 5 + [0.0075, 0.005, 0.0025])


def test_every_prompt_is_taught_each_action_exactly_once(batches):
    """So there is no label in it to leak: Q-values are no argument, and no action is preferred for any state."""
    taught(prompts_per_step=5, max_steps=4)
    tokenizer = tokenizer_of("llama")
    for prompts, completions in batches:
        actions_of = {}
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion[-1] == tokenizer.eos_token_id
            parsed = parse_completion(tokenizer.decode(completion, skip_special_tokens=True))
            assert parsed.is_well_formed
            actions_of.setdefault(tuple(prompt), []).append(action_index(parsed.answer, ACTIONS))
        assert all(sorted(actions) == list(range(len(ACTIONS))) for actions in actions_of.values())
    compared, *steps = batches  # with plain rows, before anything is taught
    assert len(compared[0]) == 3 * len(ACTIONS)
    assert sum(len(prompts) for prompts, _ in steps) == 4 * 5 * len(ACTIONS)  # four steps of five states


def test_the_reply_is_the_same_but_for_the_action(batches):
    """Nothing else in it tells the actions of a state apart."""
    taught(max_steps=1)
    tokenizer = tokenizer_of("llama")
    rests = {}
    for prompts, completions in batches[1:]:  # before them some are compared with plain rows
        for prompt, completion in zip(prompts, completions, strict=True):
            thought, _, _ = tokenizer.decode(completion).partition("<answer>")
            rests.setdefault(tuple(prompt), set()).add(thought)
    assert len(rests) == 4
    assert all(len(thoughts) == 1 for thoughts in rests.values())


def test_same_seed_same_adapter_different_seed_different():
    torch.manual_seed(0)
    report, first = taught(seed=1)
    torch.manual_seed(1)  # nothing is drawn from the common generator
    again_report, again = taught(seed=1)
    other_report, other = taught(seed=2)
    assert report == again_report
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert report["loss"] != other_report["loss"]
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("lessons_per_pass", [0, 2, 100])
def test_the_passes_of_a_step_add_up_to_one(lessons_per_pass, batches, monkeypatch):
    expected_report, expected = taught(max_steps=2, prompts_per_step=5)
    assert len(batches) == 1 + 2  # compared with plain rows, and one pass a step
    monkeypatch.setattr(warm_start, "TOKENS_PER_PASS", lessons_per_pass * 212)  # a lesson has 209 to 211
    batches.clear()
    report, found = taught(max_steps=2, prompts_per_step=5)
    assert len(batches) == 1 + 2 * math.ceil(5 / max(1, min(lessons_per_pass, 5)))
    assert report["loss"] == pytest.approx(expected_report["loss"], rel=1e-3)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=2e-3)


def test_replies_of_unequal_lengths_weigh_as_their_tokens_do(batches, monkeypatch):
    uneven = [
        (prompt, [f"{'so ' * 7 * (i % 3)}{reply}" for reply in replies]) for i, (prompt, replies) in enumerate(LESSONS)
    ]
    monkeypatch.setattr(sys.modules[__name__], "LESSONS", uneven)
    expected_report, _ = taught(max_steps=1, prompts_per_step=5)
    monkeypatch.setattr(warm_start, "TOKENS_PER_PASS", 1)
    batches.clear()
    report, _ = taught(max_steps=1, prompts_per_step=5)
    assert report["loss"] == pytest.approx(expected_report["loss"], rel=1e-4)
    lengths = [len(completions[0]) for _, completions in batches[1:]]
    assert lengths == sorted(lengths)  # those of a pass are alike, whatever was drawn
    assert lengths[0] < lengths[-1]


def test_the_base_stays_and_the_fused_head_is_removed():
    model, tokenizer, reader = student()
    ids = torch.tensor([reader.prompt(LESSONS[0][0])])
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" not in name}
    teach_format(
        model, reader, LESSONS, IS_REPLY,
        max_steps=2, prompts_per_step=2, learning_rate=0.01, threshold=2.0, seed=0,
    )  # fmt: skip
    assert "forward" not in vars(model.get_base_model())
    assert model(ids).logits.shape == (1, ids.size(1), len(tokenizer))
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
    assert all(p.grad is None for p in model.parameters())


def test_the_fused_head_is_removed_where_a_step_fails(monkeypatch):
    model, _, reader = student()
    monkeypatch.setattr(warm_start, "pack_groups", lambda *_, **__: 1 / 0)
    settings = {"max_steps": 2, "prompts_per_step": 2, "learning_rate": 0.01, "threshold": 2.0, "seed": 0}
    with pytest.raises(ZeroDivisionError):
        teach_format(model, reader, LESSONS, IS_REPLY, **settings)
    assert "forward" not in vars(model.get_base_model())


def test_it_ends_in_one_line_where_the_loss_is_no_number():
    with pytest.raises(
        InputError, match=r"^warm start, step 2: the loss is no number; lower --warm_start_learning_rate"
    ):
        taught(learning_rate=1e30)


def test_it_ends_at_the_threshold_at_its_limit_or_when_asked(monkeypatch):
    validities = iter([0.2, 0.95, 0.0])
    monkeypatch.setattr(warm_start, "sampled_format_validity", lambda *_: next(validities))
    monkeypatch.setattr(warm_start, "CHECK_EVERY_STEPS", 2)
    report, _ = taught(max_steps=20, threshold=0.9)
    assert report["steps"] == 4
    assert report["format_validity"] == 0.95
    report, _ = taught(max_steps=1, threshold=0.9)  # checked at the limit, too
    assert report["format_validity"] == 0.0
    report, _ = taught(max_steps=20, should_stop=lambda: True)
    assert report["steps"] == 1


# (texts in turn, share of well-formed ones)
VALIDITIES = {
    "all": (["<think>go</think><answer>UP</answer>"], 1.0),
    "half": (["<think>go</think><answer>UP</answer>", "UP"], 0.5),
    # Well-formed, but no action; an action, but not well-formed
    "none": (["<think>go</think><answer>NORTH</answer>", "<answer>UP</answer>"], 0.0),
}


@pytest.mark.parametrize("case", VALIDITIES)
@pytest.mark.parametrize("lesson_count", [1, 11, 100])
def test_sampled_format_validity(case, lesson_count, monkeypatch):
    texts, expected = VALIDITIES[case]
    _, _, reader = student()
    asked = []

    def completions(_self, _model, prompts, samples, _guesses):
        asked.append(len(prompts) * samples)
        return [texts[i % len(texts)] for i in range(asked[-1])]

    monkeypatch.setattr(Reader, "completions", completions)
    lessons = (LESSONS * 10)[:lesson_count]
    assert sampled_format_validity(None, reader, lessons, IS_REPLY) == pytest.approx(expected, abs=0.02)
    assert asked[0] >= warm_start.SAMPLED_PROMPTS


@pytest.mark.parametrize("rows", ["packed", "their own"])
def test_where_only_the_lessons_replies_count_nothing_is_sampled(rows, monkeypatch):
    """The share that would be as taught is the probability of the replies to a step's prompts, before the step."""
    monkeypatch.setattr(warm_start, "sampled_format_validity", lambda *_: pytest.fail("sampled"))
    monkeypatch.setattr(warm_start, "packs", lambda *_: rows == "packed")
    monkeypatch.setattr(warm_start, "CHECK_EVERY_STEPS", 1)
    monkeypatch.setattr(warm_start, "TOKENS_PER_PASS", 1)  # several passes a step
    model, _, reader = student()
    lessons = [(prompt, [f"{action}" for action in "abcd"]) for prompt, _ in LESSONS[:4]]
    probabilities = []
    with torch.no_grad():
        for prompt, replies in lessons:
            for reply in replies:
                prompt_ids, reply_ids = reader.prompt(prompt), reply_token_ids(reply, reader.tokenizer)
                logits = model(torch.tensor([[*prompt_ids, *reply_ids]])).logits[0, len(prompt_ids) - 1 : -1]
                log_p = logits.log_softmax(-1)[range(len(reply_ids)), reply_ids]
                probabilities.append(log_p.sum().exp().item())
    settings = {"prompts_per_step": 4, "learning_rate": 0.01, "threshold": 0.05, "seed": 0}
    report = teach_format(model, reader, lessons, None, max_steps=1, **settings)
    assert report["format_validity"] == pytest.approx(sum(probabilities) / 4, rel=1e-3)
    report = teach_format(model, reader, lessons, None, max_steps=60, **settings)
    assert 1 < report["steps"] < 60
    assert 0.05 <= report["format_validity"] < 0.1, "the head of a tiny policy is never surer"


def test_what_packing_is_compared_with_has_one_reply_at_a_time(monkeypatch):
    """All together their logits took 8 GB with thoughts about 64 cells."""
    model, _, reader = student()
    plain, scored = [], warm_start.reply_log_probabilities

    def counting(model, reader, batch, packed):
        plain.extend([len(batch)] * (not packed))
        return scored(model, reader, batch, packed)

    monkeypatch.setattr(warm_start, "reply_log_probabilities", counting)
    assert warm_start.packs(model, reader, LESSONS)
    assert set(plain) == {1}


def test_where_only_the_lessons_replies_count_a_sample_is_one_of_them(monkeypatch):
    _, _, reader = student()
    (_, replies), (_, others) = LESSONS[:2]
    monkeypatch.setattr(Reader, "completions", lambda *_: [replies[1], others[0], replies[0] + ".", replies[3]] * 8)
    assert sampled_format_validity(None, reader, LESSONS[:1], None) == 0.5


# The stage of a run ----------------------------------------------------------------------------------------------

IDS = torch.tensor([[5, 9, 2, 7]])
LORA = LoraConfig(r=4, target_modules="all-linear")


def started(folder, lessons=LESSONS, has_begun=False, should_stop=lambda: False, **options):
    """The model after the warm start of a run, and its report."""
    script = ScriptArguments(**({"warm_start_steps": 2, "warm_start_prompts": 2} | options))
    _, _, reader = student()
    torch.manual_seed(0)  # of the adapter's first weights
    return warm_start.warm_started(
        random_policy("llama"), LORA, reader, lessons, IS_REPLY, script, 0, folder, should_stop, has_begun
    )


def test_what_it_taught_is_merged_and_found_again(tmp_path):
    model, report = started(tmp_path / "warm_start", warm_start="always")
    assert report["steps"] == 2
    assert not isinstance(model, PeftModel)
    assert not torch.equal(model(IDS).logits, random_policy("llama")(IDS).logits)
    for has_begun in (False, True):
        again, again_report = started(tmp_path / "warm_start", warm_start="always", has_begun=has_begun)
        assert again_report == report
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("options", "more"), [({"warm_start": "never"}, {}), ({}, {"has_begun": True}), ({}, {"lessons": []})]
)
def test_runs_without_one(options, more, tmp_path):
    model, report = started(tmp_path / "warm_start", **options, **more)
    assert report == {"steps": 0}
    assert torch.equal(model(IDS).logits, random_policy("llama")(IDS).logits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("validity", "steps"), [(0.9, 0), (0.89, 2)])
def test_auto_teaches_what_is_not_well_formed_often_enough(validity, steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warm_start, "sampled_format_validity", lambda *_: validity)
    _, report = started(tmp_path / "warm_start", warm_start="auto", warm_start_threshold=0.9)
    assert (report["steps"], report["format_validity"]) == (steps, validity)
    printed = capsys.readouterr().out
    assert f"{validity:.0%} of sampled completions are as taught (90% needed)" in printed
    assert ("89% are as taught after 2 steps, not 90%" in printed) == (steps > 0)
    assert (tmp_path / "warm_start").exists() == (steps > 0)


def test_auto_does_not_ask_again_where_one_was_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warm_start, "sampled_format_validity", lambda *_: 0.0)
    for asked in (True, False, True):
        started(tmp_path / "warm_start", warm_start="auto", should_stop=lambda: True)
        assert ("of sampled completions are as taught" in capsys.readouterr().out) == asked
        if not asked:
            torch.save({"made_from": "another"}, tmp_path / "warm_start.partial")


@pytest.mark.parametrize("harm", [None, "cut", "another"])
def test_an_interrupted_one_goes_on(tmp_path, capsys, harm):
    """To the same weights, byte for byte; without a file that can be used it begins again, to the same as well."""
    whole, whole_report = started(tmp_path / "whole", warm_start="always", warm_start_steps=6)
    asked = iter([False, True, True])
    _, report = started(
        tmp_path / "warm_start", warm_start="always", warm_start_steps=6, should_stop=lambda: next(asked)
    )
    assert report["steps"] == 2
    left = tmp_path / "warm_start.partial"
    assert not (tmp_path / "warm_start").exists()
    if harm == "cut":
        left.write_bytes(left.read_bytes()[:1000])
    if harm == "another":
        torch.save({"made_from": "another"}, left)
    model, report = started(tmp_path / "warm_start", warm_start="always", warm_start_steps=6)
    said = {None: "goes on after step 2", "cut": "cannot be read", "another": "of another model, lessons or settings"}
    assert said[harm] in capsys.readouterr().out
    assert report == whole_report
    assert torch.equal(model(IDS).logits, whole(IDS).logits)
    assert not left.exists()


def test_a_shared_one_is_made_by_one_run_at_a_time(tmp_path):
    """While another process holds the lock, as a run beside this one does."""
    imports = "import sys, time; from filelock import FileLock"
    code = f"{imports}; lock = FileLock(sys.argv[1]); lock.acquire(); print(flush=True); time.sleep(60)"
    lock = tmp_path / ".seed-0.lock"
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(InputError, match="another run is making seed-0; start again when it is there"):
            started(tmp_path / "seed-0", warm_start="always", warm_start_folder=str(tmp_path))
        other.kill()
    _, report = started(tmp_path / "seed-0", warm_start="always", warm_start_folder=str(tmp_path))
    assert report["steps"] == 2


def test_checkpoints_without_the_warm_start_that_they_stand_on(tmp_path):
    with pytest.raises(InputError, match="warm_start: is gone, and the checkpoints stand on it; choose another"):
        started(tmp_path / "warm_start", warm_start="always", has_begun=True)


def test_another_lesson_in_the_middle_makes_another_warm_start():
    """Runs that hold out other maps may have as many lessons, and the same first one."""
    lessons = [([{"role": "user", "content": str(i)}], ["x"]) for i in range(1000)]
    other = [*lessons[:500], ([{"role": "user", "content": "other"}], ["x"]), *lessons[500:-1]]
    found = [stages.warm_start_checksum(ScriptArguments(), ModelConfig(), "m", those) for those in (lessons, other)]
    assert found[0] != found[1]
    assert found[0] == stages.warm_start_checksum(ScriptArguments(), ModelConfig(), "m", list(lessons))


def test_the_check_asks_lessons_from_the_first_to_the_last():
    asked = []

    class Noting(Reader):
        def completions(self, _model, prompts, samples=0, guesses=None):
            asked.extend(prompts)
            return list(guesses) * samples

    lessons = [(str(i), ["x"]) for i in range(53)]
    assert warm_start.sampled_format_validity(None, Noting(None), lessons, lambda *_: True) == 1.0
    assert len(asked) == warm_start.SAMPLED_PROMPTS
    assert [asked[0], asked[-1]] == ["0", "51"]


OTHERWISE_TAUGHT = {
    "lora_r": 4, "lora_alpha": 5, "lora_target_modules": ["q_proj"], "lora_dropout": 0.5, "use_rslora": True,
    "warm_start_steps": 3, "warm_start_prompts": 4, "warm_start_learning_rate": 0.5, "warm_start_threshold": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE_TAUGHT)
def test_another_adapter_or_setting_makes_another_warm_start(name):
    """Else a run would stand on a shared one of another rank, or of one step, in silence."""
    script, model = ScriptArguments(), ModelConfig()
    before = stages.warm_start_checksum(script, model, "m", [])
    setattr(script if hasattr(script, name) else model, name, OTHERWISE_TAUGHT[name])
    assert stages.warm_start_checksum(script, model, "m", []) != before


def test_what_has_reached_the_threshold_is_not_taught_further(tmp_path, monkeypatch):
    """Killed between its last step and the mark of a finished warm start."""
    monkeypatch.setattr(warm_start, "sampled_format_validity", lambda *_: 1.0)
    monkeypatch.setattr(warm_start, "CHECK_EVERY_STEPS", 2)
    teach = partial(started, tmp_path / "warm_start", warm_start="always", warm_start_steps=6)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            teach()
    _, report = teach()
    assert report["steps"] == 2


def test_a_shared_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--warm_start_folder .*: cannot be written \(.*\); name another folder"):
        started(tmp_path / "file/shared/seed-0", warm_start="always", warm_start_folder=str(tmp_path / "file/shared"))


def test_a_shared_one_that_another_run_has_just_made_is_not_written_over(tmp_path, monkeypatch):
    """It ended its own between our look into the folder and our lock."""

    @contextmanager
    def locked_late(folder):
        folder.mkdir()
        (folder / COMPLETE_MARK).touch()
        yield

    monkeypatch.setattr(warm_start, "alone_at", locked_late)
    with pytest.raises(InputError, match="another run has just made seed-0; start again"):
        started(tmp_path / "seed-0", warm_start="always", warm_start_folder=str(tmp_path))
