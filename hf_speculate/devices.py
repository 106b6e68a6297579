"""Where the modules of a target compute, also under a `device_map` with offloading."""

from __future__ import annotations

import torch
from torch import nn


def execution_device(module: nn.Module) -> torch.device | None:
    """Where a module's weights are; of an offloaded one, where accelerate's hook fetches them to. None: not known."""
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
