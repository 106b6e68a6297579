"""The structure of a target: what its forwards depend on, modules that multiply in their own way, its quantisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .adapters import active_adapters
from .models import GenerativeModel


# Modules that look up rows or multiply by `functional.linear`, whose row counts are tested separately.
_VOUCHED = (nn.Linear, nn.Embedding)


def structure_key(model: GenerativeModel) -> int:
    """A number that changes with everything that a trial depends on.

    That is: module classes and replaced forwards; shapes, dtypes and devices of tensors; the configuration with its
    attention; adapters, training mode and threads.
    """
    modules = [(name, type(module), vars(module).get("forward")) for name, module in model.named_modules()]
    # RoPE with scaling replaces vectors of frequencies while it runs, so only matrices among the buffers count.
    weights = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.dim() > 1)]
    tensors = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in weights]
    config = repr(model.config.to_dict()), model.config._attn_implementation
    settings = active_adapters(model), model.training, torch.get_num_threads()
    return hash((tuple(modules), tuple(tensors), config, settings))


def unvouched_modules(model: GenerativeModel) -> list[str]:
    """Classes of modules that may multiply by other means than `functional.linear`: experts, convolutions, …

    If the model class is not transformers' own, it is in the list too.
    """
    names = {type(module).__name__ for module in model.modules() if any(_matrices(module))}
    if not type(model).__module__.startswith("transformers."):
        names.add(type(model).__name__)
    return sorted(names)


def _matrices(module: nn.Module) -> Iterator[bool]:
    """True for every tensor of a module that its forward may multiply by."""
    if type(module) not in _VOUCHED:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            yield tensor is not None and tensor.dim() > 1 and tensor.dtype is not torch.bool


def quantization_label(model: GenerativeModel) -> str:
    """Quantisation of a model's weights in words: "GGUF (Q4_1, Q8_0)", "bitsandbytes (nf4)"; "" if there is none."""
    if types := sorted({str(module.block_type) for module in model.modules() if hasattr(module, "block_type")}):
        return f"GGUF ({', '.join(types)})"
    config: Any = getattr(model.config, "quantization_config", None)
    if config is None:
        return ""
    values = config if isinstance(config, Mapping) else config.to_dict()
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if values.get("load_in_4bit"):
        return f"{method} ({values.get('bnb_4bit_quant_type', '4 bit')})"
    if values.get("load_in_8bit"):
        return f"{method} (int8)"
    return f"{method} ({values['bits']} bit)" if values.get("bits") else method
