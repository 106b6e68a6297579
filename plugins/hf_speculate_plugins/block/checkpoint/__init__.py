"""Checkpoints of one-pass heads in every published layout: what they say, read, written, turned into one another.

Dialects differ in where the config says something and in what it then means; all of that ends here, in one
`BlockSpec`. No other room of this method opens a file.
"""

from .conversion import convert_head, describe_head
from .layouts import is_block_head
from .loading import LoadedHead, check_fits, load_head
from .saving import LayoutName, check_layout, default_layout, write_head


__all__ = [
    "LayoutName",
    "LoadedHead",
    "check_fits",
    "check_layout",
    "convert_head",
    "default_layout",
    "describe_head",
    "is_block_head",
    "load_head",
    "write_head",
]
