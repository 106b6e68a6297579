"""Forwards with static shapes: compiled, recorded as CUDA graphs, or both; their tensors keep their addresses.

`Compiler` keeps a bounded number of graphs for each module and falls back to the plain call. `buffers` lends the
tensors to one request after another. `recording` makes CUDA graphs of functions, with or without a compiler.
"""

from .buffers import Buffers as Buffers
from .buffers import PromptMasks as PromptMasks
from .buffers import SetKey as SetKey
from .buffers import Stacks as Stacks
from .buffers import capacity_for as capacity_for
from .buffers import lease_of as lease_of
from .buffers import padded as padded
from .buffers import padded_mask as padded_mask
from .buffers import pool_of as pool_of
from .buffers import static_cache as static_cache
from .graphs import Compiler as Compiler
from .graphs import compiler_of as compiler_of
from .graphs import find_backend as find_backend
from .layer_kernels import check_operands as check_operands
from .layer_kernels import has_triton as has_triton
from .layer_kernels import is_interpreting as is_interpreting
from .layer_kernels import power_of_two as power_of_two
from .recording import Recordings as Recordings
from .recording import is_recordable as is_recordable
