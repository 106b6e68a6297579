"""The layers of a head in one native call, on a CPU that has the kernel.

A level of a draft is a few rows of a small model: as modules it is fifty operations of microseconds, whose calls cost
more than what they compute. The modules stay the reference, and run where the kernel does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.drafting import finite
from hf_speculate.gguf import LayerParts, NativeLayers, has_kernel, new_rows

from .head import EagleHead, EntryLayer


# RoPE whose angles depend on nothing but the position.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class NativeForward:
    """`EagleHead.forward` for few rows.

    Args:
        head: whose weights are used where they lie; they may move.
    """

    def __init__(self, head: EagleHead):
        self._head = head
        self._layers: NativeLayers | None = None
        self._weights: list[tuple[dict[str, Any], str, Any]] = []
        self._angles: tuple[Tensor, Tensor] | None = None

    def __getstate__(self):
        """A copy finds its own weights."""
        return {"_head": self._head, "_layers": None, "_weights": [], "_angles": None}

    @classmethod
    def of(cls, head: EagleHead) -> NativeForward | None:
        """None where the kernel cannot compute this head, or there is none."""
        is_known = (
            head.device.type == "cpu"
            and head.dtype in (torch.float32, torch.bfloat16)
            and head.spec.rope["rope_type"] in _FIXED_ROPE
            and head.spec.hidden_act == "silu"
        )
        if not is_known or not all(parts_of(head, layer).fit() for layer in head.layers) or not has_kernel():
            return None
        return cls(head)

    def __call__(
        self,
        token_ids: Int[Tensor, "B N"],
        states: Float[Tensor, "B N Hd"],
        position_ids: Int[Tensor, "B N"],
        cache: Cache,
        masks: Sequence[Tensor | None],
    ) -> Float[Tensor, "B N Hd"] | None:
        """As `EagleHead.forward`; None, and nothing done, where that is to be called.

        Args:
            masks: see `Place`.
        """
        head, spec = self._head, self._head.spec
        if any(mask is not masks[0] for mask in masks):
            return None
        if masks[0] is None and token_ids.shape[1] > 1:
            return None
        rows = new_rows(states, cache, (0, len(head.layers)), (spec.num_kv_heads, spec.head_dim), masks[0])
        if rows is None:
            return None
        layers = self._current_layers()
        beside = head.embed(token_ids)
        if spec.version == 1:
            states, beside = finite(head.fc(torch.cat([beside, states], dim=-1))), None
        return rows.run(layers, states, self._rotary(states, position_ids), beside)[-1]

    def _current_layers(self) -> NativeLayers:
        """Made anew where weights have moved, or were exchanged."""
        is_same = all(of[name] is weight for of, name, weight in self._weights)
        if self._layers is None or not (is_same and self._layers.is_current()):
            head = self._head
            self._layers = NativeLayers([parts_of(head, layer) for layer in head.layers])
            modules = (module._parameters for module in head.layers.modules())
            self._weights = [(of, name, weight) for of in modules for name, weight in of.items()]
        return self._layers

    def _rotary(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """From a table, which grows with the text."""
        needed = int(position_ids.max()) + 1
        if self._angles is None or len(self._angles[0]) < needed or self._angles[0].dtype is not states.dtype:
            positions = torch.arange(max(2 * needed, 1024))[None]
            self._angles = tuple(part[0] for part in self._head.rotary(states, positions))  # type: ignore[assignment]
        cos, sin = self._angles  # type: ignore[misc]
        return cos[position_ids], sin[position_ids]


def parts_of(head: EagleHead, layer: Any) -> LayerParts:
    """A layer of a head as the kernel takes it."""
    spec, attention, mlp = head.spec, layer.self_attn, layer.mlp
    norms = {"mlp_norm": layer.post_attention_layernorm}
    is_entry = isinstance(layer, EntryLayer)
    before = "beside_norm" if is_entry else "attention_norm"
    if hasattr(layer, "input_layernorm"):
        norms[before] = layer.input_layernorm
    if is_entry:
        norms["attention_norm"] = layer.hidden_norm
    norms |= {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    return LayerParts(
        sizes={
            "hidden": spec.hidden_size,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "inner": spec.intermediate_size,
        },
        eps=spec.rms_norm_eps,
        scale=spec.head_dim**-0.5,
        norms={name: norm.weight for name, norm in norms.items()},
        projections={
            **{name: getattr(attention, f"{name}_proj") for name in "qkvo"},
            **{name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")},
        },
        joins=is_entry,
        norms_residual=is_entry and layer.norm_before_residual,
    )
