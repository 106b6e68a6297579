"""Medusa: decoding heads on the target's last hidden state, drafted as a static tree (arXiv:2401.10774).

All heads run in one pass, head h proposing the tokens of depth h + 1, and a tree that is fixed beforehand is filled
with their best tokens. There is no draft cache: a session keeps one hidden state a row.
"""

from .calibration import MedusaReader
from .drafter import MedusaDrafter
from .head import MedusaHeads
from .options import MedusaOptions, computed_choices, measured_accuracies


__all__ = [
    "MedusaDrafter",
    "MedusaHeads",
    "MedusaOptions",
    "MedusaReader",
    "computed_choices",
    "measured_accuracies",
]
