"""Tiny random policies whose next token depends strongly on what they see, so that a wrong mask or position shows."""

from functools import cache

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURE_NAMES = tuple(ARCHITECTURES)


@cache
def tokenizer_of(architecture: str, split_actions: bool = False) -> PreTrainedTokenizerBase:
    return tiny_tokenizer(architecture, 384, split_actions)


def random_policy(architecture: str, seed: int = 0, split_actions: bool = False) -> PreTrainedModel:
    """A model of `architecture`, float32, its random matrices five times as large: mean entropy about 4 of 6 nats."""
    model = tiny_model(architecture, tokenizer_of(architecture, split_actions), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
    return model


def add_random_adapter(model: PreTrainedModel, seed: int = 1, **options) -> PeftModel:
    """LoRA on all linear layers, none of its matrices zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**({"r": 4, "target_modules": "all-linear"} | options)))
        fill_adapter(adapted)
    return adapted


@torch.no_grad()
def fill_adapter(model: PeftModel, scale: float = 0.05) -> None:
    """Draw the B matrices anew, which LoRA starts at zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=scale)


def adapter_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def token_ids(length: int, seed: int = 0) -> list[int]:
    """`length` token ids that are no special tokens of any tiny tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 380, (length,), generator=generator).tolist()


def plain_scores(
    model: PreTrainedModel | PeftModel, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy (nats) of each token of `completion`, from a row of its own."""
    logits_TV = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / temperature
    log_probabilities_TV = logits_TV.log_softmax(-1)
    chosen_T = log_probabilities_TV.gather(1, torch.tensor(completion)[:, None])[:, 0]
    return chosen_T, -(log_probabilities_TV.exp() * log_probabilities_TV).sum(-1)
