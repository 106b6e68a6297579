"""How draft trees are shaped, for every method that drafts one.

Static trees have a structure that is fixed beforehand, a list of choices; dynamic trees are grown level by level where
the drafter is sure. Nothing here knows what scores the tokens.
"""

from .dynamic import Frontier, grow_tree, log_shares, num_candidates
from .static import Choices, StaticTree, canonical, path_sums


__all__ = ["Choices", "Frontier", "StaticTree", "canonical", "grow_tree", "log_shares", "num_candidates", "path_sums"]
