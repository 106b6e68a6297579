"""Modules that heads of decoder layers share: layers, RoPE, attention over a cache, and parts of the target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_speculate.attention import DeviceTree, tree_attention, tree_backends
from hf_speculate.drafting import finite
from hf_speculate.errors import CheckpointError
from hf_speculate.target import output_rows, unhooked
from hf_speculate.transfers import to_device

from ..checkpoints import HeadSpec, LoadReport, OpenedHead


_MAX_POSITION = 1 << 24  # longest text that RoPE is tried with; float32 counts to here

Spec = TypeVar("Spec", bound=HeadSpec)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, queries [B, heads, N, d], keys [B, kv_heads, N, d], values [B, kv_heads, N, d]) -> [B, heads, N, d]:
mixes the values that N entries see. Decoding attends over a cache, training over whole texts or unrolled steps."""


class CachedAttention:
    """`Attend` for a forward that appends to a cache.

    Args:
        cache: keys and values of earlier entries; those of the forward are appended.
        masks: additive mask for each layer [B, 1, N, M + N], or None: every entry sees all.
        is_causal: whether to use a causal mask instead of `masks`; the cache must be empty.
        sinks: additional logit of every attention head [heads], for each layer. It takes part in the softmax and has no
            value. None: there are none. Not with `is_causal`.
    """

    def __init__(
        self,
        cache: Cache,
        masks: Sequence[Tensor | None] | None = None,
        is_causal: bool = False,
        sinks: Sequence[Float[Tensor, " heads"]] | None = None,
    ):
        self.cache, self.masks, self.is_causal, self.sinks = cache, masks, is_causal, sinks

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = self.cache.update(keys, values, layer)
        mask = None if self.masks is None else self.masks[layer]
        if self.sinks is not None:
            keys, values, mask = with_sink(self.sinks[layer], keys, values, mask, queries.shape[2])
        with tree_backends(queries.device):
            return scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=self.is_causal,
                enable_gqa=keys.shape[1] != queries.shape[1],
            )


def with_sink(
    sink: Float[Tensor, " heads"], keys: Tensor, values: Tensor, mask: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask with one more entry at the end: zeros, whose mask is the logit of the sink.

    Args:
        keys, values: [B, kv_heads, M, d].
        mask: additive mask [B or 1, 1, count, M]; None: every entry sees all.
    """
    # The product with a key of zeros is 0, so the mask alone is the logit: no other kernel is needed.
    sinks = sink.to(keys.dtype)[None, :, None, None]
    if mask is None:
        mask = keys.new_zeros(1, 1, count, keys.shape[2])
    sizes = mask.shape[0], len(sink), mask.shape[2]
    mask = torch.cat([mask.expand(*sizes, -1), sinks.expand(*sizes, 1)], dim=-1)
    return functional.pad(keys, (0, 0, 0, 1)), functional.pad(values, (0, 0, 0, 1)), mask


class PlacedAttention:
    """`Attend` for a captured forward that appends to static buffers, by the kernel for trees.

    Args:
        cache: static buffers of keys and values.
        place: position of the new entries, and what they see.
    """

    def __init__(self, cache: Cache, place: DeviceTree):
        self.cache, self.place = cache, place

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = self.cache.update(keys, values, layer)
        return tree_attention(queries, keys, values, self.place).transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention of a head, with optional norms of queries and keys."""

    def __init__(self, spec: HeadSpec, layer: int, input_size: int, bias: bool, output_bias: bool):
        super().__init__()
        self.layer, self.head_dim = layer, spec.head_dim
        self.q_proj = nn.Linear(input_size, spec.num_heads * spec.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, spec.num_kv_heads * spec.head_dim, bias=bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=output_bias)
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
            self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)

    def forward(self, inputs: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        shape = (*inputs.shape[:2], -1, self.head_dim)
        queries, keys = self.q_proj(inputs).view(shape), self.k_proj(inputs).view(shape)
        values = self.v_proj(inputs).view(shape).transpose(1, 2)
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = apply_rotary_pos_emb(queries.transpose(1, 2), keys.transpose(1, 2), *rotary)
        mixed = attend(self.layer, queries, keys, values)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated feed-forward of Llama."""

    def __init__(self, spec: HeadSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = ACT2FN[spec.hidden_act]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(inputs)) * self.up_proj(inputs))


class SharingHead(nn.Module, Generic[Spec]):
    """A head that uses modules of its target instead of copies of them.

    Args:
        spec: shapes and switches of the head.
        embed_tokens, lm_head: the target's own modules where the head has none; they are referenced, neither copied
            nor registered as submodules (`state_dict` and `.to` do not reach them).

    Attributes:
        shared: modules of the target by name, None where the head has its own.
        fc: projection of the target's features.
        attends_by_kernel: whether attention of its layers may be computed by the kernel for trees.
        counts_pictures: whether `rotary` takes positions of several kinds [kinds, B, N], see `DraftRequest`.

    Do not cast the whole module with `.to(dtype)`: the rotary frequencies stay in float32. Load weights of the wanted
    dtype instead (`HeadFiles`).
    """

    attends_by_kernel = True
    counts_pictures = False
    fc: nn.Linear
    layers: nn.ModuleList
    rotary: nn.Module

    def __init__(self, spec: Spec, embed_tokens: nn.Module | None = None, lm_head: nn.Module | None = None):
        super().__init__()
        self.spec = spec
        self.shared: dict[str, Any] = {"embed_tokens": embed_tokens, "lm_head": lm_head}
        if embed_tokens is None:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if lm_head is None:
            self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self._quantized: dict[str, nn.Module] | None = None

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        weight = self.fc.weight
        if weight.is_floating_point():
            return weight.dtype
        # Norms are never packed.
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    @property
    def windows(self) -> Sequence[int | None]:
        return self.spec.windows

    def embed(self, token_ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N Hd"]:
        """Token embeddings, on the head's device (the target's embeddings may lie elsewhere)."""
        if self.shared["embed_tokens"] is None:
            return known_rows(self.embed_tokens.weight, token_ids)
        return call_on_weight_device(self.embeddings, token_ids).to(device=self.device, dtype=self.dtype)

    @property
    def embeddings(self) -> Any:
        """The module that looks tokens up: the head's own or the target's."""
        return self.shared["embed_tokens"] or self.embed_tokens

    @property
    def output(self) -> Any:
        """The module that makes draft logits: the head's own or the target's."""
        return self.shared["lm_head"] or self.lm_head

    @property
    def draft_output(self) -> Any:
        """The module that makes draft logits for drafting, see `quantize_for_drafting`."""
        return (self._quantized or {}).get("lm_head") or self.output

    def draft_logits(self, states: Float[Tensor, "*N Hd"]) -> Float[Tensor, "*N Vd"]:
        """Logits of the draft vocabulary. An output matrix of a target with added tokens has more columns."""
        logits = call_on_weight_device(self.draft_output, states).to(states.device)
        return finite(logits[..., : self.spec.draft_vocab_size])  # an infinite logit would make probabilities NaN

    @property
    def is_quantized(self) -> bool:
        """Whether `quantize_for_drafting` has changed this head."""
        return self._quantized is not None

    def quantize_for_drafting(self) -> None:
        """Lets matrices multiply few rows in 8 bits from now on, on a CPU that has the kernel. The head's weights stay,
        and so does the target."""
        from hf_speculate_gguf.native import (  # and the package for packed targets
            QuantizedLinear,
            has_kernel,
            quantize_for_drafting,
        )

        if not self.is_quantized and self.device.type == "cpu" and has_kernel():
            quantize_for_drafting(self)
            self._quantized = {}  # not registered, as what is shared
            if QuantizedLinear.suits(self.shared["lm_head"]):
                self._quantized["lm_head"] = QuantizedLinear(self.shared["lm_head"])


class FeedingHead(SharingHead[Spec]):
    """A head whose deeper draft tokens take its own states in place of the target's (EAGLE, MTP)."""

    def fuse(self, features: Sequence[Float[Tensor, "B N Ht"]]) -> Float[Tensor, "B N Hd"]:
        """The draft states for the target's features, which are in `feature_layers` order."""
        raise NotImplementedError

    def prompt_embeddings(
        self, token_ids: Int[Tensor, "B N"], features: Sequence[Float[Tensor, "B N Ht"]]
    ) -> Float[Tensor, "B N Ht"] | None:
        """Embeddings of the tokens of a prompt's entries; None if `embed` gives them."""
        return None

    def finish(self, hidden: Float[Tensor, "*N Hd"]) -> tuple[Float[Tensor, "*N Hd"], Float[Tensor, "*N Hd"]]:
        """The inputs of `output` for `forward`'s states, and the states that the next draft step takes."""
        raise NotImplementedError

    def read(self, hidden: Float[Tensor, "*N Hd"]) -> tuple[Float[Tensor, "*N Vd"], Float[Tensor, "*N Hd"]]:
        """Draft logits of `forward`'s states, and the states that the next draft step takes."""
        inputs, fed_back = self.finish(hidden)
        return self.draft_logits(inputs), fed_back


Head = TypeVar("Head", bound=SharingHead[Any])


@dataclass(frozen=True)
class LoadedHead(Generic[Head]):
    """A head ready to draft.

    Attributes:
        head: module on the device of the target's last layer, in the target's dtype.
        target_ids: int64 [Vd], target id of each draft id; None where they are the same.
        report: account of every key of the checkpoint.
    """

    head: Head
    target_ids: Tensor | None
    report: LoadReport

    @property
    def spec(self) -> Any:
        """Shapes and switches of the head."""
        return self.head.spec


def rotary_embedding(spec: HeadSpec) -> LlamaRotaryEmbedding:
    """RoPE of a head, on the CPU: computed, not loaded, it must not end on the meta device."""
    with torch.device("cpu"):
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=spec.hidden_size,
                num_attention_heads=spec.num_heads,
                head_dim=spec.head_dim,
                max_position_embeddings=spec.max_position_embeddings,
                rope_parameters=dict(spec.rope),
            )
        )


def built_head(
    head_class: type[Any], opened: OpenedHead[Any], embed_tokens: nn.Module | None, lm_head: nn.Module | None, kind: str
) -> Any:
    """A head on the meta device.

    Raises:
        CheckpointError: an unknown activation, or RoPE parameters that give no angles, for short texts or for long.
    """
    spec, folder = opened.spec, opened.checkpoint.folder
    try:
        with torch.device("meta"):
            head = head_class(spec, embed_tokens, lm_head)
        angles = _sample_angles(head.rotary, spec)
    except Exception as error:  # transformers has several kinds of errors for wrong RoPE and activations
        raise CheckpointError(
            f"{folder}: config.json makes no {kind} ({type(error).__name__}: {error}); RoPE is {spec.rope}, the "
            f"activation {spec.hidden_act!r}."
        ) from error
    if not all(part.isfinite().all() and part.shape[-1] == spec.head_dim for part in angles):
        raise CheckpointError(f"{folder}: RoPE with {spec.rope} (config.json) gives no {spec.head_dim} angles.")
    return head


def _sample_angles(rotary: nn.Module, spec: HeadSpec) -> list[Tensor]:
    """Cosines and sines at positions on both sides of every length at which a type of RoPE changes what it does."""
    original = int(spec.rope.get("original_max_position_embeddings") or 1)
    rotary, states = (
        copy.deepcopy(rotary),
        torch.zeros(1, 1, spec.hidden_size, dtype=torch.float32, device="cpu"),
    )  # a copy: it remembers lengths
    positions = (min(length, _MAX_POSITION) for length in (1, 2 * original, 2 * spec.max_position_embeddings))
    return [
        part
        for position in positions
        for part in rotary(states, torch.tensor([[position]], dtype=torch.long, device="cpu"))
    ]


def known_rows(table: Float[Tensor, "V r"], token_ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N r"]:
    """Rows of a head's own table; zeros for tokens after its end, which the target has added."""
    # Rows of the target's table would not fit. Zeros have no effect: a norm keeps them, and their bias is zero.
    token_ids, last = to_device(token_ids, table.device), len(table) - 1
    return functional.embedding(token_ids.clamp(max=last), table).masked_fill((token_ids > last)[..., None], 0)


def call_on_weight_device(module: Any, inputs: Tensor) -> Tensor:
    """Calls a module of the target, or of a head, with inputs that may lie on another device. An offloaded module has
    its weight on no device; its hook moves weight and inputs."""
    device = module.weight.device
    return unhooked(module)(inputs if device.type == "meta" else to_device(inputs, device))


def keep_packed(head: nn.Module, packed: Mapping[str, Any]) -> None:
    """Replaces projections and output matrix by layers that stay packed, where the kernel can multiply with these.

    Everything else keeps the values that it was loaded with: rows of embeddings, and of a Markov head, are looked up.
    """
    from hf_speculate_gguf.native import (  # and the package for packed targets
        NativeBackend,
        PackedLinear,
        choose_backend,
    )

    first = next(head.parameters())
    backend = choose_backend("auto", first.device, first.dtype) if first.device.type == "cpu" else None
    if not isinstance(backend, NativeBackend):
        return
    for name, module in list(head.named_modules()):
        matrix = packed.get(f"{name}.weight")
        is_projection = name in ("fc", "lm_head") or name.startswith("layers.")
        if matrix is None or not is_projection or type(module) is not nn.Linear:
            continue
        tiles = backend.pack(matrix, first.device)
        bias = None if module.bias is None else module.bias.data
        layer = PackedLinear(matrix.num_columns, matrix.num_rows, matrix.type, backend, tiles, bias)
        parent, _, attribute = name.rpartition(".")
        setattr(head.get_submodule(parent), attribute, layer.eval())


@torch.no_grad()
def dense_state(head: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a head with values in place of packed bytes."""
    state = dict(head.state_dict())
    for name, module in head.named_modules():
        layer: Any = module
        if f"{name}.weight" in state and not state[f"{name}.weight"].is_floating_point():
            state[f"{name}.weight"] = output_rows(layer, layer.in_features, dtype)
    return state
