"""One-pass heads: DFlash, DSpark, DFlash2, JetSpec.

A head of a few layers reads the target's features of the text and proposes the tokens of a whole block in one forward.
One `BlockSpec` describes the heads of all methods and dialects, one `BlockHead` computes them, and the best tree that
their scores have is found node by node.
"""

from .calibration import BlockReader
from .checkpoint import LoadedHead, check_fits, load_head, write_head
from .drafter import BlockDrafter
from .head import BlockHead
from .masks import block_masks
from .options import BlockOptions, Conventions
from .session import BlockSession
from .spec import BlockSpec


__all__ = [
    "BlockDrafter",
    "BlockHead",
    "BlockOptions",
    "BlockReader",
    "BlockSession",
    "BlockSpec",
    "Conventions",
    "LoadedHead",
    "block_masks",
    "check_fits",
    "load_head",
    "write_head",
]
