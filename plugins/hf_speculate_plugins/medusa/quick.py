"""Output matrices of Medusa heads in 8 bits, on a CPU that has the kernel: most of what a draft reads."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.gguf import RoundedLinear, WeightsInPlace, has_kernel

from .head import MedusaHeads


class QuickOutputs:
    """Makes the quick outputs of heads once, of the target's matrix once for each target.

    Args:
        heads: whose own matrices are in question; they may move.
    """

    def __init__(self, heads: MedusaHeads):
        self._heads = heads
        self._own: list[RoundedLinear] = []
        self._weights: WeightsInPlace | None = None
        self._targets: WeakKeyDictionary[PreTrainedModel, RoundedLinear] = WeakKeyDictionary()

    def __getstate__(self):
        """A copy makes its own."""
        return {"_heads": self._heads}

    def __setstate__(self, state):
        self.__init__(state["_heads"])

    def of(self, target: PreTrainedModel) -> Sequence[RoundedLinear]:
        """One for each matrix: of each head, or of all; none where the kernel does not multiply with them."""
        weight = self._heads.output_weight
        if self._heads.device.type != "cpu" or not has_kernel():
            return []
        if weight is None:
            return self._of_target(target)
        if self._weights is None or not self._weights.are_current():
            layers = [_linear(matrix) for matrix in weight]
            self._own = [RoundedLinear(layer) for layer in layers if RoundedLinear.suits(layer)]
            self._weights = WeightsInPlace([self._heads])
        return self._own

    def _of_target(self, target: PreTrainedModel) -> list[RoundedLinear]:
        lm_head = target.get_output_embeddings()
        if not RoundedLinear.suits(lm_head):
            return []
        if target not in self._targets or self._targets[target].layer is not lm_head:
            self._targets[target] = RoundedLinear(lm_head)
        return [self._targets[target]]


class QuickForward:
    """`Forward` with quick outputs.

    Args:
        heads: the heads.
        outputs: see `QuickOutputs.of`.
    """

    def __init__(self, heads: MedusaHeads, outputs: Sequence[RoundedLinear]):
        self._heads, self._outputs = heads, outputs

    @torch.no_grad()
    def __call__(self, features: Tensor, num_heads: int) -> Tensor:
        states = self._heads.states(features, num_heads)
        if len(self._outputs) == 1:
            return self._outputs[0](states)
        return torch.stack([output(rows) for output, rows in zip(self._outputs, states, strict=False)])

    def close(self) -> None:
        pass


def _linear(matrix: Tensor) -> nn.Linear:
    """A layer with this very matrix."""
    layer = nn.Linear(*reversed(matrix.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    return layer
