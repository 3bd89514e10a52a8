import json
import shutil
from pathlib import Path

import gguf
import httpx2
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import ACTIONS, ARCHITECTURES, build_tiny_model
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, LlamaForSequenceClassification, T5Config
from trl import ModelConfig, get_peft_config

from llm_policy import models
from llm_policy.errors import InputError
from llm_policy.models import EMBEDDED_MODEL, load_model, load_tokenizer, model_checksum

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 40, 41, 42]])


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def broken(llama, tmp_path) -> Path:
    """A copy of the tiny model, for a test to damage."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


def save_adapter(base: Path, folder: Path) -> PeftModel:
    """Put an adapter that changes the output on the model in `base` and save it to `folder`."""
    model = get_peft_model(load_model(base, "float32"), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def test_no_thought_is_parsed_out_of_a_completion(tmp_path):
    """TRL asks the tokenizer for a template of replies, and rewards only what it leaves."""
    folder = build_tiny_model(tmp_path / "llama", "llama")
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"response_template": {"defaults": {"role": "assistant"}}})
    )
    assert AutoTokenizer.from_pretrained(folder).response_template
    assert load_tokenizer(folder).response_template is None


def write_gguf(folder: Path, file: Path) -> None:
    """Write the tiny llama in `folder` as an unquantised GGUF file."""
    tokenizer, model = load_tokenizer(folder), load_model(folder, "float32")
    config, backend = model.config, json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        count = heads.get(name.split(".")[-2])
        if count:  # llama.cpp pairs the rotated dimensions as (0, 1), (2, 3); transformers as halves
            weight = weight.view(count, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- the tiny models that other tests build on


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_model_depends_on_the_seed_alone(architecture, tmp_path):
    state = torch.get_rng_state()
    weights = [
        load_file(build_tiny_model(tmp_path / str(i), architecture, seed) / "model.safetensors")
        for i, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("split_actions", [False, True])
def test_tiny_tokenizer_splits_actions_on_request(architecture, split_actions, tmp_path):
    tokenizer = load_tokenizer(build_tiny_model(tmp_path, architecture, split_actions=split_actions))
    opening = tokenizer("<answer>")["input_ids"]
    for action in ACTIONS:
        tokens = tokenizer(f"<answer>{action}</answer>")["input_ids"]
        assert tokens[: len(opening)] == opening
        assert (tokens[len(opening)] == tokenizer.convert_tokens_to_ids(action)) is not split_actions
        assert tokenizer.decode(tokens, skip_special_tokens=True) == f"<answer>{action}</answer>"


def test_tiny_gemma_refuses_a_system_turn_and_begins_with_bos(tmp_path):
    tokenizer = load_tokenizer(build_tiny_model(tmp_path, "gemma"))
    turn = {"role": "user", "content": "row 1"}
    text = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    assert text == "<bos><start_of_turn>user\nrow 1<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(Exception, match="System role not supported"):
        tokenizer.apply_chat_template([{"role": "system", "content": "be brief"}, turn], tokenize=False)


def test_tiny_gemma3_mixes_sliding_and_full_attention(tmp_path):
    config = load_model(build_tiny_model(tmp_path, "gemma3")).config
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window < config.max_position_embeddings


# --- what loads


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_local_folder_in_the_dtype_asked_for(llama, dtype, expected):
    assert load_model(llama, dtype).dtype == expected


def test_tokenizer_pads_left_with_its_own_token_or_the_end_token(broken):
    tokenizer = load_tokenizer(broken)
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<pad>")
    edit_json(broken / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(broken).pad_token == "<|im_end|>"


def test_adapter_folder_loads_base_and_adapter(llama, tmp_path):
    saved = save_adapter(llama, tmp_path)
    loaded = load_model(tmp_path, "float32")
    assert torch.equal(loaded(TOKENS).logits, saved(TOKENS).logits)
    assert not torch.equal(loaded(TOKENS).logits, load_model(llama, "float32")(TOKENS).logits)
    assert load_tokenizer(tmp_path).get_vocab() == load_tokenizer(llama).get_vocab()


def test_an_adapter_is_computed_in_the_dtype_of_its_base(llama, tmp_path):
    save_adapter(llama, tmp_path)
    assert {weight.dtype for weight in load_model(tmp_path, "bfloat16").parameters()} == {torch.bfloat16}


def test_an_adapters_base_keeps_its_revision(llama, tmp_path, monkeypatch):
    save_adapter(llama, tmp_path)
    edit_json(tmp_path / "adapter_config.json", revision="v2")
    asked, locate = [], models.locate

    def recorded(name, revision="main"):
        asked.append((str(name), revision))
        return locate(name, revision)

    monkeypatch.setattr(models, "locate", recorded)
    load_model(tmp_path, "float32")
    assert set(asked) == {(str(tmp_path), "main"), (str(llama), "v2")}


def test_gguf_file_trains_and_saves_like_any_model(llama, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(llama, file)
    original, unpacked = load_model(llama, "float32"), load_model(file, "float32")
    torch.testing.assert_close(unpacked(TOKENS).logits, original(TOKENS).logits, rtol=0, atol=1e-5)
    assert not hasattr(unpacked.config, "quantization_config")
    assert load_tokenizer(file).chat_template == load_tokenizer(llama).chat_template

    unpacked.save_pretrained(tmp_path / "plain")
    assert torch.equal(load_model(tmp_path / "plain", "float32")(TOKENS).logits, unpacked(TOKENS).logits)
    saved = save_adapter(file, tmp_path / "adapter")
    saved(TOKENS, labels=TOKENS).loss.backward()
    assert torch.equal(load_model(tmp_path / "adapter", "float32")(TOKENS).logits, saved(TOKENS).logits)
    with pytest.raises(InputError, match="quantised already"):
        load_model(file, quantization_config=object())


@pytest.mark.parametrize(
    "name", ["data/models/SmolLM2-135M-Instruct", "/other/clone/data/models/SmolLM2-135M-Instruct"]
)
def test_embedded_model_is_found_from_anywhere_or_named_with_its_remedy(name, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    embedded = tmp_path / "clone" / "data/models/SmolLM2-135M-Instruct"
    monkeypatch.setattr(models, "EMBEDDED_MODEL", embedded)
    with pytest.raises(InputError, match=r"not there yet; run `make model`"):
        load_model(name)
    shutil.copytree(llama, embedded)
    assert load_model(name).num_parameters() == load_model(llama).num_parameters()
    assert EMBEDDED_MODEL.parts[-3:] == embedded.parts[-3:]


def test_trl_makes_the_lora_settings():
    """Nothing of our own is needed; this test is here to notice when a release changes that."""
    assert get_peft_config(ModelConfig()) is None
    settings = get_peft_config(ModelConfig(use_peft=True, lora_r=16, lora_target_modules=["all-linear"]))
    assert (settings.r, settings.target_modules, str(settings.task_type)) == (16, "all-linear", "CAUSAL_LM")


# --- what does not load: each ends in one line with the name and the remedy


def edit_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def zero_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})


def make_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def make_reward_model(folder: Path) -> None:
    LlamaForSequenceClassification(load_model(folder).config).save_pretrained(folder)


def make_encoder(folder: Path) -> None:
    shutil.rmtree(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(**sizes, vocab_size=32)).save_pretrained(folder)


def change_weight(file: Path, name: str, change) -> None:
    """`change(weights, name)` on the weights of a file, or on the one whose name ends so."""
    weights = load_file(file)
    change(weights, next(key for key in sorted(weights) if key.endswith(name)))
    save_file(weights, file, metadata={"format": "pt"})


def no_number(weights: dict, name: str) -> None:
    weights[name].view(-1)[0] = torch.nan


def rename(weights: dict, name: str) -> None:
    weights[f"other.{name}"] = weights.pop(name)


def round_off(weights: dict, name: str) -> None:
    weights[name] = (weights[name] * 127).round().to(torch.int8)


DAMAGES = {
    "whole numbers without their scale": (
        lambda folder: change_weight(folder / "model.safetensors", "q_proj.weight", round_off),
        r"q_proj.weight is of type I8, and config.json has no quantization_config",
    ),
    "a layer less in the configuration": (
        lambda folder: edit_json(folder / "config.json", num_hidden_layers=1),
        r"9 of its weights have no place in the model of its config.json \(model.layers.1.",
    ),
    "a weight that is no number": (
        lambda folder: change_weight(folder / "model.safetensors", "q_proj.weight", no_number),
        r"model.layers.0.self_attn.q_proj.weight holds values that are no numbers",
    ),
    "a norm that is no number": (
        lambda folder: edit_json(folder / "config.json", rms_norm_eps=float("nan")),
        r"its answers are no numbers \(nan or inf\), or all the same; look at its config.json",
    ),
    "positions that are no numbers": (
        lambda folder: edit_json(
            folder / "config.json", rope_parameters={"rope_theta": float("nan"), "rope_type": "default"}
        ),
        "rotary_emb.inv_freq holds values that are no numbers",
    ),
    "all weights zero": (zero_weights, r"its answers are no numbers \(nan or inf\), or all the same"),
    "more layers than memory": (
        lambda folder: edit_json(folder / "config.json", num_hidden_layers=10**6),
        "its config.json says num_hidden_layers 1000000, expected at most 1000",
    ),
    "generation settings that are no text": (
        lambda folder: (folder / "generation_config.json").write_bytes(b"\xff\xfe"),
        "generation_config.json' is not a valid JSON file",
    ),
    "empty generation settings": (
        lambda folder: (folder / "generation_config.json").write_text(""),
        "generation_config.json' is not a valid JSON file",
    ),
    "an end that is no token": (
        lambda folder: edit_json(folder / "generation_config.json", eos_token_id="x"),
        "eos_token_id of its generation_config.json",
    ),
    "ends that are no tokens": (
        lambda folder: edit_json(folder / "generation_config.json", eos_token_id=[[1]]),
        "eos_token_id of its generation_config.json",
    ),
    "no folder": (shutil.rmtree, "no such folder"),
    "a file": (make_file, "is a file"),
    "empty folder": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "is an empty folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON"),
    "unknown architecture": (lambda folder: edit_json(folder / "config.json", model_type="xyz"), "`xyz`"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no file named model\.safetensors"),
    "cut weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 99), "cannot be loaded"),
    "one weight missing": (drop_weight, r"1 weights are missing \(model\.norm\.weight"),
    "other sizes": (lambda folder: edit_json(folder / "config.json", hidden_size=32), "cannot be loaded"),
    "encoder-decoder": (lambda folder: T5Config().save_pretrained(folder), "cannot be loaded"),
    "encoder": (make_encoder, "BertForMaskedLM, not a causal language model"),
    "reward model": (make_reward_model, "LlamaForSequenceClassification, not a causal language model"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_model_folder(case, broken):
    damage, message = DAMAGES[case]
    damage(broken)
    with pytest.raises(InputError, match=message) as caught:
        load_model(broken)
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)


ADAPTER_DAMAGES = {
    "its own base": (
        lambda folder: edit_json(folder / "adapter_config.json", base_model_name_or_path=str(folder)),
        "is an adapter itself",
    ),
    "a name that does not fit": (
        lambda folder: change_weight(folder / "adapter_model.safetensors", "q_proj.lora_A.weight", rename),
        "does not belong to its adapter_config.json: .* (is not in it|has no place in the model)",
    ),
    "a weight that is no number": (
        lambda folder: change_weight(folder / "adapter_model.safetensors", "q_proj.lora_A.weight", no_number),
        "q_proj.lora_A.default.weight holds values that are no numbers",
    ),
    "base gone": (lambda folder: edit_json(folder / "adapter_config.json", base_model_name_or_path="/gone"), "/gone"),
    "no base named": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "base_model_name_or_path"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"without adapter_model\.safe"),
    "cut weights": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\0" * 99), "cannot be loaded"),
    "an older file that fits nothing": (
        lambda folder: (
            (folder / "adapter_model.safetensors").unlink(),
            torch.save({"x": torch.zeros(1)}, folder / "adapter_model.bin"),
        ),
        "adapter_model.bin: does not belong to its adapter_config.json",
    ),
    "a scaling that is no number": (
        lambda folder: edit_json(folder / "adapter_config.json", lora_alpha=float("nan")),
        r"adapter_config.json: its scaling \(lora_alpha, r, alpha_pattern\) is no number",
    ),
    "a scaling of one module that is none": (
        lambda folder: edit_json(folder / "adapter_config.json", alpha_pattern={"q_proj": float("inf")}),
        r"adapter_config.json: its scaling \(lora_alpha, r, alpha_pattern\) is no number",
    ),
    "a scaling that drowns the model": (
        lambda folder: edit_json(folder / "adapter_config.json", lora_alpha=1e30),
        "its answers are no numbers|holds values that are no numbers",
    ),
    "layers twice": (
        lambda folder: edit_json(folder / "adapter_config.json", layer_replication=[[0, 2], [1, 2]]),
        "with layer_replication cannot be asked here|cannot be loaded",
    ),
    "a rank that no memory holds": (
        lambda folder: edit_json(folder / "adapter_config.json", r=10**6),
        "r 1000000, expected at most 10000",
    ),
    "a base whose name no disk holds": (
        lambda folder: edit_json(folder / "adapter_config.json", base_model_name_or_path="x" * 300),
        "a name of 300 bytes",
    ),
    "a base in the home of nobody": (
        lambda folder: edit_json(folder / "adapter_config.json", base_model_name_or_path="~nosuchuser/x"),
        "~nosuchuser/x: no such user's home",
    ),
    "other rank": (lambda folder: edit_json(folder / "adapter_config.json", r=2), "cannot be loaded"),
}


def test_an_adapter_that_was_saved_with_its_embeddings_loads(llama, tmp_path):
    """PEFT does so where the vocabulary was resized, or when told to."""
    model = save_adapter(llama, tmp_path)
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    assert any("embed_tokens.weight" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    torch.testing.assert_close(load_model(tmp_path, "float32")(TOKENS).logits, model(TOKENS).logits)


TEXTS = {"empty": "", "cut": '{"a": ', "null": "null", "a number": "3", "a list": "[1]", "empty object": "{}"}
FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", [*FILES, "adapter/adapter_config.json", "adapter/adapter_model.safetensors"])
def test_whatever_a_file_holds_the_answer_is_one_line_or_a_model(name, text, broken):
    """Systematically, because each of the libraries has errors of its own."""
    if name.startswith("adapter"):
        save_adapter(broken, broken / "adapter")
    (broken / name).write_text(TEXTS[text])
    folder, lines = (broken / name).parent, []
    for load in (load_model, load_tokenizer):
        try:
            load(folder)
        except InputError as error:
            lines.append(str(error))
    assert all("\n" not in line and str(folder) in line for line in lines)
    may_do = {"generation_config.json", "tokenizer_config.json"}  # with one of these alone a model can be read
    assert lines or Path(name).name in may_do


def test_an_older_adapter_file_that_fits_is_loaded(llama, tmp_path):
    saved = save_adapter(llama, tmp_path)
    torch.save(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.testing.assert_close(load_model(tmp_path, "float32")(TOKENS).logits, saved(TOKENS).logits)


def test_a_checksum_covers_the_weights_the_words_and_the_base(broken, tmp_path):
    found = [model_checksum(broken), model_checksum(broken)]
    save_adapter(broken, tmp_path / "adapter")
    found += [model_checksum(tmp_path / "adapter")]
    (broken / "README.md").write_text("says nothing of what the model is")
    assert model_checksum(broken) == found[0] == found[1]
    change_weight(broken / "model.safetensors", "q_proj.weight", lambda weights, name: weights[name].mul_(2))
    found += [model_checksum(broken), model_checksum(tmp_path / "adapter")]
    (broken / "chat_template.jinja").write_text("{{ messages }}")
    found += [model_checksum(broken)]
    assert len(set(found)) == 5


@pytest.mark.parametrize("case", ADAPTER_DAMAGES)
def test_damaged_adapter_folder(case, llama, tmp_path):
    save_adapter(llama, tmp_path)
    damage, message = ADAPTER_DAMAGES[case]
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizer_missing(broken):
    for file in broken.glob("*token*"):
        file.unlink()
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        load_tokenizer(broken)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "no such GGUF file"),
        ("./missing", "no such folder"),
        ("runs/a/missing", "no such folder"),
        ("a b", "neither a local folder nor a hub id"),
    ],
)
def test_name_that_is_no_model(name, message):
    with pytest.raises(InputError, match=f"^{name}: {message}"):
        load_model(name)


@pytest.mark.parametrize("name", [None, ""])
def test_no_name(name):
    """As `model_name_or_path:` with nothing behind it in a YAML file: it was a traceback."""
    with pytest.raises(InputError, match=r"^--model_name_or_path: names no model; expected a hub id, a folder"):
        load_model(name)


def test_gguf_file_of_four_bytes(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=r"model\.gguf: the .* cannot be loaded"):
            load(tmp_path / "model.gguf")


def test_broken_gguf_file(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"no GGUF")
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match="cannot be loaded"):
            load(file)


def test_unknown_dtype(llama):
    with pytest.raises(InputError, match="'int3' is unknown, expected one of auto, float32"):
        load_model(llama, dtype="int3")


def refusal(kind: type[HfHubHTTPError], status: int = 401) -> HfHubHTTPError:
    return kind("refused\nlong advice", response=httpx2.Response(status, request=httpx2.Request("GET", "https://hub")))


HUB_REFUSALS = {
    "gated": (
        refusal(GatedRepoError, 403),
        r"accept the licence on the model's page, then set HF_TOKEN or run `hf",
    ),
    "unknown": (refusal(RepositoryNotFoundError), "neither a local folder nor a model on the hub; check the spelling"),
    "revision": (refusal(RevisionNotFoundError, 404), "no such revision"),
    "no config": (refusal(RemoteEntryNotFoundError, 404), r"has no config\.json on the hub"),
    "bad token": (refusal(HfHubHTTPError), "status 401.*check HF_TOKEN"),
    "not cached": (
        LocalEntryNotFoundError("x\ny"),
        "hub is out of reach; give the path of a folder that is there; the embedded",
    ),
    "disk full": (OSError(28, "No space left on device"), "disk full while fetching"),
}


@pytest.mark.parametrize("case", HUB_REFUSALS)
def test_hub_refuses_a_file(case, monkeypatch):
    error, message = HUB_REFUSALS[case]

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(models, "hub_answers", lambda *_: True)
    monkeypatch.setattr(models, "hf_hub_download", refuse)
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=f"^google/gemma-2b-it: .*{message}") as caught:
            load("google/gemma-2b-it")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        httpx2.ConnectError("x"),
        httpx2.ConnectTimeout("x"),
        httpx2.ProxyError("x"),
        OfflineModeIsEnabled("x"),
        refusal(HfHubHTTPError, 503),
    ],
    ids=lambda error: type(error).__name__,
)
def test_hub_out_of_reach_leaves_the_cache(error, monkeypatch):
    def fail(*_, timeout, **__):
        assert 0 < timeout <= 10
        raise error

    monkeypatch.setattr(models.HfApi, "model_info", fail)
    with pytest.raises(InputError, match=r"^owner/no-such-model: no such local folder, and the hub is out"):
        load_model("owner/no-such-model")  # the real look into the cache


def test_hub_that_answers_no_is_not_out_of_reach(monkeypatch):
    def refuse(*_, **__):
        raise refusal(RepositoryNotFoundError)

    monkeypatch.setattr(models.HfApi, "model_info", refuse)
    with pytest.raises(InputError, match="check the spelling"):
        load_model("owner/no-such-model")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_has_the_attention_that_is_asked_for(attention, llama):
    assert load_model(llama, attn_implementation=attention).config._attn_implementation == attention
