"""The entries that each layer type of a model sees, from its config: everything, a window, or a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import CacheStateError
from .models import GenerativeModel


@dataclass(frozen=True)
class LayerType:
    """Layers that share an attention mask.

    Attributes:
        name: layer type in the config. A model with several types finds its mask by this name.
        layer_index: index of one of the layers.
        window: number of entries that a token sees, itself included; None for all.
        is_chunked: whether windows lie side by side from the first real token on, instead of moving with the token.
    """

    name: str
    layer_index: int
    window: int | None = None
    is_chunked: bool = False

    def hides_any(self, length: int) -> bool:
        """Whether some entries of a text of `length` entries may be out of sight."""
        return self.window is not None and length > self.window

    def too_far(self, seen: Tensor, seeing: Tensor, num_padding: Tensor) -> Tensor:
        """A mask of the entries that are out of a token's sight.

        Args:
            seen: int64 [R, M], index of each entry in its row's text, left padding counted (as in stock).
            seeing: int64 [R, N], index of each token that looks at them.
            num_padding: int64 [R, 1], number of left padding entries.

        Returns:
            bool [R, N, M].
        """
        assert self.window is not None
        if self.is_chunked:
            return ((seen - num_padding) // self.window)[:, None] != ((seeing - num_padding) // self.window)[..., None]
        return seen[:, None] <= seeing[..., None] - self.window


def layer_types(config: PreTrainedConfig) -> tuple[LayerType, ...]:
    """The layer types of a decoder, in the order of their first layer. A single type has the name "" and a plain mask.

    Raises:
        CacheStateError: layers differ in a way that one mask for each layer type cannot express.
    """
    decoder = config.get_text_config(decoder=True)
    types: dict[str, LayerType] = {}
    for found in (layer for layer, has_entries in _layers(decoder) if has_entries):
        known = types.setdefault(found.name, found)
        if known.window != found.window:
            raise CacheStateError(
                f"layers {known.layer_index} and {found.layer_index} are both {found.name!r}, with windows of "
                f"{known.window} and {found.window}: a model takes one mask for each layer type."
            )
    if len(types) > 1 and getattr(decoder, "layer_types", None) is None:
        raise CacheStateError(f"layers of types {sorted(types)} without `layer_types` in the config.")
    if len(types) == 1:
        (only,) = types.values()
        return (LayerType("", only.layer_index, only.window, only.is_chunked),)
    return tuple(types.values())


# Types of layers with a window, and where a config has its size.
_BY_FIELD = ("sliding_attention", "chunked_attention")  # where the config names no types
_SLIDING = ("sliding_attention", "hybrid_sliding", "reference_sliding_attention")
_WINDOWS = {"chunked_attention": "attention_chunk_size", **dict.fromkeys(_SLIDING, "sliding_window")}


def _layers(decoder: PreTrainedConfig) -> Iterator[tuple[LayerType, bool]]:
    """Each layer of a decoder, and whether the cache holds entries of its own for it.

    A layer without entries has no attention, or it uses the entries of another layer, and that layer's mask.
    """
    configs: Sequence[Any] = getattr(decoder, "per_layer_config", None) or [decoder] * decoder.num_hidden_layers
    names: Sequence[str] = getattr(decoder, "layer_types", None) or [
        next((name for name in _BY_FIELD if getattr(config, _WINDOWS[name], None) is not None), "full_attention")
        for config in configs
    ]
    num_sharing = getattr(decoder, "num_kv_shared_layers", None) or 0
    by_number = [None] * (len(names) - num_sharing) + ["reuse"] * num_sharing
    sharing = getattr(decoder, "kv_sharing_modes", None) or by_number
    for index, (name, config, mode) in enumerate(zip(names, configs, sharing, strict=True)):
        window = getattr(config, _WINDOWS[name]) if name in _WINDOWS else None
        layer = LayerType(name, index, window, is_chunked=name == "chunked_attention")
        yield layer, mode != "reuse" and name not in ("moe", "mlp")


_known_types: WeakKeyDictionary[GenerativeModel, tuple[dict[str, Any], tuple[LayerType, ...]]] = WeakKeyDictionary()


def layer_types_of(model: GenerativeModel) -> tuple[LayerType, ...]:
    """`layer_types` of a model's config, cached until a value of the config changes."""
    values = vars(model.config.get_text_config(decoder=True))
    known = _known_types.get(model)
    if known is None or known[0] != values:
        known = _known_types[model] = deepcopy(values), layer_types(model.config)
    return known[1]


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Number of entries that a token sees in every layer of a decoder, itself included; None for all."""
    decoder = config.get_text_config(decoder=True)
    layers = list(_layers(decoder))
    of_type = {layers[kind.layer_index][0].name: kind.window for kind in layer_types(config)}
    return [layer.window if has_entries else of_type.get(layer.name) for layer, has_entries in layers]
