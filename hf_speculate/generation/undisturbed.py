"""Whether a request leaves the target alone between two forwards, so that it need not be looked at each time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..drafting import Drafter
from ..models import GenerativeModel


# Whose code does not change a target that generates.
_PACKAGES = ("builtins", "transformers", "hf_speculate", "hf_speculate_plugins")

# What processors and criteria of transformers may have been given by the caller.
_CALLED = (FunctionType, MethodType, partial, nn.Module)


def undisturbed(model: GenerativeModel, *others: Any) -> AbstractContextManager[None]:
    """Around the forwards of a request: tells a packed model that nobody changes it meanwhile, where that is so.

    Args:
        others: what runs between forwards: lists of processors and criteria, streamers, drafters; None: nothing.
    """
    forward: Any = vars(model).get("forward")
    if not hasattr(forward, "undisturbed") or not all(map(_is_known, _each(others))):
        return nullcontext()
    return forward.undisturbed()


def _each(others: Iterable[Any]) -> Iterable[Any]:
    for other in others:
        yield other
        if isinstance(other, list):
            yield from other


def _is_known(other: Any) -> bool:
    """Whether this is code that is known, and calls none of others."""
    if type(other).__module__.partition(".")[0] not in _PACKAGES or isinstance(other, _CALLED):
        return False
    parts = getattr(other, "__dict__", {}).values()
    return isinstance(other, Drafter) or not any(isinstance(part, _CALLED) for part in parts)
