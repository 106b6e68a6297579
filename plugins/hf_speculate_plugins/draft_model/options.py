"""How much a draft model drafts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelOptions:
    """Options of draft-model drafting.

    Attributes:
        depth: tokens drafted along a branch; each costs one forward of the draft model.
        top_k: 1 drafts a chain, more a dynamic tree with that many branches a level.
        max_nodes: draft nodes of a tree (not used by chains).
    """

    depth: int = 5
    top_k: int = 1
    max_nodes: int = 16

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"draft_model: {name} must be at least 1, got {getattr(self, name)}.")
