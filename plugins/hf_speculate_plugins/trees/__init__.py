"""Shapes of draft trees, for every method that drafts one.

Static trees have a structure that is fixed beforehand, a list of choices; dynamic trees are grown level by level where
the drafter is sure; where all levels are scored at once, the best tree is found. Nothing here knows what scores the
tokens.
"""

from .dynamic import (
    Frontier,
    Shares,
    best_tree,
    grow_tree,
    log_shares,
    num_candidates,
    slot_scores,
    slot_shares,
    trimmed,
)
from .static import Level, StaticTree, TreeChoices, canonical, forest_of, levels_of, path_sums


__all__ = [
    "Frontier",
    "Level",
    "Shares",
    "StaticTree",
    "TreeChoices",
    "best_tree",
    "canonical",
    "forest_of",
    "grow_tree",
    "levels_of",
    "log_shares",
    "num_candidates",
    "path_sums",
    "slot_scores",
    "slot_shares",
    "trimmed",
]
