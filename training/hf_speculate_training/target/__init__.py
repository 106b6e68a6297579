"""The target of a run: which one, loaded, with its tokenizer.

A `TargetSection` names a model in any of the forms that can be drafted for: a folder or Hub id, quantised or not, a
GGUF file, with a PEFT adapter. It is loaded frozen, in `eval()` mode; its layers can be shared out among processes.
"""

from .loading import load_config, load_target, load_tokenizer
from .options import DtypeName, QuantizationName, TargetSection
from .sharding import check_sharding, in_turn, is_sharded, mesh_of_processes, shard_layers


__all__ = [
    "DtypeName",
    "QuantizationName",
    "TargetSection",
    "check_sharding",
    "in_turn",
    "is_sharded",
    "load_config",
    "load_target",
    "load_tokenizer",
    "mesh_of_processes",
    "shard_layers",
]
