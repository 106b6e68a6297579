"""One-pass heads: DFlash, DSpark, DFlash2, Domino, XPress, LiLiCorr, JetSpec.

A head of a few layers reads the target's features of the text and proposes the tokens of a whole block in one forward.
One `BlockSpec` describes the heads of all methods and dialects, and one `BlockHead` computes them. The draft is the
best tree by their scores.
"""

from ..heads import LoadedHead as LoadedHead
from .drafter import BlockDrafter as BlockDrafter
from .head import BlockHead as BlockHead
from .head import block_masks as block_masks
from .saving import BlockFiles as BlockFiles
from .spec import BlockConventions as BlockConventions
from .spec import BlockOptions as BlockOptions
from .spec import BlockSpec as BlockSpec


check_fits, load_head, write_head = BlockFiles.check_fits, BlockFiles.load, BlockFiles.write
