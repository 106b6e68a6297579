"""How much several drafters draft together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinedOptions:
    """Options of combined drafting.

    Attributes:
        max_nodes: draft nodes of the merged tree, the root not counted.
    """

    max_nodes: int = 32

    def __post_init__(self) -> None:
        if self.max_nodes < 1:
            raise ValueError(f"combined: max_nodes must be at least 1, got {self.max_nodes}.")
