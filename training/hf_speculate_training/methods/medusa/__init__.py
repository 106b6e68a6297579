"""Training of Medusa heads.

`MedusaMethod` trains heads on a frozen target, `Medusa2Method` together with an adapter of it. Fresh heads say what the
target says, published ones can be gone on from.
"""

from .medusa import MedusaMethod
from .medusa2 import Medusa2Method
from .new_head import new_medusa, warm_medusa
from .options import Medusa2TrainingOptions, MedusaShape, MedusaTrainingOptions


__all__ = [
    "Medusa2Method",
    "Medusa2TrainingOptions",
    "MedusaMethod",
    "MedusaShape",
    "MedusaTrainingOptions",
    "new_medusa",
    "warm_medusa",
]
