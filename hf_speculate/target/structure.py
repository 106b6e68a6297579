"""The facts about a model that a trial of it depends on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..models import GenerativeModel
from .adapters import active_adapters


# Their weights are looked up or multiplied by `functional.linear`, whose numbers of rows are tried by themselves.
_VOUCHED = (nn.Linear, nn.Embedding)


def structure_key(model: GenerativeModel) -> int:
    """A number that changes with whatever a trial depends on.

    That is: classes and replaced forwards of modules, shapes, dtypes and devices of tensors, the configuration (the
    attention among it), adapters, training mode and threads.
    """
    modules = [(name, type(module), vars(module).get("forward")) for name, module in model.named_modules()]
    # RoPE with scaling makes vectors of frequencies anew while it runs: of buffers only matrices count.
    weights = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.dim() > 1)]
    tensors = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in weights]
    config = repr(model.config.to_dict()), model.config._attn_implementation
    settings = active_adapters(model), model.training, torch.get_num_threads()
    return hash((tuple(modules), tuple(tensors), config, settings))


def unvouched_modules(model: GenerativeModel) -> list[str]:
    """The classes of modules that may multiply by other means than `functional.linear`: experts, convolutions, ….

    Of a model that is not transformers' own, its class: anything may be in it.
    """
    names = {type(module).__name__ for module in model.modules() if any(_matrices(module))}
    if not type(model).__module__.startswith("transformers."):
        names.add(type(model).__name__)
    return sorted(names)


def _matrices(module: nn.Module) -> Iterator[bool]:
    """True for every tensor of a module's own that its forward may multiply with."""
    if type(module) not in _VOUCHED:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            yield tensor is not None and tensor.dim() > 1 and tensor.dtype is not torch.bool
