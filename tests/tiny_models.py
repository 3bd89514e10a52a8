"""Tiny causal language models with random weights and a tokenizer, made on the spot: no network, under a second.

folder = build_tiny_model(tmp_path / "model", "gemma")
model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

ACTIONS = ("LEFT", "DOWN", "RIGHT", "UP")
MAX_POSITIONS = 512

TRAINING_TEXT = [
    "You cross a frozen lake to the goal and never step into a hole. The ice is slippery. You are at row 0, column 1.",
    "Letters: S start, F ice, H hole, G goal, A you. Reply with your thought and an action. I am at row 2, column 3.",
    "SFFF FHFH FFFH HFFG\n<think></think><answer></answer> system user assistant model",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Gemma-1's: begins with the beginning-of-sequence token, refuses a system turn, and calls the assistant "model".
GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Beyond the sizes that all share. Gemma 3: four of five layers see 16 tokens back, the fifth everything.
ARCHITECTURES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
    },
}


def build_tiny_model(
    folder: Path, architecture: str = "llama", seed: int = 0, vocabulary_size: int = 384, split_actions: bool = False
) -> Path:
    """Save a model and its tokenizer to `folder` and return it.

    Args:
        architecture: "llama", "qwen2" (both with a ChatML template), "gemma" or "gemma3" (both with Gemma's template).
        seed: of the weights; torch's own random state stays as it is.
        vocabulary_size: the tokenizer's size before the special tokens and the actions; 256 is bytes alone.
        split_actions: LEFT, DOWN, RIGHT and UP are several tokens each, which SmolLM2's and Gemma's are not.
    """
    tokenizer = tiny_tokenizer(architecture, vocabulary_size, split_actions)
    model = tiny_model(architecture, tokenizer, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def tiny_tokenizer(architecture: str, vocabulary_size: int, split_actions: bool) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with the chat template of `architecture`; it encodes any text and decodes it again."""
    gemma = architecture.startswith("gemma")
    special_tokens = ["<pad>", *(["<bos>", "<eos>"] if gemma else ["<|endoftext|>"])]
    special_tokens += ["<start_of_turn>", "<end_of_turn>"] if gemma else ["<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TRAINING_TEXT,
        BpeTrainer(
            vocab_size=vocabulary_size + len(special_tokens),
            special_tokens=special_tokens,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if gemma:  # puts <bos> before every text by itself, so that a text from the template gets it twice: Gemma's trap
        bos = ("<bos>", backend.token_to_id("<bos>"))
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    if not split_actions:
        backend.add_tokens([AddedToken(action, normalized=False) for action in ACTIONS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>" if gemma else "<|im_start|>",
        # Gemma's end token is not the one that ends its turns; SmolLM2's is.
        eos_token="<eos>" if gemma else "<|im_end|>",
        pad_token="<pad>",
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )
    tokenizer.chat_template = GEMMA_TEMPLATE if gemma else CHATML
    return tokenizer


def tiny_model(architecture: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A model of `architecture` for `tokenizer`, float32, random weights, about 100,000 parameters."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(**(sizes | ARCHITECTURES[architecture]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if architecture.startswith("gemma"):
        # As Gemma-it: generation ends at a turn's end as well.
        model.generation_config.eos_token_id = [
            tokenizer.eos_token_id,
            tokenizer.convert_tokens_to_ids("<end_of_turn>"),
        ]
    return model.eval()
