"""transformers' hooks that record outputs, made so that `torch.save(model)` still works.

They stay on a model for ever once a call asked for hidden states or attentions, and are local functions, which nothing
can pickle.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing


_INSTALLED = "_output_capturing_hooks_installed"  # transformers' mark
_INSTALL: Callable[..., None] = getattr(output_capturing, "install_output_capuring_hook", lambda module: None)
_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Recorder:
    """One of transformers' hooks; it is pickled by what it records.

    Args:
        hook: transformers' own.
    """

    def __init__(self, hook: Callable[..., Any]):
        self._hook = hook
        self.__module__ = hook.__module__  # who asks whose hook it is gets transformers' answer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._hook(module, args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        known, names = inspect.getclosurevars(self._hook).nonlocals, inspect.signature(_INSTALL).parameters
        return _recorder, ({name: known[name] for name in names if name in known},)


def _recorder(recorded: dict[str, Any]) -> Recorder:
    module = nn.Module()
    _INSTALL(module, **recorded)
    return Recorder(next(iter(module._forward_hooks.values())))


def keep_saveable(model: PreTrainedModel) -> None:
    """Exchanges the hooks that transformers left on `model`, if it left any since the last time. Nothing is removed:
    another thread may be recording."""
    for part in (model, model.base_model, model.get_decoder()):
        if part is None or part in _seen or not getattr(part, _INSTALLED, False):
            continue
        _seen.add(part)
        for module in part.modules():
            for number, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__qualname__", "").startswith(f"{_INSTALL.__name__}."):
                    module._forward_hooks[number] = Recorder(hook)
