"""Whether a target is the model that Medusa-2 heads were trained with.

Medusa-2 trains the backbone together with the heads (arXiv:2401.10774, section 2.2.2) and publishes both in one
checkpoint. On the model that it started from, such heads load and draft badly, with nothing to see.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.errors import TargetMismatchError
from hf_speculate.messages import get_logger


logger = get_logger(__name__)

# Relative (Frobenius). A cast fp16 -> bf16 -> fp32 differs by 0.2 %; merged fine-tunes differ by more than this.
_TOLERANCE = 0.01


def check_backbone(target: PreTrainedModel, backbone: Mapping[str, Tensor], folder: str) -> None:
    """Compares a few of the checkpoint's backbone weights with the target's.

    Raises:
        TargetMismatchError: the target has other weights. Targets whose weights cannot be compared (quantised) pass,
            with a warning.
    """
    compared = 0
    for name, theirs in backbone.items():
        ours = _find_parameter(target, name)
        if ours is None or not ours.is_floating_point() or ours.device.type == "meta":
            continue
        if ours.shape != theirs.shape:
            raise TargetMismatchError(
                f"{folder} holds Medusa-2 heads and the backbone they were trained with; its {name} has shape "
                f"{tuple(theirs.shape)}, the target's {tuple(ours.shape)}. Load the target from that checkpoint."
            )
        ours, theirs = (tensor.detach().to("cpu", torch.float32) for tensor in (ours, theirs))
        difference = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        if difference > _TOLERANCE:
            raise TargetMismatchError(
                f"{folder} holds Medusa-2 heads and the backbone they were trained with, and the target is another "
                f"model: {name} differs by {difference:.1%}. Load the target from that checkpoint, or pass "
                "check_backbone=False if the target is a quantised copy of it."
            )
        compared += 1
    if backbone and not compared:
        logger.warning_once(
            f"{folder} holds Medusa-2 heads; whether the target is the model they were trained with could not be "
            "checked, as its weights are quantised or named differently."
        )


def _find_parameter(target: PreTrainedModel, name: str) -> Tensor | None:
    """The target's parameter, also where an adapter has been put around its layer."""
    module, _, leaf = name.rpartition(".")
    for candidate in (name, f"{module}.base_layer.{leaf}"):
        try:
            return target.get_parameter(candidate)
        except AttributeError:
            continue
    return None
