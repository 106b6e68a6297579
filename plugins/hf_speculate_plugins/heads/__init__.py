"""What heads of decoder layers share, whatever they draft: layers, RoPE, attention over a cache, what one has read.

Nothing here knows a method or a file.
"""

from .attention import CachedAttention
from .layers import MLP, LayerSpec, call_beside, rotary_embedding, sample_angles
from .reading import Place, Reading, ReadingHead


__all__ = [
    "MLP",
    "CachedAttention",
    "LayerSpec",
    "Place",
    "Reading",
    "ReadingHead",
    "call_beside",
    "rotary_embedding",
    "sample_angles",
]
