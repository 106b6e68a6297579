"""A request of the server: what it generated, how fast, and why it ended early."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.speculator import Speculator
from hf_speculate.stats import SpeculationStats
from hf_speculate.target import GenerativeModel

from ..commands import say


HUNG_UP = "the client hung up"

# The request whose endpoint runs. `Gateway` sets it, and the server's own tasks inherit it.
current_request: ContextVar[ServedRequest] = ContextVar("hf_speculate_served_request")

_COUNTS = ("rounds", "rounds_without_draft", "drafted_tokens", "accepted_tokens", "emitted_tokens")


class RequestEnded(SpeculateError):
    """A request that ended before its text was complete: its client hung up, or the server stops."""


@dataclass(eq=False)
class ServedRequest:
    """A request, from its first byte to its line in the log.

    Attributes:
        path: path of its endpoint.
        prompt_tokens: number of tokens of its prompt.
        new_tokens: number of generated tokens.
        seconds: time that `generate` took, the prompt's included; None until its text is complete, or it failed.
        speculation: rounds, drafted and accepted tokens, tokens per round; None until the text is complete, and for
            plain generation.
        reason: clause on why it must end early; "" while it may run.
        is_logged: whether it has its line in the log.
    """

    path: str
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float | None = None
    speculation: dict[str, Any] | None = None
    reason: str = ""
    is_logged: bool = False
    _must_end: Event = field(default_factory=Event)

    def end(self, reason: str) -> None:
        """Ends the request before its next token, from any thread. One that has ended stays as it is."""
        if self.seconds is None and not self.reason:
            self.reason = reason
            self._must_end.set()

    def check(self) -> None:
        """Raises `RequestEnded` after `end`."""
        if self._must_end.is_set():
            raise RequestEnded(f"{self.reason}: the text ends after {self.new_tokens} tokens.")

    def log(self, news: str) -> None:
        """Prints the request's line to stderr."""
        self.is_logged = True
        say(f"{time.strftime('%H:%M:%S')} {self.path}: {news}", err=True)

    @property
    def summary(self) -> str:
        """Counts of tokens, and speed."""
        parts = [f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens"]
        if self.seconds:
            parts.append(f"{self.seconds:.2f} s, {self.new_tokens / self.seconds:.1f} tokens/s")
        if self.speculation is not None:
            parts.append(f"{self.speculation['tokens_per_round']:.2f} tokens per round")
        return ", ".join(parts)


class MeasuredModel:
    """The model of one request, as transformers' server sees it: a `generate` that is measured and can be ended.

    Args:
        speculator: speculator that is attached to the model; None for plain generation.
    """

    def __init__(self, model: GenerativeModel, speculator: Speculator | None, request: ServedRequest):
        self._model, self._speculator, self._request = model, speculator, request

    def generate(self, **kwargs: Any) -> Any:
        """The result of the model's `generate`. Raises `RequestEnded` as soon as the request must end."""
        request = self._request
        if request.reason:  # it has waited for others
            request.log(f"{request.reason} before its turn")
            request.check()
        watch = _Watch(request, self._speculator, kwargs.pop("streamer", None))
        request.prompt_tokens = kwargs["input_ids"].shape[-1]
        config = kwargs["generation_config"]
        _apply_temperature(config, self._model.generation_config)
        is_beam = (config.num_beams or 1) > 1  # takes no streamer
        try:
            result = self._model.generate(**kwargs, **({} if is_beam else {"streamer": watch}))
        except Exception as error:
            watch.close()
            request.log(f"{request.summary}; {request.reason or first_line(error)}")
            raise
        watch.close()
        request.new_tokens = result.shape[-1] - request.prompt_tokens  # beams have no streamer
        request.log(request.summary)
        return result


def _apply_temperature(config: GenerationConfig, own: GenerationConfig) -> None:
    """Makes a request's temperature decide whether to sample, as in OpenAI's protocol.

    Stock samples only if the model's own config has `do_sample`, and that of a GGUF file has not.
    """
    if config.temperature == 0:
        config.do_sample, config.temperature = False, None
    elif config.do_sample is None and config.temperature not in (None, own.temperature):
        config.do_sample = True


class _Watch(BaseStreamer):
    """A streamer that counts tokens and ends the request; it passes everything on to the server's own streamer.

    It holds no functions, so that a packed model still knows that nothing changes it between two forwards.
    """

    def __init__(self, request: ServedRequest, speculator: Speculator | None, inner: Any):
        self._request, self._inner = request, inner
        self._stats = None if speculator is None else speculator.stats
        self._before = _counts(self._stats)
        self._has_prompt = False
        self._start = time.perf_counter()

    def put(self, value: Tensor) -> None:
        self._request.check()
        if self._has_prompt:
            self._request.new_tokens += value.numel()
        self._has_prompt = True
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        self.close()  # first: the last event of a stream has `usage`, and its client leaves
        if self._inner is not None:
            self._inner.end()

    def close(self) -> None:
        """Notes the request's time, and its drafts, which the speculator has added to its statistics."""
        if self._request.seconds is not None:
            return
        self._request.seconds = time.perf_counter() - self._start
        added = {name: count - self._before[name] for name, count in _counts(self._stats).items()}
        if rounds := added.pop("rounds", 0) + added.pop("rounds_without_draft", 0):
            emitted = added.pop("emitted_tokens")
            self._request.speculation = {"rounds": rounds, **added, "tokens_per_round": round(emitted / rounds, 3)}


def _counts(stats: SpeculationStats | None) -> dict[str, int]:
    return {} if stats is None else {name: getattr(stats, name) for name in _COUNTS}
