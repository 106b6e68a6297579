"""Draft layers that a target brings along in its own checkpoint: multi-token prediction (MTP).

`layouts` knows how families name these layers, `source` finds and reads them, `head` computes them. They draft like an
EAGLE head: with trees where the target takes trees, with chains on hybrids.
"""

from .drafter import MtpDrafter as MtpDrafter
from .head import MtpHead as MtpHead
from .head import MtpSpec as MtpSpec
from .layouts import LAYOUTS as LAYOUTS
from .layouts import Layout as Layout
from .layouts import is_draft_layer as is_draft_layer
from .layouts import layout_of as layout_of
from .source import Source as Source
