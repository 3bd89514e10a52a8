"""Who proposes: a local model, an OpenAI-compatible endpoint, recorded answers, and two searches without a model.

All of them answer as text and through the same parser, so that only the proposals differ.
"""

import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llm_policy.chat import Messages, fit_to_template, prompt_token_ids, sampling_config
from llm_policy.environments.gym_env import seed_of
from llm_policy.errors import InputError, check_choices
from llm_policy.hardware import this_device
from llm_policy.models import DTYPES, EMBEDDED_MODEL, context_tokens, load_model, load_tokenizer
from llm_policy.policy_search.answer_log import CUT, read_log
from llm_policy.policy_search.endpoint import EndpointProposer
from llm_policy.policy_search.parameters import PARAMETER_LINE, Parameters, PolicySpace, SearchProblem
from llm_policy.policy_search.prompts import ANSWER_PREFIX
from llm_policy.policy_search.search import Answer, Proposer, Request, SearchSettings, longest_prompt
from llm_policy.run_files import ROOT
from llm_policy.sampling import sample_completions

PROPOSERS = ("local", "endpoint", "random", "hill_climbing", "recorded")
# Option -> the proposers that read it. What was recorded may stand beside the settings that it was recorded with.
OWNERS = {
    **dict.fromkeys(("dtype", "answer_prefix", "constrained"), ("local",)),
    **dict.fromkeys(("base_url", "endpoint_retries", "endpoint_timeout_seconds", "context_tokens"), ("endpoint",)),
    "answers": ("recorded",),
    **dict.fromkeys(("max_completion_tokens", "temperature"), ("local", "endpoint")),
}
# The same where the command line names it; a configuration may hold it beside another proposer.
MODEL_OWNERS = {"model_name_or_path": ("local", "recorded"), "model_name": ("endpoint", "recorded")}
NAMES_WITHOUT_MODEL = {"random": "random search", "hill_climbing": "hill climbing"}
ENDPOINT_COMPLETION_TOKENS = 1024
# What an answer may take, with room for a tokenizer that has one token per digit
TOKENS_AROUND, TOKENS_OF_REASON, TOKENS_PER_INTEGER, TOKENS_PER_DECIMAL = 16, 64, 3, 7
CHARACTERS_PER_TOKEN = 2  # of an unknown tokenizer on text that is mostly numbers: a cautious guess


@dataclass
class ProposerSettings:
    """Who proposes, and how."""

    proposer: str = field(default="local", metadata={"help": f"Who proposes: {', '.join(PROPOSERS)}."})
    model_name_or_path: str = field(
        default=str(EMBEDDED_MODEL.relative_to(ROOT)),
        metadata={"help": "local: hub id, folder or GGUF file."},
    )
    dtype: str = field(
        default="auto", metadata={"help": "local: float32, bfloat16, float16; auto: the faster one here."}
    )
    answer_prefix: str = field(
        default=ANSWER_PREFIX, metadata={"help": "local: the beginning of each answer, given to the model."}
    )
    constrained: bool = field(
        default=True, metadata={"help": "local: only tokens that can still become a well-formed answer."}
    )
    base_url: str | None = field(default=None, metadata={"help": "endpoint: its URL. Default: OpenAI's."})
    model_name: str | None = field(default=None, metadata={"help": "endpoint: the model's name there."})
    endpoint_retries: int = field(default=8, metadata={"help": "endpoint: further tries, with growing pauses."})
    endpoint_timeout_seconds: float = field(default=120.0, metadata={"help": "endpoint: longest wait for an answer."})
    context_tokens: int | None = field(
        default=None, metadata={"help": "endpoint: the model's context, to check prompts against."}
    )
    answers: str | None = field(default=None, metadata={"help": "recorded: the answers.jsonl of an earlier run."})
    max_completion_tokens: int | None = field(
        default=None, metadata={"help": "Longest answer. Default: enough for the parameters and a reason."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Of the model's answers; 0 is greedy."})

    def __post_init__(self) -> None:
        check_choices(self, {"proposer": PROPOSERS, "dtype": DTYPES})
        if self.proposer == "local" and self.constrained and not PARAMETER_LINE.search(self.answer_prefix):
            raise InputError(
                f"--answer_prefix {self.answer_prefix!r}: only values may come behind it (--constrained true), so it "
                "has to begin the line `parameters:`"
            )
        for option in fields(self):
            owners = OWNERS.get(option.name, PROPOSERS)
            if self.proposer not in (*owners, "recorded") and getattr(self, option.name) != option.default:
                whose = " or ".join(owners)
                raise InputError(f"--{option.name}: is for --proposer {whose}, and this is --proposer {self.proposer}")
        needed = {"endpoint": "model_name", "recorded": "answers"}.get(self.proposer)
        if needed and not getattr(self, needed):
            raise InputError(f"--proposer {self.proposer}: needs --{needed}")

    def name(self, method: str) -> str:
        """As tables call the search; `method` is ProPS or ProPS+."""
        if self.proposer in NAMES_WITHOUT_MODEL:
            return NAMES_WITHOUT_MODEL[self.proposer]
        models = {"local": self.model_name_or_path, "endpoint": self.model_name or ""}
        return f"{method}, {Path(models.get(self.proposer, self.proposer)).name}"


def make_proposer(
    problem: SearchProblem,
    settings: ProposerSettings,
    search: SearchSettings,
    optimum: float | None,
    description: str | None,
) -> Proposer:
    """The proposer that the settings name. `InputError` where prompts and answers can exceed the model's context."""
    space = problem.space
    if settings.proposer == "random":
        return RandomProposer(space, search.seed)
    if settings.proposer == "hill_climbing":
        return HillClimbingProposer(space, search.seed)
    if settings.proposer == "recorded":
        assert settings.answers is not None
        return RecordedProposer(settings.answers)
    tokens_per_value = TOKENS_PER_INTEGER if space.is_tabular else TOKENS_PER_DECIMAL
    answer_tokens = TOKENS_AROUND + tokens_per_value * space.count + (TOKENS_OF_REASON if search.ask_reason else 0)
    is_free = settings.proposer == "endpoint" or not settings.constrained  # and asked again with all of a failed answer
    most = max(answer_tokens, ENDPOINT_COMPLETION_TOKENS) if settings.proposer == "endpoint" else answer_tokens
    limit = settings.max_completion_tokens or most
    longest_answer = f"parameters: {space.text((space.lowest,) * space.count)}\nreason: {'because ' * 20}"
    longest_answer = longest_answer.ljust(CHARACTERS_PER_TOKEN * limit, "x") if is_free else longest_answer
    prompt = longest_prompt(space, search, optimum, description, longest_answer)
    if settings.proposer == "endpoint":
        assert settings.model_name is not None
        characters = sum(len(message["content"]) for message in prompt)
        _check_context(problem, -(-characters // CHARACTERS_PER_TOKEN), limit, settings.context_tokens)
        return EndpointProposer(
            settings.model_name,
            settings.base_url,
            limit,
            settings.temperature,
            search.seed,
            settings.endpoint_retries,
            settings.endpoint_timeout_seconds,
        )
    tokenizer = load_tokenizer(settings.model_name_or_path)
    model: Any = load_model(settings.model_name_or_path, dtype=settings.dtype, device=this_device())
    proposer = LocalProposer(
        model,
        tokenizer,
        limit,
        settings.temperature,
        search.seed,
        settings.answer_prefix,
        is_one_line=not search.ask_reason,
        space=space if settings.constrained else None,
    )
    _check_context(problem, len(proposer.prompt_tokens(prompt)), limit, context_tokens(model))
    return proposer


def _check_context(problem: SearchProblem, prompt_tokens: int, answer_tokens: int, context_tokens: int | None) -> None:
    if context_tokens is not None and prompt_tokens + answer_tokens > context_tokens:
        raise InputError(
            f"--env_id {problem.environment.env_id}: {problem.space.count} parameters per policy make prompts of up to "
            f"{prompt_tokens} tokens; with {answer_tokens} for the answer that exceeds the model's context of "
            f"{context_tokens}: take --history best_and_recent with a smaller --history_best and --history_recent, a "
            "smaller --max_completion_tokens, or another model"
        )


# Without a model -------------------------------------------------------------------------------------------------


class RandomProposer:
    """Uniform random search: every proposal is a new draw from the whole space."""

    def __init__(self, space: PolicySpace, seed: int) -> None:
        self.space, self.seed = space, seed

    def propose(self, request: Request) -> Answer:
        return Answer(_answer_text(self.space, self.space.draw(self._generator(request)), "a uniform draw"))

    def _generator(self, request: Request) -> np.random.Generator:
        return np.random.default_rng(seed_of(self.seed, type(self).__name__, request.iteration, request.attempt))


class HillClimbingProposer(RandomProposer):
    """Local search: the best policy so far with one value changed.

    Ties go to the latest, so that the search wanders where many policies are equal: most tables never reach a lake's
    goal. A policy that leads after a single rollout is rolled out again before it is built on. Without this, one lucky
    draw ends the search: .32 (exact) instead of .47 over eight seeds of 400 iterations on the slippery lake.
    """

    def propose(self, request: Request) -> Answer:
        generator, tried = self._generator(request), request.history.tried
        if not tried:
            return Answer(_answer_text(self.space, self.space.draw(generator), "nothing is known yet"))
        best = max(tried, key=lambda policy: (policy.mean, policy.last_iteration))
        leads_alone = sum(policy.mean == best.mean for policy in tried) == 1
        if request.history.pool_duplicates and leads_alone and best.first_iteration == best.last_iteration:
            return Answer(_answer_text(self.space, best.parameters, "once more, was it luck?"))
        return Answer(_answer_text(self.space, self.space.neighbour(best.parameters, generator), "beside the best"))


def _answer_text(space: PolicySpace, parameters: Parameters, reason: str) -> str:
    return f"parameters: {space.text(parameters)}\nreason: {reason}"


class RecordedProposer:
    """The answers of an earlier run, by iteration and attempt: the same run again, without the model."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.answers = {(r["iteration"], r["attempt"]): r for r in read_log(path) if r["kind"] == "answer"}

    def propose(self, request: Request) -> Answer:
        record = self.answers.get((request.iteration, request.attempt))
        if record is None:
            raise InputError(
                f"--answers {self.path}: holds no answer for iteration {request.iteration}, attempt {request.attempt}; "
                "give the settings of the recorded run"
            )
        if record["prompt"] != list(request.messages):
            raise InputError(
                f"--answers {self.path}: iteration {request.iteration}, attempt {request.attempt} was asked otherwise; "
                "give the settings of the recorded run"
            )
        is_cut = CUT in (record["error"] or "")
        return Answer(record["answer"], record["tokens_in"], record["tokens_out"], record["seconds"], is_cut)


# With a model ----------------------------------------------------------------------------------------------------


class LocalProposer:
    """A model that `llm_policy.models` loads, sampled through its chat template.

    Args:
        answer_prefix: the beginning of the answer, given to the model. Without it the embedded model wrote no line of
            parameters. It is part of the answer that is returned and parsed; "" leaves it out.
        is_one_line: a line break ends the answer.
        space: constrained decoding. At each token the model chooses among those that can still become parameters of
            this space, so that every answer is usable. Needs an `answer_prefix`. Unconstrained, the embedded model
            miscounts: none of 4 answers had 16 values. With None it writes what it wants, and the parser judges.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_completion_tokens: int,
        temperature: float = 1.0,
        seed: int = 0,
        answer_prefix: str = "",
        is_one_line: bool = False,
        space: PolicySpace | None = None,
    ) -> None:
        self.model, self.tokenizer, self.seed, self.answer_prefix = model, tokenizer, seed, answer_prefix
        self._prefix = tokenizer.encode(answer_prefix, add_special_tokens=False) if answer_prefix else []
        # After the last token of the prefix: alone, some tokenizers drop a token's leading space.
        anchor = self._prefix[-1:]
        before = len(tokenizer.decode(anchor))
        texts = tokenizer.batch_decode([[*anchor, token] for token in range(len(tokenizer))])
        self._pieces = {token: text[before:] for token, text in enumerate(texts)}
        line_breaks = [token for token, piece in self._pieces.items() if "\n" in piece]
        self._line_breaks = [token for token in line_breaks if self._pieces[token] == "\n"]
        self._space = space
        self._of_values = {t: p for t, p in self._pieces.items() if p and not p.strip("0123456789.-, ")}
        self.generation_config = sampling_config(
            model, tokenizer, max_completion_tokens, temperature, line_breaks if is_one_line else ()
        )

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """The whole prompt through the chat template, with the beginning of the answer."""
        return [*prompt_token_ids(fit_to_template(messages, self.tokenizer), self.tokenizer), *self._prefix]

    def propose(self, request: Request) -> Answer:
        began = time.perf_counter()
        prompt = self.prompt_tokens(request.messages)
        torch.manual_seed(seed_of(self.seed, "sampling", request.iteration, request.attempt))
        allowed = None if self._space is None else lambda _, ids: self._allowed(ids[len(prompt) :].tolist())
        (reply,) = sample_completions(self.model, [prompt], self.generation_config, allowed_tokens=allowed)
        (text,) = self.tokenizer.batch_decode([reply], skip_special_tokens=True)
        return Answer(
            self.answer_prefix + text,
            len(prompt),
            len(reply),
            time.perf_counter() - began,
            is_cut=reply[-1] not in self.generation_config.eos_token_id,
        )

    def _allowed(self, reply: list[int]) -> list[int]:
        """Tokens after which `reply` can still become parameters and, after them, a line of reasoning."""
        assert self._space is not None
        so_far = "".join(self._pieces[token] for token in reply)
        if "\n" in so_far:
            return list(self._pieces)
        allowed = [token for token, piece in self._of_values.items() if self._space.can_begin(so_far + piece)]
        if self._space.is_whole(so_far):
            return self._line_breaks + allowed  # the last value may have another digit
        return allowed or list(self._pieces)  # a tokenizer that cannot spell it: then the parser decides
