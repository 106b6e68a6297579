"""Dynamic draft trees, for every method that drafts one.

They are grown level by level where the drafter is sure; where all levels are scored at once, the best tree is found.
Nothing here knows what scores the tokens.
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


__all__ = [
    "Frontier",
    "Shares",
    "best_tree",
    "grow_tree",
    "log_shares",
    "num_candidates",
    "slot_scores",
    "slot_shares",
    "trimmed",
]
