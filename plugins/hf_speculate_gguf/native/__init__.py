"""The native kernel for CPUs: C++ in `kernel/`, compiled at first use, and the Python modules that use it.

binding        compiles, loads and calls the kernel; kernel_cache keeps compiled libraries
formats        block formats of packed weights: integers, with a scale and an offset for each group
backends       matrix products with packed weights, by the kernel, by torch or by Triton kernels (`gpu`)
modules        packed linear layers, fused projections and embeddings
quantized      8-bit matrices for drafting; quantized_layers: the layers that use them
forwards       `forward` of packed models: by their native runner (runner), or by the modules if it refuses (refusals)
step           whole models in one native call, with transformers' caches (caches) and inputs (inputs); thread_pool
layers         decoder layers for the kernel (layer_parts), and their rows; snapshot: changes of their modules
weights        addresses of the weights; large_pages: their memory
hybrid         delta nets and attention of hybrids, between projections that modules compute
draft          whole drafts of a head in one native call; ranking and growth: its parts
"""

from .backends import Backend as Backend
from .backends import DequantizeBackend as DequantizeBackend
from .backends import NativeBackend as NativeBackend
from .backends import choose_backend as choose_backend
from .binding import DENSE_KINDS as DENSE_KINDS
from .binding import has_kernel as has_kernel
from .binding import needs_compiler as needs_compiler
from .draft import NativeDraft as NativeDraft
from .draft import PendingEntries as PendingEntries
from .formats import DENSE_TYPES as DENSE_TYPES
from .formats import FORMATS as FORMATS
from .formats import dense_values as dense_values
from .forwards import fuse as fuse
from .growth import NativeGrowth as NativeGrowth
from .hybrid import run_hybrid_layers as run_hybrid_layers
from .large_pages import together as together
from .layer_parts import LayerParts as LayerParts
from .layers import NativeLayers as NativeLayers
from .modules import FusedLinear as FusedLinear
from .modules import PackedEmbedding as PackedEmbedding
from .modules import PackedLinear as PackedLinear
from .modules import PackedMatrix as PackedMatrix
from .modules import Projection as Projection
from .modules import ReorderedLinear as ReorderedLinear
from .modules import ScaledEmbedding as ScaledEmbedding
from .quantized_layers import QuantizedLinear as QuantizedLinear
from .quantized_layers import quantize_for_drafting as quantize_for_drafting
from .ranking import NativeRanking as NativeRanking
from .ranking import Sampling as Sampling
from .refusals import NO_KERNEL as NO_KERNEL
from .refusals import Refused as Refused
from .rows import new_rows as new_rows
from .rows import tree_rows as tree_rows
from .step import FIXED_ROPE as FIXED_ROPE
from .step import AngleTable as AngleTable
from .weights import WeightsInPlace as WeightsInPlace
