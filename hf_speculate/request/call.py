"""A request that `generate` has prepared for our loop: its rounds, and the result of `generate`."""

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
from ..loop import Decoding, decode
from ..speculator import Speculator
from ..tree import Round


# The kind of items that `hf_speculate.stream` or `rounds` will yield. If it is set, our `_sample` returns the prepared
# call unfinished, and `generate` passes it on.
streamed: ContextVar[Literal["rounds", "text"] | None] = ContextVar("hf_speculate_streamed", default=None)


@dataclass
class PreparedCall:
    """A `generate` call after its preparation.

    Attributes:
        run: state of the loop.
        speculator: speculator that gets the statistics of the call, however it ends.
        config: generation config, as `generate` completed it.
    """

    run: Decoding
    speculator: Speculator
    config: GenerationConfig
    _loop: Generator[Round] | None = None
    _first: Round | None = None

    def start(self) -> PreparedCall:
        """Runs the prompt now, within the context that `generate` was called in. `rounds` then begins with its
        round."""
        self._loop = decode(self.run)
        with self._timed():
            self._first = next(self._loop)
        return self

    def rounds(self) -> Generator[Round]:
        """The rounds of `decode`. Closing the generator ends the generation; time between rounds is not counted."""
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
            text = self.run.drafting.request.text
            if text is not None:
                remember_text(self.run.cache.cache, text + self.run.rows.sequences.new_tokens[0])
            stats.calls += 1
            self.speculator.count(stats, self.run.drafting.request.adapters)

    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        """The result of stock `generate`. Its dict form also has `speculation`, the statistics of this call."""
        sequences = self.run.rows.sequences.result()
        if not self.config.return_dict_in_generate:
            return sequences
        parts: Any = self.run.sampler.records.complete(*self.run.rows.sequences.new_shape)
        output: Any = GenerateDecoderOnlyOutput(sequences=sequences, **as_cache(self.run.cache.cache), **parts)  # type: ignore
        output.speculation = self.run.stats
        return output

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            # A stream's consumer runs the rounds outside `generate` and its `no_grad`.
            with torch.no_grad():
                yield
        finally:
            self.run.stats.total_seconds += time.perf_counter() - start
