"""A head's layers, or a whole draft, in one native call, on a CPU that has the kernel.

A level of a draft is a few rows of a small model. As modules it is fifty operations of microseconds, whose calls take
longer than their arithmetic. The call of a draft also reads the entries committed before it. The modules
(`PlainSteps`) are the reference, and run if the kernel cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_speculate.drafting import DraftState, finite
from hf_speculate.stats import EAGER, NATIVE, RunnerRecord
from hf_speculate.tree import DraftTree
from hf_speculate_gguf.native import (
    DENSE_KINDS,
    FIXED_ROPE,
    NO_KERNEL,
    AngleTable,
    LayerParts,
    NativeDraft,
    NativeGrowth,
    NativeLayers,
    NativeRanking,
    PendingEntries,
    Refused,
    Sampling,
    has_kernel,
    new_rows,
    tree_rows,
)

from ..heads import HeadCache, LoadedHead
from .head import EagleHead, EntryLayer
from .spec import TreeSize
from .steps import Pending, PlainSteps


class NativeForward:
    """`EagleHead.forward` for few rows.

    Args:
        head: a head, whose weights may be exchanged, moved and written to.
    """

    def __init__(self, head: EagleHead):
        self._head = head
        self._layers: NativeLayers | None = None
        self._ranking: NativeRanking | None = None
        self._angles = AngleTable()
        self._looked_up: tuple[nn.Module, bool] | None = None

    def __getstate__(self):
        """The head alone: a copy prepares its own weights for the kernel."""
        caches = {"_layers": None, "_ranking": None, "_angles": AngleTable(), "_looked_up": None}
        return {"_head": self._head, **caches}

    @classmethod
    def of(cls, head: EagleHead) -> NativeForward | None:
        """The native forward of a head; None if the kernel cannot compute it, or there is none."""
        if not _is_known(head) or not has_kernel() or any(parts_of(head, layer).problem() for layer in head.layers):
            return None
        forward = cls(head)
        with suppress(Refused):  # prepare the matrices now, so that no draft has to wait for them
            forward.current_layers()
            forward.current_ranking()
        return forward

    def __call__(self, *entries: Any, record: RunnerRecord | None = None) -> Float[Tensor, "B N Hd"] | None:
        """The result of `run`; None, and nothing was changed, if it is refused.

        Args:
            record: record of the request, which notes the runner; None for none.
        """
        record = record or RunnerRecord()
        try:
            states = self.run(*entries)
        except Refused as refused:
            record.ran(EAGER)
            record.refuse(NATIVE, str(refused))
            return None
        record.ran(NATIVE)
        return states

    def run(
        self,
        token_ids: Int[Tensor, "B N"],
        states: Float[Tensor, "B N Hd"],
        position_ids: Int[Tensor, "B N"],
        cache: Cache,
        masks: Sequence[Tensor | None],
    ) -> Float[Tensor, "B N Hd"]:
        """The result of `EagleHead.forward`.

        Args:
            masks: masks of a `Place`.

        Raises:
            Refused: the caller must call the head instead. Nothing was changed.
        """
        if not all(mask is masks[0] for mask in masks):
            raise Refused("layers with windows")
        rows = new_rows(self.current_layers(), states, cache, masks[0])
        states, second = self.inputs(token_ids, states)
        return rows.run(states, self.rotary(states, position_ids), second)[-1]

    @property
    def embeddings(self) -> nn.Module:
        """The module that looks tokens up."""
        return self._head.embeddings

    @property
    def looks_up(self) -> bool:
        """Whether the kernel can look tokens up. (The call checks again.)"""
        if self._looked_up is None or self._looked_up[0] is not self.embeddings:
            self._looked_up = self.embeddings, NativeDraft.looks_up(self.embeddings, self._head.dtype)
        return self._looked_up[1]

    def pending_entries(
        self, token_ids: Int[Tensor, "B J"], features: Sequence[Float[Tensor, "B J Ht"]]
    ) -> PendingEntries:
        """Entries as a draft's call reads them."""
        head, tokens = self._head, token_ids.contiguous()
        is_plain = head.spec.version == 3 and not (head.spec.fc_norm or head.spec.norm_before_fc)
        fusing = PendingEntries.fusing_of(head.fc, len(features)) if is_plain else None
        if fusing is None or any(states.dtype != head.dtype or not states.is_cpu for states in features):
            return PendingEntries(tokens, [head.fuse(features).contiguous()])
        return PendingEntries(tokens, [states.contiguous() for states in features], fusing)

    def inputs(
        self, token_ids: Int[Tensor, "B N"], states: Float[Tensor, "B N Hd"]
    ) -> tuple[Float[Tensor, "B N Hd"], Float[Tensor, "B N Hd"] | None]:
        """The input of the first layer, and the part that the layer joins to it."""
        head = self._head
        second = head.embed(token_ids)
        if head.spec.version == 3:
            return states, second
        return finite(head.fc(torch.cat([second, states], dim=-1))), None

    def current_layers(self) -> NativeLayers:
        """The layers, made again if weights were exchanged or moved. Raises `Refused` if the kernel cannot compute
        them now."""
        if self._layers is None or not self._layers.is_current():
            self._layers = None
            parts = [parts_of(self._head, layer) for layer in self._head.layers]
            self._layers = NativeLayers.of([part.quantized() for part in parts] if self._head.is_quantized else parts)
        return self._layers

    def current_ranking(self) -> NativeRanking:
        """The ranking of the layers' outputs; it is made again, or refused, in the same cases as `current_layers`."""
        if self._ranking is None or not self._ranking.is_current():
            self._ranking = None
            head, spec = self._head, self._head.spec
            norm = head.norm if spec.norm_logits else None
            feeds_normed = spec.feed_back_normed
            if feeds_normed and not spec.norm_logits:
                raise Refused("a head that feeds normed states back, but ranks others")
            how = spec.rms_norm_eps, head.dtype, feeds_normed, head.is_quantized, spec.draft_vocab_size
            self._ranking = NativeRanking.of(head.draft_output, norm, *how)
        return self._ranking

    @property
    def problem_with_trees(self) -> str:
        """The reason why the kernel cannot draft whole trees, as it cannot rank the outputs of the layers; "" if it
        can."""
        try:
            self.current_ranking()
        except Refused as refused:
            return str(refused)
        return ""

    def rotary(
        self, states: Tensor, position_ids: Int[Tensor, "B N"]
    ) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B N D"]]:
        """Cosines and sines in the type of the states, from a table, which grows with the text."""
        cos, sin = self.angles(states, int(position_ids.max()) + 1)
        return cos[position_ids], sin[position_ids]

    def angles(self, states: Tensor, needed: int) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]]:
        """The table of cosines and sines, for at least `needed` positions."""
        return self._angles.upto(self._head.rotary, needed, states.dtype)


def parts_of(head: EagleHead, layer: Any) -> LayerParts:
    """A layer of a head in the form that the kernel takes."""
    spec = head.spec
    norms = {"mlp_norm": layer.post_attention_layernorm}
    is_entry = isinstance(layer, EntryLayer)
    before = "second_norm" if is_entry else "attention_norm"
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


def _is_known(head: EagleHead) -> bool:
    """Whether the kernel is for heads of this kind."""
    return head.device.type == "cpu" and head.spec.rope["rope_type"] in FIXED_ROPE and head.spec.hidden_act == "silu"


def problem_without_kernel(head: EagleHead) -> str:
    """The reason, which a user can change, why the kernel does not compute a head; "" if there is none."""
    if not _is_known(head):
        return ""
    if not has_kernel():
        return NO_KERNEL
    return "" if head.dtype in DENSE_KINDS else f"a head in {head.dtype}"


class NativeSteps(PlainSteps):
    """`PlainSteps` that draw dynamic trees natively, if the kernel computes everything that a request needs."""

    def __init__(
        self,
        loaded: LoadedHead[EagleHead],
        head_cache: HeadCache,
        native: NativeForward,
        record: RunnerRecord | None = None,
    ):
        self._forward, self._record = native, record or RunnerRecord()
        super().__init__(loaded, head_cache, partial(native, record=self._record))

    def tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
        try:
            return self._native_tree(root.contiguous(), None, state, size)
        except Refused as refused:
            self._record.refuse(NATIVE, str(refused))
            return super().tree(root, state, size)

    def tree_after(
        self, pending: Pending, state: DraftState, size: TreeSize, root: Tensor | None = None
    ) -> tuple[DraftTree, Tensor] | None:
        token_ids, features, lengths = pending
        has_holes = set(lengths) != {token_ids.shape[1]} or self._head_cache.visible() is not None
        if has_holes or not self._forward.looks_up:
            return None
        head = self._loaded.head
        states = torch.empty(
            len(token_ids), head.spec.hidden_size, dtype=head.dtype, device="cpu"
        )  # no row keeps its `root`
        try:
            tree = self._native_tree(states, self._forward.pending_entries(token_ids, features), state, size)
        except Refused:  # entries and tree are tried apart, and the reason counted then
            return None
        self._head_cache.keep(lengths)
        return tree, states

    @torch.no_grad()
    def _native_tree(
        self, root: Tensor, pending: PendingEntries | None, state: DraftState, size: TreeSize
    ) -> DraftTree:
        """The tree, in one call of the kernel.

        Args:
            root: states of the entry committed last; written to if entries are pending.
            pending: entries that the call reads first.

        Raises:
            Refused: the modules must draft it. No committed entry was changed.
        """
        forward, head_cache = self._forward, self._head_cache
        layers, ranking = forward.current_layers(), forward.current_ranking()
        sampling = Sampling.of(state.warpers if state.samples else ())
        head = self._loaded.head
        joining = NativeDraft.joining_of(head.fc, head.dtype) if head.spec.version == 1 else None
        if head.spec.version == 1 and joining is None:
            raise Refused("a projection that the kernel cannot read")
        if not forward.looks_up:
            raise Refused("embeddings that the kernel cannot read")

        @cache  # the first level's noise also gives the width
        def noise(depth: int) -> Tensor | None:
            log_noise = state.log_noise((depth,), ranking.num_columns, self._loaded.target_ids)
            return None if log_noise is None else log_noise[:, 0].float().contiguous()

        first = noise(0)
        width = min(size.width, ranking.num_columns if first is None else first.shape[-1])
        num_pending = 0 if pending is None else pending.tokens.shape[1]
        rows = tree_rows(
            layers, root, head_cache.tree_cache.cache, (width, size.depth), head_cache.visible(), num_pending
        )
        growth = NativeGrowth(len(root), width, size.depth, self._loaded.target_ids)

        def should_continue() -> bool:
            return state.should_continue(growth.values, growth.previous)

        starts = head_cache.next_positions()
        angles = forward.angles(root, max(starts) + num_pending + growth.depth)
        draft = NativeDraft(rows, ranking, forward.embeddings, angles, joining)
        positions = torch.tensor(starts, dtype=torch.long, device="cpu")
        if not draft.grow(growth, root, pending, positions, sampling, noise, should_continue):
            raise Refused("scores that are not finite, or a token without an embedding")
        self._record.ran(NATIVE)
        tokens, parents, values = growth.best(state.root_ids, size.max_nodes)
        return DraftTree(tokens, parents, max_depth=growth.num_levels, values=values)
