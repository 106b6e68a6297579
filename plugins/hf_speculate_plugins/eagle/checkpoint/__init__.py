"""Checkpoints of EAGLE heads in every published layout: what they say, read, written, turned into one another.

Dialects differ in names, in how they count layers and in what a flag means; all of that ends here, in one `EagleSpec`.
A layout that cannot say what a head computes is refused. No other room of this method opens a file.
"""

from .conversion import convert_head, describe_head
from .layouts import eagle_version
from .loading import LoadedHead, check_fits, load_head
from .saving import LayoutName, check_layout, write_head


__all__ = [
    "LayoutName",
    "LoadedHead",
    "check_fits",
    "check_layout",
    "convert_head",
    "describe_head",
    "eagle_version",
    "load_head",
    "write_head",
]
