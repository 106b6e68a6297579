"""Compilation of forwards with static shapes: functions become graphs, and their tensors keep their addresses.

`Compiler` keeps a bounded number of graphs for each module and falls back to the plain call. `buffers` lends the
tensors to one request after another. On GPUs graphs are recorded as CUDA graphs.
"""

from .buffers import Buffers as Buffers
from .buffers import SetKey as SetKey
from .buffers import StaticLayer as StaticLayer
from .buffers import capacity_for as capacity_for
from .buffers import lease_of as lease_of
from .buffers import padded as padded
from .buffers import padded_mask as padded_mask
from .buffers import pool_of as pool_of
from .capture import Recorder as Recorder
from .graphs import Compiler as Compiler
from .graphs import find_backend as find_backend
