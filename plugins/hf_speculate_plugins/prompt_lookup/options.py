"""What prompt lookup looks for, and how much of what it finds is drafted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupOptions:
    """Options of prompt lookup.

    Attributes:
        max_ngram: longest suffix that is looked up.
        min_ngram: shortest one; after one token the copy is often wrong, which its value says.
        depth: tokens of a continuation that are drafted.
        branches: different continuations that are drafted side by side, the latest occurrence first.
        max_nodes: draft nodes altogether.
    """

    max_ngram: int = 5
    min_ngram: int = 1
    depth: int = 8
    branches: int = 2
    max_nodes: int = 12

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"prompt_lookup: {name} must be at least 1, got {getattr(self, name)}.")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"prompt_lookup: min_ngram ({self.min_ngram}) is above max_ngram ({self.max_ngram}).")
