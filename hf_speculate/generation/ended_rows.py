"""Rows of a batch that end before others: what the target still has to run of them.

Stock goes on with every row until the last one ends, feeding padding to those that have ended. Of that, others get to
see the entry of a row's EOS in the returned cache, which the next turn attends to; and where something looks at the
whole batch, or at every step of every row, what rows show for their padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cache import TreeCache
from ..tree import DraftTree
from ..verification import Sequences, Stopping, Verdict


# Steps of padding that a row catches up with in one round at most.
_MAX_PADDING = 32


class EndedRows:
    """What rows that have ended owe.

    Args:
        sequences, stopping: of the request.
        are_padded: they go on with padding, as stock's do; else with their EOS alone.
        show_cache: somebody gets to see the cache.

    Attributes:
        prompt_lengths: entries a row behind the prompt; None until it has run.
    """

    def __init__(self, sequences: Sequences, stopping: Stopping, *, are_padded: bool, show_cache: bool):
        self._sequences = sequences
        self._stopping = stopping
        self.are_padded = are_padded
        # Without EOS rows go on with tokens of their own, and all end together.
        self._owe_eos = show_cache and stopping.has_eos and not are_padded
        self.prompt_lengths: Sequence[int] | None = None

    def is_any_behind(self, cache: TreeCache) -> bool:
        """Whether, all rows having ended, one has not been run as far as stock's."""
        emitted = self._sequences.num_emitted
        if self.are_padded:
            return len(set(emitted)) > 1
        pairs = zip(cache.lengths, self.settled_lengths(emitted), strict=True)
        return self._owe_eos and any(found < settled for found, settled in pairs)

    def done(self, cache: TreeCache) -> list[int]:
        """Rows that need not be run any more, whatever the others do. Rows that go on with padding are none of them."""
        if self.are_padded:
            return []
        return [row for row in self._sequences.finished_rows if not self._owes_eos(row, cache)]

    def paths(self, verdict: Verdict, cache: TreeCache) -> list[list[int]]:
        """What is kept of a round: the accepted paths, and the root of a row that has ended with it."""
        if not self._owe_eos or not any(self._sequences.finished):
            return verdict.paths
        owing = [row for row in cache.rows if self._owes_eos(row, cache)]
        return [path or ([0] if row in owing else path) for row, path in enumerate(verdict.paths)]

    def settled_lengths(self, num_new: Sequence[int]) -> list[int]:
        """Entries of real tokens in stock's cache where rows have so many new tokens: the last step's have none."""
        assert self.prompt_lengths is not None
        last = max(max(num_new) - 1, 0)
        return [length + min(n, last) for length, n in zip(self.prompt_lengths, num_new, strict=True)]

    def with_padding(self, tree: DraftTree) -> DraftTree:
        """The tree with a chain of padding for every row that has ended, as deep as the longest may get."""
        sequences, chains = self._sequences, {}
        if not self.are_padded or not any(sequences.finished):
            return tree
        longest = max(sequences.num_emitted) + tree.max_depth
        for row, tokens in enumerate(sequences.new_tokens):
            if not self._stopping.is_running(sequences, row):
                length = min(longest - len(tokens), _MAX_PADDING)
                chains[row] = [tokens[-1], *[sequences.pad_token_id] * length]
        return tree.with_chains(chains) if chains else tree

    def _owes_eos(self, row: int, cache: TreeCache) -> bool:
        """Whether the last token of a row is its EOS, and not in the cache."""
        assert self.prompt_lengths is not None
        is_behind = cache.lengths[row] < self.prompt_lengths[row] + len(self._sequences.new_tokens[row])
        return self._owe_eos and self._sequences.finished[row] and is_behind
