"""What the target found probable after every token when it last scored one: recycled rows.

Source: "Turning Trash into Treasure" (arXiv:2408.08696), whose matrix holds the eight most probable tokens of greedy
requests, without their probabilities; here they are a source of the automaton, and of sampled requests as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import Choices
from hf_speculate.tree import ROOT_PARENT


class RecycledRow(NamedTuple):
    """What followed a token: as `Followers`, with probabilities for counts."""

    counts: Mapping[int, float]
    total: int = 1

    @property
    def leading(self) -> Iterable[int]:
        return self.counts


class RecycledRows:
    """token -> the row of the last node with it.

    Args:
        vocab_size, num_choices: shape of the matrix; memory is taken for the rows that are written.
    """

    def __init__(self, vocab_size: int, num_choices: int):
        self._tokens: Int[Tensor, "V K"] = torch.zeros(vocab_size, num_choices, dtype=torch.int32)
        self._probs: Float[Tensor, "V K"] = torch.zeros(vocab_size, num_choices)  # none: never seen

    def learn(self, choices: Choices) -> None:
        """Of a token at several nodes, the last one counts."""
        last: dict[int, tuple[int, int]] = {}
        for slot, row in enumerate(choices.tree.rows()):
            nodes = zip(row.token_ids, row.parents, strict=True)
            last |= {token: (slot, node) for node, (token, parent) in enumerate(nodes) if parent >= ROOT_PARENT}
        contexts, (slots, places) = torch.tensor(list(last)), torch.tensor(list(last.values())).T
        count = choices.token_ids.shape[-1]
        self._tokens[contexts, :count] = choices.token_ids[slots, places].int()
        self._probs[contexts, :count] = choices.probs[slots, places]

    def after(self, context: Sequence[int]) -> RecycledRow | None:
        """What followed the context, which must be one token."""
        if len(context) > 1:
            return None
        pairs = zip(self._tokens[context[0]].tolist(), self._probs[context[0]].tolist(), strict=True)
        counts = {token: prob for token, prob in pairs if prob}
        return RecycledRow(counts) if counts else None
