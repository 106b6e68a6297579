"""EAGLE-1, EAGLE-2 and EAGLE-3 heads."""

from .config import Conventions, EagleSpec
from .drafter import EagleDrafter, EagleOptions
from .head import EagleHead
from .loading import LoadedHead, load_head
from .saving import write_head
from .session import EagleSession
from .static import StaticTree


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
