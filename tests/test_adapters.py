"""The life of a LoRA adapter: it changes nothing at first, merges exactly, joins with others, or is refused."""

from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from tiny_models import build_tiny_model
from tiny_policies import add_random_adapter, random_policy
from trl import ModelConfig

from llm_policy import adapters, models
from llm_policy.errors import InputError

IDS = torch.tensor([[5, 9, 2, 7]])


def test_a_fresh_adapter_changes_nothing_yet():
    base = random_policy("llama")
    logits = base(IDS).logits
    model = adapters.fresh(base, LoraConfig(r=4, target_modules="all-linear"))
    assert torch.equal(model(IDS).logits, logits)
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_a_model_stands_on_what_the_adapter_does(tmp_path):
    adapted = add_random_adapter(random_policy("llama"))
    adapted.save_pretrained(tmp_path)
    merged = adapters.stood_on(random_policy("llama"), tmp_path)
    assert not isinstance(merged, PeftModel)
    torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-4)


def test_who_may_read_the_folder_may_read_the_weights(tmp_path):
    adapters.save(add_random_adapter(random_policy("llama")), tmp_path)
    modes = {file.name: file.stat().st_mode for file in tmp_path.iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_joined_adapters_do_what_they_do_one_on_top_of_the_other(parts, use_rslora, tmp_path):
    model, folders = random_policy("llama"), []
    for part in range(parts):
        folders.append(tmp_path / str(part))
        adapted = add_random_adapter(model, seed=part, r=4, use_rslora=use_rslora)
        adapted.save_pretrained(folders[-1])
        model = adapted.merge_and_unload()
    together = adapters.joined(random_policy("llama"), folders)
    torch.testing.assert_close(together(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    together.save_pretrained(tmp_path / "joined")
    loaded = PeftModel.from_pretrained(random_policy("llama"), tmp_path / "joined")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_joining_rounds_nothing_of_adapters_on_a_model_in_16_bits(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for seed, (folder, rank) in enumerate(zip(folders, (4, 2), strict=True)):
        add_random_adapter(random_policy("llama"), seed=seed, r=rank).save_pretrained(folder)
    apart, together = (
        adapters.joined(random_policy("llama").to(dtype), folders) for dtype in (torch.float32, torch.bfloat16)
    )
    weights = {name: w for name, w in together.named_parameters() if "lora_" in name}
    assert {w.dtype for w in weights.values()} == {torch.float32}
    for name, w in apart.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(weights[name], w)


# What cannot be joined -------------------------------------------------------------------------------------------

ODD_ADAPTERS = [
    (LoraConfig(target_modules=["q_proj"], use_dora=True), "with use_dora cannot"),
    (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "with modules_to_save cannot"),
    (LoraConfig(target_modules=["q_proj"], layers_to_transform=[0]), "with layers_to_transform cannot"),
    (LoraConfig(target_modules=r".*q_proj"), "with target_modules as a pattern cannot"),
    (
        LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa_niter_4"),
        "with init_lora_weights pissa_niter_4 cannot",
    ),
    (
        LoraConfig(target_modules=["q_proj"], exclude_modules=["layers.0.self_attn.q_proj"]),
        "with exclude_modules cannot",
    ),
    (LoraConfig(target_modules=["q_proj"], bias="lora_only"), "with bias lora_only cannot"),
    (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "with trainable_token_indices cannot"),
    (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "with PeftType.IA3 cannot"),
]


@pytest.mark.parametrize(("config", "words"), ODD_ADAPTERS)
def test_an_adapter_that_cannot_be_joined(config, words):
    with pytest.raises(InputError, match=f"^runs/odd: an adapter {words} be trained further here"):
        adapters.check_joinable(Path("runs/odd"), config)


def test_plain_lora_can_be_joined():
    adapters.check_joinable(Path("runs/plain"), LoraConfig(target_modules=["q_proj"], use_rslora=True))
    adapters.check_joinable(Path("runs/plain"), LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"))


def test_every_option_of_trl_for_what_cannot_be_joined_is_refused():
    assert all(hasattr(LoraConfig(), name) for name in adapters.UNJOINABLE), "PEFT calls it otherwise by now"
    options = [option for option in adapters.UNJOINABLE.values() if option]
    assert len(options) == 3
    adapters.check_model_options(ModelConfig(use_peft=True))
    for option in options:
        config = ModelConfig(use_peft=True, **{option: True if option == "use_dora" else ["lm_head"]})
        with pytest.raises(InputError, match=f"^--{option} .*: warm start and GRPO are joined into one adapter"):
            adapters.check_model_options(config)
    with pytest.raises(InputError, match=r"^--use_peft false: what is trained and saved here is a LoRA adapter"):
        adapters.check_model_options(ModelConfig())


# The model to train ----------------------------------------------------------------------------------------------


def options_of(folder: Path, **more) -> ModelConfig:
    return ModelConfig(
        model_name_or_path=str(folder), dtype="float32", use_peft=True, lora_target_modules=["q_proj", "v_proj"], **more
    )


def test_the_model_to_train_comes_without_an_adapter(tmp_path):
    folder = build_tiny_model(tmp_path / "model")
    model, lora, folders = adapters.model_to_train(options_of(folder), torch.device("cpu"))
    assert not isinstance(model, PeftModel)
    assert (lora.target_modules, folders) == ({"q_proj", "v_proj"}, [])


def test_an_adapter_to_train_further_is_merged_into_its_model(tmp_path):
    folder = build_tiny_model(tmp_path / "model")
    plain, _, _ = adapters.model_to_train(options_of(folder), torch.device("cpu"))
    adapted = add_random_adapter(plain, target_modules=["q_proj", "v_proj"])
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path / "adapter")
    model, _, folders = adapters.model_to_train(options_of(tmp_path / "adapter"), torch.device("cpu"))
    assert folders == [tmp_path / "adapter"]
    torch.testing.assert_close(model(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-4)
    # Half of a policy, beside the warm start that it stands on, is not
    (tmp_path / "warm_start").mkdir()
    with pytest.raises(InputError, match=f"trained on top of another adapter; name the run's folder, {tmp_path}"):
        adapters.model_to_train(options_of(tmp_path / "adapter"), torch.device("cpu"))


@pytest.mark.parametrize("layer", ["embed_tokens", "lm_head"])
def test_embeddings_that_are_the_head_as_well_are_refused(layer, tmp_path):
    model = build_tiny_model(tmp_path / "gemma", "gemma")
    config = ModelConfig(
        model_name_or_path=str(model), dtype="float32", use_peft=True, lora_target_modules=[layer, "q_proj"]
    )
    with pytest.raises(InputError, match="adapts embeddings or lm_head, which are the same weights in this model"):
        adapters.model_to_train(config, torch.device("cpu"))


@pytest.mark.parametrize("saves_base", [True, False])
def test_an_adapter_of_a_head_that_is_the_embeddings_as_well_is_not_merged(saves_base, tmp_path):
    """PEFT saves the weights below such an adapter, too, unless it is told not to."""
    folder = build_tiny_model(tmp_path / "gemma", "gemma")
    adapted = add_random_adapter(models.load_model(folder, dtype="float32"), target_modules=["q_proj", "lm_head"])
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=saves_base)
    with pytest.raises(InputError, match="adapts embeddings or lm_head, which are the same weights in this model"):
        adapters.model_to_train(options_of(tmp_path / "adapter"), torch.device("cpu"))


def test_a_head_is_not_adapted(tmp_path):
    """Its weights are read without what LoRA adds, so that nothing would be learnt there."""
    options = options_of(build_tiny_model(tmp_path / "model"))
    model = models.load_model(tmp_path / "model", dtype="float32")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "model")
    options.lora_target_modules = ["q_proj", "lm_head"]
    with pytest.raises(InputError, match=r"'lm_head'\]: adapts the head, whose weights are read as they are"):
        adapters.model_to_train(options, torch.device("cpu"))


def test_layers_that_the_model_does_not_have(tmp_path):
    options = options_of(build_tiny_model(tmp_path / "model"))
    options.lora_target_modules = ["nowhere", "neither"]
    with pytest.raises(InputError, match=r"^--lora_target_modules \['nowhere', 'neither'\]: "):
        adapters.model_to_train(options, torch.device("cpu"))


@pytest.mark.parametrize(("revision", "saved"), [("main", None), ("v2", "v2")])
def test_an_adapter_says_which_revision_of_its_base_it_belongs_to(revision, saved, tmp_path):
    options = options_of(build_tiny_model(tmp_path / "model"), model_revision=revision)
    _, lora, _ = adapters.model_to_train(options, torch.device("cpu"))
    assert lora.revision == saved
