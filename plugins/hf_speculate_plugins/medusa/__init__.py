"""Medusa: decoding heads on the target's last hidden state, drafted as a static tree (arXiv:2401.10774).

All heads run in one pass, head h proposing the tokens of depth h + 1, and a tree that is fixed beforehand is filled
with their best tokens. There is no draft cache: a session keeps one hidden state per row.
"""

from .drafter import MedusaDrafter as MedusaDrafter
from .drafter import MedusaOptions as MedusaOptions
from .head import MedusaHeads as MedusaHeads
from .tree import StaticTree as StaticTree
