"""How draft trees are shaped, for every method that drafts one.

Static trees have a structure that is fixed beforehand, a list of choices; dynamic trees are grown level by level where
the drafter is sure; where all levels are scored at once, the best tree is found. Nothing here knows what scores the
tokens.
"""

from .best import Shares, best_tree, slot_scores, slot_shares, trimmed
from .dynamic import Frontier, grow_tree, log_shares, num_candidates
from .static import Choices, StaticTree, canonical, path_sums


__all__ = [
    "Choices",
    "Frontier",
    "Shares",
    "StaticTree",
    "best_tree",
    "canonical",
    "grow_tree",
    "log_shares",
    "num_candidates",
    "path_sums",
    "slot_scores",
    "slot_shares",
    "trimmed",
]
