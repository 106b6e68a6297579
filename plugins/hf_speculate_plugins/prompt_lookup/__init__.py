"""Prompt lookup: what followed the same n-gram earlier is drafted again."""

from .drafter import PromptLookupDrafter, PromptLookupOptions, SuffixIndex


__all__ = ["PromptLookupDrafter", "PromptLookupOptions", "SuffixIndex"]
