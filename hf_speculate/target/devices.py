"""The devices where the modules of a target compute, also under a `device_map` with offloading."""

from __future__ import annotations

import torch
from torch import nn

from .models import GenerativeModel, decoder_of


def execution_device(module: nn.Module) -> torch.device | None:
    """The device of a module's weights; for an offloaded module, the device to which accelerate's hook moves them.

    None if unknown.
    """
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type != "meta":
        return parameter.device
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for single in getattr(hook, "hooks", [hook]):
            device = getattr(single, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None


def weight_device(module: nn.Module | None, model: GenerativeModel) -> torch.device:
    """The device where `module` computes, or else that of `model`."""
    return (execution_device(module) if isinstance(module, nn.Module) else None) or model.device


def input_device(model: GenerativeModel) -> torch.device:
    """The device where a model takes its tokens. `model.device` is "meta" if the embeddings are offloaded."""
    return weight_device(model.get_input_embeddings(), model)


def last_device(model: GenerativeModel) -> torch.device:
    """The device of a model's last layer. Under a `device_map` the states for a head arrive there last."""
    layers = getattr(decoder_of(model), "layers", None)
    return weight_device(layers[-1] if layers else None, model)
