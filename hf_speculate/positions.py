"""What a model makes of positions: how deep a draft may go before a forward would differ from one-token forwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel


def takes_position_ids(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def has_length_dependent_rope(config: PreTrainedConfig) -> bool:
    """Whether the forward depends on its longest position (RoPE types `dynamic` and `longrope`)."""
    return any(p.get("rope_type") in ("dynamic", "longrope") for p in _rope_parameters(config))


def depth_limit(config: PreTrainedConfig, root_position: int) -> int | None:
    """How deep a tree may go so that every position is one that the model knows, and its longest leaves RoPE as a
    one-token forward would have it.

    Args:
        root_position: the largest position of a root in the batch.
    Returns:
        The depth (0: no draft), or None for no limit.
    """
    limits = []
    if (size := num_positions(config)) is not None:
        limits.append(max(size - 1 - root_position, 0))
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == "dynamic":
            limits.append(max(config.get_text_config(decoder=True).max_position_embeddings - 1 - root_position, 0))
        elif parameters.get("rope_type") == "longrope":
            last_short = parameters["original_max_position_embeddings"] - 1
            if root_position <= last_short:
                limits.append(last_short - root_position)
    return min(limits, default=None)


def longrope_switch(config: PreTrainedConfig) -> int | None:
    """Positions up to which RoPE of type `longrope` takes its short factors; None for other types."""
    of_type = (p for p in _rope_parameters(config) if p.get("rope_type") == "longrope")
    return next((p["original_max_position_embeddings"] for p in of_type), None)


def num_positions(config: PreTrainedConfig) -> int | None:
    """Positions that a model without RoPE has in its table, learned or computed; None: any (RoPE), or not known.

    A text may end before its table does though it was allowed more tokens than that: a draft must not look up what
    plain `generate` would not have come to.
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
