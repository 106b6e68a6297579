"""The heads of Medusa as one module, all of which run in one pass, and their forwards, plain and in 8 bits.

Source: Cai et al., "Medusa" (arXiv:2401.10774), section 2.1. A head is a few residual blocks `x + SiLU(W x + b)` on the
target's last hidden state *after* the final norm, and an output matrix: its own, one for all heads, or the target's.
Head h (from 0) on the state at position t predicts the token at t + 2 + h; the target's own head predicts t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from hf_speculate.stats import EAGER, NATIVE
from hf_speculate.target import GenerativeModel, unhooked


if TYPE_CHECKING:
    from hf_speculate_gguf.native import QuantizedLinear, WeightsInPlace


class MedusaHeads(nn.Module):
    """D heads of L blocks, kept stacked, so that a round costs L + 1 matrix products and not D times as many.

    Args:
        block_weight: matrices of the blocks [D, L, H, H].
        block_bias: biases of the blocks [D, L, H]; None: the blocks have none.
        output_weight: output matrices [D, Vd, H]; [1, Vd, H] for one that all heads share; None for the target's.
        token_ids: int64 [Vd], target token of each row of a truncated vocabulary; None for the target's vocabulary.
    """

    def __init__(
        self,
        block_weight: Float[Tensor, "D L H H"],
        block_bias: Float[Tensor, "D L H"] | None = None,
        output_weight: Float[Tensor, "d Vd H"] | None = None,
        token_ids: Int[Tensor, " Vd"] | None = None,
    ):
        super().__init__()
        self.block_weight = nn.Parameter(block_weight)
        self.block_bias = None if block_bias is None else nn.Parameter(block_bias)
        self.output_weight = None if output_weight is None else nn.Parameter(output_weight)
        self.register_buffer("token_ids", token_ids)
        self.token_ids: Tensor | None

    def with_output(self, output_weight: Float[Tensor, "d Vd H"] | None) -> MedusaHeads:
        """The same blocks with other output matrices, for the target's whole vocabulary."""
        bias = None if self.block_bias is None else self.block_bias.data
        return MedusaHeads(self.block_weight.data, bias, output_weight)

    @property
    def num_heads(self) -> int:
        return self.block_weight.shape[0]

    @property
    def num_layers(self) -> int:
        return self.block_weight.shape[1]

    @property
    def hidden_size(self) -> int:
        return self.block_weight.shape[-1]

    @property
    def vocab_size(self) -> int | None:
        """Vd, or None when the target's output matrix is used."""
        return None if self.output_weight is None else self.output_weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.block_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.block_weight.device

    def forward(
        self,
        features: Float[Tensor, "*lead H"],
        lm_head: nn.Module | None = None,
        num_heads: int | None = None,
    ) -> Float[Tensor, "D *lead Vd"]:
        """Logits of the first `num_heads` heads (default: all).

        Args:
            lm_head: the target's output layer, for heads that have no matrix of their own. It is called, not copied: it
                may be quantised, and at 128 000 tokens it is the largest tensor there is.
        """
        states = self.states(features.reshape(-1, features.shape[-1]), num_heads)
        logits = self._output(states, lm_head)
        return logits.view(len(states), *features.shape[:-1], logits.shape[-1])

    def states(self, features: Float[Tensor, "R H"], num_heads: int | None = None) -> Float[Tensor, "D R H"]:
        """The states that the first `num_heads` heads (default: all) multiply with their output matrices."""
        count = self.num_heads if num_heads is None else num_heads
        states = features.expand(count, -1, -1)
        for layer in range(self.num_layers):
            weight = self.block_weight[:count, layer].mT
            if self.block_bias is None:
                update = torch.bmm(states, weight)
            else:
                update = torch.baddbmm(self.block_bias[:count, layer, None], states, weight)
            states = states + functional.silu(update)
        return states

    def _output(self, states: Float[Tensor, "D R H"], lm_head: nn.Module | None) -> Tensor:
        weight = self.output_weight
        if weight is None:
            if lm_head is None:
                raise TypeError("these Medusa heads have no output matrix of their own: pass the target's lm_head.")
            return unhooked(lm_head)(states)
        if weight.shape[0] == 1:
            return functional.linear(states, weight[0])
        return torch.bmm(states, weight[: len(states)].mT)


class HeadForward:
    """Runs the heads of one request.

    Class attributes:
        runner: runner of the output matrices, which take most of a draft's time.
    """

    runner = EAGER

    def __init__(self, heads: MedusaHeads, lm_head: nn.Module | None):
        self._heads, self._lm_head = heads, lm_head

    def __call__(self, features: Float[Tensor, "B H"], num_heads: int) -> Float[Tensor, "D B Vd"]:
        """Logits of the first `num_heads` heads."""
        return self._heads(features, self._lm_head, num_heads=num_heads)


class QuantizedHeadForward(HeadForward):
    """The forward with output matrices in 8 bits, which the kernel multiplies."""

    runner = NATIVE

    def __init__(self, heads: MedusaHeads, outputs: Sequence[QuantizedLinear]):
        super().__init__(heads, None)
        self._outputs = outputs

    @torch.no_grad()
    def __call__(self, features: Tensor, num_heads: int) -> Tensor:
        states = self._heads.states(features, num_heads)
        if len(self._outputs) == 1:
            return self._outputs[0](states)
        return torch.stack([output(rows) for output, rows in zip(self._outputs, states, strict=False)])


class QuantizedOutputs:
    """Output matrices in 8 bits, on a CPU that has the kernel. The heads' own are made once, a target's once per
    target."""

    def __init__(self, heads: MedusaHeads):
        self._heads = heads
        self._own: list[QuantizedLinear] = []
        self._weights: WeightsInPlace | None = None
        self._targets: WeakKeyDictionary[GenerativeModel, QuantizedLinear] = WeakKeyDictionary()

    def __getstate__(self):
        """The heads alone: a copy makes its own matrices in 8 bits."""
        return {"_heads": self._heads}

    def __setstate__(self, state):
        self.__init__(state["_heads"])

    def of(self, target: GenerativeModel) -> Sequence[QuantizedLinear]:
        """One output layer per head, or one for all heads; none if the kernel cannot multiply with them."""
        from hf_speculate_gguf.native import (  # and the package for packed targets
            QuantizedLinear,
            WeightsInPlace,
            has_kernel,
        )

        weight, lm_head = self._heads.output_weight, target.get_output_embeddings()
        if (
            self._heads.device.type != "cpu"
            or not has_kernel()
            or (weight is None and not QuantizedLinear.suits(lm_head))
        ):
            return []
        if weight is None:
            if target not in self._targets or self._targets[target].layer is not lm_head:
                self._targets[target] = QuantizedLinear(lm_head)
            return [self._targets[target]]
        if self._weights is None or not self._weights.are_current():
            layers = [_linear(matrix) for matrix in weight]
            self._own = [QuantizedLinear(layer) for layer in layers if QuantizedLinear.suits(layer)]
            self._weights = WeightsInPlace([self._heads])
        return self._own


def _linear(matrix: Tensor) -> nn.Linear:
    """A layer with this very matrix."""
    layer = nn.Linear(*reversed(matrix.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    return layer
