"""QLoRA (NF4 + LoRA) on a CPU: gradients, the command, a kill, and what plain PEFT makes of the adapter."""

import json

import pytest
import torch
from conftest import interrupted_at_step
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_train_script import small_run
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import ModelConfig

import evaluate_policy
import train_script
from llm_policy.adapters import loading_options, quantization_of
from llm_policy.errors import InputError
from llm_policy.models import load_model

pytest.importorskip("bitsandbytes", reason="requirements-4bit.txt")

NF4 = ("--load_in_4bit", "true", "--use_bnb_nested_quant", "true", "--report_to", "none")
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def gradients(model) -> list[torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def test_gradients_after_an_evaluation_are_those_before(tmp_path):
    """bitsandbytes repacks weights at the first evaluation on some CPUs, and no gradient passes them from then on."""
    folder = build_tiny_model(tmp_path / "model")
    options = loading_options(ModelConfig(load_in_4bit=True, dtype="float32"))
    torch.manual_seed(0)
    model = get_peft_model(load_model(folder, **options), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before = gradients(model.train())
    with torch.no_grad():
        model.eval()(IDS)
    after = gradients(model.train())
    assert all(gradient.abs().sum() > 0 for gradient in before)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


def test_a_killed_run_ends_in_the_same_adapter_and_plain_peft_loads_it(answering_llama, tmp_path, capsys):
    whole, parts = (small_run(answering_llama, tmp_path / name, *NF4, "--objective", "grpo") for name in ("one", "two"))
    assert train_script.main(whole) == 0
    assert "each completion decodes with a copy of its prompt" in capsys.readouterr().out

    interrupted_at_step(4, lambda: train_script.main(parts))  # two steps of the warm start, one of GRPO
    assert train_script.main([*parts, "--resume_from_checkpoint", "auto"]) == 0
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)

    # The warm start was no good to merge into four bits: GRPO continued its adapter, whose rank it has
    config = json.loads((tmp_path / "one/adapter_config.json").read_text())
    warm = load_file(tmp_path / "one/warm_start/adapter_model.safetensors")
    assert config["r"] == json.loads((tmp_path / "one/warm_start/adapter_config.json").read_text())["r"]
    assert any(not torch.equal(one[name], warm[name]) for name in warm)

    run = json.loads((tmp_path / "one/run.json").read_text())
    assert (run["load_in_4bit"], run["use_bnb_nested_quant"]) == (True, True)
    stock = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    base = AutoModelForCausalLM.from_pretrained(answering_llama, dtype="float32", quantization_config=stock)
    loaded = PeftModel.from_pretrained(base, tmp_path / "one").train()  # bitsandbytes' bfloat16 kernels are for eval()
    ours = load_model(tmp_path / "one", "float32", quantization_config=quantization_of(run))
    torch.testing.assert_close(loaded(IDS).logits, ours(IDS).logits)

    judged = ["--policies", str(tmp_path / "one"), "--samples_per_state", "0", "--episodes", "2"]
    assert evaluate_policy.main([*judged, "--output_dir", str(tmp_path / "judged")]) == 0
    trained, again = (
        next(p for p in json.loads((tmp_path / name / "evaluation.json").read_text())["policies"] if end in p["policy"])
        for name, end in (("one", "trained, greedy"), ("judged", "one, greedy"))
    )
    assert trained["policy_SA"] == again["policy_SA"]


def test_an_adapter_is_not_merged_into_rounded_weights(answering_llama, tmp_path):
    get_peft_model(load_model(answering_llama), LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path / "a")
    with pytest.raises(InputError, match=r"--load_in_4bit, --load_in_8bit: .* is an adapter"):
        train_script.main(small_run(tmp_path / "a", tmp_path / "out", *NF4))


def test_four_and_eight_bits(answering_llama, tmp_path):
    with pytest.raises(InputError, match="8 bit and 4 bit precision at the same time"):
        train_script.main(small_run(answering_llama, tmp_path / "out", *NF4, "--load_in_8bit", "true"))
