"""The rows of a request: what each has emitted, which have ended, and what the target must still run for those.

Stock runs every row until the last one ends, and feeds padding to finished rows. Part of that is visible to others: the
returned cache has an entry for a row's EOS, which the next turn attends to. If something sees the whole batch or every
step of it, the results for padding are visible too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cache import TreeCache
from ..tree import DraftTree, TreeRow
from ..verification import Sequences, Stopping, Verdict


# Most padding steps that a row catches up with in one round.
_MAX_PADDING = 32


class Rows:
    """The rows of one request.

    Args:
        sequences: text of every row.
        stopping: criteria that end rows.
        lockstep: whether all rows must emit the same number of tokens per round. A single row always does.
        are_padded: whether finished rows continue with padding, as in stock. Otherwise they end with their EOS.
        show_cache: whether the caller gets to see the cache.

    Attributes:
        lockstep: whether all rows advance together.
        prompt_lengths: number of cache entries of each row's prompt; None until the prompt has run.
    """

    def __init__(
        self,
        sequences: Sequences,
        stopping: Stopping,
        *,
        lockstep: bool = False,
        are_padded: bool = False,
        show_cache: bool = False,
    ):
        self.sequences = sequences
        self.stopping = stopping
        self.lockstep = lockstep or sequences.batch_size == 1
        self.are_padded = are_padded
        # Without an EOS, rows keep emitting their own tokens and end together.
        self._owe_eos = show_cache and stopping.has_eos and not are_padded
        self.prompt_lengths: Sequence[int] | None = None

    @property
    def active(self) -> tuple[bool, ...]:
        """Whether the next round can emit tokens in a row."""
        if not self.lockstep:
            return tuple(not finished for finished in self.sequences.finished)
        return tuple(self.stopping.is_running(self.sequences, row) for row in range(self.sequences.batch_size))

    @property
    def can_leave(self) -> bool:
        """Whether finished rows need no more forwards.

        In lock-step all rows run, because code that gets the whole batch must see what stock shows it.
        """
        finished = self.sequences.finished
        return not self.lockstep and any(finished) and not all(finished)

    def are_unfinished(self, cache: TreeCache) -> bool:
        """Whether another round is needed."""
        return not all(self.sequences.finished) or self._is_any_behind(cache)

    def _is_any_behind(self, cache: TreeCache) -> bool:
        """Whether, after all rows have ended, one has run fewer steps than in stock."""
        emitted = self.sequences.num_emitted
        if self.are_padded:
            return len(set(emitted)) > 1
        pairs = zip(cache.lengths, self.final_lengths(emitted), strict=True)
        return self._owe_eos and any(num_cached < final for num_cached, final in pairs)

    def done(self, cache: TreeCache) -> list[int]:
        """Finished rows that need no more forwards. Rows that continue with padding are not among them."""
        if self.are_padded:
            return []
        return [row for row in self.sequences.finished_rows if not self._owes_eos(row, cache)]

    def paths(self, verdict: Verdict, cache: TreeCache) -> list[list[int]]:
        """The nodes to keep: the accepted paths, and the root of a row whose EOS still needs an entry."""
        if not self._owe_eos or not any(self.sequences.finished):
            return verdict.paths
        owing = [row for row in cache.rows if self._owes_eos(row, cache)]
        return [path or ([0] if row in owing else path) for row, path in enumerate(verdict.paths)]

    def final_lengths(self, num_new: Sequence[int]) -> list[int]:
        """Number of entries of real tokens in stock's cache after `num_new` new tokens per row. The last step's tokens
        have none."""
        assert self.prompt_lengths is not None
        last = max(max(num_new) - 1, 0)
        return [length + min(n, last) for length, n in zip(self.prompt_lengths, num_new, strict=True)]

    def with_padding(self, tree: DraftTree) -> DraftTree:
        """The tree with a chain of padding for every finished row, as deep as the longest row may get."""
        sequences, chains = self.sequences, {}
        if not self.are_padded or not any(sequences.finished):
            return tree
        longest = max(sequences.num_emitted) + tree.max_depth
        for row, tokens in enumerate(sequences.new_tokens):
            if not self.stopping.is_running(sequences, row):
                length = min(longest - len(tokens), _MAX_PADDING)
                chains[row] = [tokens[-1], *[sequences.pad_token_id] * length]
        if not chains:
            return tree
        rows = tree.host.rows()
        for row, chain in chains.items():
            rows[row] = TreeRow(chain, range(-1, len(chain) - 1), [0.0] * len(chain))
        return DraftTree.from_rows(rows)

    def _owes_eos(self, row: int, cache: TreeCache) -> bool:
        """Whether the last token of a row is its EOS and not yet in the cache."""
        assert self.prompt_lengths is not None
        is_behind = cache.lengths[row] < self.prompt_lengths[row] + len(self.sequences.new_tokens[row])
        return self._owe_eos and self.sequences.finished[row] and is_behind
