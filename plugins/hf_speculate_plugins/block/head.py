"""The forward pass of one-pass heads.

Sources: DFlash (Chen et al., arXiv:2602.06036, z-lab/dflash), DSpark (deepseek-ai/DeepSpec), JetSpec
(hao-ai-lab/JetSpec), and the code that writes the published files, see `loading`. The target's features of the text
become keys and values once, when tokens are committed. A block `[anchor, mask, mask, …]` attends over them and over
itself in one forward, and every slot proposes a token:

    context:  c = hidden_norm(fc([feature ; feature ; …]));   keys, values of every layer from c
    block:    y = layers(embeddings of the block);            logits = output matrix(norm(y))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import rotate_half

from hf_speculate.drafting import finite
from hf_speculate.tree import additive

from ..heads import MLP, Attend, Attention, CachedAttention, SharingHead, known_rows, rotary_embedding
from .lattice import LatticeHead
from .markov import MarkovHead
from .spec import BlockSpec


Append = Callable[[int, Tensor, Tensor], Any]
"""append(layer, keys [B, kv_heads, J, d], values [B, kv_heads, J, d]): takes J context entries of a layer."""


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
        return known_rows(self.predecessor_codebook, previous) * self.hidden_projection(states)

    def bias(self, inputs: Float[Tensor, "*N P r"], columns: Int[Tensor, "*N M"]) -> Float[Tensor, "*N P M"]:
        """The bias at some columns, see `MarkovHead.bias`."""
        return inputs @ self.rows(columns).mT

    def rows(self, columns: Int[Tensor, "*N M"]) -> Float[Tensor, "*N M r"]:
        return functional.embedding(columns, self.successor_codebook)


def block_masks(
    spec: BlockSpec,
    positions: Int[Tensor, "B S"],
    context_positions: Int[Tensor, "B M"],
    visible: Bool[Tensor, "B M"] | None,
    dtype: torch.dtype,
    places: Int[Tensor, " S"] | None = None,
) -> list[Float[Tensor, "B 1 S T"] | None]:
    """Additive masks over context and block, one a layer; None: every slot sees all.

    Args:
        visible: mask of the context entries that are real; None if all are.
        places: indices of the slots among the context entries, if these are a whole buffer; None: the slots come after
            all of them.
    """
    known: dict[tuple[bool, int | None], Tensor | None] = {}
    for kind in zip(spec.causal, spec.windows, strict=True):
        if kind not in known:
            known[kind] = _mask(spec, *kind, positions, context_positions, visible, dtype, places)
    return [known[kind] for kind in zip(spec.causal, spec.windows, strict=True)]


def _mask(
    spec: BlockSpec,
    causal: bool,
    window: int | None,
    positions: Tensor,
    context_positions: Tensor,
    visible: Tensor | None,
    dtype: torch.dtype,
    places: Tensor | None,
) -> Tensor | None:
    if visible is None and not causal and window is None:
        return None
    queries = positions[:, :, None]
    is_seen = torch.ones_like(queries, dtype=torch.bool).expand(-1, -1, context_positions.shape[1])
    if visible is not None:
        is_seen = is_seen & visible[:, None]
    among = torch.ones(len(positions), spec.block_size, spec.block_size, dtype=torch.bool, device=positions.device)
    if window is not None:
        ends = positions[:, :1, None] if spec.window_from_anchor else queries
        # A window from the anchor counts context entries. A window from a slot counts its own entry, too.
        reach = window + 1 if spec.window_from_anchor else window
        is_seen = is_seen & (ends - context_positions[:, None] < reach)
        if not spec.window_from_anchor:
            among = among & ((queries - positions[:, None]).abs() < window)
    if causal:
        among = among & (positions[:, None] <= queries)
    whole = torch.cat([is_seen, among], dim=-1) if places is None else is_seen.index_copy(2, places, among)
    return additive(whole, dtype)[:, None]


def halves_of_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of attention heads, reordered from interleaved RoPE pairs to RoPE of two halves. Queries and keys are
    reordered alike, so their products stay the same."""
    if rows.dim() == 0 or len(rows) % head_dim:
        return rows  # the account of keys refuses it
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


class BlockAttention(Attention):
    """Attention whose keys and values come from the context or from the block."""

    def __init__(self, spec: BlockSpec, layer: int):
        super().__init__(spec, layer, spec.hidden_size, spec.attention_bias, spec.attention_bias)
        if spec.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.empty(spec.num_heads))

    def keys_values(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of context entries [B, kv_heads, J, d]; keys after norm and RoPE."""
        keys, values = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.k_proj, self.v_proj)
        )
        if hasattr(self, "k_norm"):
            keys = self.k_norm(keys)
        cosines, sines = (part.unsqueeze(1) for part in rotary)
        return keys * cosines + rotate_half(keys) * sines, values


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
        """Kernels before and after the sublayer."""
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
    """Projects every feature of the target to the head's hidden size (JetSpec's `hidden_dim_adapter`)."""

    def __init__(self, spec: BlockSpec):
        super().__init__()
        self.proj = nn.Linear(spec.target_hidden_size, spec.hidden_size, bias=False)


class ConfidenceHead(nn.Module):
    """Projection to the confidence of a slot that its token will be accepted (DSpark)."""

    def __init__(self, spec: BlockSpec):
        super().__init__()
        extra = spec.markov_rank if spec.confidence_with_markov else 0
        self.proj = nn.Linear(spec.hidden_size + extra, 1)


class BlockHead(SharingHead[BlockSpec]):
    """A one-pass head of any method and dialect; for its arguments see `SharingHead`."""

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
        if spec.lattice is not None:
            self.lilicorr = LatticeHead(spec.lattice, spec.hidden_size, spec.max_depth, spec.rms_norm_eps)
        self.rotary = rotary_embedding(spec)

    def fuse(self, features: Sequence[Float[Tensor, "B J Ht"]]) -> Float[Tensor, "B J H"]:
        """The target's features, in `feature_layers` order, as the layers take them: one state a token."""
        return self.fuse_joined(self.join(features))

    def join(self, features: Sequence[Float[Tensor, "B J Ht"]]) -> Float[Tensor, "B J W"]:
        """The concatenation of features, which may lie on several devices, on the head's device."""
        return torch.cat([feature.to(device=self.device, dtype=self.dtype) for feature in features], dim=-1)

    def fuse_joined(self, joined: Float[Tensor, "B J W"]) -> Float[Tensor, "B J H"]:
        """The states of features that `join` has concatenated."""
        if self.spec.adapts_features:
            features = joined.chunk(self.spec.num_features, dim=-1)
            joined = torch.cat([self.hidden_dim_adapter.proj(feature) for feature in features], dim=-1)
        return self.hidden_norm(finite(self.fc(joined)))

    def read(self, context: Float[Tensor, "B J H"], position_ids: Int[Tensor, "B J"], append: Append) -> None:
        """Computes keys and values of context entries in every layer, and calls `append` with them."""
        rotary = self.rotary(context, position_ids)
        for layer in self.layers:
            attention: Any = layer.self_attn
            append(attention.layer, *attention.keys_values(context, rotary))

    def block_ids(self, anchors: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
        """Token ids of blocks: every anchor, then mask tokens."""
        ids = anchors.new_full((len(anchors), self.spec.block_size), self.spec.mask_token_id)
        ids[:, 0] = anchors
        return ids

    def attention(self, cache: Cache, masks: Sequence[Tensor | None]) -> CachedAttention:
        """The `attend` of a block over the context in `cache`; for the arguments see `CachedAttention`."""
        layers: Any = self.layers
        sinks = [layer.self_attn.attention_sink_bias for layer in layers] if self.spec.attention_sinks else None
        return CachedAttention(cache, masks, sinks=sinks)

    def forward(
        self, token_ids: Int[Tensor, "B S"], position_ids: Int[Tensor, "B S"], attend: Attend
    ) -> Float[Tensor, "B S H"]:
        """Runs blocks.

        Args:
            token_ids: ids from `block_ids`.
            position_ids: positions of the slots, the anchor's place in the text first.
            attend: function that mixes values, once a layer; it knows the masks and the context.
        Returns:
            The states after the final norm.
        """
        states = self.spec.embedding_scale * self.embed(token_ids)
        rotary = self.rotary(states, position_ids)
        for layer in self.layers:
            states = layer(states, rotary, attend)
        return self.norm(states)

    def codes(self, previous: Int[Tensor, "*N"]) -> Float[Tensor, "*N c"]:
        """The codes of tokens for the Markov head, see `MarkovHead.inputs`."""
        return self.embed(previous) if self.spec.markov == "domino" else self.markov_head.codes(previous)

    def logits(self, states: Float[Tensor, "B S H"]) -> Float[Tensor, "B S Vd"]:
        """Logits of the slots by themselves, without the part of a Markov head, selector or lattice."""
        # Flat: torch 2.13 has no fast kernel on a CPU for a slice of bf16 states and a frozen weight.
        logits = self.draft_logits(states.reshape(-1, states.shape[-1])).unflatten(0, states.shape[:-1])
        if self.spec.output_multiplier != 1.0:
            logits = logits * self.spec.output_multiplier
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits

    def confidence(self, states: Float[Tensor, "*N H"], previous: Int[Tensor, "*N"]) -> Float[Tensor, "*N"]:
        """Logits of the confidence head at slots after these tokens."""
        if self.spec.confidence_with_markov:
            states = torch.cat([states, self.markov_head.codes(previous)], dim=-1)
        return self.confidence_head.proj(states)[..., 0]
