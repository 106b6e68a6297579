"""The forward pass of one-pass heads.

Sources: DFlash (Chen et al., arXiv:2602.06036, z-lab/dflash), DSpark (deepseek-ai/DeepSpec), JetSpec
(hao-ai-lab/JetSpec), and the code that writes the published files, see `checkpoint`. What the target said of the text
becomes keys and values once, when tokens are committed; a block `[anchor, mask, mask, …]` attends over them and over
itself in one forward, and every slot proposes a token:

    context:  c = hidden_norm(fc([feature ; feature ; …]));   keys, values of every layer from c
    block:    y = layers(embeddings of the block);            logits = output matrix(norm(y))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from hf_speculate.drafting import finite

from ..heads import MLP, SharingHead, call_beside, rotary_embedding
from .conditions import CandidateSelector, MarkovHead
from .spec import BlockSpec


# attend(layer, queries [B, heads, S, d], keys [B, kv_heads, S, d], values [B, kv_heads, S, d]) -> [B, heads, S, d]:
# what the S slots of a block see, these and the context. Decoding looks into a cache, training into whole texts.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# append(layer, keys [B, kv_heads, J, d], values [B, kv_heads, J, d]): takes what J context entries are to a layer.
Append = Callable[[int, Tensor, Tensor], Any]


class BlockAttention(nn.Module):
    """Grouped-query attention whose keys and values come from the context or from the block."""

    def __init__(self, spec: BlockSpec, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, spec.head_dim
        bias = spec.attention_bias
        self.q_proj = nn.Linear(spec.hidden_size, spec.num_heads * spec.head_dim, bias=bias)
        self.k_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.v_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=bias)
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
            self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)

    def keys_values(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, kv_heads, J, d] each; keys after norm and RoPE."""
        keys, values = (self._split(projection(inputs)) for projection in (self.k_proj, self.v_proj))
        if hasattr(self, "k_norm"):
            keys = self.k_norm(keys)
        cosines, sines = (part.unsqueeze(1) for part in rotary)
        return keys * cosines + rotate_half(keys) * sines, values

    def forward(self, inputs: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        queries, keys, values = (self._split(each(inputs)) for each in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        mixed = attend(self.layer, queries, keys, values)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SlotConvolution(nn.Module):
    """A short convolution over the slots of a block, before and after a sublayer (DFlash2).

    `out[j] = sum over t of (base[t] + delta_j[t]) * x[j - t]`, zero before the first slot; `delta` is a projection of
    the sublayer's normed input, one value for a group of channels.
    """

    def __init__(self, spec: BlockSpec):
        super().__init__()
        self.taps, self.groups = spec.conv_kernel_size, spec.hidden_size // spec.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, spec.hidden_size))
        self.kernel_projection = nn.Linear(spec.hidden_size, 2 * self.taps * self.groups, bias=False)

    def kernels(self, normed: Float[Tensor, "B S H"]) -> Float[Tensor, "2 B S K H"]:
        """Before and after the sublayer."""
        delta = self.kernel_projection(normed).unflatten(-1, (2, self.taps, self.groups))
        delta = delta.repeat_interleave(normed.shape[-1] // self.groups, dim=-1)
        return (self.base_kernel + delta).movedim(2, 0)

    @staticmethod
    def apply_kernel(kernel: Float[Tensor, "B S K H"], states: Float[Tensor, "B S H"]) -> Float[Tensor, "B S H"]:
        mixed = kernel[..., 0, :] * states
        for tap in range(1, kernel.shape[-2]):
            earlier = nn.functional.pad(states, (0, 0, tap, 0))[:, : states.shape[1]]
            mixed = mixed + kernel[..., tap, :] * earlier
        return mixed


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer, with convolutions around its halves if the spec has them."""

    def __init__(self, spec: BlockSpec, layer: int):
        super().__init__()
        self.self_attn = BlockAttention(spec, layer)
        self.mlp = MLP(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        if spec.conv_kernel_size:
            self.attention_conv, self.mlp_conv = SlotConvolution(spec), SlotConvolution(spec)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        states = states + self._convolved(
            "attention_conv", self.input_layernorm(states), lambda inputs: self.self_attn(inputs, rotary, attend)
        )
        return finite(states + self._convolved("mlp_conv", self.post_attention_layernorm(states), self.mlp))

    def _convolved(self, name: str, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        convolution = getattr(self, name, None)
        if convolution is None:
            return sublayer(normed)
        before, after = convolution.kernels(normed)
        return convolution.apply_kernel(after, sublayer(convolution.apply_kernel(before, normed)))


class FeatureAdapter(nn.Module):
    """Brings every feature of the target to the head's width (JetSpec's `hidden_dim_adapter`)."""

    def __init__(self, spec: BlockSpec):
        super().__init__()
        self.proj = nn.Linear(spec.target_hidden_size, spec.hidden_size, bias=False)


class ConfidenceHead(nn.Module):
    """How sure a slot is that its token will be accepted (DSpark)."""

    def __init__(self, spec: BlockSpec):
        super().__init__()
        extra = spec.markov_rank if spec.confidence_with_markov else 0
        self.proj = nn.Linear(spec.hidden_size + extra, 1)


class BlockHead(SharingHead[BlockSpec]):
    """A one-pass head of any method and dialect.

    Args: as of `SharingHead`.
    """

    def __init__(self, spec: BlockSpec, embed_tokens: nn.Module | None = None, lm_head: nn.Module | None = None):
        super().__init__(spec, embed_tokens, lm_head)
        if spec.adapts_features:
            self.hidden_dim_adapter = FeatureAdapter(spec)
        width = spec.hidden_size if spec.adapts_features else spec.target_hidden_size
        self.fc = nn.Linear(spec.num_features * width, spec.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(spec, layer) for layer in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        if spec.markov is not None:
            self.markov_head = MarkovHead(spec)
        if spec.confidence:
            self.confidence_head = ConfidenceHead(spec)
        if spec.selector_rank:
            self.candidate_selector = CandidateSelector(spec)
        self.rotary = rotary_embedding(spec)

    def fuse(self, features: Sequence[Float[Tensor, "B J Ht"]]) -> Float[Tensor, "B J H"]:
        """What the target's features, in `feature_layers` order, are to the layers: one state a token."""
        return self.fuse_joined(self.join(features))

    def join(self, features: Sequence[Float[Tensor, "B J Ht"]]) -> Float[Tensor, "B J W"]:
        """Features, which may lie on several devices, side by side as the head takes them."""
        return torch.cat([feature.to(device=self.device, dtype=self.dtype) for feature in features], dim=-1)

    def fuse_joined(self, joined: Float[Tensor, "B J W"]) -> Float[Tensor, "B J H"]:
        """`fuse` of what `join` made."""
        if self.spec.adapts_features:
            features = joined.chunk(self.spec.num_features, dim=-1)
            joined = torch.cat([self.hidden_dim_adapter.proj(feature) for feature in features], dim=-1)
        return self.hidden_norm(finite(self.fc(joined)))

    def read(self, context: Float[Tensor, "B J H"], position_ids: Int[Tensor, "B J"], append: Append) -> None:
        """Hands every layer's keys and values of context entries to `append`."""
        rotary = self.rotary(context, position_ids)
        for layer in self.layers:
            attention: Any = layer.self_attn
            append(attention.layer, *attention.keys_values(context, rotary))

    def block_ids(self, anchors: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
        """Every anchor in front of masks."""
        ids = anchors.new_full((len(anchors), self.spec.block_size), self.spec.mask_token_id)
        ids[:, 0] = anchors
        return ids

    def forward(
        self, token_ids: Int[Tensor, "B S"], position_ids: Int[Tensor, "B S"], attend: Attend
    ) -> Float[Tensor, "B S H"]:
        """Runs blocks.

        Args:
            token_ids: from `block_ids`.
            position_ids: of the slots, the anchor's place in the text first.
            attend: mixes values, once a layer; knows the masks and the context.
        Returns:
            The states after the final norm.
        """
        states = self.spec.embedding_scale * self.embed(token_ids)
        rotary = self.rotary(states, position_ids)
        for layer in self.layers:
            states = layer(states, rotary, attend)
        return self.norm(states)

    def logits(self, states: Float[Tensor, "B S H"]) -> Float[Tensor, "B S Vd"]:
        """What the slots say by themselves: without what a Markov head or a selector adds."""
        # Flat: torch 2.13 has no fast kernel on a CPU for a slice of bf16 states and a frozen weight.
        logits = call_beside(self.draft_output, states.reshape(-1, states.shape[-1])).to(states.device)
        logits = logits.unflatten(0, states.shape[:-1])
        if self.spec.output_multiplier != 1.0:
            logits = logits * self.spec.output_multiplier
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits

    def confidence(self, states: Float[Tensor, "*N H"], previous: Int[Tensor, "*N"]) -> Float[Tensor, "*N"]:
        """Logits of the confidence head at slots behind these tokens."""
        if self.spec.confidence_with_markov:
            states = torch.cat([states, self.markov_head.codes(previous)], dim=-1)
        return self.confidence_head.proj(states)[..., 0]
