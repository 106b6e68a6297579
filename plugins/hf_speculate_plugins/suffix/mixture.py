"""How much each context length of each source is believed."""

from __future__ import annotations

from dataclasses import dataclass, field


# Trials that the first weight counts as, and those at which the past is halved, so that weights follow the text.
_PRIOR_TRIALS = 4
_MAX_TRIALS = 600
PRIOR_WEIGHT = 0.5
# More observations of a context than these say no more about how far it can be trusted.
MAX_TOTAL = 3


# Whose weight one is: a source, the order of its contexts, and how often these were seen (3: or more).
Component = tuple[str, int, int]


@dataclass
class Mixture:
    """The weights, learnt from every token that came: running means of how probable it is that a component, rather than
    those of shorter contexts, explains the token."""

    weights: dict[Component, float] = field(default_factory=dict)
    trials: dict[Component, int] = field(default_factory=dict)

    def weight(self, component: Component) -> float:
        return self.weights.get(component, PRIOR_WEIGHT)

    def learn(self, component: Component, posterior: float) -> None:
        """Args: posterior: that the component explains the token that came."""
        trials = self.trials.get(component, _PRIOR_TRIALS) + 1
        weight = self.weight(component)
        self.weights[component] = weight + (posterior - weight) / trials
        self.trials[component] = trials if trials < _MAX_TRIALS else trials // 2

    def copy(self) -> Mixture:
        return Mixture(dict(self.weights), dict(self.trials))
