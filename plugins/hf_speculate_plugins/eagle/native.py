"""The layers of a head in one native call, on a CPU that has the kernel.

A level of a draft is a few rows of a small model: as modules it is fifty operations of microseconds, whose calls cost
more than what they compute. The modules stay the reference, and run where the kernel does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_speculate.drafting import finite
from hf_speculate.gguf import (
    FIXED_ROPE,
    AngleTable,
    LayerParts,
    NativeDraft,
    NativeLayers,
    NativeRanking,
    Unread,
    has_kernel,
    new_rows,
    served,
)

from .head import EagleHead, EntryLayer


class NativeForward:
    """`EagleHead.forward` for few rows.

    Args:
        head: whose weights may be exchanged, moved and written to.
    """

    def __init__(self, head: EagleHead):
        self._head = head
        self._layers: NativeLayers | None = None
        self._ranking: NativeRanking | None = None
        self._angles = AngleTable()
        self._looked_up: tuple[nn.Module, bool] | None = None

    def __getstate__(self):
        """A copy finds its own weights."""
        found = {"_layers": None, "_ranking": None, "_angles": AngleTable(), "_looked_up": None}
        return {"_head": self._head, **found}

    @classmethod
    def of(cls, head: EagleHead) -> NativeForward | None:
        """None where the kernel cannot compute this head, or there is none."""
        is_known = (
            head.device.type == "cpu" and head.spec.rope["rope_type"] in FIXED_ROPE and head.spec.hidden_act == "silu"
        )
        if not is_known or not all(parts_of(head, layer).fit() for layer in head.layers) or not has_kernel():
            return None
        found = cls(head)
        found.current_layers()  # whose matrices take their time, which is no draft's
        found.current_ranking()
        return found

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
        if not served(states) or any(mask is not masks[0] for mask in masks):
            return None
        layers = self.current_layers()
        rows = None if layers is None else new_rows(layers, states, cache, 0, masks[0])
        if rows is None:
            return None
        states, beside = self.inputs(token_ids, states)
        return rows.run(states, self.rotary(states, position_ids), beside)[-1]

    @property
    def embeddings(self) -> nn.Module:
        """The module that looks tokens up."""
        return self._head.embeddings

    @property
    def is_one_call(self) -> bool:
        """Whether the kernel computes what the first layer takes. (The call looks again.)"""
        if self._looked_up is None or self._looked_up[0] is not self.embeddings:
            self._looked_up = self.embeddings, NativeDraft.looks_up(self.embeddings, self._head.dtype)
        return self._head.spec.version == 3 and self._looked_up[1]

    def unread(self, token_ids: Int[Tensor, "B J"], features: Sequence[Float[Tensor, "B J Ht"]]) -> Unread:
        """Entries of an EAGLE-3 head as the one call reads them."""
        head, tokens = self._head, token_ids.contiguous()
        is_plain = not (head.spec.fc_norm or head.spec.norm_before_fc)
        fusing = Unread.fusing_of(head.fc, len(features)) if is_plain else None
        if fusing is None or any(states.dtype != head.dtype or not states.is_cpu for states in features):
            return Unread(tokens, [head.fuse(features).contiguous()])
        return Unread(tokens, [states.contiguous() for states in features], fusing)

    def inputs(
        self, token_ids: Int[Tensor, "B N"], states: Float[Tensor, "B N Hd"]
    ) -> tuple[Float[Tensor, "B N Hd"], Float[Tensor, "B N Hd"] | None]:
        """What the first layer takes, and what it joins to that."""
        head = self._head
        beside = head.embed(token_ids)
        if head.spec.version == 3:
            return states, beside
        return finite(head.fc(torch.cat([beside, states], dim=-1))), None

    def current_layers(self) -> NativeLayers | None:
        """Made anew where weights were exchanged or have moved; None if the kernel does not compute them now."""
        if self._layers is None or not self._layers.is_current():
            parts = [parts_of(self._head, layer) for layer in self._head.layers]
            self._layers = NativeLayers.of([each.rounded() for each in parts] if self._head.is_quick else parts)
        return self._layers

    def current_ranking(self) -> NativeRanking | None:
        """What ranks the layers' outputs; the same holds."""
        if self._ranking is None or not self._ranking.is_current():
            head, spec = self._head, self._head.spec
            norm = head.norm if spec.norm_logits else None
            feeds_normed = spec.feed_back_normed
            is_known = spec.norm_logits or not feeds_normed
            how = spec.rms_norm_eps, head.dtype, feeds_normed, head.is_quick
            self._ranking = NativeRanking.of(head.draft_output, norm, *how) if is_known else None
        return self._ranking

    def rotary(
        self, states: Tensor, position_ids: Int[Tensor, "B N"]
    ) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B N D"]]:
        """Cosines and sines in the type of the states, from a table, which grows with the text."""
        cos, sin = self.angles(states, int(position_ids.max()) + 1)
        return cos[position_ids], sin[position_ids]

    def angles(self, states: Tensor, needed: int) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]]:
        """The table, of so many positions at least."""
        return self._angles.upto(self._head.rotary, needed, states.dtype)


def parts_of(head: EagleHead, layer: Any) -> LayerParts:
    """A layer of a head as the kernel takes it."""
    spec = head.spec
    norms = {"mlp_norm": layer.post_attention_layernorm}
    is_entry = isinstance(layer, EntryLayer)
    before = "beside_norm" if is_entry else "attention_norm"
    if hasattr(layer, "input_layernorm"):
        norms[before] = layer.input_layernorm
    if is_entry:
        norms["attention_norm"] = layer.hidden_norm
    return LayerParts.of(
        layer.self_attn,
        layer.mlp,
        norms,
        sizes={
            "hidden": spec.hidden_size,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "inner": spec.intermediate_size,
        },
        eps=spec.rms_norm_eps,
        scale=spec.head_dim**-0.5,
        joins=is_entry,
        norms_residual=is_entry and layer.norm_before_residual,
    )
