"""How much of a head's greedy chains is accepted, and whether that is what a trained head shows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jaxtyping import Int
from torch import Tensor

from hf_speculate.stats import HeadRecord


# Published heads accept 62 to 73 % at depth 1, and of those accepted to one depth, at the next not less than 0.77 times
# that share (figures in vLLM's tests). A state that is fed back wrongly shows at depth 2 only.
_LOW_DECAY = 0.7


@dataclass(frozen=True)
class AcceptanceRates:
    """How much of a greedy chain is accepted, over all positions.

    Attributes:
        num_positions: how many chains were drafted.
        by_depth: share of chains accepted to depth 1, 2, … (unconditional).
        conditional: of the chains accepted to the depth before, the share accepted at this one; None without any.
        mean_length: tokens a round would emit, the bonus token included.
    """

    num_positions: int
    by_depth: tuple[float, ...]
    conditional: tuple[float | None, ...]
    mean_length: float

    @classmethod
    def of(cls, accepted: Int[Tensor, " P"], depth: int) -> AcceptanceRates:
        """From the number of accepted tokens of every chain."""
        counts = [len(accepted), *(int((accepted >= d).sum()) for d in range(1, depth + 1))]
        return cls(
            num_positions=counts[0],
            by_depth=tuple(count / counts[0] for count in counts[1:]),
            conditional=tuple(after / before if before else None for before, after in pairwise(counts)),
            mean_length=1 + sum(counts[1:]) / counts[0],
        )

    def is_low(self, record: HeadRecord) -> bool:
        """Whether depth 1 accepts less than the head's record lets expect, or acceptance falls faster than usual."""
        first, *deeper = self.conditional
        return first is None or first < record.low_first or any((rate or 0.0) < _LOW_DECAY * first for rate in deeper)
