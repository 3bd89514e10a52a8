"""The life of a LoRA adapter: fresh on its model, merged into the weights, joined with others, checked before it is.

What a run saves is one adapter on the plain base model, however many adapters were trained on top of each other on the
way to it. So only adapters that can be joined are trained: plain LoRA on linear layers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from trl import ModelConfig, get_peft_config, get_quantization_config

from llm_policy import processes
from llm_policy.errors import InputError, check_choices, library_errors
from llm_policy.hardware import cuda_random_states, restore_cuda_random_states
from llm_policy.models import load_model
from llm_policy.run_files import CONFIG_FILE, let_umask_decide, run_settings

# Options that make an adapter which is no sum of matrix products: PEFT's LoraConfig -> TRL's ModelConfig (None: TRL has
# no such option).
UNJOINABLE = {
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "layers_to_transform": None,
    "exclude_modules": None,  # the joined adapter would leave them out of the others, too
    "trainable_token_indices": None,
    "lora_bias": None,
    "alora_invocation_tokens": None,
    "kasa_config": None,
    "use_bdlora": None,
}
ADAPTER_ALONE = (True, False, "gaussian", "eva", "orthogonal")  # starts of LoRA that leave the model's weights alone
WARM_START_FOLDER, GRPO_FOLDER = "warm_start", "grpo"  # in a run; the two are joined in the end
ATTENTION = (None, "eager", "sdpa")
QUANTIZATION = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")  # of TRL's ModelConfig


def check_model_options(model_config: ModelConfig) -> None:
    """`InputError` for options of a model that cannot be honoured.

    Among them are those whose adapter could not be joined with another one in the end.
    """
    if model_config.attn_implementation not in ATTENTION:
        raise InputError(
            f"--attn_implementation {model_config.attn_implementation}: rows of several completions need a mask of "
            "their own; expected eager or sdpa"
        )
    if (model_config.load_in_4bit or model_config.load_in_8bit) and find_spec("bitsandbytes") is None:
        bits = "4bit" if model_config.load_in_4bit else "8bit"
        raise InputError(
            f"--load_in_{bits} true: the package bitsandbytes is missing; pip install -r requirements-4bit.txt"
        )
    check_choices(model_config, {"lora_task_type": tuple(TaskType.__members__)})
    if isinstance(model_config.lora_target_modules, str):
        with library_errors(f"--lora_target_modules {model_config.lora_target_modules!r}", (re.error,)):
            re.compile(model_config.lora_target_modules)
    if not model_config.use_peft:
        raise InputError("--use_peft false: what is trained and saved here is a LoRA adapter; set use_peft to true")
    for option in filter(None, UNJOINABLE.values()):
        if value := getattr(model_config, option):
            raise InputError(
                f"--{option} {value}: warm start and GRPO are joined into one adapter in the end, which "
                "only plain LoRA on linear layers can be; leave it out"
            )


def model_to_train(model_config: ModelConfig, device: torch.device) -> tuple[PreTrainedModel, LoraConfig, list[Path]]:
    """The model, the LoRA to train on it, and the adapter folders that are merged into the model.

    There is one such folder where `--model_name_or_path` is an adapter, else none. `InputError` where the model has no
    layers of the LoRA's names, or its adapter cannot be trained further.
    """
    loading = loading_options(model_config)
    model = load_model(
        model_config.model_name_or_path,
        device=device,
        revision=model_config.model_revision,
        answers=not processes.in_pieces(),
        **loading,
    )
    folders, revision = [], model_config.model_revision
    if isinstance(model, PeftModel):
        check_whole("--model_name_or_path", model_config.model_name_or_path)
        if loading["quantization_config"] is not None:
            raise InputError(
                f"--load_in_4bit, --load_in_8bit: {model_config.model_name_or_path} is an adapter, and merged into "
                "rounded weights it would be rounded, too; leave the option out, or start from the base model"
            )
        revision = model.peft_config["default"].revision or "main"
        folders = [Path(model_config.model_name_or_path)]
        check_joinable(folders[0], model.peft_config["default"])
        check_head(model, str(folders[0]))
        model = model.merge_and_unload()
    lora = get_peft_config(model_config)
    if folders and isinstance(lora.target_modules, str) and lora.target_modules != "all-linear":
        raise InputError(
            f"--lora_target_modules {lora.target_modules}: a pattern cannot be joined with the list of {folders[0]}; "
            "name the modules"
        )
    lora.revision = None if revision == "main" else revision  # saved with the adapter, for whoever loads its base
    try:
        peft_model = get_peft_model(model, lora)  # a mistake in the names shows before anything is written
    except ValueError as error:
        raise InputError(f"--lora_target_modules {model_config.lora_target_modules}: {error}") from error
    what = f"--lora_target_modules {model_config.lora_target_modules}"
    check_head(peft_model, what)
    if isinstance(peft_model.get_output_embeddings(), LoraLayer):
        raise InputError(f"{what}: adapts the head, whose weights are read as they are; leave lm_head out")
    return peft_model.unload(), lora, folders


def check_whole(option: str, name: str) -> None:
    """`InputError` for an adapter of a run that was trained on top of another one, its warm start for instance.

    Alone on the base model it is half a policy. The run's own folder has them joined.
    """
    folder, run = Path(name), Path(name).resolve().parent
    if (folder / CONFIG_FILE).exists():  # a run itself
        return
    stands_on_warm_start = (run / WARM_START_FOLDER).is_dir() and folder.name != WARM_START_FOLDER
    settings = run_settings(run)
    if stands_on_warm_start or settings.get("on_adapter") or settings.get("on_shared_warm_start"):
        raise InputError(f"{option} {name}: trained on top of another adapter; name the run's folder, {run}")


def check_head(model: PeftModel, what: str) -> None:
    """`InputError` for LoRA on embeddings that are the model's head as well, or on that head: merged, both change."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.get_text_config().tie_word_embeddings and any(isinstance(m, LoraLayer) for m in ends):
        raise InputError(
            f"{what}: adapts embeddings or lm_head, which are the same weights in this model; leave both out"
        )


def loading_options(model_config: ModelConfig) -> dict:
    """How the model's weights are loaded, the same for training and for the judgement of what was saved."""
    dtype = model_config.dtype or "bfloat16"
    return {
        "dtype": dtype,
        "attn_implementation": model_config.attn_implementation,
        "quantization_config": get_quantization_config(replace(model_config, dtype=dtype)),
    }


def quantization(model_config: ModelConfig) -> dict:
    """What run.json says of it, as `quantization_of` reads it; nothing where the weights are not quantised."""
    is_quantised = model_config.load_in_4bit or model_config.load_in_8bit
    return {name: getattr(model_config, name) for name in QUANTIZATION if is_quantised}


def quantization_of(settings: Mapping) -> object | None:
    """How run.json says that a run's base model was quantised, as `load_model` takes it; None where it was not."""
    named = {name: settings[name] for name in QUANTIZATION if name in settings}
    return get_quantization_config(ModelConfig(dtype=settings.get("dtype"), **named))


def fresh(model: PreTrainedModel | PeftModel, lora: LoraConfig) -> PeftModel:
    """`model` with a new adapter that changes nothing yet; as it is where it has an adapter to continue with."""
    return model if isinstance(model, PeftModel) else get_peft_model(model, lora)


def stood_on(model: PreTrainedModel, folder: Path) -> PreTrainedModel | PeftModel:
    """`model` as GRPO finds it after a warm start: with the adapter in `folder` merged into its weights.

    Weights of 4 or 8 bits would round it away: there it stays an adapter, and GRPO continues with it.
    """
    if getattr(model, "is_quantized", False):
        return PeftModel.from_pretrained(model, folder, is_trainable=True)
    return PeftModel.from_pretrained(model, folder).merge_and_unload()


def save(model: PeftModel, folder: Path, **options) -> None:
    """The adapter, for all who may read the folder."""
    model.save_pretrained(folder, **options)
    let_umask_decide(folder / "adapter_model.safetensors")


def check_joinable(folder: Path, config: PeftConfig) -> None:
    """`InputError` for an adapter that `joined` could not put together with another one."""
    odd = [name for name in UNJOINABLE if getattr(config, name, None)]
    if (bias := getattr(config, "bias", "none")) != "none":
        odd.append(f"bias {bias}")
    if (start := getattr(config, "init_lora_weights", True)) not in ADAPTER_ALONE:  # PiSSA and the like
        odd.append(f"init_lora_weights {start}")
    if not isinstance(config, LoraConfig) or odd or isinstance(config.target_modules, str):
        kind = odd[0] if odd else "target_modules as a pattern" if isinstance(config, LoraConfig) else config.peft_type
        raise InputError(
            f"{folder}: an adapter with {kind} cannot be trained further here, because it is joined with the new one "
            "in the end; merge it into its model (PEFT's merge_and_unload) and start from that"
        )


def joined(base_model: PreTrainedModel, folders: Sequence[Path]) -> PeftModel:
    """One LoRA adapter that does what those in `folders` do together: B A = [B1 B2 ...] [A1; A2; ...].

    Its rank is the sum of their ranks. What GRPO learnt stands on the warm start; joined, one adapter on the plain base
    model is all that a user of the policy has to load.
    """
    names = [f"part{i}" for i in range(len(folders))]
    model = PeftModel.from_pretrained(base_model, folders[0], adapter_name=names[0])
    for name, folder in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(folder, name)
    model.peft_config[names[0]].use_rslora = False  # its scaling is in the factors by now, and must not come twice
    model.add_weighted_adapter(names, [1.0] * len(names), "default", combination_type="cat")
    _in_full_precision(model, names)
    model.set_adapter("default")
    for name in names:
        model.delete_adapter(name)
    return model.eval()


def _in_full_precision(model: PeftModel, names: Sequence[str]) -> None:
    """The factors of the joined adapter once more: PEFT makes it in the base's 16 bits, and rounds what it copies."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and "default" in layer.lora_A:
            own = [name for name in names if name in layer.lora_A]
            whole_a = torch.cat([layer.lora_A[name].weight.float() * layer.scaling[name] for name in own])
            whole_b = torch.cat([layer.lora_B[name].weight.float() for name in own], dim=1)
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            a.data, b.data = (torch.zeros_like(factor, dtype=torch.float32) for factor in (a, b))
            a.data[: len(whole_a)], b.data[:, : whole_b.size(1)] = whole_a, whole_b


def learning_state(model: PeftModel, optimizer: torch.optim.Optimizer) -> dict:
    """All that goes on learning as if it had not stopped: trained weights, optimiser, PyTorch's random numbers."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return {
        "weights": weights,
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": cuda_random_states(),
    }


def restore_learning_state(state: dict, model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of `learning_state`."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in state["weights"].items():
            own[name].copy_(values)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    restore_cuda_random_states(state["random_cuda"])
