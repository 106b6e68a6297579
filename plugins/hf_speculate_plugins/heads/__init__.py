"""Heads of decoder layers, whatever they draft: modules, files, drafter, session, entries read, compiled forwards.

The drafters and sessions of methods are built on these; nothing here knows a method.
"""

from .compiled import CompiledForwards, form_of
from .drafter import HeadDrafter, HeadSession
from .files import HeadFiles, Limit, Written
from .head import MLP, Attend, Attention, CachedAttention, LoadedHead, SharingHead, known_rows, rotary_embedding
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
    "form_of",
    "known_rows",
    "rotary_embedding",
]
