"""What a slot's scores owe to the token before: Markov heads (DSpark) and candidate selectors (DFlash2)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from .spec import BlockSpec


class MarkovHead(nn.Module):
    """A bias of low rank on a slot's logits, from the token before it.

    Source: deepseek-ai/DeepSpec, `markov_head.py`. "vanilla": `w2(w1[token])`; "gated": the code is weighed by a gate
    that sees the slot's state; "rnn": a recurrent state runs along the path.
    """

    def __init__(self, spec: BlockSpec):
        super().__init__()
        rank = spec.markov_rank
        self.kind = spec.markov
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(spec.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank)

    def codes(self, previous: Int[Tensor, "*N"]) -> Float[Tensor, "*N r"]:
        return self.markov_w1(previous)

    def inputs(
        self, states: Float[Tensor, "*N H"], codes: Float[Tensor, "*N r"], carried: Float[Tensor, "*N r"] | None = None
    ) -> tuple[Float[Tensor, "*N r"], Float[Tensor, "*N r"] | None]:
        """What `markov_w2` takes, and the recurrent state behind these slots.

        Args:
            states: of the slots.
            codes: of the tokens before them.
            carried: the recurrent state before them; only "rnn" has one, None: at the first slot.
        """
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([states, codes], dim=-1))) * codes, carried
        if self.kind == "rnn":
            carried = torch.zeros_like(codes) if carried is None else carried
            gate, new, out = self.joint_proj(torch.cat([carried, codes, states], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            carried = gate * carried + (1 - gate) * torch.tanh(new)
            return torch.tanh(out), carried
        return codes, carried

    def bias(self, inputs: Float[Tensor, "... r"], columns: Int[Tensor, "*N M"] | None = None) -> Tensor:
        """Behind the tokens that `inputs` stand for: [..., Vd]; at some columns, of `inputs` [*N, P, r], [*N, P, M]."""
        if columns is None:
            return self.markov_w2(inputs)
        return inputs @ self.rows(columns).mT

    def rows(self, columns: Int[Tensor, "*N M"]) -> Float[Tensor, "*N M r"]:
        """What `bias` takes of the output matrix."""
        return functional.embedding(columns, self.markov_w2.weight)


class CandidateSelector(nn.Module):
    """Scores of pairs: `U(b) + <A[a] * P h, B[b]>` for the token `a` before a slot of state `h` and its candidates `b`.

    Source: z-lab/dflash 0.1.0, DFlash2. It was trained to choose among the slot's `selector_top_k` best candidates.
    """

    def __init__(self, spec: BlockSpec):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocab_size, spec.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(spec.draft_vocab_size, spec.selector_rank))
        self.hidden_projection = nn.Linear(spec.hidden_size, spec.selector_rank, bias=False)

    def inputs(self, states: Float[Tensor, "*N H"], previous: Int[Tensor, "*N"]) -> Float[Tensor, "*N r"]:
        return functional.embedding(previous, self.predecessor_codebook) * self.hidden_projection(states)

    def bias(self, inputs: Float[Tensor, "*N P r"], columns: Int[Tensor, "*N M"]) -> Float[Tensor, "*N P M"]:
        """As `MarkovHead.bias`."""
        return inputs @ self.rows(columns).mT

    def rows(self, columns: Int[Tensor, "*N M"]) -> Float[Tensor, "*N M r"]:
        return functional.embedding(columns, self.successor_codebook)
