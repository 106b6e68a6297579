"""Tells transformers that a model is quantised: it then refuses to save it, to train it and to compile it by itself."""

from __future__ import annotations

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import GgufConfig


class PackedGgufQuantizer(HfQuantizer):
    """Of models from `load_gguf`, which packs the weights itself; nothing here touches them."""

    requires_calibration = False

    def __init__(self):
        super().__init__(GgufConfig())

    def is_serializable(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_compileable(self) -> bool:
        return False
