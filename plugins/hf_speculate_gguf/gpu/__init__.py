"""Packed matrices on NVIDIA GPUs: their layout, and products with few rows by Triton kernels.

blocks     the contents of GGUF's blocks: codes, scales and offsets
planes     the layout in memory: tiles of 64 matrix rows, with a plane for each part of a weight
products   the kernels

`native.backends` makes a backend of it. Nothing here was measured on a GPU yet.
"""

from .planes import LAYOUTS as LAYOUTS
from .planes import TILE_ROWS as TILE_ROWS
from .planes import pack as pack
from .planes import tile_bytes as tile_bytes
from .planes import unpack as unpack
from .products import MAX_ROWS as MAX_ROWS
from .products import multiply as multiply
from .products import problem as problem
