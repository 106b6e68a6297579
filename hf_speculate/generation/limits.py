"""How deep a round may draft."""

from __future__ import annotations

from collections.abc import Sequence

from ..models import GenerativeModel
from ..target import DepthLimit, Scorer, has_length_dependent_rope, takes_position_ids
from ..verification import Sequences, Stopping


_UNBOUNDED = 10**9


class DepthLimits:
    """How deep each row may draft: to where tokens can still be emitted, and where the target's forward does not depend
    on its longest position.

    Args:
        target: the model.
        stopping, sequences: of the request.
    """

    def __init__(self, target: GenerativeModel, stopping: Stopping, sequences: Sequences):
        self._stopping = stopping
        self._sequences = sequences
        self._of_positions = DepthLimit(target.config)
        self._takes_position_ids = takes_position_ids(target)
        self._counts_padding = has_length_dependent_rope(target.config)

    def __call__(self, scorer: Scorer, root_positions: Sequence[int]) -> list[int]:
        """For every row of the batch; a node at depth d can be emitted only if d tokens and the bonus still fit."""
        limit = 0 if scorer.takes_root_only else self._limit(scorer.cache.append_index, root_positions)
        rows, max_length = range(self._sequences.batch_size), self._stopping.max_length
        if max_length is None:
            return [limit for _ in rows]
        return [max(min(limit, max_length - self._sequences.length(row) - 1), 0) for row in rows]

    def _limit(self, append_index: int, root_positions: Sequence[int]) -> int:
        limit = None
        if self._of_positions.is_any:
            limit = self._of_positions(self._counts(append_index, root_positions))
        return _UNBOUNDED if limit is None else limit

    def _counts(self, append_index: int, root_positions: Sequence[int]) -> set[int]:
        """The places that the model may take its roots to be at. Padding has no positions, but some models count it."""
        if not self._takes_position_ids:
            return {append_index}
        return {max(root_positions), *((append_index,) if self._counts_padding else ())}
