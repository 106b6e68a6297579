"""One text of a request: what it counts, and what it drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_speculate.drafting import DraftState

from .automaton import Automaton, draft_tree
from .contexts import ContextCounts
from .counts import WindowCounts
from .drafts import Draft, best_of
from .index import IndexKind
from .matching import MatchRule, best_draft
from .mixture import Mixture
from .options import SuffixOptions
from .race import Race


def index_kind(options: SuffixOptions) -> IndexKind:
    """What is counted of every text."""
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
        """What the target has written."""
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
