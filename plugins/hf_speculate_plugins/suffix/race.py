"""Which of a node's children a sampled request will choose, as its noise is known."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from hf_speculate.drafting import DraftState


class Race:
    """The target samples `argmax(probs / noise)` (see `Noise`): of tokens that are likely, those with little noise.

    Args:
        state: of a request that samples.
        row: whose noise.
    """

    def __init__(self, state: DraftState, row: int):
        self._state, self._row = state, row
        self._log_noise: dict[int, Tensor] = {}  # by depth, on the CPU

    def __call__(self, probabilities: Mapping[int, float], depth: int) -> dict[int, float]:
        """Probabilities to be chosen after a node at `depth`, from those without the noise.

        What is left for tokens that are not named wins with a probability of its own: the smallest of `noise / prob`
        over many tokens is distributed as that of one with all their probability.
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
