"""Who proposes: a local model, an OpenAI-compatible endpoint, recorded answers, and two searches without a model.

All answer as text in the same form and through the same parser, so that nothing but the proposals differs.
"""

import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from llm_policy.errors import InputError
from llm_policy.policy_search.parameters import Parameters, PolicySpace
from llm_policy.policy_search.search import Answer, Request, read_log, seed_of
from llm_policy.sampling import sample_completions
from prompts import Messages, fit_to_template, prompt_token_ids

PROPOSERS = ("local", "endpoint", "random", "hill_climbing", "recorded")
KEY_VARIABLE = "OPENAI_API_KEY"


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

    Of equally good ones the latest, so that it wanders where many are equal: most tables never reach a lake's goal. A
    policy that leads after a single rollout is rolled out again before anything is built on it. Without that one lucky
    draw ends the search: over eight seeds of 400 iterations on the slippery lake .32 (exact) instead of .47.
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
    """The answers of an earlier run, by iteration and attempt: tests, and the same run again without the model."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.answers = {(r["iteration"], r["attempt"]): r for r in read_log(path) if r["kind"] == "answer"}

    def propose(self, request: Request) -> Answer:
        record = self.answers.get((request.iteration, request.attempt))
        if record is None:
            raise InputError(
                f"--answers {self.path}: holds no answer for iteration {request.iteration}, attempt {request.attempt}; "
                "repeat the run with the settings of the recorded one"
            )
        return Answer(record["answer"], record["tokens_in"], record["tokens_out"], record["seconds"])


class LocalProposer:
    """A model that `llm_policy.models` loads, sampled through its chat template.

    Args:
        answer_prefix: the beginning of the answer, put into the model's mouth: without it the embedded model wrote no
            single line of parameters. It is part of the answer that is returned and parsed; "" leaves it out.
        is_one_line: a line break ends the answer.
        space: constrained decoding: at each token the model chooses among those that can still become parameters of
            this space, so that every answer is one. Needs an `answer_prefix`. Unconstrained, the embedded model
            miscounts: in 4 answers out of 4 there were not 16 values. None: it writes what it wants, and the parser
            judges.
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
        ends = model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        # Behind the last token of the prefix: alone, some tokenizers drop a token's leading space.
        anchor = self._prefix[-1:]
        before = len(tokenizer.decode(anchor))
        texts = tokenizer.batch_decode([[*anchor, token] for token in range(len(tokenizer))])
        self._pieces = {token: text[before:] for token, text in enumerate(texts)}
        line_breaks = [token for token, piece in self._pieces.items() if "\n" in piece]
        if is_one_line:
            ends += line_breaks
        self._line_breaks = [token for token in line_breaks if self._pieces[token] == "\n"]
        self._space = space
        self._of_values = {t: p for t, p in self._pieces.items() if p and not p.strip("0123456789.-, ")}
        self.generation_config = GenerationConfig(
            max_new_tokens=max_completion_tokens,
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else None,
            top_k=0 if temperature > 0 else None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted({*ends, tokenizer.eos_token_id}),
            disable_compile=True,
        )

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """The whole prompt through the chat template, the beginning of the answer included."""
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
        if self._space.is_whole(so_far):
            return self._line_breaks
        allowed = [token for token, piece in self._of_values.items() if self._space.can_begin(so_far + piece)]
        return allowed or list(self._pieces)  # a tokenizer that cannot spell it: the parser has the last word


class EndpointProposer:
    """A chat model behind an OpenAI-compatible endpoint, through the official client.

    The client itself waits and tries again after status 408, 409, 429 and 5xx and after connection errors: 0.5 s, twice
    as long each time up to 8 s, or what the server's Retry-After asks for. After `retries` of these the run ends with
    one line; what was answered is in the log.
    The key comes from the environment alone; a server at `base_url` may need none.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        max_completion_tokens: int = 1024,
        temperature: float = 1.0,
        seed: int = 0,
        retries: int = 8,
        timeout_seconds: float = 120.0,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise InputError(
                "--proposer endpoint: the package openai is missing; pip install -r requirements-endpoint.txt"
            ) from error
        self._openai = openai
        self.base_url = base_url
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if base_url is not None:
            parts = urlsplit(base_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise InputError("--base_url: expected a URL such as http://127.0.0.1:8000/v1")
            if parts.username or parts.password or parts.query:  # without the value: this is what must not be logged
                raise InputError(f"--base_url: holds a user, password or query; the key belongs into {KEY_VARIABLE}")
        elif not self._key:
            raise InputError(f"--proposer endpoint: set {KEY_VARIABLE} in the environment, or give --base_url")
        self.model_name, self.max_completion_tokens, self.temperature = model_name, max_completion_tokens, temperature
        self.seed, self.retries = seed, retries
        self._client = openai.OpenAI(
            api_key=self._key or "none", base_url=base_url, max_retries=retries, timeout=timeout_seconds
        )

    def propose(self, request: Request) -> Answer:
        began = time.perf_counter()
        try:
            reply = self._client.chat.completions.create(
                model=self.model_name,
                messages=request.messages,  # type: ignore[arg-type]
                max_completion_tokens=self.max_completion_tokens,
                temperature=self.temperature,
                # OpenAI's own API takes 64 bits, other servers hand it to torch or numpy: 31 suit all
                seed=seed_of(self.seed, "sampling", request.iteration, request.attempt) % 2**31,
            )
        except self._openai.OpenAIError as error:
            raise self._input_error(error) from error
        choices = getattr(reply, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise InputError(f"{self._place}: answers, but with no chat completion; does --base_url end in /v1?")
        usage = reply.usage
        return Answer(
            choices[0].message.content or "",
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            time.perf_counter() - began,
            is_cut=choices[0].finish_reason == "length",
        )

    @property
    def _place(self) -> str:
        return f"endpoint {self.base_url or 'of OpenAI'}"

    def _input_error(self, error: Exception) -> InputError:
        """One line for whatever the client raises. The key is never in it, though servers quote it."""
        openai = self._openai
        kept = "; the history is kept, the same command goes on"
        if isinstance(error, openai.APITimeoutError):
            return InputError(f"{self._place}: no answer in time after {self.retries} more tries{kept}")
        if isinstance(error, openai.APIConnectionError):
            return InputError(f"{self._place}: cannot be reached after {self.retries} more tries{kept}")
        if not isinstance(error, openai.APIStatusError):
            return InputError(f"{self._place}: {self._redacted(error)}{kept}")
        status = error.status_code
        if isinstance(error, openai.RateLimitError):
            return InputError(f"{self._place}: status 429, rate-limited after {self.retries} more tries{kept}")
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return InputError(f"{self._place}: status {status}, refuses the key; check {KEY_VARIABLE}{kept}")
        if isinstance(error, openai.NotFoundError):
            return InputError(f"{self._place}: status 404; check --base_url and --model_name {self.model_name}{kept}")
        tries = f" after {self.retries} more tries" if status >= 500 else ""
        return InputError(f"{self._place}: status {status}{tries} ({self._redacted(error)}){kept}")

    def _redacted(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        return (text.replace(self._key, "***") if self._key else text)[:300]
