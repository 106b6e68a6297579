"""A smaller causal LM as the drafter."""

from .drafter import DraftModelDrafter, DraftModelOptions


__all__ = ["DraftModelDrafter", "DraftModelOptions"]
