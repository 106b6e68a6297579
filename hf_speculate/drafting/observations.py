"""Committed rounds that the drafter has not seen yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..transfers import to_device


class Observation(NamedTuple):
    """The arguments of one `DraftSession.observe` call."""

    tokens: Int[Tensor, "B J"]
    features: Mapping[int, Float[Tensor, "B J H"]]
    lengths: Int[Tensor, " B"]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], features: Mapping[int, Tensor]) -> Observation:
        """An observation from the tokens of every row, and features as wide as the longest row."""
        width = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long, device="cpu")
        return cls(tokens, features, torch.tensor([len(row) for row in rows], dtype=torch.long, device="cpu"))


def new_tokens(tokens: Int[Tensor, "B J"], lengths: Int[Tensor, " B"], is_prompt: bool) -> list[list[int]]:
    """The tokens of every row that are new for a session that knows the text of the prompt.

    Args:
        tokens, lengths: see `DraftSession.observe`.
        is_prompt: whether this is the observation after the prefill. Then only the token after the prompt is new.
    """
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [row[length - 1 if is_prompt else 0 : length] for row, length in rows]


class Observations:
    """Rounds that wait for the drafter.

    Rounds without a draft are passed on in one piece before the next draft. So a pause in drafting costs no drafter
    forwards.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[Sequence[int]], Mapping[int, Tensor]]] = []

    def add(self, rows: Sequence[Sequence[int]], features: Mapping[int, Tensor]) -> None:
        """Stores one round; see `Observation.from_rows`."""
        self._waiting.append((rows, features))

    def take(self) -> Observation | None:
        """All waiting rounds as one observation; None if there are none."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        if len(waiting) == 1:
            return Observation.from_rows(*waiting[0])
        if all(len(set(map(len, rows))) == 1 for rows, _ in waiting):  # nothing is padded
            rows = [list(chain.from_iterable(parts)) for parts in zip(*(rows for rows, _ in waiting), strict=True)]
            layers = waiting[0][1]
            return Observation.from_rows(
                rows, {layer: torch.cat([features[layer] for _, features in waiting], dim=1) for layer in layers}
            )
        return joined([Observation.from_rows(*waiting_round) for waiting_round in waiting])


def joined(observations: Sequence[Observation]) -> Observation:
    """Consecutive observations as one: each row's real columns in order, then padding."""
    if len(observations) == 1:
        return observations[0]
    tokens = torch.cat([observation.tokens for observation in observations], dim=1)
    is_real = torch.cat(
        [torch.arange(o.tokens.shape[1], dtype=torch.long, device="cpu") < o.lengths[:, None] for o in observations],
        dim=1,
    )
    lengths = is_real.sum(1)
    columns = pad_sequence([row.nonzero()[:, 0] for row in is_real], batch_first=True)
    features = {}
    for layer in observations[0].features:
        states = torch.cat([observation.features[layer] for observation in observations], dim=1)
        index = to_device(columns, states.device)[..., None].expand(-1, -1, states.shape[-1])
        features[layer] = states.gather(1, index)
    return Observation(tokens.gather(1, columns), features, lengths)
