"""`generate(streamer=...)`: the tokens of every step are handed over as they are chosen, in stock's order."""

from __future__ import annotations

import time
from typing import Any

from ..verification import Noise, Sequences


class Delivery:
    """A streamer at work on one request.

    Args:
        streamer: as `generate` takes it.
        sequences: the text; rows are of equal length.
        noise: of a request that samples.

    Attributes:
        num_steps: steps that were handed over.
        seconds: that the streamer has taken since `take_seconds` was called: they are not ours.
    """

    def __init__(self, streamer: Any, sequences: Sequences, noise: Noise | None):
        self._streamer = streamer
        self._sequences = sequences
        self._noise = noise
        self.num_steps = 0
        self.seconds = 0.0

    def __call__(self) -> bool:
        """Hands over what is new. What the streamer draws is drawn in its turn: False if it has drawn, and so changed
        the noise of what is still to be chosen."""
        start = time.perf_counter()
        if self._noise is not None:
            self._noise.pause(self._sequences.num_emitted[0])
        for tokens in self._sequences.columns(self.num_steps):
            self.num_steps += 1
            self._streamer.put(tokens)
        was_disturbed = self._noise is not None and self._noise.resume()
        self.seconds += time.perf_counter() - start
        return not was_disturbed

    def take_seconds(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
