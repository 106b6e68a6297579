"""Parts of a one-pass head that correct a slot's logits by the tokens of the path before it.

All end in a matrix of low rank, `bias = w2(inputs)`. They differ in how much of the path the inputs depend on.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ..heads import known_rows
from .spec import BlockSpec


class MarkovHead(nn.Module):
    """A bias of low rank on a slot's logits, from the tokens before it.

    Sources: deepseek-ai/DeepSpec, `markov_head.py`; NVIDIA/Model-Optimizer 0.47 (Domino); vllm-project/speculators
    0.9.0 (XPress). "vanilla": `w2(w1[token])`; "gated": the code is weighed by a gate that sees the slot's state;
    "rnn": a recurrent state runs along the path; "domino": a GRU reads the path's embeddings; "xpress": `Refiner`.
    """

    def __init__(self, spec: BlockSpec):
        super().__init__()
        rank, size = spec.markov_rank, spec.gru_size
        self.kind, self.num_bare = spec.markov, spec.num_bare_slots
        if self.kind != "domino":
            self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(spec.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank)
        elif self.kind == "domino":
            self.gru_input = nn.Linear(spec.hidden_size, 3 * size, bias=False)
            self.gru_state = nn.Linear(size, 3 * size, bias=False)
            self.joint_proj = nn.Linear(spec.hidden_size + size, rank, bias=False)
        elif self.kind == "xpress":
            self.refiner = Refiner(spec)

    def codes(self, previous: Int[Tensor, "*N"]) -> Float[Tensor, "*N r"]:
        return known_rows(self.markov_w1.weight, previous)

    def inputs(
        self,
        states: Float[Tensor, "*N H"],
        codes: Float[Tensor, "*N c"],
        carried: Float[Tensor, "*N s"] | None = None,
        slot: int = 0,
    ) -> tuple[Float[Tensor, "*N r"], Tensor | None]:
        """Inputs of `markov_w2`, and the state for the next slot of the path.

        Args:
            states: the slots' states; for "xpress" those of `Refiner.features`.
            codes: codes of the tokens before them; for "domino" the embeddings of these tokens.
            carried: state from the slots before them; None at the first slot.
            slot: place of the slots in their block.
        """
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([states, codes], dim=-1))) * codes, carried
        if self.kind == "rnn":
            carried = torch.zeros_like(codes) if carried is None else carried
            gate, new, out = self.joint_proj(torch.cat([carried, codes, states], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            carried = gate * carried + (1 - gate) * torch.tanh(new)
            return torch.tanh(out), carried
        if self.kind == "domino":
            carried = self._gru(codes, carried)
            inputs = functional.silu(self.joint_proj(torch.cat([states, carried], dim=-1)))
            return (torch.zeros_like(inputs) if slot < self.num_bare else inputs), carried
        if self.kind == "xpress":
            return self.refiner(states, codes, carried, slot)
        return codes, carried

    def _gru(self, inputs: Float[Tensor, "*N H"], state: Float[Tensor, "*N s"] | None) -> Float[Tensor, "*N s"]:
        """The state of a GRU without biases after one more input."""
        state = inputs.new_zeros(*inputs.shape[:-1], self.gru_state.in_features) if state is None else state
        reset, keep, new = self.gru_input(inputs).chunk(3, dim=-1)
        old_reset, old_keep, old = self.gru_state(state).chunk(3, dim=-1)
        new = torch.tanh(new + torch.sigmoid(reset + old_reset) * old)
        return torch.lerp(new, state, torch.sigmoid(keep + old_keep))

    def bias(self, inputs: Float[Tensor, "... r"], columns: Int[Tensor, "*N M"] | None = None) -> Tensor:
        """The bias for some inputs, [..., Vd]. With `columns` only at these, for `inputs` of [*N, P, r]: [*N, P, M]."""
        if columns is None:
            return self.markov_w2(inputs)
        return inputs @ self.rows(columns).mT

    def rows(self, columns: Int[Tensor, "*N M"]) -> Float[Tensor, "*N M r"]:
        """The rows of the output matrix that `bias` multiplies with."""
        return functional.embedding(columns, self.markov_w2.weight)


class Refiner(nn.Module):
    """XPress: states of low rank, mixed causally over the slots of a block.

    Source: vllm-project/speculators 0.9.0, which finds a block's tokens by Jacobi passes. Their fixed point is the
    greedy path, which a tree follows token by token, so any number of passes leads here.

        x[k] = in_proj([down_h(h[k]) ; down_g(mean of h) ; w1[token before k]])
        y[k] = x[k] + sum over j <= k of mix[:, k, j] * x[j];   inputs = y[k] + mlp(y[k])
    """

    def __init__(self, spec: BlockSpec):
        super().__init__()
        rank, width = spec.markov_rank, spec.refiner_size
        self.down_h = nn.Linear(spec.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(spec.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, spec.block_size, spec.block_size))
        self.mlp_gate = nn.Linear(rank, width, bias=False)
        self.mlp_up = nn.Linear(rank, width, bias=False)
        self.mlp_down = nn.Linear(width, rank, bias=False)

    def features(self, slots: Float[Tensor, "B S H"]) -> Float[Tensor, "B S F"]:
        """The refiner's view of a whole block: F = 2 r values for each slot."""
        mean = slots.mean(dim=1, keepdim=True).expand_as(slots)
        return torch.cat([self.down_h(slots), self.down_g(mean)], dim=-1)

    def forward(
        self, features: Float[Tensor, "*N F"], codes: Float[Tensor, "*N r"], carried: Tensor | None, slot: int
    ) -> tuple[Float[Tensor, "*N r"], Float[Tensor, "*N s"]]:
        """The result of `MarkovHead.inputs`. The state is the `x` of all slots so far, concatenated."""
        own = self.in_proj(torch.cat([features, codes], dim=-1))
        path = own if carried is None else torch.cat([carried, own], dim=-1)
        mixed = own + (path.unflatten(-1, (slot + 1, -1)) * self.mix_l[:, slot, : slot + 1].mT).sum(-2)
        return mixed + self.mlp_down(functional.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed)), path
