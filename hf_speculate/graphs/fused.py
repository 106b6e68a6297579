"""Captured forwards with fewer kernels: norms, rotations and gates of a model's layers in one kernel each.

A module takes part if it has the form of Llama's, and its kernel gives the same on a sample input (`_agrees`). So there
is no list of architectures, and what computes something else (Gemma's norms, a gate with GELU) stays as it is. Only
16-bit modules on a GPU take part: in float32 a captured forward computes what the plain one does.

Forwards are replaced for the length of one call, and for the thread that makes it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..messages import get_logger
from ..triton_support import has_triton
from .cuda_graphs import modules_in
from .layer_kernels import gated, rms_norm, rotated


logger = get_logger(__name__)

DEVICES = frozenset({"cuda"})
"""Types of devices on which kernels replace forwards."""

_ROTATION = "apply_rotary_pos_emb"
# Largest difference on a sample whose largest value is about 1: two units in the last place.
_TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}

Function = Callable[..., Any]


class Place(NamedTuple):
    """A name that stands for another function during a forward.

    Attributes:
        names: attributes of a module, or globals of a file.
        name: name among them.
        stock: function that it stands for; None is the method of the module's class.
        replacement: function in its place.
        num_inputs: number of tensors that it takes. Calls with anything else go to `stock`.
    """

    names: dict[str, Any]
    name: str
    stock: Function | None
    replacement: Function
    num_inputs: int


_places: WeakKeyDictionary[nn.Module, list[Place]] = WeakKeyDictionary()


@cache
def fusing(function: Function) -> Function:
    """`function`, with kernels in place of what they agree with in all modules among its arguments; made once."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        with _replaced([place for module in modules_in(arguments) for place in places_of(module)]):
            return function(*arguments)

    return run


def places_of(module: nn.Module) -> list[Place]:
    """Everything that kernels replace in captured forwards of `module`, found out once."""
    if module not in _places:
        _places[module] = list(_found_in(module)) if has_triton() else []
    return _places[module]


def _found_in(module: nn.Module) -> Iterator[Place]:
    verdicts: dict[Any, bool] = {}
    for each in module.modules():
        if (replacement := _replacement_for(each)) is None or "forward" in vars(each):
            continue
        kind = type(each), type(getattr(each, "act_fn", None)), _size_of(each), _dtype_of(each)
        if kind not in verdicts:
            verdicts[kind] = _agrees(partial(replacement, each), each, (_sample(each, 4, _size_of(each)),))
        if verdicts[kind]:
            yield Place(vars(each), "forward", None, partial(replacement, each), 1)
    attentions = {type(each).__module__: each for each in module.modules() if hasattr(each, "q_proj")}
    for file, attention in attentions.items():
        stock = getattr(sys.modules[file], _ROTATION, None)
        if callable(stock) and _dtype_of(attention) is not None:
            tables = (_sample(attention, 1, 4, 16) for _ in range(2))
            inputs = _sample(attention, 1, 3, 4, 16), _sample(attention, 1, 1, 4, 16), *tables
            if _agrees(partial(_rotate, stock), stock, inputs):
                yield Place(vars(sys.modules[file]), _ROTATION, stock, partial(_rotate, stock), len(inputs))


def _replacement_for(module: nn.Module) -> Function | None:
    """The function that computes the same as the module if it is what it looks like; None if it looks like nothing."""
    if _dtype_of(module) is None:
        return None
    if isinstance(getattr(module, "variance_epsilon", None), float) and isinstance(module.weight, Tensor):
        return _norm
    if type(module) is nn.RMSNorm and module.weight.dim() == 1:
        return _norm_of_torch
    names = ("gate_proj", "up_proj", "down_proj")
    return _gate if all(isinstance(getattr(module, name, None), nn.Module) for name in names) else None


def _norm(module: Any, states: Tensor) -> Tensor:
    if states.dtype != module.weight.dtype:
        return type(module).forward(module, states)
    return rms_norm(states, module.weight, module.variance_epsilon)


def _norm_of_torch(module: Any, states: Tensor) -> Tensor:
    if states.dtype != module.weight.dtype:
        return type(module).forward(module, states)
    eps = torch.finfo(states.dtype).eps if module.eps is None else module.eps
    return rms_norm(states, module.weight, eps, rounds_once=True)


def _gate(module: Any, states: Tensor) -> Tensor:
    return module.down_proj(gated(module.gate_proj(states), module.up_proj(states)))


def _rotate(stock: Function, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Any:
    if cos.dim() != 3 or cos.shape[-1] != queries.shape[-1] or cos.dtype != queries.dtype:
        return stock(queries, keys, cos, sin)
    return rotated(queries, cos, sin), rotated(keys, cos, sin)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """The 16-bit dtype of a module that a kernel may replace; None if none may."""
    found = {each.dtype for each in module.parameters() if each.device.type in DEVICES}
    return found.pop() if len(found) == 1 and found < _TOLERANCE.keys() else None


def _size_of(module: Any) -> int:
    gate = getattr(module, "gate_proj", None)
    return len(module.weight) if gate is None else getattr(gate, "in_features", 0)


def _sample(module: nn.Module, *shape: int) -> Tensor:
    """Values between -1 and 1 that look random. Drawing them would change what the request draws."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=next(module.parameters()).device)
    return (numbers + 1).square().mul(0.7).sin().view(shape).to(_dtype_of(module))


def _agrees(replacement: Function, stock: Function, inputs: tuple[Tensor, ...]) -> bool:
    """Whether both give the same. A kernel that cannot be built or launched agrees with nothing."""
    try:
        both = replacement(*inputs), stock(*inputs)
        pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in both), strict=True)
        return all(_are_close(*pair) for pair in pairs)
    except Exception as error:  # of Triton, of a compiler, of something that only has the same name
        logger.info(f"{type(stock).__name__} is captured as it is: {first_line(error)}")
        return False


def _are_close(found: Tensor, expected: Tensor) -> bool:
    difference, size = (found.float() - expected.float()).abs().max(), expected.float().abs().max().clamp(min=1e-6)
    return found.dtype == expected.dtype and bool(difference <= _TOLERANCE[expected.dtype] * size)


@contextmanager
def _replaced(places: Iterable[Place]) -> Iterator[None]:
    thread = threading.get_ident()
    # What someone else has replaced since stays theirs.
    replaced = [place for place in places if place.names.get(place.name) is place.stock]
    try:
        for place in replaced:
            place.names[place.name] = partial(_for_thread, thread, place)
        yield
    finally:
        for place in replaced:
            if place.stock is None:
                place.names.pop(place.name, None)
            else:
                place.names[place.name] = place.stock


def _for_thread(thread: int, place: Place, *args: Any, **kwargs: Any) -> Any:
    if threading.get_ident() == thread and len(args) == place.num_inputs and not kwargs:
        return place.replacement(*args)
    if place.stock is not None:
        return place.stock(*args, **kwargs)
    module = place.replacement.args[0]  # type: ignore[attr-defined]
    return type(module).forward(module, *args, **kwargs)
