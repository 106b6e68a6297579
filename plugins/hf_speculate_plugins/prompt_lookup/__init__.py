"""Prompt lookup: what followed the same n-gram earlier in prompt or output is drafted again.

Method: Saxena, "Prompt Lookup Decoding" (2023). Unlike stock `prompt_lookup_num_tokens`, the longest suffix wins, the
index grows with the text (no rescan a round), and several continuations become branches of one tree.
"""

from .drafter import PromptLookupDrafter
from .options import PromptLookupOptions


__all__ = ["PromptLookupDrafter", "PromptLookupOptions"]
