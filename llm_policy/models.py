"""A name on the command line -> model and tokenizer: hub id, local folder, adapter folder, GGUF file.

LoRA settings: trl's own `get_peft_config(model_config)` does the whole job.
"""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import torch
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llm_policy.errors import InputError
from llm_policy.run_files import ROOT

EMBEDDED_MODEL = ROOT / "data/models/SmolLM2-135M-Instruct"
"""The model that needs no hub account; a path that ends like this one finds it from any working directory and clone."""

HUB_TIMEOUT_SECONDS = 5
DTYPES = ("auto", "float32", "bfloat16", "float16")
CAUSAL_ARCHITECTURES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def load_tokenizer(name_or_path: str | Path, revision: str = "main") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, a local folder (a model's or an adapter's) or a GGUF file.

    It pads on the left, as generation needs, and its padding token is set: its own, or the end token for want of one.
    Raises `InputError` as `load_model` does, and where there is no tokenizer.
    """
    source, options = locate(name_or_path, revision)
    if is_adapter(source) and not (Path(source) / "tokenizer_config.json").is_file():
        source, options = locate(*base_of_adapter(source))
    with input_errors(name_or_path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**options, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise InputError(f"{name_or_path}: its tokenizer has neither a padding nor an end token; set eos_token there")
    return tokenizer


def load_model(
    name_or_path: str | Path,
    dtype: str = "bfloat16",
    attn_implementation: str | None = None,
    quantization_config: object | None = None,
    device: torch.device | None = None,
    revision: str = "main",
) -> PreTrainedModel | PeftModel:
    """Load a causal language model.

    Args:
        name_or_path: a hub id, a local folder, a GGUF file (unpacked to `dtype`: it then trains and saves like any
            other), or a folder with a PEFT adapter (its base model is loaded, too, and the adapter put on top).
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        attn_implementation, quantization_config, revision: as in transformers' `from_pretrained`.
        device: where the weights go; None: the CPU's memory.

    Raises `InputError` for a path that is not there, empty, damaged or no causal language model; a hub id that is
    unknown, gated or out of reach; an adapter without its base; a package that an option needs.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown, expected one of {', '.join(DTYPES)}")
    source, options = locate(name_or_path, revision)
    if is_adapter(source):
        name, revision = base_of_adapter(source)
        base = load_model(name, dtype, attn_implementation, quantization_config, device, revision)
        with input_errors(name_or_path, "adapter"):
            model = PeftModel.from_pretrained(base, source)
            check_adapter(model, Path(source))
        check_finite(model, name_or_path)
        return _placed(model, device)
    if "gguf_file" in options:
        if quantization_config is not None:
            raise InputError(f"{name_or_path}: a GGUF file is quantised already; leave out the quantisation options")
        # Without `dequantize` the model counts as quantised, and then it can neither be trained nor saved.
        quantization_config = GgufConfig(dequantize=True)
    with input_errors(name_or_path, "model"):
        if "gguf_file" not in options:
            check_architecture(name_or_path, AutoConfig.from_pretrained(**options))
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # its annotation knows no `output_loading_info`
            **options,
            dtype=dtype,
            attn_implementation=attn_implementation,
            quantization_config=quantization_config,
            # Quantised weights cannot be moved
            device_map={"": device} if device is not None and quantization_config is not None else None,
            output_loading_info=True,
        )
    model, report = loaded
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes would repack its weights at the first evaluation, and in that form nothing has a gradient
            module.support_avx512bf16_for_cpu = False
    # transformers fills missing weights with random numbers and only warns.
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"{name_or_path}: {len(missing)} weights are missing ({missing[0]}, ...); fetch the model again"
        )
    # It drops what the configuration has no place for, layers included
    unknown = sorted(key for key in report["unexpected_keys"] if ".layers." in key and "inv_freq" not in key)
    if unknown:
        raise InputError(
            f"{name_or_path}: {len(unknown)} of its weights have no place in the model of its config.json "
            f"({unknown[0]}, ...); fetch the model again"
        )
    check_finite(model, name_or_path)
    if "gguf_file" in options:
        model.name_or_path = model.config._name_or_path = str(source)  # peft and trl look here for an adapter's base
    return _placed(model, device)


def _placed(model: Any, device: torch.device | None) -> Any:
    """On `device`. Quantised weights were loaded to where they are: they cannot be moved."""
    return model if device is None or getattr(model, "is_quantized", False) else model.to(device)


def context_tokens(model: PreTrainedModel) -> int:
    """How many tokens the model can read, prompt and completion together."""
    return model.config.get_text_config().max_position_embeddings


def locate(name_or_path: str | Path, revision: str = "main") -> tuple[str | Path, dict]:
    """Find a model: its path or hub id, and the arguments by which transformers' `from_pretrained` finds it.

    A hub id is asked for once, with a time limit that `from_pretrained` lacks; a hub out of reach leaves its cache.
    Raises `InputError` for whatever is not there.
    """
    path = Path(name_or_path).expanduser()
    if not path.exists() and path.parts[-3:] == EMBEDDED_MODEL.parts[-3:]:
        path = EMBEDDED_MODEL
        if not path.exists():
            raise InputError(f"{path}: the embedded model is not there yet; run `python data/fetch_smollm2.py`")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{path}: no such GGUF file")
        return path.resolve(), {"pretrained_model_name_or_path": path.resolve().parent, "gguf_file": path.name}
    if path.exists():
        if not path.is_dir():
            raise InputError(f"{path}: is a file; expected a model's folder, a .gguf file or a hub id")
        if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            found = "has no config.json or adapter_config.json" if any(path.iterdir()) else "is an empty folder"
            raise InputError(f"{path}: {found}; expected a folder written by save_pretrained")
        return path.resolve(), {"pretrained_model_name_or_path": path.resolve()}

    name = str(name_or_path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name}: no such folder")
    with input_errors(name, "model"):
        cache_only = not hub_answers(name, revision)
        hf_hub_download(name, "config.json", revision=revision, local_files_only=cache_only)
    return name, {"pretrained_model_name_or_path": name, "revision": revision, "local_files_only": cache_only}


def hub_answers(name: str, revision: str = "main") -> bool:
    """Ask the hub for a model, for seconds at most; False where it is out of reach or switched off (HF_HUB_OFFLINE).

    Raises the hub's own `HfHubHTTPError` where it answers with a refusal: no such model, no such revision, bad token.
    """
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    except (httpx2.TransportError, OfflineModeIsEnabled):
        return False
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            return False
        raise
    return True


def is_adapter(source: str | Path) -> bool:
    """Whether `source` is a folder with a PEFT adapter and not with a model of its own."""
    return (Path(source) / "adapter_config.json").is_file() and not (Path(source) / "config.json").is_file()


def base_of_adapter(folder: str | Path) -> tuple[str, str]:
    """Name and revision of the model that an adapter belongs to.

    Raises `InputError` for an incomplete adapter or no base.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise InputError(f"{folder}: adapter_config.json without adapter_model.safetensors; save the adapter again")
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        base, revision = str(config["base_model_name_or_path"]), config.get("revision") or "main"
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}/adapter_config.json: no base_model_name_or_path to be read ({error!r})") from error
    try:
        found, _ = locate(base, revision)
        if is_adapter(found):
            raise InputError(f"{base} is an adapter itself")
    except InputError as error:
        raise InputError(
            f"{folder}: the adapter's base model is missing ({error}); "
            "put one there, or correct base_model_name_or_path in adapter_config.json"
        ) from error
    return base, revision


def check_adapter(model: PeftModel, folder: Path) -> None:
    """`InputError` where an adapter's file and the model do not have the same LoRA weights: PEFT only warns."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return  # an older .bin
    with safe_open(file, "pt") as stored:
        in_file = set(stored.keys())
    in_model = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    saved_too = {key for key in in_file if key.endswith(("embed_tokens.weight", "lm_head.weight"))}  # on request
    odd = sorted((in_file ^ in_model) - saved_too)
    if odd:
        where = "has no place in the model" if odd[0] in in_file else "is not in it"
        raise InputError(f"{file}: does not belong to its adapter_config.json: {odd[0]} {where}; save it again")


def check_finite(model: torch.nn.Module, name: str | Path) -> None:
    """`InputError` for weights that are no numbers: every answer of such a model is the same."""
    weights = {weight_name: weight for weight_name, weight in model.named_parameters() if weight.is_floating_point()}
    if bad := not_finite(weights):
        raise InputError(f"{name}: {bad} holds values that are no numbers (nan or inf); take another model")


@torch.no_grad()
def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that holds nan or inf, by its sum, which then is none either; None if none does."""
    if not tensors:
        return None
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    bad = [name for name, is_finite in zip(tensors, sums.isfinite().tolist(), strict=True) if not is_finite]
    return bad[0] if bad else None


def check_architecture(name: str | Path, config: object) -> None:
    """Raise `InputError` unless the model was stored as a causal language model.

    transformers would load an encoder or a reward model as one, too, with an output layer of random numbers.
    """
    architectures = getattr(config, "architectures", None) or []
    if architectures and not any(architecture.endswith(CAUSAL_ARCHITECTURES) for architecture in architectures):
        raise InputError(f"{name}: is a {architectures[0]}, not a causal language model; take one that generates text")


@contextmanager
def input_errors(name: str | Path, what: str) -> Iterator[None]:
    """Turn what the libraries raise for a user's mistake into one line with the remedy."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except GatedRepoError as error:  # before RepositoryNotFoundError, its parent
        raise InputError(
            f"{name}: is gated; accept the licence on the model's page, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{name}: neither a local folder nor a model on the hub; "
            "check the spelling, and for a private model set HF_TOKEN or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{name}: the hub has no such revision of it; check --model_revision") from error
    except (LocalEntryNotFoundError, httpx2.TransportError, OfflineModeIsEnabled) as error:
        raise InputError(
            f"{name}: no such local folder, and the hub is out of reach; "
            "give a local path, or leave out the name to take the embedded model"
        ) from error
    except EntryNotFoundError as error:
        raise InputError(f"{name}: has no config.json on the hub; take a model in transformers' format") from error
    except HfHubHTTPError as error:
        reason = f"status {error.response.status_code}, {error.server_message or first_line(error)}"
        raise InputError(f"{name}: the hub refuses it ({reason}); check HF_TOKEN, or wait and try again") from error
    except HFValidationError as error:
        raise InputError(f"{name}: neither a local folder nor a hub id (`owner/model`)") from error
    except ImportError as error:
        raise InputError(f"{name}: {first_line(error)}") from error
    except InputError:
        raise
    except Exception as error:  # files of another's making: the libraries raise whatever these lead to
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise InputError(f"{name}: disk full while fetching; make room or set HF_HOME to another disk") from error
        raise InputError(f"{name}: the {what} cannot be loaded: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of a library's message: the rest is advice for its developers."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
