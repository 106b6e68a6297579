"""Attention over draft trees: which entries each node sees, and how that is computed.

`AttentionMetadata` says it for a forward of any model or head, `CapturedMetadata` for captured ones. `grouped` is the
attention of most forwards, `tree_kernel` that of captured ones on a GPU, `per_node` that of exact ones. The last two
learn by `in_progress` what nodes see.
"""

from .backends import backends_in_use as backends_in_use
from .backends import tree_backends as tree_backends
from .captured import CapturedMetadata as CapturedMetadata
from .captured import text_entries as text_entries
from .grouped import Mask as Mask
from .grouped import MaskForm as MaskForm
from .grouped import TreeAttention as TreeAttention
from .grouped import fold as fold
from .grouped import grouped_sdpa as grouped_sdpa
from .grouped import kernel_fits as kernel_fits
from .grouped import uninstall_attention as uninstall_attention
from .metadata import AttentionMetadata as AttentionMetadata
from .metadata import TreeMask as TreeMask
from .per_node import PerNodeAttention as PerNodeAttention
from .per_node import Sizes as Sizes
from .per_node import attending_per_node as attending_per_node
from .per_node import depth_first as depth_first
from .prefix import PromptRows as PromptRows
from .prefix import prefix_mask as prefix_mask
from .prefix import prompt_starts as prompt_starts
from .tree_kernel import DeviceTree as DeviceTree
from .tree_kernel import tree_attention as tree_attention
