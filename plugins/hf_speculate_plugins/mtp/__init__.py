"""Draft layers in a target's own checkpoint: multi-token prediction (MTP).

`layouts` knows how families name these layers, `source` finds and reads them, `head` computes them, and `saving` keeps
them when a model is saved. They draft like an EAGLE head: with trees where the target takes trees, else with chains.
"""

from .drafter import MtpDrafter as MtpDrafter
from .drafter import MtpOptions as MtpOptions
from .head import MtpHead as MtpHead
from .head import MtpSpec as MtpSpec
from .head import load_head as load_head
from .head import new_head as new_head
from .layouts import LAYOUTS as LAYOUTS
from .layouts import Layout as Layout
from .layouts import layout_of as layout_of
from .saving import keep as keep
from .saving import save_pretrained as save_pretrained
from .source import Source as Source
from .source import num_layers_of as num_layers_of
from .source import text_config as text_config
