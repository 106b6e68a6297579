"""EAGLE-1, EAGLE-2 and EAGLE-3 heads."""

from .checkpoint.loading import LoadedHead, load_head
from .checkpoint.saving import write_head
from .drafter import EagleDrafter, EagleOptions
from .head import EagleHead
from .levels import StaticTree
from .session import EagleSession
from .spec import Conventions, EagleSpec


__all__ = [
    "Conventions",
    "EagleDrafter",
    "EagleHead",
    "EagleOptions",
    "EagleSession",
    "EagleSpec",
    "LoadedHead",
    "StaticTree",
    "load_head",
    "write_head",
]
