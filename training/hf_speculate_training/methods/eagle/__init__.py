"""Training of EAGLE heads: drafting is unrolled over a whole text at once.

`Eagle3Method` trains a head against the target's distribution, `Eagle1Method` against its next feature as well. Fresh
heads are shaped after the target; the training of published ones can go on.
"""

from .heads import Eagle3Shape, EagleShape, new_eagle1, new_eagle3, warm_eagle
from .method import Eagle1Method, Eagle1TrainingOptions, Eagle3Method, Eagle3TrainingOptions


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
