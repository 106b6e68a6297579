"""EAGLE-1, EAGLE-2, EAGLE-3 and P-EAGLE heads (arXiv:2401.15077, 2406.16858, 2503.01840, 2602.01469).

A head of one layer or a few reads the target's features and drafts from its own states, one level of a tree after the
other; P-EAGLE's drafts all levels at once, from masks. One `EagleSpec` describes the heads of all generations and
dialects, and one `EagleHead` computes them.
"""

from ..heads import LoadedHead
from .drafter import EagleDrafter, EagleSession
from .head import EagleHead
from .saving import EagleFiles
from .spec import EagleConventions, EagleOptions, EagleSpec


check_fits, load_head, write_head = EagleFiles.check_fits, EagleFiles.load, EagleFiles.write

__all__ = [
    "EagleConventions",
    "EagleDrafter",
    "EagleFiles",
    "EagleHead",
    "EagleOptions",
    "EagleSession",
    "EagleSpec",
    "LoadedHead",
    "check_fits",
    "load_head",
    "write_head",
]
