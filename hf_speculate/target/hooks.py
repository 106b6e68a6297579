"""Hooks on the target's modules: which package owns them, who must not call them, and how to save a model with hooks.

After a call with hidden states or attentions, transformers' recording hooks stay on the model. They are local
functions, which pickle cannot save. `keep_saveable` replaces them, so that `torch.save(model)` still works.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers.utils import output_capturing

from .models import GenerativeModel, decoder_of


# Packages whose hooks treat each row alone, or must run for a correct forward.
_INDIFFERENT = ("hf_speculate", "hf_speculate_plugins", "torch", "transformers", "accelerate", "peft")


def has_foreign_hooks(model: nn.Module) -> bool:
    """Whether a forward of `model` calls a hook that may hold a value for each row of the batch.

    Any hook may, except known ones: those of torch, transformers and accelerate, our own, those whose function has
    `row_wise = True`, and PEFT's without bound values. (PEFT binds an adapter for each row.)
    """
    return next(foreign_hooks(model), None) is not None


def foreign_hooks(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks that `has_foreign_hooks` looks for."""
    everywhere = chain(_global_forward_hooks.values(), _global_forward_pre_hooks.values())
    return filter(_is_foreign, chain(everywhere, *map(_hooks, model.modules())))


def may_hold_rows(model: nn.Module, forward_kwargs: Mapping[str, Any]) -> bool:
    """Whether anything besides inputs and cache may hold a value for each row of the batch.

    That is a hook, or an argument of every forward that is more than a switch. Then no row can leave the forwards.
    """
    if any(not isinstance(value, bool | int | float | str) for value in forward_kwargs.values()):
        return True
    return has_foreign_hooks(model)


def unhooked(module: nn.Module) -> Callable[..., Any]:
    """A module of the target for drafters to call, without the user's hooks: these are meant for the target's own
    forwards."""
    if torch.compiler.is_compiling() or not any(map(_is_foreign, _hooks(module))):
        return module
    return module.forward


@contextmanager
def without_foreign_hooks(model: nn.Module) -> Iterator[None]:
    """A context in which forwards of `model` call no hooks of others."""
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


_INSTALLED = "_output_capturing_hooks_installed"  # the attribute by which transformers marks a model
_INSTALL: Callable[..., None] = getattr(output_capturing, "install_output_capuring_hook", lambda module: None)
_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class SaveableHook:
    """One of transformers' recording hooks, in a form that pickle can save.

    Args:
        hook: original hook.
    """

    def __init__(self, hook: Callable[..., Any]):
        self._hook = hook
        self.__module__ = hook.__module__  # callers that check the owner of a hook get transformers' name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._hook(module, args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        known, names = inspect.getclosurevars(self._hook).nonlocals, inspect.signature(_INSTALL).parameters
        return _saveable_hook, ({name: known[name] for name in names if name in known},)


def _saveable_hook(recorded: dict[str, Any]) -> SaveableHook:
    module = nn.Module()
    _INSTALL(module, **recorded)
    return SaveableHook(next(iter(module._forward_hooks.values())))


def keep_saveable(model: GenerativeModel) -> None:
    """Replaces the recording hooks that transformers has left on `model`.

    No hook is removed, because another thread may be recording.
    """
    for part in (model, model.base_model, decoder_of(model)):
        if part is None or part in _seen or not getattr(part, _INSTALLED, False):
            continue
        _seen.add(part)
        for module in part.modules():
            for number, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__qualname__", "").startswith(f"{_INSTALL.__name__}."):
                    module._forward_hooks[number] = SaveableHook(hook)
