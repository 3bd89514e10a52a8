"""Policies from a chat model behind an OpenAI-compatible endpoint."""

import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from llm_policy.environments.gym_env import seed_of
from llm_policy.errors import InputError, library_errors
from llm_policy.policy_search.search import Answer, Request

KEY_VARIABLE = "OPENAI_API_KEY"
KEPT = "; the history is kept and the same command resumes"
SILENT_SECONDS = 10  # until a line says that the first answer does not come
LONGEST_PAUSE_SECONDS = 120  # of openai's client between two tries, where a server's Retry-After asks for it
LARGEST_REPLY = 10_000_000  # bytes


class Message(BaseModel):
    content: str | None = None


class Choice(BaseModel):
    message: Message
    finish_reason: str | None = None


class Usage(BaseModel):
    prompt_tokens: NonNegativeInt = 0
    completion_tokens: NonNegativeInt = 0


class ChatCompletion(BaseModel):
    """What is read of an endpoint's reply."""

    choices: Annotated[list[Choice], Field(min_length=1)]
    usage: Usage | None = None


def _cut_at_the_largest(response) -> None:
    """A hook of the HTTP client: a body without end is cut, and then it is no chat completion."""
    whole = response.iter_bytes

    def iter_bytes(*arguments):
        size = 0
        for part in whole(*arguments):
            size += len(part)
            if size > LARGEST_REPLY:
                return
            yield part

    response.iter_bytes = iter_bytes


class EndpointProposer:
    """A chat model behind an OpenAI-compatible endpoint, through the official client.

    The client itself waits and tries again after status 408, 409, 429 and 5xx and after connection errors: 0.5 s, then
    twice as long each time up to 8 s, or as long as the server's Retry-After says, up to two minutes (above it tries no
    more). After `retries` of these the run
    ends with one line; the answers so far are in the log.
    The key comes only from the environment; a server at `base_url` may need none.
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
        if not (self._key.isascii() and self._key.isprintable()):
            raise InputError(f"{KEY_VARIABLE}: holds a character that no HTTP header takes; set it again")
        if base_url is not None:
            with library_errors("--base_url", (ValueError,)):
                parts = urlsplit(base_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise InputError("--base_url: expected a URL such as http://127.0.0.1:8000/v1")
            if parts.username or parts.password or parts.query:  # without the value: this is what must not be logged
                raise InputError(f"--base_url: holds a user, password or query; the key belongs in {KEY_VARIABLE}")
        elif not self._key:
            raise InputError(f"--proposer endpoint: set {KEY_VARIABLE} in the environment, or give --base_url")
        self.model_name, self.max_completion_tokens, self.temperature = model_name, max_completion_tokens, temperature
        self.seed, self.retries, self.timeout_seconds = seed, retries, timeout_seconds
        self._has_waited = False
        with library_errors("--base_url", (Exception,)):  # of an HTTP library that openai may change
            self._client = openai.OpenAI(
                api_key=self._key or "none", base_url=base_url, max_retries=retries, timeout=timeout_seconds,
                http_client=openai.DefaultHttpxClient(event_hooks={"response": [_cut_at_the_largest]}),
            )  # fmt: skip

    def propose(self, request: Request) -> Answer:
        began = time.perf_counter()
        try:
            reply = self._whole_reply(
                model=self.model_name,
                messages=request.messages,  # type: ignore[arg-type]
                max_completion_tokens=self.max_completion_tokens,
                temperature=self.temperature,
                # OpenAI's own API takes 64 bits, other servers hand it to torch or numpy: 31 suit all
                seed=seed_of(self.seed, "sampling", request.iteration, request.attempt) % 2**31,
            )
        except InputError:
            raise
        except Exception as error:  # also of what openai stands on: a host's name that cannot be encoded
            raise self._input_error(error) from error
        try:
            completion = ChatCompletion.model_validate_json(reply)
        except ValidationError as error:
            raise InputError(
                f"{self._where}: answers, but with no chat completion ({self._redacted(reply):.60}); "
                "does --base_url end in /v1?"
            ) from error
        choice, usage = completion.choices[0], completion.usage or Usage()
        return Answer(
            choice.message.content or "",
            usage.prompt_tokens,
            usage.completion_tokens,
            time.perf_counter() - began,
            is_cut=choice.finish_reason == "length",
        )

    def _whole_reply(self, **options) -> bytes:
        """The body of the reply. The client's time limit is one for each read: a server may drip for ever."""
        tries = self.retries + 1
        longest = tries * self.timeout_seconds + self.retries * LONGEST_PAUSE_SECONDS
        found: Future = Future()

        def ask() -> None:
            try:
                found.set_result(self._client.chat.completions.with_raw_response.create(**options).content)
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        if not self._has_waited and longest > SILENT_SECONDS:
            with suppress(TimeoutError):
                return found.result(SILENT_SECONDS)
            self._has_waited, longest = True, longest - SILENT_SECONDS
            print(f"{self._where}: no answer in {SILENT_SECONDS} s; waits, and tries {tries} times", flush=True)
        try:
            return found.result(longest)
        except TimeoutError:
            raise self._too_late() from None

    @property
    def _where(self) -> str:
        return f"endpoint {self.base_url or 'of OpenAI'}"

    def _too_late(self) -> InputError:
        return InputError(f"{self._where}: no answer in time after {self.retries} more tries{KEPT}")

    def _input_error(self, error: Exception) -> InputError:
        """One line for whatever the client raises, without the key, which some servers quote."""
        openai = self._openai
        if isinstance(error, openai.APITimeoutError):
            return self._too_late()
        if isinstance(error, openai.APIConnectionError):
            return InputError(f"{self._where}: cannot be reached after {self.retries} more tries{KEPT}")
        if not isinstance(error, openai.APIStatusError):
            return InputError(f"{self._where}: {self._redacted(error)}{KEPT}")
        status = error.status_code
        if isinstance(error, openai.RateLimitError):
            return InputError(f"{self._where}: status 429, rate-limited after at most {self.retries} more tries{KEPT}")
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return InputError(f"{self._where}: status {status}, refuses the key; check {KEY_VARIABLE}{KEPT}")
        if isinstance(error, openai.NotFoundError):
            return InputError(f"{self._where}: status 404; check --base_url and --model_name {self.model_name}{KEPT}")
        tries = f" after at most {self.retries} more tries" if status >= 500 else ""
        return InputError(f"{self._where}: status {status}{tries} ({self._redacted(error)}){KEPT}")

    def _redacted(self, error: Exception | bytes) -> str:
        text = error.decode(errors="replace") if isinstance(error, bytes) else str(error)
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:300]
