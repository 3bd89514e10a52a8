"""Chat messages -> token ids -> completions: how a model is asked, the same in training, evaluation and search."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from llm_policy import processes
from llm_policy.errors import InputError, library_errors
from llm_policy.sampling import sample_completions

Messages = list[dict[str, str]]
ROWS_ON_GPU = 256
MOST_COMPLETIONS = 1_000_000  # of one judgement


def accepts_system_role(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template takes a system turn. Gemma's raises inside the template, others leave it out."""
    if tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path}: its tokenizer has no chat template; "
            "take an instruction-tuned model (a name that ends in -it, -Instruct or -chat)"
        )
    turns = [{"role": role, "content": long_text(role)} for role in ("system", "user")]
    try:
        text = rendered(turns, tokenizer)
        if all(turn["content"] in text for turn in turns):
            return True
    except InputError:  # it refuses a system turn
        pass
    joined = f"{turns[0]['content']}\n\n{turns[1]['content']}"
    shown = rendered([{"role": "user", "content": joined}], tokenizer)  # one that refuses this, too, is broken
    if joined not in shown:
        raise InputError(
            f"{tokenizer.name_or_path}: its chat template leaves out what the user says, or part of it; correct "
            "chat_template in its tokenizer files"
        )
    return False


@cache
def long_text(name: str) -> str:
    """As long as a prompt, no two words alike: a template that leaves out any part of it is seen."""
    return "\n".join(" ".join(f"{name}{line}-{word}" for word in range(8)) for line in range(64))


def rendered(messages: Messages, tokenizer: PreTrainedTokenizerBase, **options) -> Any:
    """What the chat template makes of `messages`. `InputError` where it fails: it is a program of the model's."""
    with library_errors(f"{tokenizer.name_or_path}: its chat template fails", (Exception,)):
        return tokenizer.apply_chat_template(messages, **({"tokenize": False} | options))


_ACCEPTS: dict[tuple[str, str], bool] = {}  # (tokenizer, its template) -> `accepts_system_role`


def fit_to_template(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Messages:
    """`messages` as the chat template takes them: where it refuses a system turn, its text opens the user's turn."""
    if messages[0]["role"] != "system":
        return messages
    key = tokenizer.name_or_path, str(tokenizer.chat_template)
    if key not in _ACCEPTS:
        _ACCEPTS[key] = accepts_system_role(tokenizer)
    if _ACCEPTS[key]:
        return messages
    system, user, *rest = messages
    return [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def prompt_token_ids(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt through the chat template, up to where the model's reply begins; BOS exactly once.

    The same call as TRL makes for conversational prompts, so that warm start, evaluation and training agree.
    """
    return rendered(messages, tokenizer, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]


def check_prompt(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, context_tokens: int, max_completion_tokens: int
) -> None:
    """Raise `InputError` for a prompt that the model would see cut, or with a BOS token too many."""
    if len(token_ids) + max_completion_tokens > context_tokens:
        raise InputError(
            f"prompt of {len(token_ids)} tokens + --max_completion_length {max_completion_tokens} exceed the model's "
            f"context of {context_tokens} tokens: use a smaller map, a shorter completion or another model"
        )
    if tokenizer.bos_token_id is not None and token_ids[:2] == [tokenizer.bos_token_id] * 2:
        raise InputError(
            f"{tokenizer.name_or_path}: the chat template writes {tokenizer.bos_token!r} (BOS) twice; take one of the "
            "two out of chat_template in its tokenizer files"
        )


def check_vocabulary(texts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, vocabulary_size: int) -> None:
    """`InputError` for a token, of the texts or one that pads or ends them, that the model has no embedding for."""
    largest = max(tokenizer.pad_token_id, tokenizer.eos_token_id, *(max(token_ids) for token_ids in texts))
    if largest >= vocabulary_size:
        raise InputError(
            f"{tokenizer.name_or_path}: its tokenizer makes the token {largest}, and its model has {vocabulary_size} "
            "(numbered from 0); fetch both again"
        )


# Asking a model ------------------------------------------------------------------------------------------------


def sampling_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_completion_tokens: int,
    temperature: float = 1.0,
    further_ends: Sequence[int] = (),
) -> GenerationConfig:
    """How completions are drawn: at `temperature` from all tokens, or greedily where it is 0.

    A completion ends at the tokenizer's end token, at those that the model names (Gemma: the end of a turn), and at
    `further_ends`.
    """
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return GenerationConfig(
        max_new_tokens=max_completion_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else None,
        top_k=0 if temperature > 0 else None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted({*ends, *further_ends, tokenizer.eos_token_id}),
        disable_compile=True,
    )


def reply_token_ids(reply: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a whole reply, its end token included."""
    return [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]


@dataclass(frozen=True)
class Reader:
    """Asks a model: chat messages in, the texts of its completions out.

    Attributes:
        max_completion_tokens: a completion is cut there.
        rows_per_batch: completions that are decoded at the same time, on a GPU at least `ROWS_ON_GPU`. On a CPU more
            are no faster: 248 states of unseen maps took 77 s with 256 rows, 55 s with 64 (one thread, AMD EPYC).
    """

    tokenizer: PreTrainedTokenizerBase
    max_completion_tokens: int = 64
    rows_per_batch: int = 64

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids of a prompt, up to where the reply begins."""
        return prompt_token_ids(fit_to_template(messages, self.tokenizer), self.tokenizer)

    def completions(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Messages],
        samples: int = 0,
        guesses: Sequence[str] | None = None,
    ) -> list[str]:
        """Texts of `samples` completions of each prompt at temperature 1, or of the greedy one where `samples` is 0.

        Several processes share the prompts, and each gets all texts.

        Args:
            guesses: a likely reply to each prompt. Right or wrong, it changes the time and not the samples.
        """
        if (count := len(prompts) * samples) > MOST_COMPLETIONS:
            raise InputError(
                f"--samples_per_state {samples}: {len(prompts)} prompts make {count} completions, expected at most "
                f"{MOST_COMPLETIONS}, which take days; name fewer"
            )
        asked = [self.prompt(messages) for messages in prompts]
        replies = None if guesses is None else [reply_token_ids(guess, self.tokenizer) for guess in guesses]
        check_vocabulary([*asked, *(replies or [])], self.tokenizer, model.config.get_text_config().vocab_size)
        own, group = processes.own_share(len(asked)), max(samples, 1)
        noise_RT = processes.uniform_from_main(len(asked) * samples, self.max_completion_tokens)
        token_ids = sample_completions(
            model,
            asked[own],
            sampling_config(model, self.tokenizer, self.max_completion_tokens, temperature=float(samples > 0)),
            group,
            max(self.rows_per_batch, ROWS_ON_GPU) if model.device.type == "cuda" else self.rows_per_batch,
            guesses=replies and replies[own],
            noise_RT=noise_RT[own.start * group : own.stop * group],
        )
        return processes.gathered(self.tokenizer.batch_decode(token_ids, skip_special_tokens=True))
