"""What was committed and the drafter has not been told yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Observation(NamedTuple):
    """The arguments of `DraftSession.observe`, see there."""

    tokens: Int[Tensor, "B J"]
    features: Mapping[int, Float[Tensor, "B J H"]]
    lengths: Int[Tensor, " B"]


class Observations:
    """Rounds in waiting. A drafter that is not asked for drafts is not bothered either: what rounds without a draft
    committed is told in one piece before the next one, so that a pause costs no drafter forwards."""

    def __init__(self) -> None:
        self._waiting: list[Observation] = []

    def add(self, observation: Observation) -> None:
        self._waiting.append(observation)

    def take(self) -> Observation | None:
        """All that waited, as one observation; None if nothing did."""
        waiting, self._waiting = self._waiting, []
        return joined(waiting) if waiting else None


def joined(observations: Sequence[Observation]) -> Observation:
    """Consecutive observations as one: the real columns of every row one after the other, padding at the end."""
    if len(observations) == 1:
        return observations[0]
    tokens = torch.cat([observation.tokens for observation in observations], dim=1)
    is_real = torch.cat([torch.arange(o.tokens.shape[1]) < o.lengths[:, None] for o in observations], dim=1)
    lengths = is_real.sum(1)
    columns = pad_sequence([row.nonzero()[:, 0] for row in is_real], batch_first=True)
    features = {}
    for layer in observations[0].features:
        states = torch.cat([observation.features[layer] for observation in observations], dim=1)
        index = columns.to(states.device)[..., None].expand(-1, -1, states.shape[-1])
        features[layer] = states.gather(1, index)
    return Observation(tokens.gather(1, columns), features, lengths)
