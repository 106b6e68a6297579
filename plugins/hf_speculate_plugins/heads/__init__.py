"""Heads of decoder layers, whatever they draft: modules, files, drafter, session, entries read, compiled forwards.

The drafters and sessions of methods are built on these; nothing here knows a method.
"""

from .compiled import CompiledForwards, form_of
from .drafter import HeadDrafter, HeadSession
from .files import HeadFiles, Limit, Written
from .head import MLP, Attend, Attention, CachedAttention, LoadedHead, SharingHead, call_beside, rotary_embedding
from .reading import Place, Reading


__all__ = [
    "MLP",
    "Attend",
    "Attention",
    "CachedAttention",
    "CompiledForwards",
    "HeadDrafter",
    "HeadFiles",
    "HeadSession",
    "Limit",
    "LoadedHead",
    "Place",
    "Reading",
    "SharingHead",
    "Written",
    "call_beside",
    "form_of",
    "rotary_embedding",
]
