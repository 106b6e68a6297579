"""The native kernel for CPUs: C++ in `kernel/`, compiled at first use, and what computes with it.

binding    compiles and calls `kernel/` (kept and checked by kernel_cache)
formats    the bytes of a block: integers, scale and offset per group
backends   products with packed matrices, computed by the kernel or by torch
modules    packed linear layers, fused projections, embeddings
rounded    matrices in 8 bits for what drafts, and the layers that answer by them
forwards   whole models in one native call (step), for few rows (rows), into transformers' caches (caches); fused: their
           layers (layer_parts, layers) one by one; with weights where they lie (weights), in large_pages; angles of
           positions
ranking, growth  the proposals of a head, and trees of them, for drafters; draft: in one call
"""

from .angles import FIXED_ROPE as FIXED_ROPE
from .angles import AngleTable as AngleTable
from .backends import BACKENDS as BACKENDS
from .backends import Backend as Backend
from .backends import DequantizeBackend as DequantizeBackend
from .backends import NativeBackend as NativeBackend
from .backends import choose_backend as choose_backend
from .binding import has_kernel as has_kernel
from .draft import NativeDraft as NativeDraft
from .draft import Unread as Unread
from .formats import DENSE_TYPES as DENSE_TYPES
from .formats import FORMATS as FORMATS
from .formats import dense_values as dense_values
from .forwards import fuse as fuse
from .growth import NativeGrowth as NativeGrowth
from .large_pages import together as together
from .layer_parts import LayerParts as LayerParts
from .layers import NativeLayers as NativeLayers
from .modules import FusedLinear as FusedLinear
from .modules import PackedEmbedding as PackedEmbedding
from .modules import PackedLinear as PackedLinear
from .modules import PackedMatrix as PackedMatrix
from .modules import Projection as Projection
from .ranking import NativeRanking as NativeRanking
from .ranking import Sampling as Sampling
from .rounded_layers import RoundedLinear as RoundedLinear
from .rounded_layers import quicken as quicken
from .rows import TreeRows as TreeRows
from .rows import new_rows as new_rows
from .rows import served as served
from .rows import tree_rows as tree_rows
from .weights import WeightsInPlace as WeightsInPlace
