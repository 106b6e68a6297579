"""One request of `suffix`: counts a row, which grow with the text, beside what is shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hf_speculate.drafting import Choices, DraftRequest, DraftSession, DraftState
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow

from .automaton import Automaton, Mixture, Race, draft_tree
from .contexts import ContextCounts, RecycledRows
from .options import SuffixOptions
from .store import Index, IndexKind, SuffixStore
from .windows import Draft, MatchRule, WindowCounts, best_draft, best_of


def index_kind(options: SuffixOptions) -> IndexKind:
    """The kind of counts that are kept of every text."""
    return IndexKind(tuple(options.orders), None) if options.smoothing else IndexKind(None, options.depth)


class SmoothedRow:
    """Drafts with the smoothed automaton.

    Args:
        shared: counts of other texts, by the name of their source.
        mixture: what is learnt of all rows.
    """

    def __init__(self, options: SuffixOptions, shared: Mapping[str, Any], mixture: Mixture):
        self.options = options
        self._counts, self._tail = ContextCounts(options.orders), []
        self._automaton = Automaton({**shared, "local": self._counts}, options.orders, mixture)

    def read(self, tokens: Sequence[int]) -> None:
        """The prompt."""
        self._counts.extend(self._tail, tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens that the target has written."""
        for token in tokens:
            self._automaton.learn(tuple(self._tail), token)
            self._counts.extend(self._tail, [token])

    def draft(self, state: DraftState, number: int) -> Draft:
        """Args: number: of the row in the request."""
        depth = min(state.max_depth, self.options.depth)
        race = Race(state, number) if state.samples else None
        return draft_tree(self._automaton, self._tail, self.options, depth, state.chains_only, race)


class CountedRow:
    """Drafts by counts, as SuffixDecoding does: the best of this text's draft and those of the other sources."""

    def __init__(self, options: SuffixOptions, shared: Mapping[str, Any]):
        self.options = options
        self._counts, self._cursor = WindowCounts(options.depth), []
        self._sources = [self._counts, *shared.values()]
        self._context: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        """The prompt, or what the target has written."""
        self._counts.extend(self._cursor, tokens)
        self._context += tokens
        del self._context[: -self.options.depth]

    append = read

    def draft(self, state: DraftState, _number: int) -> Draft:
        options = self.options
        rule = MatchRule(
            max_tokens=options.max_nodes,
            factor=options.max_spec_factor,
            offset=options.max_spec_offset,
            floor=options.min_token_prob,
            tree=options.tree and not state.chains_only,
            max_depth=state.max_depth,
        )
        return best_of([best_draft(counts, self._context, rule) for counts in self._sources])


class SuffixSession(DraftSession):
    """Counts of one text a row.

    Args:
        sources: counts of other texts, by name; the store's are among them.
        recycled: where choices go, and one more source; None: nobody asks for them.
        store: where the outputs go; its lock is held while sources are read.
        mixture: weights to begin with; changed.
        keep: what is told of them at the end.
    """

    def __init__(
        self,
        options: SuffixOptions,
        request: DraftRequest,
        sources: Mapping[str, Index],
        recycled: RecycledRows | None,
        store: SuffixStore | None,
        mixture: Mixture,
        keep: Callable[[Mixture], None],
    ):
        self.options = options
        # The end of the output is not drafted after, but belongs into the store.
        self.carries_over = store is not None
        self._recycled, self._store, self._mixture, self._keep = recycled, store, mixture, keep
        self.num_choices = 0 if recycled is None else options.recycled
        self._lock = nullcontext() if store is None else store.lock
        self._rows: list[SmoothedRow | CountedRow] = []
        shared = sources if recycled is None else {"recycled": recycled, **sources}
        for prompt in request.row_texts:
            row = SmoothedRow(options, shared, mixture) if options.smoothing else CountedRow(options, shared)
            row.read(prompt)
            self._rows.append(row)
        self._outputs: list[list[int]] = [[] for _ in self._rows]
        self._numbers = [] if store is None else [store.begin(request.adapters) for _ in self._rows]
        self._has_seen_prompt = False

    def observe(self, tokens, features, lengths) -> None:
        with self._lock:
            for row, (texts, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
                # The prompt is counted already; what is new is the token after its last position.
                new = texts[:length] if self._has_seen_prompt else texts[length - 1 : length]
                self._rows[row].append(new)
                self._outputs[row] += new
        self._has_seen_prompt = True
        # SuffixDecoding drafts from outputs as they grow. With smoothing a text would count twice, here and there.
        if not self.options.smoothing:
            self._record()

    def observe_choices(self, choices: Choices) -> None:
        assert self._recycled is not None
        with self._lock:
            self._recycled.learn(choices)

    def draft(self, state: DraftState) -> DraftTree:
        drafts = []
        with self._lock:
            for number, (row, is_active) in enumerate(zip(self._rows, state.active, strict=True)):
                drafts.append(row.draft(state, number) if is_active else Draft())
        if not any(draft.tokens for draft in drafts):
            return DraftTree.root_only(state.root_ids)
        return DraftTree.from_rows(
            [
                TreeRow(
                    [root, *draft.tokens],
                    [ROOT_PARENT, *(parent + 1 for parent in draft.parents)],
                    [0.0, *map(math.log, draft.probs)],
                )
                for root, draft in zip(state.root_ids.tolist(), drafts, strict=True)
            ]
        )

    def close(self) -> None:
        self._record()
        self._keep(self._mixture)

    def _record(self) -> None:
        if self._store is not None:
            for number, output in zip(self._numbers, self._outputs, strict=True):
                self._store.extend(number, output)
        self._outputs = [[] for _ in self._rows]
