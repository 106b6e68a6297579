"""The target of a run: which one, loaded, with its tokenizer.

A `TargetSection` names a model in any of the forms that can be drafted for: a folder or Hub id, quantised or not, a
GGUF file, with a PEFT adapter. It is loaded frozen, in `eval()` mode, and nothing here changes it afterwards.
"""

from .loading import load_config, load_target, load_tokenizer
from .options import DtypeName, QuantizationName, TargetSection


__all__ = ["DtypeName", "QuantizationName", "TargetSection", "load_config", "load_target", "load_tokenizer"]
