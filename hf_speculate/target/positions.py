"""Limits that positions set to drafts: the depth at which a forward would begin to differ from one-token forwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig

from .models import GenerativeModel


# Keyed by the forward function, as other code may replace it.
_takes_position_ids: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def takes_position_ids(model: GenerativeModel) -> bool:
    function = getattr(model.forward, "__func__", model.forward)
    if function not in _takes_position_ids:
        _takes_position_ids[function] = "position_ids" in inspect.signature(model.forward).parameters
    return _takes_position_ids[function]


def has_length_dependent_rope(config: PreTrainedConfig) -> bool:
    """Whether the forward depends on its longest position (RoPE types `dynamic` and `longrope`)."""
    return any(p.get("rope_type") in ("dynamic", "longrope") for p in _rope_parameters(config))


class DepthLimit:
    """The depth to which trees may go.

    Every position must be known to the model, and the longest one must leave RoPE as in a one-token forward.

    Args:
        config: config of the model, read once: reading it takes longer than a round may.
    """

    def __init__(self, config: PreTrainedConfig):
        self._num_positions = num_positions(config)
        self._switch = longrope_switch(config)
        types = [p.get("rope_type") for p in _rope_parameters(config)]
        if "dynamic" in types:  # treated as a table: beyond it every length has its own RoPE
            self._num_positions = config.get_text_config(decoder=True).max_position_embeddings

    @property
    def is_any(self) -> bool:
        """Whether any limit exists."""
        return self._num_positions is not None or self._switch is not None

    def __call__(self, root_positions: Iterable[int]) -> int | None:
        """The largest depth (0: no draft); None for no limit.

        Args:
            root_positions: position ids of the roots, in one batch.
        """
        limits = []
        for position in root_positions:
            if self._num_positions is not None:
                limits.append(max(self._num_positions - 1 - position, 0))
            if self._switch is not None and position < self._switch:
                limits.append(self._switch - 1 - position)
        return min(limits, default=None)


def longrope_switch(config: PreTrainedConfig) -> int | None:
    """Number of positions for which RoPE of type `longrope` uses its short factors; None for other types."""
    of_type = (p for p in _rope_parameters(config) if p.get("rope_type") == "longrope")
    return next((p["original_max_position_embeddings"] for p in of_type), None)


def num_positions(config: PreTrainedConfig) -> int | None:
    """Number of positions in the table of a model without RoPE; None for RoPE, or if unknown.

    A text may end before the table does although it was allowed more tokens. A draft must not look up positions that
    plain `generate` would never reach.
    """
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "rope_parameters", None):
        return None
    sizes = (getattr(decoder, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict]:
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
