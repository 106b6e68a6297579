"""Several drafters in one tree."""

from .drafter import CombinedDrafter, CombinedOptions


__all__ = ["CombinedDrafter", "CombinedOptions"]
