"""The PEFT adapters that a target computes with: what a drafter learns holds only for these.

PEFT is not imported; its layers are recognised by their attributes or their module. Of what is found here, only
`pass_on` decides what computes a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from .models import GenerativeModel


_SAMPLES = 256


def active_adapters(model: GenerativeModel) -> str:
    """The active adapters as one name, merged ones included.

    The name is "" for none, "first", "first+second" for several at once, and "first|second|__base__" for a batch with
    an adapter for each row (`adapter_names=`).

    Args:
        model: transformers model, without wrappers (`unwrap`).
    """
    prepare = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if prompt_learning(model) is not None:
        return str(getattr(prepare, "active_adapter", "prompt"))
    by_row = _hook_arguments(model, "adapter_names")
    return "|".join(by_row) if by_row else "+".join(sorted(_names_in_effect(model)))


def prompt_learning(model: GenerativeModel) -> Any:
    """Config of a prompt-learning adapter (PEFT), which changes the inputs while it calls `generate`; or None."""
    prepare = getattr(model.prepare_inputs_for_generation, "__self__", model)
    config: Any = getattr(prepare, "active_peft_config", None)
    return config if prepare is not model and getattr(config, "is_prompt_learning", False) else None


def base_module(module: nn.Module) -> nn.Module:
    """The module that PEFT has put its layers around; the module itself if there are none."""
    layers = adapter_layers_around(module)
    return layers[-1].base_layer if layers else module


def effective_module(module: nn.Module) -> nn.Module:
    """The module inside PEFT's layers if they only pass its result on, else the module itself."""
    return base_module(module) if pass_on(adapter_layers_around(module)) else module


def adapter_layers_around(module: Any) -> list[Any]:
    """PEFT's layers around a module, the outermost one first: the module may be one of them."""
    layers = []
    while type(module).__module__.startswith("peft.tuners.") and "base_layer" in module._modules:
        layers.append(module)
        module = module.base_layer
    return layers


def pass_on(layers: Sequence[Any]) -> bool:
    """Whether PEFT's layers only pass on the results of the modules inside them.

    A layer does that if it is disabled, or if it is LoRA for other adapters than the active ones. It must also be as
    PEFT made it: a merged adapter changes weights, and a hook may change inputs.
    """
    return (
        not any(chain.from_iterable(map(_CHANGES, layers)))
        and not any("forward" in vars(layer) for layer in layers)
        and (all(map(_IS_OFF, layers)) or all(_IS_OFF(layer) or _is_for_others(layer) for layer in layers))
    )


# Read by C code: a model has hundreds of layers, and the check may run before every forward.
_CHANGES = attrgetter("merged_adapters", "_forward_pre_hooks", "_forward_hooks")
_IS_OFF = attrgetter("_disable_adapters")


def _is_for_others(layer: Any) -> bool:
    is_lora = type(layer).__module__.startswith("peft.tuners.lora.")
    return is_lora and not any(name in layer.lora_A or name in layer.lora_embedding_A for name in layer.active_adapters)


def outdated_peft() -> str:
    """The problem if the installed PEFT is older than transformers requires; "" if there is none.

    Prompt-learning adapters of an older PEFT may not know transformers' argument names.
    """
    try:
        found = version("peft")
    except PackageNotFoundError:
        return ""
    needed = transformers.integrations.peft.MIN_PEFT_VERSION
    if Version(found) >= Version(needed):
        return ""
    return f"transformers {transformers.__version__} needs peft >= {needed}, {found} is installed"


def activated_lora(model: GenerativeModel) -> bool:
    """Whether an adapter is active only from some token on (aLoRA).

    PEFT then counts a forward's tokens from its end, which is right only for prompts and for one token at a time.
    """
    return any(offset is not None for offset in _hook_arguments(model, "alora_offsets"))


def adapter_fingerprints(model: GenerativeModel) -> Mapping[str, str]:
    """A sha256 over a sample of the weights of each active adapter, by name, without prompt learning.

    Files with the same weights have the same fingerprint under any name; PEFT calls most adapters "default".
    """
    names = _names_in_effect(model)
    if not names:
        return {}
    digests = {name: hashlib.sha256() for name in names}
    for key, tensor in sorted(model.state_dict().items()):
        for name in names.intersection(key.split(".")) if isinstance(tensor, Tensor) else ():
            digests[name].update(f"{_without(name, key)} {tuple(tensor.shape)}".encode())
            digests[name].update(sample_bytes(tensor))
    return {name: digest.hexdigest() for name, digest in sorted(digests.items())}


def sample_bytes(tensor: Tensor) -> bytes:
    """256 evenly spaced values of a tensor as bytes; empty for an offloaded tensor."""
    if tensor.device.type == "meta":
        return b""
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(
        0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel()), dtype=torch.float64, device="cpu"
    ).long()
    values = flat[places.to(flat.device)].cpu()
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""


def _without(name: str, key: str) -> str:
    return ".".join(part for part in key.split(".") if part != name)


def _adapter_layers(model: nn.Module) -> Iterator[Any]:
    """PEFT's layers, and the modules that it keeps copies of (`modules_to_save`)."""
    if getattr(model, "peft_config", None):  # PEFT sets this wherever it adds layers
        for module in model.modules():
            if hasattr(module, "disable_adapters") and hasattr(module, "active_adapters"):
                yield module


def _names_in_effect(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for layer in _adapter_layers(model):
        if not layer.disable_adapters:  # a disabled layer also removes its merged weights
            names.update(layer.merged_adapters or layer.active_adapters)
    return names


def _hook_arguments(model: nn.Module, argument: str) -> list[Any]:
    """The value of an argument that PEFT passes to its layers through hooks during this `generate`; [] without one."""
    for layer in _adapter_layers(model):
        # the last hook wins; an error may leave older ones behind
        for hook in reversed(layer._forward_pre_hooks.values()):
            if given := getattr(hook, "keywords", {}).get(argument):
                return list(given)
    return []
