"""What heads of decoder layers share, whatever they draft: layers, RoPE, attention over a cache, what one has read,
forwards that are compiled.

Drafters and sessions of methods are built on these; nothing here knows a method.
"""

from .attention import CachedAttention
from .compiled import CompiledForwards, form_of, problem_with_head
from .drafter import HeadDrafter
from .layers import MLP, LayerSpec, call_beside, rotary_embedding
from .loading import LoadedHead, build_head, check_head_fits, check_mask_token, fill_head, overridden, warn_of_unclear
from .reading import Place, Reading, ReadingHead
from .sharing import HeadSpec, SharingHead


__all__ = [
    "MLP",
    "CachedAttention",
    "CompiledForwards",
    "HeadDrafter",
    "HeadSpec",
    "LayerSpec",
    "LoadedHead",
    "Place",
    "Reading",
    "ReadingHead",
    "SharingHead",
    "build_head",
    "call_beside",
    "check_head_fits",
    "check_mask_token",
    "fill_head",
    "form_of",
    "overridden",
    "problem_with_head",
    "rotary_embedding",
    "warn_of_unclear",
]
