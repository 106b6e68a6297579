"""A smaller causal LM of the same vocabulary as the drafter (arXiv:2211.17192, arXiv:2302.01318).

It drafts chains, or dynamic trees as EAGLE-2 grows them. Any causal LM in a folder that is not a head of another method
is recognised as one.
"""

from .drafter import DraftModelDrafter as DraftModelDrafter
from .options import DraftModelOptions as DraftModelOptions
