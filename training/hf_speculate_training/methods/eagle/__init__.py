"""Training of EAGLE heads: drafting is unrolled over a whole text at once.

`Eagle3Method` trains a head against the target's distribution, `Eagle1Method` against its next feature as well. Fresh
heads are shaped after the target; the training of published ones can continue.
"""

from .heads import Eagle3Shape as Eagle3Shape
from .heads import new_eagle1 as new_eagle1
from .heads import new_eagle3 as new_eagle3
from .heads import warm_eagle as warm_eagle
from .method import Eagle1Method as Eagle1Method
from .method import Eagle1TrainingOptions as Eagle1TrainingOptions
from .method import Eagle3Method as Eagle3Method
from .method import Eagle3TrainingOptions as Eagle3TrainingOptions
from .method import EagleTrainingOptions as EagleTrainingOptions
from .method import UnrolledMethod as UnrolledMethod
