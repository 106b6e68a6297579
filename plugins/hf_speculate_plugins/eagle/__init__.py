"""EAGLE-1, EAGLE-2, EAGLE-3 and P-EAGLE heads (arXiv:2401.15077, 2406.16858, 2503.01840, 2602.01469).

A head of one layer or a few reads the target's features and drafts from its own states, one level of a tree after the
other; P-EAGLE's drafts all levels at once, from masks. One `EagleSpec` describes the heads of all generations and
dialects, and one `EagleHead` computes them.
"""

from ..heads import LoadedHead as LoadedHead
from .drafter import EagleDrafter as EagleDrafter
from .drafter import EagleSession as EagleSession
from .head import EagleHead as EagleHead
from .saving import EagleFiles as EagleFiles
from .spec import EagleConventions as EagleConventions
from .spec import EagleOptions as EagleOptions
from .spec import EagleSpec as EagleSpec


check_fits, load_head, write_head = EagleFiles.check_fits, EagleFiles.load, EagleFiles.write
