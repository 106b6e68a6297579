"""One-pass heads: DFlash, DSpark, DFlash2, JetSpec.

A head of a few layers reads the target's features of the text and proposes the tokens of a whole block in one forward.
One `BlockSpec` describes the heads of all methods and dialects, one `BlockHead` computes them, and the best tree that
their scores have is found node by node.
"""

from ..heads import LoadedHead
from .drafter import BlockDrafter
from .head import BlockHead, block_masks
from .saving import BlockFiles
from .spec import BlockConventions, BlockOptions, BlockSpec


check_fits, load_head, write_head = BlockFiles.check_fits, BlockFiles.load, BlockFiles.write

__all__ = [
    "BlockConventions",
    "BlockDrafter",
    "BlockFiles",
    "BlockHead",
    "BlockOptions",
    "BlockSpec",
    "LoadedHead",
    "block_masks",
    "check_fits",
    "load_head",
    "write_head",
]
