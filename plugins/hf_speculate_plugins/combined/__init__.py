"""Several drafters in one tree: `speculator="examples/pycoder-eagle3+prompt_lookup"`.

A head is right more often, a lookup costs nothing and goes deeper where the text repeats itself. Every part drafts its
own tree, the trees are merged, and the nodes are ordered by how often such a node was accepted. Every part drafts as
deep as pays beside the drafts of the cheaper ones, or not at all; now and then all draft all they can.
"""

from .drafter import CombinedDrafter
from .options import CombinedOptions


__all__ = ["CombinedDrafter", "CombinedOptions"]
