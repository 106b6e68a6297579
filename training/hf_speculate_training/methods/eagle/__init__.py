"""Training of EAGLE heads: drafting is unrolled over a whole text at once.

`Eagle3Method` trains a head against the target's distribution, `Eagle1Method` against its next feature as well. Fresh
heads are shaped after the target, published ones can be gone on from.
"""

from .eagle1 import Eagle1Method
from .eagle3 import Eagle3Method
from .new_head import new_eagle1, new_eagle3, warm_eagle
from .options import Eagle1TrainingOptions, Eagle3Shape, Eagle3TrainingOptions, EagleShape


__all__ = [
    "Eagle1Method",
    "Eagle1TrainingOptions",
    "Eagle3Method",
    "Eagle3Shape",
    "Eagle3TrainingOptions",
    "EagleShape",
    "new_eagle1",
    "new_eagle3",
    "warm_eagle",
]
