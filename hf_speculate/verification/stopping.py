"""Stopping criteria, evaluated after every emitted token as in plain `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .sequences import Sequences


if TYPE_CHECKING:
    from .records import Records


# `MaxTimeCriteria` is missing: when the time is up, stock ends all rows at the same step.
_ROW_WISE = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)
_KNOWN = (*_ROW_WISE, MaxTimeCriteria)


class Stopping:
    """The stopping criteria of a request.

    Args:
        criteria: stopping criteria as `generate` prepared them.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.criteria = criteria
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.max_length: int | None = criteria.max_length
        # An unknown criterion may draw from the RNG that the request samples with.
        self.may_draw = any(type(criterion) not in _KNOWN for criterion in criteria)
        self._host_rules = _host_rules(criteria)
        deadlines = [c.initial_timestamp + c.max_time for c in criteria if type(c) is MaxTimeCriteria]
        self._deadline: float | None = min(deadlines, default=None)

    @property
    def row_wise(self) -> bool:
        """Whether each row can be judged alone, at its own pace."""
        known = all(type(c) in _ROW_WISE or getattr(c, "row_wise", False) for c in self.criteria)
        # Without EOS stock lets rows that have stopped write on until the last one stops.
        return known and (self.has_eos or all(type(c) is MaxLengthCriteria for c in self.criteria))

    def is_running(self, sequences: Sequences, row: int) -> bool:
        """Whether a row still gets tokens of its own. Stock fills finished rows with padding only if there is an
        EOS."""
        return not (self.has_eos and sequences.finished[row])

    def update(self, rows: Sequence[int], sequences: Sequences, records: Records) -> None:
        """Marks the rows among `rows` (of equal length) that are finished after their last token."""
        if self._host_rules is not None:
            is_late = self._deadline is not None and time.time() > self._deadline
            for row in rows:
                length, token = sequences.length(row), sequences.new_tokens[row][-1]
                sequences.finished[row] |= is_late or any(rule(length, token) for rule in self._host_rules)
            return
        scores = None
        if records.scores is not None and len(rows) == sequences.batch_size:
            scores = records.scores.complete(sequences.batch_size)
        done = self.criteria(sequences.view(rows), scores)  # type: ignore[arg-type]
        for row, is_done in zip(rows, done.tolist(), strict=True):
            sequences.finished[row] |= is_done


def _host_rules(criteria: StoppingCriteriaList) -> list[Callable[[int, int], bool]] | None:
    """The usual criteria as functions (length, last token) -> is done, without tensors; None if there are others.

    For every token these save the tensor work of `StoppingCriteriaList.__call__`, the plain reference. On accelerators
    they also save a host synchronisation.
    """
    rules: list[Callable[[int, int], bool]] = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            # Beyond the context stock warns once; leave that to the criterion itself.
            longest = criterion.max_position_embeddings
            if longest is not None and criterion.max_length > longest:
                return None
            rules.append(lambda length, token, limit=criterion.max_length: length >= limit)
        elif type(criterion) is EosTokenCriteria:
            eos_ids = frozenset(criterion.eos_token_id.tolist())
            rules.append(lambda length, token, eos_ids=eos_ids: token in eos_ids)
        elif type(criterion) is not MaxTimeCriteria:  # `Stopping` checks the time once a step
            return None
    return rules
