"""Checkpoints of Medusa heads in every published layout: recognised, read, written, turned into one another.

What there is is read off the tensors, as published configs say little and some of it wrong. Medusa-2 files hold the
backbone too, which is compared with the target. No other room of this method opens a file.
"""

from .backbone import check_backbone
from .conversion import convert_heads, describe_heads
from .layouts import LayoutName, holds_heads
from .loading import MedusaCheckpoint, read_heads
from .saving import check_layout, write_heads


__all__ = [
    "LayoutName",
    "MedusaCheckpoint",
    "check_backbone",
    "check_layout",
    "convert_heads",
    "describe_heads",
    "holds_heads",
    "read_heads",
    "write_heads",
]
