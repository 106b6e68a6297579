"""The smoothed automaton: it predicts the next token by interpolation over contexts of several lengths and sources."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from torch import Tensor

from hf_speculate.drafting import DraftState

from .contexts import ContextCounts, Followers, RecycledRow, RecycledRows
from .guide import Component, Guess, Position


# Largest number of children of a node, and smallest probability of a path that is drafted.
_MAX_CHILDREN, FLOOR = 8, 0.01
# Number of trials that the first weight counts as, and number at which the trials are halved. Halving keeps weights
# close to recent text.
_PRIOR_TRIALS = 4
_MAX_TRIALS = 600
PRIOR_WEIGHT = 0.5
# Contexts with this many observations or more share one weight.
MAX_TOTAL = 3


@dataclass
class Mixture:
    """The weights of the components, learnt from every token of the text.

    A weight is the running mean of one probability: that a token was produced by this component, and not by a component
    of shorter contexts.
    """

    weights: dict[Component, float] = field(default_factory=dict)
    trials: dict[Component, int] = field(default_factory=dict)

    def weight(self, component: Component) -> float:
        return self.weights.get(component, PRIOR_WEIGHT)

    def learn(self, component: Component, posterior: float) -> None:
        """Updates a weight.

        Args:
            posterior: probability that the component produced the token.
        """
        trials = self.trials.get(component, _PRIOR_TRIALS) + 1
        weight = self.weight(component)
        self.weights[component] = weight + (posterior - weight) / trials
        self.trials[component] = trials if trials < _MAX_TRIALS else trials // 2

    def copy(self) -> Mixture:
        return Mixture(dict(self.weights), dict(self.trials))


class Race:
    """The probability of each token to be sampled, for the noise of one row.

    The target samples `argmax(probs / noise)` (see `Noise`). So a probable token with little noise is the most likely
    one.
    """

    def __init__(self, state: DraftState, row: int):
        self._state, self._row = state, row
        self._log_noise: dict[int, Tensor] = {}  # by depth, on the CPU

    def __call__(self, probabilities: Mapping[int, float], depth: int) -> dict[int, float]:
        """The probabilities that each token is sampled after a node at `depth`.

        Args:
            probabilities: probability of each token before noise. All other tokens share the rest. They are treated as
                one token with the probability of the rest, because the smallest `noise / prob` of many tokens has the
                same distribution.
        """
        noise = self._noise(depth)
        num_tokens = len(noise)
        tokens = [token for token in probabilities if token < num_tokens]
        rest = max(1.0 - sum(probabilities.values()), 0.0)
        logs = noise[tokens].tolist()
        worth = {token: probabilities[token] * math.exp(-log) for token, log in zip(tokens, logs, strict=True)}
        total = sum(worth.values())
        return {token: value / total * math.exp(-rest / value) for token, value in worth.items() if value > 0}

    def _noise(self, depth: int) -> Tensor:
        if depth not in self._log_noise:
            noise = self._state.log_noise((depth,))
            assert noise is not None
            self._log_noise[depth] = noise[self._row, 0].cpu()
        return self._log_noise[depth]


# Probability of a token without any source, about one divided by the size of a vocabulary. It keeps posteriors finite.
_UNSEEN = 1e-5

Tail = tuple[int, ...]
Source = ContextCounts | RecycledRows
Races = Callable[[Mapping[int, float], int], Mapping[int, float]]
_second = itemgetter(1)


class Automaton:
    """P(next token | last tokens): `P <- (1 - w) P + w q` from the shortest context to the longest.

    q is the relative frequency of the token after the context in one source. w is the weight of such contexts in the
    mixture.

    Args:
        sources: counts by name. For the same context, a later source is interpolated after an earlier one.
    """

    def __init__(self, sources: Mapping[str, Source], orders: Sequence[int], mixture: Mixture):
        self.sources = sources
        self.orders = orders
        self.mixture = mixture
        self._lookups = [(name, source.after) for name, source in sources.items()]

    def probabilities(self, tail: Tail, floor: float = 0.0, guesses: Sequence[Guess] = ()) -> dict[int, float]:
        """The probabilities of the next token, by token. Only the leading tokens of each context count.

        Args:
            floor: smallest probability that matters. Shorter contexts are left out when their total probability is not
                above it. Above 0, rows of recycled tokens leave out improbable tokens.
            guesses: components that are interpolated after all contexts.
        """
        probabilities: dict[int, float] = {}
        weights = self.mixture.weights
        left = 1.0  # probability that the longer contexts leave
        for component, followers in reversed(self._components(tail, guesses)):
            weight = weights.get(component, PRIOR_WEIGHT)
            factor = left * weight / followers.total
            if probabilities:
                for token, count in followers.leading(floor > 0):
                    probabilities[token] = probabilities.get(token, 0.0) + factor * count
            else:
                probabilities = {token: factor * count for token, count in followers.leading(floor > 0)}
            left *= 1 - weight
            if left <= floor:
                break
        return probabilities

    def learn(self, tail: Tail, token: int, guesses: Sequence[Guess] = ()) -> None:
        """Updates the weights by the token that followed `tail`. The counts must not include that token yet."""
        probability = _UNSEEN
        for component, followers in self._components(tail, guesses):
            weight = self.mixture.weight(component)
            own = weight * followers.counts.get(token, 0) / followers.total
            probability = (1 - weight) * probability + own
            self.mixture.learn(component, own / probability)

    def _components(self, tail: Tail, guesses: Sequence[Guess]) -> list[tuple[Component, Followers | RecycledRow]]:
        """Contexts from the shortest to the longest, then the guesses.

        A source without a context is not searched for longer contexts, because it cannot have them.
        """
        components: list[tuple[Component, Followers | RecycledRow]] = []
        sources = self._lookups
        for order in self.orders:
            if order > len(tail):
                break
            context = tail[-order:]
            hits = []
            for lookup in sources:
                followers = lookup[1](context)
                if followers is not None:
                    hits.append(lookup)
                    total = followers.total
                    components.append(((lookup[0], order, total if total < MAX_TOTAL else MAX_TOTAL), followers))
            if not hits:
                break
            sources = hits
        components += guesses
        return components


@dataclass
class TextDraft:
    """Nodes below the last token of a text, best first, parents first.

    Attributes:
        tokens: tokens of the draft nodes.
        parents: index of each node's parent, -1 for the last token of the text.
        probs: probability of each node's path.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)


def draft_tree(
    automaton: Automaton,
    tail: Sequence[int],
    *,
    max_nodes: int,
    max_depth: int,
    chain: bool,
    race: Races | None = None,
    position: Position | None = None,
) -> TextDraft:
    """The most probable paths after `tail`, best first.

    The context of a node is the end of its path. So a draft can continue past the end of an occurrence: it falls back
    to shorter contexts, and returns to longer ones.

    Args:
        chain: whether to draft one path only, the most probable token after each.
        race: function that gives the probability of each child to be sampled, see `Race`; None for greedy requests.
    """
    draft = TextDraft()
    longest, num_children = automaton.orders[-1], 1 if chain else _MAX_CHILDREN
    heap: list[tuple[float, int, int, int, int, Tail, Position | None]] = []
    num_pushed = 0

    def push_children(tail: Tail, parent: int, prob: float, depth: int, position: Position | None) -> None:
        nonlocal num_pushed
        if depth >= max_depth:
            return
        guesses = () if position is None else position.guesses
        probabilities: Mapping[int, float] = automaton.probabilities(tail, FLOOR if race is None else 0.0, guesses)
        if race is not None:
            probabilities = race(probabilities, depth)
        # `sorted` is faster than `nlargest` for so few.
        for token, token_prob in sorted(probabilities.items(), key=_second, reverse=True)[:num_children]:
            path_prob = prob * token_prob
            if path_prob < FLOOR:
                break
            num_pushed += 1
            heapq.heappush(heap, (-path_prob, num_pushed, parent, token, depth + 1, tail, position))

    push_children(tuple(tail), -1, 1.0, 0, position)
    while heap and len(draft.tokens) < max_nodes:
        negative, _, parent, token, depth, above, before = heapq.heappop(heap)
        draft.tokens.append(token)
        draft.parents.append(parent)
        draft.probs.append(-negative)
        if len(draft.tokens) < max_nodes:  # children of the last node would not be drafted
            after = None if before is None else before.after(token)
            push_children((*above, token)[-longest:], len(draft.tokens) - 1, -negative, depth, after)
    return draft
