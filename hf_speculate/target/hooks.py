"""Hooks on the target's modules: whose they are, and who must not call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks


# Whose hooks look at each row alone, whatever rows there are, or have to run for a forward to be right.
_INDIFFERENT = ("hf_speculate", "hf_speculate_plugins", "torch", "transformers", "accelerate", "peft")


def has_foreign_hooks(model: nn.Module) -> bool:
    """Whether a forward of `model` calls a hook that may have a value for each row of the batch.

    Every hook may, unless it is known to be indifferent: those of torch, transformers and accelerate, ours, PEFT's
    without values bound to them (it binds an adapter for each row), and those whose function says `row_wise = True`.
    """
    everywhere = chain(_global_forward_hooks.values(), _global_forward_pre_hooks.values())
    return any(map(_is_foreign, chain(everywhere, *map(_hooks, model.modules()))))


def may_hold_rows(model: nn.Module, forward_kwargs: Mapping[str, Any]) -> bool:
    """Whether something beside inputs and cache may have a value for each row of the batch, so that no row can be left
    out of the forwards: arguments of every forward, if they are more than a switch, and hooks.
    """
    if any(not isinstance(value, bool | int | float | str) for value in forward_kwargs.values()):
        return True
    return has_foreign_hooks(model)


def unhooked(module: nn.Module) -> Callable[..., Any]:
    """A module of the target, as a drafter calls it: a user's hooks are about the target's own forwards."""
    if torch.compiler.is_compiling() or not any(map(_is_foreign, _hooks(module))):
        return module
    return module.forward


@contextmanager
def without_foreign_hooks(model: nn.Module) -> Iterator[None]:
    """Forwards of `model` in here call no hook of others."""
    taken = []
    try:
        of_modules = ((module._forward_hooks, module._forward_pre_hooks) for module in model.modules())
        for hooks in chain((_global_forward_hooks, _global_forward_pre_hooks), *of_modules):
            foreign = [key for key, hook in hooks.items() if _is_foreign(hook)]
            if foreign:
                taken.append((hooks, dict(hooks)))
                for key in foreign:
                    del hooks[key]
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)


def _hooks(module: nn.Module) -> Iterable[Callable[..., Any]]:
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def _is_foreign(hook: Callable[..., Any]) -> bool:
    function = hook
    while isinstance(function, partial):
        values = (*function.args, *function.keywords.values())
        if any(isinstance(value, Sequence | Tensor) and not isinstance(value, str) for value in values):
            return True
        function = function.func
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package not in _INDIFFERENT and not getattr(function, "row_wise", False)
