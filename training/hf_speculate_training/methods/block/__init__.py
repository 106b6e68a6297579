"""Training of one-pass heads: all blocks of a text at once, as DeepSpec does it.

`DFlashMethod` trains heads whose slots propose independently, `DSparkMethod` heads with a Markov head, which looks at
the token before. Fresh heads are shaped after the target; the training of published ones can go on.
"""

from .blocks import Blocks
from .heads import DFlashShape, DSparkShape, new_block, warm_block
from .method import BlockTrainingOptions, DFlashMethod, DSparkMethod, DSparkTrainingOptions


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
