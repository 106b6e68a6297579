"""A request that `generate` has prepared for our loop: its rounds, and what `generate` returns in the end."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache import as_cache
from ..drafting import remember_text
from ..speculator import Speculator
from ..tree import Round
from .loop import Decoding, decode


# What `hf_speculate.stream` or `rounds` is about to yield. Where it is set, our `_sample` hands the prepared call back
# unfinished, and `generate` returns it as it is.
streamed: ContextVar[Literal["rounds", "text"] | None] = ContextVar("hf_speculate_streamed", default=None)


@dataclass
class PreparedCall:
    """One `generate` call behind its preparation.

    Attributes:
        run: the loop's state.
        speculator: gets the statistics of the call, however it ends.
        config: the request, as `generate` completed it.
    """

    run: Decoding
    speculator: Speculator
    config: GenerationConfig
    _loop: Generator[Round] | None = None
    _first: Round | None = None

    def start(self) -> PreparedCall:
        """Runs the prompt now, within whatever `generate` was called in; `rounds` then begins with its outcome."""
        self._loop = decode(self.run)
        with self._timed():
            self._first = next(self._loop)
        return self

    def rounds(self) -> Generator[Round]:
        """The rounds, see `decode`. Closing it ends the generation; the time between rounds is the consumer's."""
        stats, loop = self.run.stats, self._loop or decode(self.run)
        try:
            if self._first is not None:
                yield self._first
            while True:
                with self._timed():
                    round = next(loop, None)
                if round is None:
                    return
                yield round
        finally:
            with self._timed():
                loop.close()
            text = self.run.drafts.driver.request.text
            if text is not None:
                remember_text(self.run.cache.cache, text + self.run.rows.sequences.new_tokens[0])
            stats.calls += 1
            self.speculator.count(stats, self.run.drafts.driver.request.adapters)

    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        """The result of stock `generate`, with `speculation` (this call's statistics) in the dict form."""
        sequences = self.run.rows.sequences.result()
        if not self.config.return_dict_in_generate:
            return sequences
        parts: Any = self.run.choosing.sampler.records.complete(*self.run.rows.sequences.new_shape)
        output: Any = GenerateDecoderOnlyOutput(sequences=sequences, **as_cache(self.run.cache.cache), **parts)  # type: ignore
        output.speculation = self.run.stats
        return output

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            # The consumer of a stream calls from outside `generate` and its `no_grad`.
            with torch.no_grad():
                yield
        finally:
            self.run.stats.total_seconds += time.perf_counter() - start
