"""The options of the `draft_model` drafter."""

from __future__ import annotations

from dataclasses import dataclass

from hf_speculate.speculator import check_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelOptions:
    """Options of draft-model drafting.

    Attributes:
        depth: tokens drafted along a branch; each costs one forward of the draft model.
        top_k: branches of a level of a dynamic tree; 1 drafts a chain, the only kind for another vocabulary.
        max_nodes: draft nodes of a tree (not used by chains).
    """

    depth: int = 5
    top_k: int = 1
    max_nodes: int = 16

    def __post_init__(self) -> None:
        check_sizes("draft_model", self, "depth", "top_k", "max_nodes")
