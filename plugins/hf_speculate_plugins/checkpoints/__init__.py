"""Files of heads and of their targets: which ones there are, read safely, written whole.

A folder becomes a config and named tensors; a method that takes what it knows keeps an account of every key, so that
none is dropped or left at its initial value in silence. Nothing here knows a method.
"""

from .accounting import KeyAccount, LoadReport, num_indexed
from .config import ConfigValues
from .reading import Checkpoint, read_checkpoint, read_config, tensor_shapes
from .stated_target import check_stated_target
from .target_files import TargetFiles
from .weight_files import WEIGHT_TYPES, listed, write_checkpoint


__all__ = [
    "WEIGHT_TYPES",
    "Checkpoint",
    "ConfigValues",
    "KeyAccount",
    "LoadReport",
    "TargetFiles",
    "check_stated_target",
    "listed",
    "num_indexed",
    "read_checkpoint",
    "read_config",
    "tensor_shapes",
    "write_checkpoint",
]
