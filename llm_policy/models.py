"""A name on the command line -> model and tokenizer: hub id, local folder, adapter folder, GGUF file.

LoRA settings: trl's own `get_peft_config(model_config)` does the whole job.
"""

import errno
import hashlib
import math
import os
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
from peft.tuners.lora import LoraLayer
from pydantic import StrictInt, TypeAdapter
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from llm_policy.errors import InputError
from llm_policy.reading import check_texts, parse_json, read_text
from llm_policy.run_files import ROOT

EMBEDDED_MODEL = ROOT / "data/models/SmolLM2-135M-Instruct"
"""The model that needs no hub account; a path that ends like this one finds it from any working directory and clone."""

HUB_TIMEOUT_SECONDS = 5
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer.json", "chat_template.jinja")  # beside the weights
END_TOKENS = TypeAdapter(StrictInt | list[StrictInt] | None)
PROBE_TOKENS = 64  # of 8, PyTorch's attention on a CPU hides those that are no numbers
LARGEST_SIZES = {"num_hidden_layers": 1000, "hidden_size": 100_000, "head_dim": 10_000, "num_attention_heads": 10_000}
LARGEST_RANK = 10_000
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
    # TRL would take a thought in <think> tags out of the completion before the reward sees it
    tokenizer.response_template = None
    if tokenizer.eos_token is None:
        raise InputError(f"{name_or_path}: its tokenizer has no end token; set eos_token there")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name_or_path: str | Path,
    dtype: str = "bfloat16",
    attn_implementation: str | None = None,
    quantization_config: object | None = None,
    device: torch.device | None = None,
    revision: str = "main",
    answers: bool = True,
) -> PreTrainedModel | PeftModel:
    """Load a causal language model.

    Args:
        name_or_path: a hub id, a local folder, a GGUF file (unpacked to `dtype`: it then trains and saves like any
            other), or a folder with a PEFT adapter (its base model is loaded, too, and the adapter put on top).
        dtype: of the weights, an adapter's as well: "auto" (as stored), "float32", "bfloat16" or "float16".
        attn_implementation, quantization_config, revision: as in transformers' `from_pretrained`.
        device: where the weights go; None: the CPU's memory.
        answers: read some tokens with it, to see whether numbers come out. A large model on a CPU takes minutes.

    Raises `InputError` for a path that is not there, empty, damaged or no causal language model; a hub id that is
    unknown, gated or out of reach; an adapter without its base; a package that an option needs.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown, expected one of {', '.join(DTYPES)}")
    source, options = locate(name_or_path, revision)
    if is_adapter(source):
        name, revision = base_of_adapter(source)
        base = load_model(name, dtype, attn_implementation, quantization_config, device, revision, answers)
        with input_errors(name_or_path, "adapter"):
            # Factors in the base's dtype, as autocast computes them in training; PEFT would make them float32
            model = PeftModel.from_pretrained(base, source, autocast_adapter_dtype=False)
            check_adapter(model, Path(source))
        check_finite(model, name_or_path)
        model = _placed(model, device)
        return checked_answers(model, name_or_path) if answers else model
    if "gguf_file" in options:
        if quantization_config is not None:
            raise InputError(f"{name_or_path}: a GGUF file is quantised already; leave out the quantisation options")
        # Without `dequantize` the model counts as quantised, and then it can neither be trained nor saved.
        quantization_config = GgufConfig(dequantize=True)
    with input_errors(name_or_path, "model"):
        if "gguf_file" not in options:
            config = AutoConfig.from_pretrained(**options)
            check_architecture(name_or_path, config)
            if getattr(config, "quantization_config", None) is None:
                check_not_rounded(Path(source))
            if (Path(source) / GENERATION_CONFIG_NAME).exists():  # a damaged one would be left out in silence
                GenerationConfig.from_pretrained(source)
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
    with input_errors(f"{name_or_path}: eos_token_id of its generation_config.json", "model"):
        END_TOKENS.validate_python(model.generation_config.eos_token_id)
    if "gguf_file" in options:
        model.name_or_path = model.config._name_or_path = str(source)  # peft and trl look here for an adapter's base
    model = _placed(model, device)
    return checked_answers(model, name_or_path) if answers else model


def _placed(model: Any, device: torch.device | None) -> Any:
    """On `device`. Quantised weights were loaded to where they are: they cannot be moved."""
    return model if device is None or getattr(model, "is_quantized", False) else model.to(device)


def model_checksum(name_or_path: str | Path, revision: str = "main") -> str:
    """Of the files that make a model what it is, an adapter's base included: about a second per GB."""
    source, options = locate(name_or_path, revision)
    if "gguf_file" in options:
        files = [Path(source)]
    else:
        folder = Path(source)
        if isinstance(source, str):  # of the hub: `locate` has fetched it
            folder = Path(hf_hub_download(source, "config.json", revision=revision, local_files_only=True)).parent
        files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
        files += [file for name in MODEL_FILES if (file := folder / name).is_file()]
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    if is_adapter(source):
        digest.update(model_checksum(*base_of_adapter(source)).encode())
    return digest.hexdigest()[:16]


def context_tokens(model: PreTrainedModel) -> int:
    """How many tokens the model can read, prompt and completion together."""
    config = model.config.get_text_config()
    if (context := getattr(config, "max_position_embeddings", None)) is None:
        raise InputError(f"{config.model_type}: its configuration has no max_position_embeddings; take another model")
    return context


def locate(name_or_path: str | Path, revision: str = "main") -> tuple[str | Path, dict]:
    """Find a model: its path or hub id, and the arguments by which transformers' `from_pretrained` finds it.

    A hub id is asked for once, with a time limit that `from_pretrained` lacks; a hub out of reach leaves its cache.
    Raises `InputError` for whatever is not there.
    """
    if not name_or_path:  # left empty in a YAML file
        raise InputError("--model_name_or_path: names no model; expected a hub id, a folder or a GGUF file")
    check_texts({"model_name_or_path": str(name_or_path)})  # an adapter's base comes from a file
    path = Path(os.path.expanduser(name_or_path))
    if not path.exists() and path.parts[-3:] == EMBEDDED_MODEL.parts[-3:]:
        path = EMBEDDED_MODEL
        if not path.exists():
            raise InputError(f"{path}: the embedded model is not there yet; run `make model`")
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
        config = parse_json(read_text(folder / "adapter_config.json"))
        base, revision = str(config["base_model_name_or_path"]), config.get("revision") or "main"
        if config.get("r", 0) > LARGEST_RANK:
            raise InputError(f"{folder}/adapter_config.json: r {config['r']}, expected at most {LARGEST_RANK}")
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
    if getattr(model.peft_config["default"], "layer_replication", None):
        raise InputError(f"{folder}: an adapter with layer_replication cannot be asked here; merge it into its model")
    config = model.peft_config["default"]
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        raise InputError(f"{folder}: an adapter ({config.peft_type}) beside the model's layers cannot be asked here")
    scalings = [
        scaling for module in model.modules() if isinstance(module, LoraLayer) for scaling in module.scaling.values()
    ]
    if not all(map(math.isfinite, scalings)):
        raise InputError(f"{folder}/adapter_config.json: its scaling (lora_alpha, r, alpha_pattern) is no number")
    file = folder / "adapter_model.safetensors"
    if file.is_file():
        with safe_open(file, "pt") as stored:
            in_file = set(stored.keys())
    else:  # an older one
        file = folder / "adapter_model.bin"
        in_file = set(torch.load(file, map_location="cpu", weights_only=True))
    in_model = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    ends = ("embed_tokens.weight", "lm_head.weight", "embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
    saved_too = {key for key in in_file if key.endswith(ends)}  # on request, or because they are adapted
    odd = sorted((in_file ^ in_model) - saved_too)
    if odd:
        where = "has no place in the model" if odd[0] in in_file else "is not in it"
        raise InputError(f"{file}: does not belong to its adapter_config.json: {odd[0]} {where}; save it again")


def check_finite(model: torch.nn.Module, name: str | Path) -> None:
    """`InputError` for weights or constants that are no numbers: every answer of such a model is the same."""
    named = [*model.named_parameters(), *model.named_buffers()]
    weights = {weight_name: weight for weight_name, weight in named if weight.is_floating_point()}
    if bad := not_finite(weights):
        raise InputError(f"{name}: {bad} holds values that are no numbers (nan or inf); take another model")


@torch.no_grad()
def checked_answers(model: PreTrainedModel | PeftModel, name: str | Path) -> PreTrainedModel | PeftModel:
    """`model`; `InputError` where what it makes of a few tokens is no number, or the same for every token.

    Sound weights are not enough: a norm's epsilon or an adapter's scale that is none makes every answer a random one.
    """
    with input_errors(name, "model"):
        ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
        logits_TV = model(input_ids=ids).logits[0].float()
    if not logits_TV.isfinite().all() or (logits_TV == logits_TV[:, :1]).all():
        raise InputError(
            f"{name}: its answers are no numbers (nan or inf), or all the same; look at its config.json, adapter_config"
            ".json and weights, or take another model"
        )
    return model


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
    for size, most in LARGEST_SIZES.items():
        found = getattr(config, size, 0)
        if isinstance(found, int) and found > most:  # it would take all memory before a weight is read
            raise InputError(f"{name}: its config.json says {size} {found}, expected at most {most}; fetch it again")
    architectures = getattr(config, "architectures", None) or []
    if architectures and not any(architecture.endswith(CAUSAL_ARCHITECTURES) for architecture in architectures):
        raise InputError(f"{name}: is a {architectures[0]}, not a causal language model; take one that generates text")


def check_not_rounded(folder: Path) -> None:
    """`InputError` for whole numbers as weights, whose scale no config.json gives: they would be taken as they are."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no dict)
                if (kind := stored.get_slice(name).get_dtype()).startswith(("I", "U")) and name.endswith(".weight"):
                    raise InputError(
                        f"{file}: {name} is of type {kind}, and config.json has no quantization_config that says what "
                        "it stands for; fetch the model again, or take one in float32, bfloat16 or float16"
                    )


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
            f"give the path of a folder that is there; the embedded model is {EMBEDDED_MODEL.relative_to(ROOT)}"
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
