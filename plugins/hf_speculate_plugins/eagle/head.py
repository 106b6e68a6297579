"""The forward pass of EAGLE heads.

Sources: EAGLE-1 (Li et al., arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840), P-EAGLE (arXiv:2602.01469) and the code that
writes the published files, see `loading`. Entry i of a head pairs the target's feature at position i with the
embedding of token i + 1, has RoPE position i, and predicts token i + 2. Deeper draft tokens take the head's own state
instead of the feature; in P-EAGLE, which is EAGLE-3 otherwise, a learnt mask instead of both.

    EAGLE-1:  x = fc([embedding ; feature]);  y = layers(x);                     logits = target's output matrix(y)
    EAGLE-3:  g = fc([low ; mid ; high]);     y = layers([embedding ; g], g);    logits = output matrix(norm(y))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hf_speculate.drafting import finite

from ..heads import MLP, Attend, Attention, FeedingHead, rotary_embedding
from .spec import EagleSpec


class DecoderLayer(nn.Module):
    """A Llama decoder layer; the first one of EAGLE-1 has no norm before its attention."""

    def __init__(self, spec: EagleSpec, layer: int, input_size: int | None = None, norm_input: bool = True):
        super().__init__()
        self.self_attn = Attention(spec, layer, input_size or spec.hidden_size, spec.qkv_bias, spec.o_bias)
        self.mlp = MLP(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        if norm_input:
            self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def forward(self, states: Tensor, **attention) -> Tensor:
        normed = self.input_layernorm(states) if hasattr(self, "input_layernorm") else states
        return self._finish(states, normed, **attention)

    def _finish(self, residual: Tensor, inputs: Tensor, **attention) -> Tensor:
        states = residual + self.self_attn(inputs, **attention)
        return finite(states + self.mlp(self.post_attention_layernorm(states)))


class EntryLayer(DecoderLayer):
    """The first layer of EAGLE-3: attends over [embedding ; state], both normed; the residual is the state alone."""

    def __init__(self, spec: EagleSpec):
        super().__init__(spec, layer=0, input_size=2 * spec.hidden_size, norm_input=spec.norm_embedding)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.norm_before_residual = spec.norm_before_residual

    def forward(self, states: Tensor, *, embeddings: Tensor, **attention) -> Tensor:
        if hasattr(self, "input_layernorm"):
            embeddings = self.input_layernorm(embeddings)
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        return self._finish(residual, torch.cat([embeddings, normed], dim=-1), **attention)


class EagleHead(FeedingHead[EagleSpec]):
    """An EAGLE head of any generation and dialect; for its arguments see `SharingHead`."""

    def __init__(self, spec: EagleSpec, embed_tokens: nn.Module | None = None, lm_head: nn.Module | None = None):
        super().__init__(spec, embed_tokens, lm_head)
        self._add_projection()
        first = EntryLayer(spec) if spec.version == 3 else DecoderLayer(spec, layer=0, norm_input=False)
        others = (DecoderLayer(spec, layer) for layer in range(1, spec.num_layers))
        self.layers = nn.ModuleList([first, *others])
        if spec.norm_logits or spec.feed_back_normed:
            self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.rotary = rotary_embedding(spec)

    def _add_projection(self) -> None:
        spec = self.spec
        num_inputs = spec.num_features * spec.target_hidden_size
        if spec.version == 1:
            num_inputs += spec.hidden_size
        self.fc = nn.Linear(num_inputs, spec.hidden_size, bias=spec.fc_bias)
        if spec.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_inputs, eps=spec.rms_norm_eps)
        if spec.fc_norm:
            norms = (nn.RMSNorm(spec.target_hidden_size, eps=spec.rms_norm_eps) for _ in range(spec.num_features))
            self.fc_norm = nn.ModuleList(norms)
        if spec.parallel:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, num_inputs))

    def fuse(self, features: Sequence[Float[Tensor, "B N Ht"]]) -> Float[Tensor, "B N Hd"]:
        """The draft states for the target's features, which are in `feature_layers` order.

        EAGLE-1 projects feature and embedding together, in `forward`; there the state is the feature itself.
        """
        placed = [feature.to(device=self.device, dtype=self.dtype) for feature in features]
        if self.spec.version == 1:
            return placed[0]
        if self.spec.fc_norm:
            placed = [norm(feature) for norm, feature in zip(self.fc_norm, placed, strict=True)]
        joined = torch.cat(placed, dim=-1)
        return finite(self.fc(self.input_norm(joined) if self.spec.norm_before_fc else joined))

    def forward(
        self,
        token_ids: Int[Tensor, "B N"],
        states: Float[Tensor, "B N Hd"],
        position_ids: Int[Tensor, "B N"],
        attend: Attend,
    ) -> Float[Tensor, "B N Hd"]:
        """Runs N entries.

        Args:
            token_ids: tokens *after* the ones that the states belong to.
            states: states from `fuse`, or those that `read` returned for the entry before.
            position_ids: positions of the states' tokens.
            attend: function that mixes values, once a layer; it knows the mask and earlier entries.
        Returns:
            The states before the final norm.
        """
        embeddings = self.embed(token_ids)
        attention = {"rotary": self.rotary(states, position_ids), "attend": attend}
        if self.spec.version == 3:
            hidden = self.layers[0](states, embeddings=embeddings, **attention)
        else:
            # Features and embeddings may be large in 16 bit, so they are joined, not projected one by one and added.
            joined = finite(self.fc(torch.cat([embeddings, states], dim=-1)))
            hidden = self.layers[0](joined, **attention)
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden, **attention)
        return hidden

    def masks(self, batch_size: int, count: int) -> tuple[Int[Tensor, "B D"], Float[Tensor, "B D Hd"]]:
        """Ids and states that `forward` takes for `count` deeper tokens after the last entry (P-EAGLE)."""
        mask = self.spec.mask_token_id
        assert mask is not None
        features = self.mask_hidden.chunk(self.spec.num_features, dim=-1)
        token_ids = torch.full((batch_size, count), mask, device=self.device, dtype=torch.long)
        return token_ids, self.fuse(features).expand(batch_size, count, -1)

    def finish(self, hidden: Float[Tensor, "*N Hd"]) -> tuple[Float[Tensor, "*N Hd"], Float[Tensor, "*N Hd"]]:
        """The inputs of `output` for `forward`'s states, and the states that the next draft step takes."""
        normed = self.norm(hidden) if hasattr(self, "norm") else hidden
        return normed if self.spec.norm_logits else hidden, normed if self.spec.feed_back_normed else hidden
