"""What the config of a head says of its target: compared with the one that it is given, and handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.errors import TargetMismatchError
from hf_speculate.hub import check_stated_name

from .config import ConfigValues
from .target_files import TargetFiles


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
    check_stated_name(folder, stated_name(values), _verifier(values).texts("architectures"), target)


def stated_name(values: ConfigValues) -> str | None:
    """Hub id or path of the target, as far as the config says it."""
    return _verifier(values).text("name_or_path") or values.text("base_model_name_or_path")


def facts_of_target(values: ConfigValues, target: TargetFiles | None) -> dict[str, Any]:
    """`target_name`, `target_architectures` and `num_target_layers` for another file of the same head: of the target's
    files, else as far as the config says."""
    if target is not None:
        depth = target.text_config.num_hidden_layers
        return {"target_name": target.name, "target_architectures": target.architectures, "num_target_layers": depth}
    return {
        "target_name": stated_name(values),
        "target_architectures": _verifier(values).texts("architectures"),
        "num_target_layers": values.size("num_target_layers") if "num_target_layers" in values else None,
    }


def speculators_section(
    algorithm: str, num_tokens: int, target_name: str | None, target_architectures: list[str] | None
) -> dict[str, Any]:
    """`speculators_config` of vllm-project/speculators."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target_name, "architectures": target_architectures or []},
    }


def _verifier(values: ConfigValues) -> ConfigValues:
    return values.inner("speculators_config").inner("verifier")
