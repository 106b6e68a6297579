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


@dataclass(kw_only=True)
class Choosing:
    """The choice of tokens in one request.

    Attributes:
        sampler: sampler that chooses as stock's loop does.
        delivery: delivery of every step's tokens [B] to a streamer; None if there is no streamer.
        is_text_broken: whether plain decoding steps give scores that are not finite, in every row.
    """

    sampler: Sampler
    delivery: Delivery | None = None
    is_text_broken: bool = False

    def walk(
        self,
        logits: Tensor,
        tree: DraftTree,
        rows: Rows,
        verdict: Verdict,
        table: Any = None,
        may_be_tainted: bool = False,
    ) -> None:
        """Walks the tree and emits what the sampler chooses; see `verification.verify`.

        Args:
            table: tokens that the forward over the tree has chosen already (`tree_forward`); None for none.
        """
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
            table=table,
        )

    def num_delivered(self, rows: Rows) -> list[int]:
        """Number of tokens of every row that its consumer has received."""
        emitted = rows.sequences.num_emitted
        return list(emitted) if self.delivery is None else [min(self.delivery.num_steps, n) for n in emitted]

    def take_seconds(self) -> float:
        """Seconds that the streamer has taken since the last call."""
        return 0.0 if self.delivery is None else self.delivery.take_seconds()
