"""A record of a packed model's modules when it was loaded.

It shows whether a hook or another module was added since. The kernel reads the weights without calling the modules, so
it would ignore them. PEFT's layers do not count while they only pass results on (`effective_module`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules
from transformers.utils import output_capturing

from hf_speculate.target import adapter_layers_around, base_module, pass_on

from .refusals import ACTIVE_ADAPTER


class Snapshot:
    """The state of modules when they were loaded, to notice changes and hooks.

    Children are noted without PEFT's layers around them, whose effect may change from forward to forward. Of `parents`
    only the children must stay the same.
    """

    def __init__(self, modules: Sequence[nn.Module], parents: Sequence[nn.Module] = ()):
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [module.__dict__ for module in modules]
        self._children = [module._modules for module in (*modules, *parents) if module._modules]
        self._children_before = _bases(self._children)
        self._adapted = _NOT_ADAPTED

    def change(self) -> str:
        """The first change since, as the reason of a `Refused`; "" if nothing was added or replaced."""
        if any(self._hooks):
            hooks = chain.from_iterable(map(dict.values, self._hooks))
            if (stranger := next((hook for hook in hooks if not is_captor(hook)), None)) is not None:
                return f"a hook inside the model ({name_of(stranger)})"
        if any(map(operator.contains, self._attributes, repeat("forward"))):
            return "a module whose forward was replaced"
        if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
            return "hooks on all modules of the process"
        return self._change_of_children()

    def _change_of_children(self) -> str:
        """A change among the children. PEFT's layers that only pass results on are none."""
        if self._children == self._children_before:
            self._adapted = _NOT_ADAPTED  # keeps no adapters alive
            return ""
        watched, known, layers = self._adapted
        if not known or watched != known:
            around = [adapter_layers_around(child) for of in self._children for child in of.values()]
            layers = list(chain.from_iterable(around))
            watched = [*self._children, *(layer._modules for layer in layers)]
            layers = layers if _bases(self._children) == self._children_before else None
            self._adapted = watched, [dict(of) for of in watched], layers
        if layers is None:
            return "a module that was exchanged"
        return "" if pass_on(layers) else ACTIVE_ADAPTER


_Children = list[dict[str, Any]]
_NOT_ADAPTED: tuple[_Children, _Children, list[Any] | None] = [], [], None
"""The children that were compared, a copy of them, and PEFT's layers around them; None if other modules changed."""


def _bases(children: Sequence[dict[str, Any]]) -> _Children:
    return [{name: base_module(child) for name, child in of.items()} for of in children]


def base_modules(module: nn.Module) -> list[nn.Module]:
    """All modules below another one, each once, without PEFT's layers."""
    children = [base_module(child) for child in module.children()]
    return list(dict.fromkeys(chain(children, *map(base_modules, children))))


def name_of(hook: Any) -> str:
    """A hook's name for messages: its module and function, or the class of a callable object."""
    while isinstance(hook, partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"


def is_captor(hook: Any) -> bool:
    """Whether a hook is one of transformers' for collecting outputs."""
    return getattr(hook, "__module__", None) == output_capturing.__name__
