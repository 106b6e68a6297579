"""Packed matrices on NVIDIA GPUs: their layout.

blocks     the contents of GGUF's blocks: codes, scales and offsets
planes     the layout in memory: tiles of 64 matrix rows, with a plane for each part of a weight
"""

from .planes import LAYOUTS as LAYOUTS
from .planes import TILE_ROWS as TILE_ROWS
from .planes import pack as pack
from .planes import tile_bytes as tile_bytes
from .planes import unpack as unpack
