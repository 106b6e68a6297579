"""A smaller causal LM as the drafter (arXiv:2211.17192, arXiv:2302.01318).

It drafts chains, or dynamic trees as EAGLE-2 grows them. Any causal LM in a folder that is not a head of another method
is recognised as one. A draft model of another vocabulary reads and writes text by its own tokenizer (`translation`) and
drafts chains.
"""

from .drafter import DraftModelDrafter as DraftModelDrafter
from .options import DraftModelOptions as DraftModelOptions
