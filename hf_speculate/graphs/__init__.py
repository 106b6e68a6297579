"""Functions with static shapes: compiled, captured as CUDA graphs, or both; their tensors keep their addresses.

`GraphRunner` keeps a bounded number of graphs for each module and falls back to the plain call. `buffers` lends the
tensors to one request after another. `cuda_graphs` captures functions, with or without a compiler. `fused` replaces
small functions of a model by kernels while it is captured.
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
from .cuda_graphs import CudaGraphs as CudaGraphs
from .cuda_graphs import can_capture as can_capture
from .graph_runner import GraphRunner as GraphRunner
from .graph_runner import find_backend as find_backend
from .graph_runner import graph_runner_for as graph_runner_for
