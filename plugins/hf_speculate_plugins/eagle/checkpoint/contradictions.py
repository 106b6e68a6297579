"""Sizes that the config of an EAGLE head states and its weights do not have: two files that do not belong together."""

from __future__ import annotations

from hf_speculate.errors import CheckpointError

from ...checkpoints import ConfigValues
from ..spec import EagleSpec


def check_stated_sizes(config: ConfigValues, layer_config: ConfigValues, spec: EagleSpec) -> None:
    """Compares what the config states with what the tensors said; what it leaves out is not compared.

    Args:
        config: the top level.
        layer_config: where the decoder layers are described.
        spec: read off the tensors.
    Raises:
        CheckpointError: a size that differs, with both numbers.
    """
    for values, key, found in (
        (layer_config, "hidden_size", spec.hidden_size),
        (layer_config, "intermediate_size", spec.intermediate_size),
        (layer_config, "vocab_size", spec.vocab_size),
        (config, "draft_vocab_size", spec.draft_vocab_size if spec.version == 3 else None),
        (config, "target_hidden_size", spec.target_hidden_size),
    ):
        if found is not None and key in values and (stated := values.size(key)) != found:
            raise CheckpointError(
                f"{config.where}: {key} in config.json is {stated}, that of the weights {found}: they do not belong "
                "together, or one of them was changed."
            )
