"""The choice of a request's tokens, and their delivery to a streamer in stock's order."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..tree import DraftTree
from ..verification import Noise, Sampler, Sequences, Verdict, verify
from .rows import Rows


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


@dataclass(kw_only=True)
class Choosing:
    """The choice of tokens in one request.

    Attributes:
        sampler: chooses as stock's loop does.
        delivery: hands the tokens [B] of every step to a streamer; None: there is none.
        is_text_broken: whether stock's own steps give scores that are not finite, in every row.
    """

    sampler: Sampler
    delivery: Delivery | None = None
    is_text_broken: bool = False

    def verify(
        self, logits: Tensor, tree: DraftTree, rows: Rows, verdict: Verdict, *, may_be_tainted: bool = False
    ) -> None:
        """Walks the tree, emitting what the sampler chooses; see `verification.verify`."""
        verify(
            logits,
            tree,
            self.sampler,
            rows.stopping,
            rows.sequences,
            lockstep=rows.lockstep,
            pads_ended=rows.are_padded,
            may_be_tainted=may_be_tainted and not self.is_text_broken,
            after_step=self.delivery,
            verdict=verdict,
        )

    def num_delivered(self, rows: Rows) -> list[int]:
        """Tokens of every row that its consumer has got."""
        emitted = rows.sequences.num_emitted
        return list(emitted) if self.delivery is None else [min(self.delivery.num_steps, n) for n in emitted]

    def take_seconds(self) -> float:
        """Seconds that the streamer has taken since the last call."""
        return 0.0 if self.delivery is None else self.delivery.take_seconds()
