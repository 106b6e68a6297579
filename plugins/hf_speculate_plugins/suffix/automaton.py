"""The smoothed automaton: what comes next by interpolation over contexts of several lengths and sources."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from .contexts import ContextCounts, Followers
from .drafts import Draft
from .mixture import Component, Mixture
from .options import SuffixOptions
from .recycled import RecycledRow, RecycledRows


# What a token has before any source is asked: about one over a vocabulary. It only keeps posteriors finite.
_UNSEEN = 1e-5

Tail = tuple[int, ...]
Source = ContextCounts | RecycledRows
Races = Callable[[Mapping[int, float], int], Mapping[int, float]]


class Automaton:
    """P(next token | last tokens): `P <- (1 - w) P + w q` from the shortest context to the longest.

    q are the shares of what followed the context in a source, w is what the mixture has learnt of such contexts.

    Args:
        sources: counts by name; of equal contexts the later source has the last word.
        orders: lengths of contexts, rising: those of the counts.
        mixture: changed by `learn`.
    """

    def __init__(self, sources: Mapping[str, Source], orders: Sequence[int], mixture: Mixture):
        self.sources = sources
        self.orders = orders
        self.mixture = mixture

    def probabilities(self, tail: Tail) -> dict[int, float]:
        """Token -> probability, as far as it comes from contexts after which the token is frequent."""
        probabilities: dict[int, float] = {}
        left = 1.0  # by the longer contexts
        for component, found in reversed(list(self._components(tail))):
            weight, counts = self.mixture.weight(component), found.counts
            share = left * weight / found.total
            for token in found.leading:
                probabilities[token] = probabilities.get(token, 0.0) + share * counts[token]
            left *= 1 - weight
        return probabilities

    def learn(self, tail: Tail, token: int) -> None:
        """Moves the weights by the token that came after `tail`; the counts must not have it yet."""
        probability = _UNSEEN
        for component, found in self._components(tail):
            weight = self.mixture.weight(component)
            own = weight * found.counts.get(token, 0) / found.total
            probability = (1 - weight) * probability + own
            self.mixture.learn(component, own / probability)

    def _components(self, tail: Tail) -> Iterator[tuple[Component, Followers | RecycledRow]]:
        for order in self.orders:
            if order > len(tail):
                return
            context = tail[-order:]
            for source, counts in self.sources.items():
                found = counts.after(context)
                if found is not None:
                    yield Component.of(source, order, found.total), found


def draft_tree(
    automaton: Automaton,
    tail: Sequence[int],
    options: SuffixOptions,
    max_depth: int,
    chain: bool,
    race: Races | None = None,
) -> Draft:
    """The most probable paths after `tail`, best first.

    Contexts move along the path: a draft runs past the end of an occurrence, into shorter contexts and back.

    Args:
        tail: the last tokens of the text, as many as the longest order.
        max_depth: of a node.
        chain: one path only, the most probable token after each.
        race: what is known of a sampled request's choice of a child, see `Race`.
    """
    draft = Draft()
    longest, num_children = automaton.orders[-1], 1 if chain else options.children
    heap: list[tuple[float, int, int, int, int, Tail]] = []
    num_pushed = 0

    def push_children(tail: Tail, parent: int, prob: float, depth: int) -> None:
        nonlocal num_pushed
        if depth >= max_depth:
            return
        probabilities: Mapping[int, float] = automaton.probabilities(tail)
        if race is not None:
            probabilities = race(probabilities, depth)
        for token in heapq.nlargest(num_children, probabilities, key=probabilities.__getitem__):
            path_prob = prob * probabilities[token]
            if path_prob < options.floor:
                break
            num_pushed += 1
            heapq.heappush(heap, (-path_prob, num_pushed, parent, token, depth + 1, (*tail, token)[-longest:]))

    push_children(tuple(tail), -1, 1.0, 0)
    while heap and len(draft.tokens) < options.max_nodes:
        negative, _, parent, token, depth, reached = heapq.heappop(heap)
        push_children(reached, draft.add(token, parent, -negative), -negative, depth)
    return draft
