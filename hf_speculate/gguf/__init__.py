"""GGUF files as targets whose weights stay packed: `hf_speculate.load_gguf(path)`.

reading    the header, every length checked against the size of the file
formats    what the bytes of a block mean: integers, scale and offset per group
metadata   its values by type, and what they say of the vocabulary
tokenizer  the tokenizer in the file
model      which model the file holds: configuration, names, shapes
native     compiles and calls `kernel/`, C++ for CPUs (kept and checked by kernel_cache)
backends   where products with packed matrices are computed
modules    packed linear layers, fused projections, embeddings
forwards   whole models in one native call (native_step), for few rows (native_rows), into transformers' caches
           (native_caches); fused: their layers (decoder_layers, layer_parts, native_layers) one by one; with weights
           where they lie (native_weights), in large_pages; angles of positions
native_ranking, native_growth  what a head proposes, and trees of it, for drafters; native_draft: in one call
rounded    matrices in 8 bits for what drafts, and the layers that answer by them (rounded_layers)
shards     which file on the disk or the Hub, and models in several
loading    builds the model, and reports on its packed weights
"""

from .angles import FIXED_ROPE as FIXED_ROPE
from .angles import AngleTable as AngleTable
from .backends import BACKENDS as BACKENDS
from .forwards import fuse as fuse
from .layer_parts import LayerParts as LayerParts
from .loading import PackingReport as PackingReport
from .loading import load_gguf as load_gguf
from .loading import load_model as load_model
from .loading import packing_report as packing_report
from .loading import read_tokenizer as read_tokenizer
from .model import plan_model as plan_model
from .modules import PackedMatrix as PackedMatrix
from .native import has_kernel as has_kernel
from .native_draft import NativeDraft as NativeDraft
from .native_draft import Unread as Unread
from .native_growth import NativeGrowth as NativeGrowth
from .native_layers import NativeLayers as NativeLayers
from .native_ranking import NativeRanking as NativeRanking
from .native_ranking import Sampling as Sampling
from .native_rows import TreeRows as TreeRows
from .native_rows import new_rows as new_rows
from .native_rows import served as served
from .native_rows import tree_rows as tree_rows
from .native_weights import WeightsInPlace as WeightsInPlace
from .rounded_layers import RoundedLinear as RoundedLinear
from .rounded_layers import quicken as quicken
from .shards import find_file as find_file
from .shards import read_model_file as read_model_file
