"""Training of one-pass heads: all blocks of a text at once, in the way that DeepSpec does.

`DFlashMethod` trains heads whose slots propose by themselves, `DSparkMethod` those with a Markov head, which adds what
the token before says. Fresh heads are shaped after the target, published ones can be gone on from.
"""

from .blocks import Blocks
from .methods import DFlashMethod, DSparkMethod
from .new_head import new_block, warm_block
from .options import BlockTrainingOptions, DFlashShape, DSparkShape, DSparkTrainingOptions


__all__ = [
    "BlockTrainingOptions",
    "Blocks",
    "DFlashMethod",
    "DFlashShape",
    "DSparkMethod",
    "DSparkShape",
    "DSparkTrainingOptions",
    "new_block",
    "warm_block",
]
