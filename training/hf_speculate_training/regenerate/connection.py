"""Requests to a server that may be busy, restart, or cut the line: what can be tried again is tried again.

The client is OpenAI's own. It waits longer each time, as long as the server wants where that says so.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from hf_speculate.errors import SpeculateError
from hf_speculate.masking import MASK


KEY_VARIABLE = "HF_SPECULATE_SERVER_KEY"


class ServerError(SpeculateError, RuntimeError):
    """A server cannot be reached, or does not do what it is asked for.

    Attributes:
        status: of its answer, where it refused a request that it understood.
    """

    def __init__(self, message: str, status: int | None = None):
        key = os.environ.get(KEY_VARIABLE)  # answers may quote it, and it need not look like one
        super().__init__(message.replace(key, MASK) if key else message)
        self.status = status


class Connection:
    """Requests to one server, from many threads.

    A key that it wants is taken from the environment (`HF_SPECULATE_SERVER_KEY`), and neither logged nor written.

    Args:
        url: with or without `/v1`.
        timeout: seconds for an answer.
        retries: so often a request is tried again that got no answer or a broken one, was put off (408, 409, 429), or
            failed there (5xx).
    """

    def __init__(self, url: str, *, timeout: float = 600.0, retries: int = 5):
        if find_spec("openai") is None:
            raise ServerError("a server is asked with the package openai: pip install 'hf-speculate[server]'")
        from openai import OpenAI

        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"{url!r} is no address of a server: e.g. http://localhost:8000.")
        self._retries = retries
        key = os.environ.get(KEY_VARIABLE, "none")
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=timeout, max_retries=retries)

    def models(self) -> list[str]:
        """Names of what it serves."""
        return [str(each.get("id")) for each in self._asked("get", "/models").get("data", [])]

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Its answer to a request.

        Args:
            path: below `/v1`.
        Raises:
            ServerError: it refuses, or gives no answer however often it is asked.
        """
        return self._asked("post", path, body=body)

    def close(self) -> None:
        """Ends what is under way: nobody waits for it any more."""
        self._client.close()

    def _asked(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        from openai import APIConnectionError, APIStatusError

        problem: Exception | None = None
        for _ in range(self._retries + 1):
            try:
                found: Any = getattr(self._client, method)(path, cast_to=object, **given)
            except APIStatusError as error:
                raise self._refused(path, error) from error
            except APIConnectionError as error:
                raise self._silent(path, error.__cause__ or error) from error
            except ValueError as error:  # the line was cut in the middle of an answer
                problem = error
                continue
            if isinstance(found, dict):
                return found
            problem = ValueError(f"it answered {str(found)[:80]!r}")
        assert problem is not None
        raise self._silent(path, problem)

    def _refused(self, path: str, error: Any) -> ServerError:
        said = " ".join(str(error.message).split())[:300]
        if error.status_code >= 500 or error.status_code in (408, 409, 429):
            return ServerError(f"{self.url}/v1{path} failed {self._retries + 1} times, at last with {said}")
        return ServerError(f"{self.url}/v1{path} refuses a request: {said}", error.status_code)

    def _silent(self, path: str, error: BaseException) -> ServerError:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        return ServerError(f"{self.url}/v1{path} gave no answer in {self._retries + 1} attempts ({said}).")
