"""The delivery of a request's tokens to a streamer, in stock's order."""

from __future__ import annotations

import time
from typing import Any

from ..verification import Noise, Sequences


class Delivery:
    """Delivers the tokens of one request to a streamer.

    Args:
        streamer: streamer that was given to `generate`.
        sequences: texts of the rows, which must have equal lengths.
        noise: noise of a request that samples; None if it is greedy.

    Attributes:
        num_steps: number of steps delivered so far.
        seconds: time that the streamer has taken since the last `take_seconds`; it does not count as ours.
    """

    def __init__(self, streamer: Any, sequences: Sequences, noise: Noise | None):
        self._streamer = streamer
        self._sequences = sequences
        self._noise = noise
        self.num_steps = 0
        self.seconds = 0.0

    def __call__(self) -> bool:
        """Delivers new tokens. Returns False if the streamer drew random numbers, which changes the noise of later
        steps."""
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
        """Seconds that the streamer has taken since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
