"""A few weights of a target, by which it is recognised in any dtype.

Up to 16 values are taken of a norm and of a linear layer of each kind. Names alone decide which layers are taken.
Matrices that are quantised, offloaded or sharded are left out; norms are never quantised.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hf_speculate.target import GenerativeModel, decoder_of


Values = Float[Tensor, "*n"]
"""float32 on the CPU: [4, 4] of a matrix, [16] of a vector, less of small ones."""

_SIDE, _LENGTH, _MAX_KINDS = 4, 16, 8
_DENSE = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# A tensor counts as changed if a smaller share of its values is equal. A cast may move some by one step of bfloat16.
_EQUAL_SHARE, _STEP = 0.75, 2.0**-8


@torch.no_grad()
def sample_weights(model: GenerativeModel) -> dict[str, str]:
    """Samples by tensor name below the decoder, adapters left out.

    A sample is text: the dtype, the shape of the values, and each value as eight hexadecimal digits.
    """
    return {f"{name}.weight": _text(module.weight) for name, module in _chosen(decoder_of(model)) if _is_dense(module)}


def compare_weights(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the values of each tensor of both samples are equal, up to a cast if dtypes differ.

    Anything but a sample of dense weights is left out.
    """
    pairs = {name: (_parsed(ours[name]), _parsed(theirs[name])) for name in ours if name in theirs}
    return {name: _are_same(*a, *b) for name, (a, b) in pairs.items() if a and b and a[1].shape == b[1].shape}


def _are_same(ours: str, a: Values, theirs: str, b: Values) -> bool:
    allowed = 0 if ours == theirs else _STEP * a.abs() + 1e-7
    return float(((a - b).abs() <= allowed).float().mean()) >= _EQUAL_SHARE


def _chosen(decoder: nn.Module) -> Iterator[tuple[str, Any]]:
    """One linear layer and one norm of each kind, by name."""
    linear: dict[str, list[tuple[str, nn.Module]]] = {}
    norms: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, module in decoder.named_modules():
        name = re.sub(r"\.(base_layer|original_module)\b", "", path)
        kind = re.sub(r"\d+", "#", name)
        if "lora_" in path or hasattr(module, "base_layer"):
            continue
        if isinstance(module, nn.Linear):
            linear.setdefault(kind, []).append((name, module))
        elif getattr(getattr(module, "weight", None), "ndim", 0) == 1:
            norms.setdefault(kind, []).append((name, module))
    for kinds in (linear, norms):
        for kind in sorted(kinds)[:_MAX_KINDS]:
            yield kinds[kind][zlib.crc32(kind.encode()) % len(kinds[kind])]


def _is_dense(module: Any) -> bool:
    weight = module.weight
    is_whole = weight.device.type != "meta" and not hasattr(weight, "placements")
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in _DENSE.values() and is_whole


def _text(weight: Tensor) -> str:
    # Select the values first: a conversion would copy the whole tensor.
    values = weight.detach()[_places(weight.shape[0], _SIDE if weight.ndim == 2 else _LENGTH)]
    if weight.ndim == 2:
        values = values[:, _places(weight.shape[1], _SIDE)]
    bits = values.float().cpu().view(torch.int32).flatten().tolist()
    words = [str(weight.dtype).removeprefix("torch."), "x".join(map(str, values.shape))]
    return " ".join([*words, *(f"{pattern & 0xFFFFFFFF:08x}" for pattern in bits)])


def _parsed(text: Any) -> tuple[str, Values] | None:
    """dtype and values of a sample; None for anything else, and for those of a quantised tensor."""
    try:
        dtype, shape, *words = text.split(" ")
        values = torch.tensor([int(word, 16) for word in words], dtype=torch.int64, device="cpu")
        values = (values - (values >> 31 << 32)).to(torch.int32).view(torch.float32)
        return (dtype, values.view([int(size) for size in shape.split("x")])) if dtype in _DENSE else None
    except (ValueError, RuntimeError, OverflowError, AttributeError):
        return None


def _places(size: int, count: int) -> Tensor:
    return torch.linspace(0, size - 1, min(count, size), dtype=torch.float64, device="cpu").long()
