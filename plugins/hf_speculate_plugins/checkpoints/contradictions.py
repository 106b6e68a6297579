"""What a head cannot be: weights of other dimensions, and a config that states other sizes than they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hf_speculate.errors import CheckpointError

from .config import ConfigValues
from .sharing import HeadSizes


_DIMENSIONS = {
    "fc.weight": 2,
    "embed_tokens.weight": 2,
    "lm_head.weight": 2,
    "layers.0.self_attn.k_proj.weight": 2,
    "layers.0.self_attn.q_norm.weight": 1,
    "layers.0.mlp.gate_proj.weight": 2,
    "d2t": 1,
    "t2d": 1,
}


class StatedSizes(HeadSizes, Protocol):
    """Sizes that configs state, too."""

    @property
    def intermediate_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...


def check_dimensions(folder: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `CheckpointError` where the sizes of tensors say what the head is; others are compared with these."""
    for name, shape in shapes.items():
        wanted = _DIMENSIONS.get(name, len(shape))
        if len(shape) != wanted:
            raise CheckpointError(f"{folder}: {name} has shape {shape}, expected {wanted} dimensions.")


def check_stated_sizes(
    config: ConfigValues, layer_config: ConfigValues, spec: StatedSizes, *, drafts_all: bool = False
) -> None:
    """Compares what the config states with what the tensors said; what it leaves out is not compared.

    Args:
        config: the top level.
        layer_config: where the decoder layers are described.
        spec: read off the tensors.
        drafts_all: whether such heads draft the whole vocabulary, whatever the config says of it.
    Raises:
        CheckpointError: a size that differs, with both numbers.
    """
    for values, key, found in (
        (layer_config, "hidden_size", spec.hidden_size),
        (layer_config, "intermediate_size", spec.intermediate_size),
        (layer_config, "vocab_size", spec.vocab_size),
        (config, "draft_vocab_size", None if drafts_all else spec.draft_vocab_size),
        (config, "target_hidden_size", spec.target_hidden_size),
    ):
        if found is not None and key in values and (stated := values.size(key)) != found:
            raise CheckpointError(
                f"{config.where}: {key} in config.json is {stated}, that of the weights {found}: they do not belong "
                "together, or one of them was changed."
            )
