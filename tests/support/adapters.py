"""PEFT adapters."""

from __future__ import annotations

import torch


def perturbed(model, seed: int = 0):
    """Adapters begin as zeros: these change the text from its first tokens on."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model.eval().requires_grad_(False)
