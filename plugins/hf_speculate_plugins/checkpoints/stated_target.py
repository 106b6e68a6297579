"""What the config of a head says of the target that it was made for, compared with the one that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.errors import TargetMismatchError
from hf_speculate.hub import check_stated_name

from .config import ConfigValues


def check_stated_target(folder: str, config: Mapping[str, Any], target: PreTrainedModel) -> None:
    """Compares depth, name and class: `num_target_layers` (SpecForge, DeepSpec), `base_model_name_or_path` (Medusa) and
    `verifier` (speculators). Another name or class is logged, once.

    Raises:
        TargetMismatchError: a target of another depth.
        CheckpointError: values of these keys that are not of their types.
    """
    values = ConfigValues(folder, config)
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    if "num_target_layers" in values and (stated := values.size("num_target_layers")) != depth:
        raise TargetMismatchError(
            f"the head {folder} was made for a target of {stated} layers (num_target_layers in config.json), but this "
            f"{type(target).__name__} has {depth}."
        )
    verifier = values.inner("speculators_config").inner("verifier")
    name = verifier.text("name_or_path") or values.text("base_model_name_or_path")
    check_stated_name(folder, name, verifier.texts("architectures"), target)
