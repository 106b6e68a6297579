"""How much a one-pass head drafts, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Options of drafting with one-pass heads.

    Attributes:
        max_nodes: draft nodes of a tree, the root not counted; they are the best ones that the head's scores have.
        top_k: children of a node at the most; 1 drafts a chain.
        depth: of a draft; None: as many slots as the head has.
        candidates: tokens of a slot that are scored behind tokens of the slot before, where the head scores pairs.
            None: 64, of sampled requests 256, whose noise lifts tokens from far behind.
        min_confidence: a DSpark head's own: what follows a slot that is less sure is not drafted; 0 never cuts.
    """

    max_nodes: int = 24
    top_k: int = 8
    depth: int | None = None
    candidates: int | None = None
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_nodes", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"block: {name} must be at least 1, got {getattr(self, name)}.")
        for name in ("depth", "candidates"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"block: {name} must be None or at least 1, got {getattr(self, name)}.")
        if not 0 <= self.min_confidence < 1:
            raise ValueError(f"block: min_confidence must be from 0 to below 1, got {self.min_confidence}.")


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What the caller knows better than the checkpoint: overrides of how a head is read; None: as the file says.

    Attributes:
        feature_layers: indices into the target's `hidden_states`, in concatenation order.
        mask_token_id: what is embedded in the slots behind the anchor.
        first_slot: the first slot that proposes: 0 as DeepSpec's do, 1 as z-lab's.
        causal: whether slots see only slots up to their own, in all layers.
        rope_theta: base of the rotary embedding.
    """

    feature_layers: Sequence[int] | None = None
    mask_token_id: int | None = None
    first_slot: Literal[0, 1] | None = None
    causal: bool | None = None
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        if self.feature_layers is not None:
            object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if self.first_slot not in (None, 0, 1):
            raise ValueError(f"block: first_slot must be 0, 1 or None, got {self.first_slot!r}.")
