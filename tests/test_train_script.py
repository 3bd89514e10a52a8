"""The command from the first line to the files it leaves, on tiny models; and what it says to bad input."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tiny_models import build_tiny_model

import evaluate_policy
import train_script
from llm_policy.chat import prompt_token_ids
from llm_policy.checkpoints import latest_checkpoint
from llm_policy.environments.expert_q import ExpertOptions, write_expert_csv
from llm_policy.errors import InputError, run_script
from llm_policy.grpo.stages import GRPO_FOLDER, WARM_START_FOLDER
from llm_policy.grpo.trainer import PolicyTrainer
from llm_policy.models import load_model, load_tokenizer
from llm_policy.run_files import ROOT, only_process_in, write_run_files
from tasks.tabular_judge import TableJudge
from train_script import enough_rows, main, read_options

LAPTOP = str(ROOT / "configs/laptop.yaml")
CSV = ROOT / "expert_demos_batched_avg_q.csv"
LOGGED = (
    "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "entropy",
    "rewards/combined_reward/mean", "rewards/format_reward/mean", "rewards/advantage_reward/mean",
    "reward/uniform policy", "reward/optimal policy", "completions/mean_length",
)  # fmt: skip
JUDGED = (
    "policy/success_probability", "policy/success_at_horizon", "policy/percent_of_optimal", "policy/optimal_states",
    "policy/format_validity", "policy/mutual_information", "time/evaluation_share",
)  # fmt: skip


def small_run(model: Path, output_dir: Path, *more: str) -> list[str]:
    """Arguments of a run of two steps, a second or two long; what stands in `more` wins."""
    options = {
        "config": LAPTOP, "model_name_or_path": model, "output_dir": output_dir, "dtype": "float32", "bf16": "false",
        "max_steps": 2, "save_steps": 1, "evaluate_steps": 1, "stop_when": "never", "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "num_generations": 4, "max_completion_length": 32, "warm_start": "always",
        "warm_start_steps": 2, "warm_start_prompts": 2, "samples_per_state": 1, "episodes": 10,
    }  # fmt: skip
    return [text for name, value in options.items() for text in (f"--{name}", str(value))] + [str(m) for m in more]


def metrics_of(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def adapters_of(*folders: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / "adapter_model.safetensors") for folder in folders]


# A run and its files -------------------------------------------------------------------------------------------


RUNS = {
    # name: (architecture, its options, further arguments)
    "expected": ("llama", {}, ()),
    "expected, gemma": ("gemma", {}, ()),
    "expected, actions of several tokens": ("llama", {"split_actions": True}, ()),
    "natural": ("llama", {}, ("--objective", "natural")),
    "grpo": ("llama", {}, ("--objective", "grpo")),
    "grpo through TRL's own pass, gemma": ("gemma", {}, ("--objective", "grpo", "--packed", "false")),
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def finished_run(request, taught, tmp_path_factory):
    architecture, options, more = request.param
    model, out = taught(architecture, **options), tmp_path_factory.mktemp("run") / "out"
    arguments = small_run(model, out, *more)
    assert main(arguments) == 0
    return model, out, arguments


def test_adapter_and_tokenizer(finished_run):
    model_folder, out, _ = finished_run
    model, tokenizer = load_model(out, dtype="float32"), load_tokenizer(out)
    weights = load_file(out / "adapter_model.safetensors")
    assert len(weights) == 2 * 7 * 2  # A and B of seven linear layers in each of two blocks
    assert {min(weight.shape) for weight in weights.values()} == {16 + 16}  # the ranks of warm start and GRPO
    assert any(weight.abs().max() > 0 for name, weight in weights.items() if "lora_B" in name)
    base = load_model(model_folder, dtype="float32")
    token_ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(model.eval()(token_ids).logits, base.eval()(token_ids).logits)
    assert tokenizer.chat_template == load_tokenizer(model_folder).chat_template


def test_adapter_moved_in_the_steps_and_not_only_in_the_warm_start(finished_run):
    _, out, _ = finished_run
    first, second, last = adapters_of(out / "checkpoint-1", out / "checkpoint-2", out / GRPO_FOLDER)
    assert any(not torch.equal(first[name], second[name]) for name in last)
    assert all(torch.equal(second[name], last[name]) for name in last)
    (taught,) = adapters_of(out / WARM_START_FOLDER)
    for learnt in (taught, last):
        assert any(weight.abs().max() > 0 for name, weight in learnt.items() if "lora_B" in name)


def test_adapter_is_what_was_learnt_on_top_of_the_warm_start(finished_run):
    model_folder, out, _ = finished_run
    taught = PeftModel.from_pretrained(load_model(model_folder, dtype="float32"), out / WARM_START_FOLDER)
    learnt = PeftModel.from_pretrained(taught.merge_and_unload(), out / GRPO_FOLDER)
    token_ids = torch.tensor([[5, 6, 7]])
    logits, expected = (m.eval()(token_ids).logits for m in (load_model(out, dtype="float32"), learnt))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_resolved_config_repeats_the_run(finished_run):
    _, out, arguments = finished_run
    config = yaml.safe_load((out / "resolved_config.yaml").read_text())
    assert (config["max_steps"], config["save_steps"], config["num_generations"]) == (2, 1, 4)
    first = read_options(arguments)
    again = read_options(["--config", str(out / "resolved_config.yaml")])
    assert again.config == str(out / "resolved_config.yaml")
    for one, other in zip(first.groups, again.groups, strict=True):
        assert str(one) == str(other)


def test_run_json(finished_run):
    _, out, _ = finished_run
    run = json.loads((out / "run.json").read_text())
    assert (run["config"], run["seed"], run["observation"]) == ("laptop.yaml", 0, "coordinates")
    assert (run["maps"], run["is_slippery"]) == (["SFFF|FHFH|FFFH|HFFG"], True)
    assert run["max_completion_length"] == 32
    assert run["versions"]["torch"] == torch.__version__
    assert len(run["commit"]) in (len("unknown"), 40)


def test_metrics(finished_run):
    _, out, arguments = finished_run
    lines = metrics_of(out)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        for name in (*LOGGED, *JUDGED):
            assert math.isfinite(line[name]), name
        assert line["rewards/format_reward/mean"] > 0.3, "the taught model's answers are well-formed"
        assert line["reward"] == pytest.approx(line["rewards/combined_reward/mean"])
        combined = (line["rewards/format_reward/mean"] + line["rewards/advantage_reward/mean"]) / 2
        assert combined == pytest.approx(line["rewards/combined_reward/mean"], abs=1e-6)
        assert 0 <= line["policy/success_probability"] <= 14 / 17 + 1e-9
        # In the laptop's reward, over the 11 states, each counted once
        assert line["reward/always LEFT"] == pytest.approx(0.89228, abs=1e-4)
        assert line["reward/uniform policy"] == pytest.approx(0.82461, abs=1e-4)
        assert line["reward/optimal policy"] == pytest.approx(1.5)
    if "grpo" not in arguments:
        assert all(0 <= line["action/entropy"] <= math.log(4) + 1e-6 for line in lines)


def test_tensorboard(finished_run):
    _, out, _ = finished_run
    (event_file,) = out.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(event_file), {"images": 0}).Reload()
    assert [event.step for event in events.Images("policy")] == [1, 2]
    assert events.Images("policy")[0].encoded_image_string.startswith(b"\x89PNG")
    scalars = events.Tags()["scalars"]
    assert {f"train/{name}" for name in (*LOGGED, *JUDGED)} <= set(scalars)
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    [chart] = layout.category[0].chart
    drawn = {scalar for scalar in scalars if any(re.match(tag, scalar) for tag in chart.multiline.tag)}
    lines = ("always LEFT", "uniform policy", "optimal policy")
    assert drawn == {"train/reward", *(f"train/reward/{line}" for line in lines)}


def test_evaluation(finished_run):
    _, out, _ = finished_run
    judged = {p["policy"]: p for p in json.loads((out / "evaluation.json").read_text())["policies"]}
    assert list(judged) == [
        "optimal", "uniform random", "best constant action (DOWN)",
        "untrained, greedy", "warm start, greedy", "trained, greedy", "trained, sampled",
    ]  # fmt: skip
    assert judged["optimal"]["success_probability"] == pytest.approx(14 / 17, abs=1e-6)
    assert judged["trained, greedy"]["success_probability"] == pytest.approx(
        metrics_of(out)[-1]["policy/success_probability"]
    )
    result = (out / "result.txt").read_text()
    assert "0.8235" in result
    assert result.splitlines()[-1].startswith("verdict: ")
    assert "warm start 2 steps, GRPO 2" in result
    with Image.open(out / "policy.png") as picture:
        picture.load()
        assert picture.width > picture.height > 300


@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_training_stops_at_the_first_value_that_is_no_number(what, taught, tmp_path, monkeypatch):
    out, steps, step = tmp_path / "out", [], torch.optim.AdamW.step
    loss = PolicyTrainer._compute_loss

    def spoilt_loss(*arguments):
        steps.append(0)
        return loss(*arguments) * (math.nan if len(steps) == 2 else 1.0)

    def spoilt_step(optimizer, *arguments):
        step(optimizer, *arguments)
        steps.append(0)
        if len(steps) == 2:
            optimizer.param_groups[0]["params"][0].data[0] = math.inf

    if what == "gradient":
        monkeypatch.setattr(PolicyTrainer, "_compute_loss", spoilt_loss)
    else:
        monkeypatch.setattr(torch.optim.AdamW, "step", spoilt_step)
    more = ("--save_steps", "1", "--max_steps", "3", "--evaluate_steps", "0", "--warm_start", "never")
    with pytest.raises(InputError, match=rf"^step 2: the {what} of \S+ is no number .*checkpoints stay"):
        main(small_run(taught("llama"), out, *more))
    assert latest_checkpoint(out).name == "checkpoint-1"
    assert not (out / "evaluation.json").exists()


@pytest.mark.parametrize("objective", ["cloning", "distillation"])
def test_supervision_samples_nothing_while_training(objective, taught, tmp_path):
    """All completions are the reply that the warm start teaches, so nothing is said of rewards."""
    out = tmp_path / "out"
    more = ("--objective", objective, "--action_entropy_coef", "0.1")
    assert main(small_run(taught("llama"), out, *more)) == 0
    lines = metrics_of(out)
    assert [line["completions/clipped_ratio"] for line in lines] == [0.0, 0.0]
    assert not any(name in line for line in lines for name in ("reward", "frac_reward_zero_std"))
    assert all("action/expected_reward" in line and "policy/optimal_states" in line for line in lines)


def test_a_finished_run_is_shown_again_and_not_trained(finished_run, capsys):
    _, out, arguments = finished_run
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert main([*arguments, "--resume_from_checkpoint", "auto"]) == 0
    printed = capsys.readouterr().out
    assert "holds a finished run" in printed
    assert (out / "result.txt").read_text() in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == files


@pytest.mark.parametrize(
    "other",
    [
        ("--seed", "99"),
        ("--lora_r", "3"),
        ("--observation", "grid"),
        ("--warm_start", "never"),
        ("--scale_rewards", "batch"),
        ("--learning_rate", "0.25"),
        ("--max_steps", "3"),  # finished after two
    ],
)
def test_another_run_is_not_resumed(finished_run, other):
    _, out, arguments = finished_run
    config = (out / "resolved_config.yaml").read_text()
    with pytest.raises(InputError, match=rf"{other[0]} {other[1]}: .* was begun with .* choose another --output_dir"):
        main([*arguments, *other, "--resume_from_checkpoint", "auto"])
    assert (out / "resolved_config.yaml").read_text() == config


def test_evaluate_policy_reads_the_run(finished_run, capsys):
    _, out, _ = finished_run
    arguments = ["--samples_per_state", "0", "--dtype", "float32", "--episodes", "10"]
    assert evaluate_policy.main(["--policies", str(out), *arguments, "--output_dir", str(out / "again")]) == 0
    again = json.loads((out / "again/evaluation.json").read_text())["policies"][-1]
    judged = json.loads((out / "evaluation.json").read_text())["policies"]
    (first,) = (policy for policy in judged if policy["policy"] == "trained, greedy")
    assert again["policy"] == f"{out}, greedy"
    assert again["policy_SA"] == first["policy_SA"]
    capsys.readouterr()


# Other ways to begin -------------------------------------------------------------------------------------------


def test_the_real_command(answering_llama, tmp_path):
    command = [sys.executable, "train_script.py", *small_run(answering_llama, tmp_path / "out", "--max_steps", "1")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("train_script.py: loading PyTorch, Transformers and TRL ...\n")
    lines = done.stdout.splitlines()
    assert lines[0] == f"CPU: {LAPTOP} with {answering_llama}, seed 0"
    assert any(line.startswith("verdict: ") for line in lines)
    assert (tmp_path / "out/evaluation.json").exists()


def test_same_seed_same_adapter_other_seed_another(answering_llama, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        assert main(small_run(answering_llama, tmp_path / name, "--seed", seed, "--max_steps", 1)) == 0
    one, two, other = adapters_of(*(tmp_path / name for name in ("one", "two", "other")))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_auto_on_an_empty_folder_begins(answering_llama, tmp_path):
    arguments = small_run(answering_llama, tmp_path / "out", "--max_steps", 1, "--resume_from_checkpoint", "auto")
    assert main(arguments) == 0
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [1]


def test_warm_start_auto_leaves_out_what_is_not_needed(answering_llama, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = small_run(answering_llama, out, "--max_steps", 1, "--warm_start", "auto")
    assert main([*arguments, "--warm_start_threshold", "0.5"]) == 0
    assert "of sampled completions are as taught (50% needed)" in capsys.readouterr().out
    assert not (out / "warm_start").exists()
    assert "warm start 0 steps" in (out / "result.txt").read_text()


def test_an_adapter_can_be_trained_further(answering_llama, tmp_path):
    assert main(small_run(answering_llama, tmp_path / "first", "--max_steps", 1)) == 0
    arguments = small_run(tmp_path / "first", tmp_path / "second", "--max_steps", 1, "--warm_start", "never")
    assert main(arguments) == 0
    (joined,) = adapters_of(tmp_path / "second")
    ranks = {weight.shape[0] for name, weight in joined.items() if "lora_A" in name}
    assert ranks == {16 + 16 + 16}, "warm start, first run, second run"
    first = PeftModel.from_pretrained(load_model(answering_llama, dtype="float32"), tmp_path / "first")
    second = PeftModel.from_pretrained(first.merge_and_unload(), tmp_path / "second" / GRPO_FOLDER)
    token_ids = torch.tensor([[5, 6, 7]])
    logits, expected = (m.eval()(token_ids).logits for m in (load_model(tmp_path / "second", dtype="float32"), second))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "with modules_to_save cannot"),
        (LoraConfig(target_modules=["q_proj"], layers_to_transform=[0]), "with layers_to_transform cannot"),
        (LoraConfig(target_modules=r".*q_proj"), "with target_modules as a pattern cannot"),
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "with use_dora cannot"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "with PeftType.IA3 cannot"),
    ],
)
def test_an_adapter_that_cannot_be_joined_is_refused_before_it_is_trained(config, words, answering_llama, tmp_path):
    get_peft_model(load_model(answering_llama), config).save_pretrained(tmp_path / "odd")
    with pytest.raises(InputError, match=f"{tmp_path / 'odd'}: an adapter {words}"):
        main(small_run(tmp_path / "odd", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_two_processes_in_one_folder(answering_llama, tmp_path):
    arguments = small_run(answering_llama, tmp_path / "out", "--resume_from_checkpoint", "auto")
    with only_process_in(tmp_path / "out"), pytest.raises(InputError, match="out: another process is at work there"):
        main(arguments)
    assert not (tmp_path / "out").exists()


def test_flags_arrive_and_what_is_trained_is_what_is_judged(answering_llama, tmp_path, monkeypatch):
    class Made(Exception):
        """The run ends where the trainer would be made."""

    seen, answers = {}, TableJudge.answers

    def trainer(*_, **options):
        seen.update(options)
        raise Made

    def judged(judge, *arguments):
        seen["judge"] = judge
        return answers(judge, *arguments)

    monkeypatch.setattr(train_script, "PolicyTrainer", trainer)
    monkeypatch.setattr(TableJudge, "answers", judged)
    dry = write_expert_csv(ExpertOptions(is_slippery=False, rows="states", output=str(tmp_path / "dry.csv")))
    more = ("--expert_csv", dry, "--is_slippery", "false", "--observation", "grid", "--warm_start", "never")
    more += ("--action_entropy_coef", "0.7", "--form_coef", "0.3", "--thought_coef", "0.2", "--action_baseline", "0.6")
    more += ("--reward_shape", "rank", "--balance_actions", "1")
    with pytest.raises(Made):
        main(small_run(answering_llama, tmp_path / "out", *more))
    assert len(seen["train_dataset"]) == 11
    assert len(set(seen["train_dataset"]["state"])) < 11  # balanced: drawn
    [lake], reader, words = seen["judge"].environments, seen["judge"].reader, seen["judge"].words
    for row in seen["train_dataset"]:
        assert row["map"] == str(lake)
        judged_prompt = reader.prompt(words.messages(lake, row["state"]))
        assert prompt_token_ids(row["prompt"], reader.tokenizer) == judged_prompt
        assert "Not slippery" in row["prompt"][0]["content"]
        assert "You are at" not in row["prompt"][-1]["content"]
    assert (seen["action_entropy_coef"], seen["form_coef"], seen["thought_coef"]) == (0.7, 0.3, 0.2)
    assert seen["action_baseline"] == 0.6
    earned = seen["action_rewards"]([{"q_values": [0.2, 0.4, 0.6, 0.1]}])
    assert earned[0] == pytest.approx([2 / 3, 5 / 6, 1.5, 0.5])


def test_a_run_in_bfloat16_as_the_configurations_have_it(answering_llama, tmp_path):
    more = ("--dtype", "bfloat16", "--bf16", "true", "--max_steps", 1)
    assert main(small_run(answering_llama, tmp_path / "out", *more)) == 0
    [line] = metrics_of(tmp_path / "out")
    assert all(math.isfinite(line[name]) for name in LOGGED)
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def test_few_states_are_repeated_to_fill_a_batch(answering_llama, tmp_path, capsys):
    path = tmp_path / "two.csv"
    path.write_text("\n".join(CSV.read_text().splitlines()[:2]) + "\n")
    arguments = small_run(answering_llama, tmp_path / "out", "--expert_csv", path, "--max_steps", 1)
    assert main(arguments) == 0
    assert "1 rows for 2 prompts per step: rows are repeated" in capsys.readouterr().out


@pytest.mark.parametrize(("accumulated", "needed"), [(2, 3), (4, 3), (8, 6)])
def test_a_step_over_several_batches_has_rows_for_all_of_them(accumulated, needed):
    training = SimpleNamespace(
        generation_batch_size=12, num_generations=4, steps_per_generation=4, num_iterations=1,
        gradient_accumulation_steps=accumulated,
    )  # fmt: skip
    assert enough_rows([{"row": 1}, {"row": 2}], training) == [{"row": 1 + i % 2} for i in range(needed)]


def test_stop_when_collapsed(tmp_path):
    """A model whose answers are never well-formed: all groups are unanimous from the first step."""
    model = build_tiny_model(tmp_path / "model")
    arguments = small_run(model, tmp_path / "out", "--max_steps", 20, "--stop_when", "collapsed", "--evaluate_steps", 0)
    assert main([*arguments, "--max_completion_length", "4", "--check", "warn", "--save_strategy", "no"]) == 0
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    assert "collapsed: all groups unanimous since step 1" in (tmp_path / "out/result.txt").read_text()


def test_the_last_configuration_counts():
    options = read_options(["--config", LAPTOP, f"--config={ROOT}/configs/random_maps.yaml"])
    assert options.config.endswith("random_maps.yaml")
    assert options.task.test_maps == 200


def test_a_configuration_can_name_the_task(places):
    options = read_options(["--config", str(places / "taxi.yaml")])
    assert (options.script.task, type(options.task).__name__) == ("taxi", "Arguments")
    flags = ["--task", "frozen_lake", "--observation", "grid"]
    assert read_options(["--config", str(places / "taxi.yaml"), *flags]).task.observation == "grid"


# Bad input -----------------------------------------------------------------------------------------------------

CONFIGS = {
    "unknown_key.yaml": "model_name_or_path: m\nlearning_rte: 1\n",
    "not_yaml.yaml": "a: [1\nb: }",
    "list.yaml": "- a\n- b\n",
    "empty.yaml": "",
    "bad_value.yaml": "reward_shape: softmax\n",
    "bad_task.yaml": "task: nonsense\n",
    "taxi.yaml": "task: taxi\noutput_dir: out\nuse_cpu: true\nbf16: false\nnum_generations: 2\n",
}
HEADER, ROW, *_ = CSV.read_text().splitlines()
CSVS = {
    "nan.csv": f"{HEADER}\n{ROW}\n{ROW.replace('0.5277624262', 'nan', 1)}\n",
    "no_column.csv": f"{HEADER.replace('q_value_up', 'q')}\n{ROW}\n",
    "no_rows.csv": f"{HEADER}\n",
    "action.csv": f"{HEADER}\n{ROW.replace(',0,LEFT', ',7,LEFT')}\n",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """model/, another run in other/, a file, an empty model folder, a half checkpoint, configs and CSVs."""
    tmp = tmp_path_factory.mktemp("places")
    build_tiny_model(tmp / "model")
    for name, text in (CONFIGS | CSVS).items():
        (tmp / name).write_text(text)
    (tmp / "file").write_text("kept")
    (tmp / "empty").mkdir()
    for name in ("other/checkpoint-1", "other/checkpoint-2", "half/checkpoint-3"):
        (tmp / name).mkdir(parents=True)
        (tmp / name / "trainer_state.json").write_text("{}")
    (tmp / "other/checkpoint-1/COMPLETE").touch()
    (tmp / "other/resolved_config.yaml").write_text("seed: 1\n")
    return tmp


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [([], 0, "no errors"), (["--observation", "original"], 2, "error: wrong examples: 3 answers")],
    ids=["clean", "the original's prompt"],
)
def test_check_only_trains_nothing(more, code, words, places, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(small_run(places / "model", out, "--check", "only", *more)) == code
    assert words in capsys.readouterr().out
    assert not out.exists()
    assert main(small_run(places / "model", places / "other", "--check", "only", *more)) == code  # another run's folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_configuration_for_a_gpu_is_checked_without_one_and_not_trained(places, tmp_path):
    """Whatever its number format: Transformers would speak of bf16."""
    for_gpu = small_run(places / "model", tmp_path / "out", "--use_cpu", "false", "--bf16", "true")
    assert main([*for_gpu, "--check", "only"]) == 0
    with pytest.raises(InputError, match=r"^--use_cpu false: CUDA finds no GPU here; --use_cpu true trains on the CPU"):
        main(for_gpu)


@pytest.mark.parametrize(("task", "lakes_own"), [([], True), (["--task", "taxi"], False)])
def test_help_has_the_options_of_the_task(task, lakes_own, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([*task, "--help"])
    assert leaving.value.code == 0
    printed = capsys.readouterr().out
    for words in ("--task ", "--objective ", "--expert_csv ", "--help_all ", "exit codes: 0 done, 2 "):
        assert words in printed
    assert ("--test_maps " in printed) == lakes_own
    assert "--vllm" not in printed


def test_many_maps_judged_on_those_held_out(taught, tmp_path, capsys):
    lakes, out = tmp_path / "lakes.csv", tmp_path / "out"
    write_expert_csv(ExpertOptions(random_maps=5, rows="states", output=str(lakes)))
    more = ("--expert_csv", lakes, "--test_maps", "3", "--optimal_bonus", "1", "--check", "warn")
    assert main(small_run(taught("llama"), out, *more)) == 0
    printed = capsys.readouterr().out
    assert "5 maps" in printed
    assert "3 maps held out" in printed
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["maps"] == json.loads((out / "run.json").read_text())["maps"]
    names = {policy["policy"] for policy in evaluation["policies"]}
    assert {"optimal", "uniform random", "untrained, greedy", "trained, greedy", "shortest path"} <= names
    # Judged again, on the same three maps
    arguments = ["--samples_per_state", "0", "--dtype", "float32", "--episodes", "3"]
    assert evaluate_policy.main(["--policies", str(out), *arguments, "--output_dir", str(out / "again")]) == 0
    again = json.loads((out / "again/evaluation.json").read_text())
    assert again["maps"] == evaluation["maps"]
    before = next(policy for policy in evaluation["policies"] if policy["policy"] == "trained, greedy")
    assert again["policies"][-1]["actions"] == before["actions"]
    assert again["policies"][-1]["success_probability"] == pytest.approx(before["success_probability"])


def test_the_untrained_model_need_not_be_judged(answering_llama, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(small_run(answering_llama, out, "--judge_untrained", "false", "--max_steps", 1)) == 0
    assert "judging the untrained model" not in capsys.readouterr().out
    assert not (out / "untrained.json").exists()
    names = {policy["policy"] for policy in json.loads((out / "evaluation.json").read_text())["policies"]}
    assert "trained, greedy" in names
    assert "untrained, greedy" not in names


def test_the_warm_start_need_not_be_judged(answering_llama, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(small_run(answering_llama, out, "--judge_warm_start", "false", "--max_steps", 1)) == 0
    assert "judging the warmed-up model" not in capsys.readouterr().out
    assert not (out / "warm_start.json").exists()
    assert "warm start 2 steps, GRPO 1" in (out / "result.txt").read_text()
    names = {policy["policy"] for policy in json.loads((out / "evaluation.json").read_text())["policies"]}
    assert {"untrained, greedy", "trained, greedy"} <= names
    assert "warm start, greedy" not in names


BAD_INPUT = [
    # further arguments, what the line names: {tmp} is the folder of `places`
    # Flags and configurations
    (["--learning_rte", "1"], "--learning_rte"),
    (["stray"], "stray"),
    (["--see", "5"], "unknown arguments: --see 5 (did you mean --seed?)"),  # abbreviated
    (["--task", "nonsense"], "--task nonsense: expected one of frozen_lake, cliff_walking, taxi"),
    (["--task", "taxi", "--observation", "grid"], "--observation 'grid': expected one of sides, cells"),
    (["--task", "taxi", "--test_maps", "3"], "unknown arguments: --test_maps 3"),
    (["--learning_rate", "high"], "'high'"),
    (["--temperature", "0"], "--temperature 0: expected a number above 0"),
    (["--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps 0: expected an integer of at least 1"),
    (["--max_completion_length", "0"], "--max_completion_length 0: expected an integer of at least 1"),
    (["--eval_strategy", "steps", "--eval_steps", "5"], "--eval_strategy steps: evaluation is this script's"),
    (["--trust_remote_code", "true"], "--trust_remote_code: is not passed on"),
    (["--cache_implementation", "static"], "--cache_implementation: is not passed on"),
    (["--enable_jit_checkpoint", "true"], "--enable_jit_checkpoint: would take the signals"),
    (["--num_train_epochs", "1"], "--num_train_epochs 1: --max_steps"),
    (["--eval_steps", "5"], "--eval_steps: evaluation is this script's, --evaluate_steps"),
    (["--save_only_model", "true"], "--save_only_model: leaves nothing to resume from"),
    (["--push_to_hub", "true"], "--push_to_hub: would upload GRPO's part"),
    (["--hub_token", "hf_x"], "--hub_token: would stand in the run's files"),
    (["--attn_implementation", "flash_attention_2"], "--attn_implementation flash_attention_2"),
    (["--save_strategy", "best"], "--save_strategy best: waits for evaluations that are not made here; use steps"),
    (["--data_seed", "7"], "--data_seed: has no effect"),
    (["--train_sampling_strategy", "group_by_length"], "--train_sampling_strategy group_by_length: groups are"),
    (
        ["--objective", "cloning", "--stop_when", "collapsed"],
        "--stop_when collapsed: --objective cloning has no groups that could agree",
    ),
    (
        ["--objective", "natural", "--multi_objective_aggregation", "normalize_then_sum"],
        "--multi_objective_aggregation normalize_then_sum: under natural the luck",
    ),
    (["--warm_start_folder", "{tmp}/file"], "--warm_start_folder {tmp}/file: is a file; name a folder"),
    (["--multi_objective_aggregation", "foo"], "--multi_objective_aggregation 'foo': expected one of"),
    (["--use_vllm", "true"], "--use_vllm true: needs vllm, 0.22 to 0.31"),
    (
        ["--steps_per_generation", "3", "--gradient_accumulation_steps", "2"],
        "--steps_per_generation 3: 1.5 optimiser steps on one batch of completions",
    ),
    (["--seed", "-1"], "--seed -1: expected an integer of at least 0"),
    (["--warm_start_learning_rate", "0"], "--warm_start_learning_rate 0: expected a number above 0"),
    (["--config"], "--config: expected the path of a YAML file"),
    (["--config", "{tmp}/nowhere.yaml"], "--config {tmp}/nowhere.yaml: no such file"),
    (["--config", "{tmp}/unknown_key.yaml"], "learning_rte"),
    (["--config", "{tmp}/not_yaml.yaml"], "{tmp}/not_yaml.yaml"),
    (["--config", "{tmp}/list.yaml"], "{tmp}/list.yaml must contain a YAML mapping"),
    (["--config", "{tmp}/empty.yaml"], "{tmp}/empty.yaml must contain a YAML mapping"),
    (["--config", "{tmp}"], "{tmp}"),
    (["--config", "{tmp}/bad_value.yaml"], "--reward_shape 'softmax'"),
    (["--config", "{tmp}/bad_task.yaml"], "--task nonsense: expected one of frozen_lake, cliff_walking, taxi"),
    # Values
    (["--reward_shape", "softmax"], "--reward_shape 'softmax': expected one of minmax, gap, rank"),
    (["--objective", "ppo"], "--objective 'ppo': expected one of natural, expected, cloning"),
    (
        ["--objective", "distillation", "--action_entropy_coef", "0"],
        "--action_entropy_coef 0: distillation needs a number above 0",
    ),
    (["--form_coef", "nan"], "--form_coef nan: expected a number of at least 0"),
    (["--form_coef", "-1"], "--form_coef -1: expected a number of at least 0"),
    (["--observation", "pixels"], "--observation 'pixels': expected one of grid, coordinates, neighbours"),
    (["--warm_start", "sometimes"], "--warm_start 'sometimes': expected one of auto, always, never"),
    (["--stop_when", "bored"], "--stop_when 'bored': expected one of optimal, collapsed, either, best, mean, never"),
    (["--check", "maybe"], "--check 'maybe': expected one of stop, warn, only"),
    (["--balance_actions", "1.5"], "--balance_actions 1.5: expected a number of at least 0, at most 1"),
    (["--test_maps", "-1"], "--test_maps -1: expected an integer of at least 0"),
    (["--test_maps", "1"], "has 1 map, and one must be left to train on"),
    (["--warm_start_steps", "0"], "--warm_start_steps 0: expected an integer of at least 1"),
    (["--evaluate_steps", "-1"], "--evaluate_steps -1: expected an integer of at least 0"),
    (["--evaluate_steps", "0", "--stop_when", "optimal"], "--stop_when optimal: needs --evaluate_steps of at least 1"),
    (["--warm_start_threshold", "90"], "--warm_start_threshold 90: expected a number above 0, at most 1"),
    (["--use_dora", "true"], "--use_dora True: warm start and GRPO are joined into one adapter"),
    (["--lora_modules_to_save", "lm_head"], "--lora_modules_to_save ['lm_head']: warm start and GRPO are joined"),
    (["--max_steps", "0"], "--max_steps: expected at least 1"),
    (["--objective", "expected", "--packed", "false"], "--packed true"),
    (["--importance_sampling_level", "sequence"], "--importance_sampling_level sequence: one ratio for all tokens"),
    (["--use_peft", "false"], "--use_peft"),
    (["--lora_target_modules", "nonsense"], "--lora_target_modules"),
    (["--loss_type", "nonsense"], "nonsense"),
    (["--scale_rewards", "nonsense"], "nonsense"),
    (["--dtype", "int3"], "'int3'"),
    # Sizes
    (["--per_device_train_batch_size", "6"], "num_generations (4)"),
    (["--num_generations", "1"], "at least 2 generations"),
    (["--reward_weights", "1", "1"], "--reward_weights [1.0, 1.0]: expected one for each of combined_reward, "),
    (["--num_iterations", "2", "--save_steps", "1"], "--save_steps 1: expected a multiple of 2"),
    (["--max_completion_length", "500"], "--max_completion_length 500 exceed the model's context of 512 tokens"),
    # The expert
    (["--expert_csv", "{tmp}/nowhere.csv"], "{tmp}/nowhere.csv: no such file"),
    (["--expert_csv", "{tmp}"], "{tmp}: is a folder"),
    (["--expert_csv", "{tmp}/nan.csv"], "{tmp}/nan.csv: line 3, column q_value_"),
    (["--expert_csv", "{tmp}/no_column.csv"], "column q_value_up is missing"),
    (["--expert_csv", "{tmp}/no_rows.csv"], "{tmp}/no_rows.csv: has a header and no rows"),
    (["--expert_csv", "{tmp}/action.csv"], "'7' is no action"),
    (["--is_slippery", "false"], "wrong dynamics: mean Bellman residual"),
    (["--observation", "original"], "prompts differ in colour codes only: 11 states"),
    # The model
    (["--model_name_or_path", "{tmp}/nowhere"], "{tmp}/nowhere: no such folder"),
    (["--model_name_or_path", "{tmp}/empty"], "{tmp}/empty: is an empty folder"),
    (["--model_name_or_path", "{tmp}/file"], "{tmp}/file: is a file"),
    # The output folder
    (["--output_dir", "{tmp}/other"], "--output_dir {tmp}/other: holds a run"),
    (["--output_dir", "{tmp}/half"], "--output_dir {tmp}/half: holds a run"),
    (["--output_dir", "{tmp}/file"], "--output_dir {tmp}/file: is a file"),
    (["--output_dir", "{tmp}/file/sub"], "--output_dir {tmp}/file/sub: cannot be written"),
    (["--output_dir", "/proc/no"], "--output_dir /proc/no: cannot be written"),
    # Resuming
    (["--resume_from_checkpoint", "yes"], "--resume_from_checkpoint yes: no complete checkpoint there; try auto"),
    (["--resume_from_checkpoint", "{tmp}/nowhere/checkpoint-1"], "no complete checkpoint there"),
    # half written, beside a whole one
    (["--resume_from_checkpoint", "{tmp}/other/checkpoint-2"], "no complete checkpoint there"),
    (["--resume_from_checkpoint", "auto", "--output_dir", "{tmp}/file"], "is a file"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "message"), BAD_INPUT, ids=[" ".join(more) for more, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_writes_nothing(more, message, places, tmp_path, monkeypatch, capsys):
    def files():
        return {path: path.stat().st_mtime_ns for folder in (places, tmp_path) for path in folder.rglob("*")}

    before = files()
    more = [text.format(tmp=places) for text in more]
    arguments = small_run(places / "model", tmp_path / "out", *more)
    if "--config" in more:
        arguments = arguments[2:]
    monkeypatch.setattr(sys, "argv", ["train_script.py", *arguments])
    with pytest.raises(SystemExit) as leaving:
        run_script(main)
    assert leaving.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message.format(tmp=places) in lines[0]
    assert files() == before


@pytest.mark.parametrize(("begun_in", "is_refused"), [(1, True), (2, False)])
def test_another_batch_is_another_run_but_in_another_number_of_processes(begun_in, is_refused, tmp_path):
    asked = small_run(tmp_path / "model", tmp_path / "out", "--resume_from_checkpoint", "auto")
    begun = train_script.read_options(asked)
    write_run_files(tmp_path / "out", begun.groups, begun.config, 0, {}, "a CPU", processes=begun_in)
    other = train_script.read_options([*asked, "--per_device_train_batch_size", "16"])
    if is_refused:
        with pytest.raises(InputError, match=r"^--per_device_train_batch_size 16: .* was begun with the default"):
            train_script.has_ended(other)
    else:
        assert not train_script.has_ended(other)
