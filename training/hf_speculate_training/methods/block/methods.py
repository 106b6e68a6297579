"""Training of DFlash and DSpark heads."""

from __future__ import annotations

from .base import BaseBlockMethod
from .options import BlockTrainingOptions, DFlashShape, DSparkShape, DSparkTrainingOptions


class DFlashMethod(BaseBlockMethod[BlockTrainingOptions]):
    """Trains a head whose slots know nothing of each other's tokens, see `BaseBlockMethod`.

    JetSpec's heads are these with `causal: true` and `first_slot: 1`, trained with `loss: kl` and `decay: null`.
    """

    name = "dflash"
    head_class = DFlashShape
    options_class = BlockTrainingOptions


class DSparkMethod(BaseBlockMethod[DSparkTrainingOptions]):
    """Trains a head with a Markov head, and one that says how sure a slot is, see `BaseBlockMethod`."""

    name = "dspark"
    head_class = DSparkShape
    options_class = DSparkTrainingOptions
