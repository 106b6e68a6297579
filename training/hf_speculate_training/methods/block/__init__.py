"""Training of one-pass heads: all blocks of a text at once, as DeepSpec does it.

`DFlashMethod` trains heads whose slots propose independently, `DSparkMethod` heads with a Markov head, which looks at
the token before. Fresh heads are shaped after the target; the training of published ones can continue.
"""

from .blocks import TextBlocks as TextBlocks
from .heads import DFlashShape as DFlashShape
from .heads import DSparkShape as DSparkShape
from .heads import new_block as new_block
from .heads import warm_block as warm_block
from .method import BlockTrainingOptions as BlockTrainingOptions
from .method import DFlashMethod as DFlashMethod
from .method import DSparkMethod as DSparkMethod
from .method import DSparkTrainingOptions as DSparkTrainingOptions
