"""Where the weights of a head go: beside the module of the target that it works with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_speculate.target import execution_device


def device_beside(module: Any, target: PreTrainedModel) -> torch.device:
    """Where `module` of the target computes, also under a `device_map` with offloading; else where the target is."""
    return (execution_device(module) if isinstance(module, nn.Module) else None) or target.device
