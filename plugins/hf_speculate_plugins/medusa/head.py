"""The heads of Medusa as one module: all of them run in one pass.

Source: Cai et al., "Medusa" (arXiv:2401.10774), section 2.1. A head is a few residual blocks `x + SiLU(W x + b)` on the
target's last hidden state *after* the final norm, and an output matrix: its own, one for all heads, or the target's.
Head h (from 0) on the state at position t predicts the token at t + 2 + h; t + 1 is what the target's own head says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from hf_speculate.target import unhooked


class MedusaHeads(nn.Module):
    """D heads of L blocks, kept stacked, so that a round costs L + 1 matrix products and not D times as many.

    Args:
        block_weight: [D, L, H, H].
        block_bias: [D, L, H], or None for blocks without bias.
        output_weight: [D, Vd, H]; [1, Vd, H] when all heads share one matrix; None when they use the target's.
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

    @classmethod
    def untrained(cls, num_heads: int, num_layers: int, output_weight: Float[Tensor, "V H"]) -> MedusaHeads:
        """Heads as training begins: W = 0 and b = 0 make a block the identity, and every head has a copy of the
        target's output matrix, so that each predicts what the target does (paper, section 2.2)."""
        hidden_size = output_weight.shape[1]
        return cls(
            output_weight.new_zeros(num_heads, num_layers, hidden_size, hidden_size),
            output_weight.new_zeros(num_heads, num_layers, hidden_size),
            output_weight.detach().expand(num_heads, -1, -1).clone(),
        )

    def selected(self, order: Sequence[int]) -> MedusaHeads:
        """Some of the heads in another order."""
        index, shared = list(order), self.output_weight is None or len(self.output_weight) == 1
        output = self.output_weight if shared or self.output_weight is None else self.output_weight[index]
        bias = None if self.block_bias is None else self.block_bias[index]
        return MedusaHeads(self.block_weight[index], bias, output, self.token_ids)

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
            features: the target's last hidden states, after its final norm.
            lm_head: the target's output layer, called where the heads have no matrix of their own. (Called, not
                copied: it may be quantised, and at 128 000 tokens it is the largest tensor there is.)
        """
        states = self.states(features.reshape(-1, features.shape[-1]), num_heads)
        logits = self._output(states, lm_head)
        return logits.view(len(states), *features.shape[:-1], logits.shape[-1])

    def states(self, features: Float[Tensor, "R H"], num_heads: int | None = None) -> Float[Tensor, "D R H"]:
        """What the output matrices of the first `num_heads` heads (default: all) are multiplied with."""
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
