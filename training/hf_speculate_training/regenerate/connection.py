"""Requests to a server that may be busy, restart, cut the line, or never come to an end; and its answers, by a schema.

The client is OpenAI's own. It knows which requests can be tried again, and waits longer each time, or as long as the
server asks. It bounds the time between two bytes; all attempts of a request together have one total time.

Answers have OpenAI's form. A field that is used has its type, or the answer is refused: numbers are not texts, booleans
not token ids, and a text holds no lone surrogates. Fields that are not used may hold anything.
"""

from __future__ import annotations

import os
import reprlib
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import MASK


KEY_VARIABLE = "HF_SPECULATE_SERVER_KEY"

Reply = TypeVar("Reply", bound=BaseModel)


class ServerError(SpeculateError, RuntimeError):
    """A server cannot be reached, or refuses a request; then `status` is that of its answer."""

    def __init__(self, message: str, status: int | None = None):
        key = os.environ.get(KEY_VARIABLE)  # answers may quote it, and it need not look like one
        super().__init__(message.replace(key, MASK) if key else message)
        self.status = status


class Connection:
    """Requests to one server, from many threads, until it is closed.

    The server's key comes from the environment (`HF_SPECULATE_SERVER_KEY`), and is neither logged nor written.

    Args:
        url: address of the server, with or without `/v1`.
        timeout: seconds without a byte after which an attempt ends. All attempts together have `retries + 1` times as
            long, pauses included.
        retries: number of times that a request is tried again that got no answer or a broken one, was put off (408,
            409, 429), or failed there (5xx).
    """

    def __init__(self, url: str, *, timeout: float = 600.0, retries: int = 5):
        if find_spec("openai") is None:
            raise ServerError("a server is asked with the package openai: pip install 'hf-speculate[server]'")
        from anyio.from_thread import start_blocking_portal
        from openai import AsyncOpenAI

        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"{url!r} is not the address of a server, e.g. http://localhost:8000.")
        self._retries, self._total = retries, timeout * (retries + 1)
        key = os.environ.get(KEY_VARIABLE, "none")
        self._client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=timeout, max_retries=retries)
        self._is_closed, self._open = False, ExitStack()
        self._portal = self._open.enter_context(start_blocking_portal(name="server"))

    def models(self) -> list[str]:
        """Names of the models that it serves."""
        return [model.id for model in self._asked("get", "/models", Models).data]

    def ask(self, path: str, body: dict[str, Any], form: type[Reply]) -> Reply:
        """Sends a request to a path below `/v1`, and returns the answer in a form.

        Raises:
            ServerError: it refuses, gives no answer however often it is asked, or answers in another form.
        """
        return self._asked("post", path, form, body=body)

    def close(self) -> None:
        """Ends requests under way: their answers are not needed any more."""
        from anyio import move_on_after

        async def end() -> None:
            with move_on_after(1):  # some ways of closing wait for the other side
                await self._client.close()
            await self._portal.stop(cancel_remaining=True)

        if not self._is_closed:
            self._is_closed = True
            self._portal.start_task_soon(end)
            self._open.close()

    def _asked(self, method: str, path: str, form: type[Reply], **given: Any) -> Reply:
        from anyio import fail_after
        from openai import APIConnectionError, APIStatusError

        async def request() -> bytes:
            with fail_after(self._total):
                return await getattr(self._client, method)(path, cast_to=bytes, **given)

        problem: str = ""
        for _ in range(self._retries + 1):
            try:
                return form.model_validate_json(self._portal.call(request))
            except APIStatusError as error:
                raise self._refused(path, error) from error
            except APIConnectionError as error:
                cause = error.__cause__ or error
                raise self._silent(path, f"{type(cause).__name__}: {cause}".rstrip(": ")) from error
            except TimeoutError as error:
                raise self._silent(path, f"no whole answer within {self._total:g} s") from error
            except ValidationError as error:
                problem = first_fault(error)
                if not is_cut(error):
                    raise ServerError(f"{self.url}/v1{path} answers in another form: {problem}.") from error
        raise self._silent(path, problem)

    def _refused(self, path: str, error: Any) -> ServerError:
        problem = " ".join(str(error.message).split())[:300]
        if error.status_code >= 500 or error.status_code in (408, 409, 429):
            return ServerError(f"{self.url}/v1{path} failed {self._retries + 1} times; last error: {problem}")
        return ServerError(f"{self.url}/v1{path} refuses a request: {problem}", error.status_code)

    def _silent(self, path: str, problem: str) -> ServerError:
        return ServerError(f"{self.url}/v1{path} gave no answer in {self._retries + 1} attempts ({problem}).")


TokenIds = list[Annotated[int, Field(ge=0)]]


class _Reply(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ReplyMessage(_Reply):
    """Text of a chat's answer. The other fields hold parts that the server has taken out of it."""

    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def is_taken_apart(self) -> bool:
        return any((self.reasoning, self.reasoning_content, self.tool_calls))


class ReplyChoice(_Reply):
    """One answer. Servers that return tokens (vLLM) name those of a text's prompt here."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    message: ReplyMessage | None = None
    text: str | None = None
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None


class Usage(_Reply):
    """Numbers of tokens."""

    prompt_tokens: int | None = None


class CompletionReply(_Reply):
    """Reply to a request for text, or for a chat's next turn."""

    choices: Annotated[list[ReplyChoice], Field(min_length=1)]
    prompt_token_ids: TokenIds | None = None
    usage: Usage | None = None


class Model(_Reply):
    """One of the models that a server has."""

    id: str


class Models(_Reply):
    """Reply to the request for the models."""

    data: list[Model]


def is_cut(error: ValidationError) -> bool:
    """True if the reply is not JSON: the line was cut, or another server answered."""
    return error.errors(include_url=False)[0]["type"] == "json_invalid"


def first_fault(error: ValidationError) -> str:
    """One line on the first wrong field."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(map(str, fault["loc"])) or "the reply"
    return f"{place}: {fault['msg']}, found {reprlib.repr(fault['input'])}"
