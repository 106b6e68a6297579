"""Files of heads and of their targets: found, read safely, and written whole.

A folder becomes a config and named tensors. A method that takes tensors keeps an account of every key, so that none is
dropped or left at its initial value in silence. Nothing here knows a method; `llamacpp` knows the names in GGUF files.
"""

from .accounting import KeyAccount, LoadReport, num_indexed
from .config import GGUF_ARCHITECTURE, GGUF_FILE, GGUF_ROPE, ConfigValues, mask_token_of
from .decoder_config import (
    HeadFacts,
    HeadSpec,
    Shapes,
    check_stated_size,
    check_stated_target,
    facts_of_target,
    speculators_section,
    stated_name,
    stated_sizes,
)
from .files import (
    Checkpoint,
    checkpoint_files,
    listed,
    read_checkpoint,
    read_config,
    tensor_shapes,
    write_checkpoint,
)
from .layer_config import rope_of, speculators_version, windows_of
from .sharing import (
    OpenedHead,
    draft_vocabulary,
    is_copy,
    shared_embeddings,
    shared_output,
    target_needed,
    vocabulary_output,
    vocabulary_tensors,
    were_trained,
)
from .target_files import LoadedTarget, TargetFiles


__all__ = [
    "GGUF_ARCHITECTURE",
    "GGUF_FILE",
    "GGUF_ROPE",
    "Checkpoint",
    "ConfigValues",
    "HeadFacts",
    "HeadSpec",
    "KeyAccount",
    "LoadReport",
    "LoadedTarget",
    "OpenedHead",
    "Shapes",
    "TargetFiles",
    "check_stated_size",
    "check_stated_target",
    "checkpoint_files",
    "draft_vocabulary",
    "facts_of_target",
    "is_copy",
    "listed",
    "mask_token_of",
    "num_indexed",
    "read_checkpoint",
    "read_config",
    "rope_of",
    "shared_embeddings",
    "shared_output",
    "speculators_section",
    "speculators_version",
    "stated_name",
    "stated_sizes",
    "target_needed",
    "tensor_shapes",
    "vocabulary_output",
    "vocabulary_tensors",
    "were_trained",
    "windows_of",
    "write_checkpoint",
]
