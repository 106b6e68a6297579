"""Medusa: decoding heads on the target's last hidden state, drafted as a static tree (arXiv:2401.10774).

All heads run in one pass, head h proposing the tokens of depth h + 1, and a tree that is fixed beforehand is filled
with their best tokens. There is no draft cache: a session keeps one hidden state per row.
"""

from .drafter import MedusaDrafter, MedusaOptions
from .head import MedusaHeads
from .tree import StaticTree


__all__ = [
    "MedusaDrafter",
    "MedusaHeads",
    "MedusaOptions",
    "StaticTree",
]
