"""Files of heads and of their targets: which ones there are, read safely, written whole.

A folder becomes a config and named tensors; a method that takes what it knows keeps an account of every key, so that none
is dropped or left at its initial value in silence. Nothing here knows a method.
"""

from .reading import Checkpoint, KeyAccount, LoadReport, num_indexed, read_checkpoint, read_config, tensor_shapes


__all__ = [
    "Checkpoint",
    "KeyAccount",
    "LoadReport",
    "num_indexed",
    "read_checkpoint",
    "read_config",
    "tensor_shapes",
]
