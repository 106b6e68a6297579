"""Files of heads and of their targets: which ones there are, read safely, written whole.

A folder becomes a config and named tensors; a method that takes what it knows keeps an account of every key, so that
none is dropped or left at its initial value in silence. Nothing here knows a method.
"""

from .accounting import KeyAccount, LoadReport, num_indexed
from .config import ConfigValues, mask_token_of
from .contradictions import check_dimensions, check_stated_sizes
from .decoder_config import (
    Shapes,
    attention_sizes,
    layer_config_of,
    num_layers_of,
    rope_of,
    stated_sizes,
    windows_of,
)
from .reading import Checkpoint, read_checkpoint, read_config, tensor_shapes
from .sharing import HeadSizes, OpenedHead, is_copy, shared_embeddings, shared_output, vocabulary_output
from .stated_target import check_stated_target, facts_of_target, speculators_section, stated_name
from .switches import refuse_switches
from .target_files import LoadedTarget, TargetFiles
from .vocabulary import draft_vocabulary, vocabulary_tensors
from .weight_files import WEIGHT_TYPES, checkpoint_files, listed, write_checkpoint


__all__ = [
    "WEIGHT_TYPES",
    "Checkpoint",
    "ConfigValues",
    "HeadSizes",
    "KeyAccount",
    "LoadReport",
    "LoadedTarget",
    "OpenedHead",
    "Shapes",
    "TargetFiles",
    "attention_sizes",
    "check_dimensions",
    "check_stated_sizes",
    "check_stated_target",
    "checkpoint_files",
    "draft_vocabulary",
    "facts_of_target",
    "is_copy",
    "layer_config_of",
    "listed",
    "mask_token_of",
    "num_indexed",
    "num_layers_of",
    "read_checkpoint",
    "read_config",
    "refuse_switches",
    "rope_of",
    "shared_embeddings",
    "shared_output",
    "speculators_section",
    "stated_name",
    "stated_sizes",
    "tensor_shapes",
    "vocabulary_output",
    "vocabulary_tensors",
    "windows_of",
    "write_checkpoint",
]
