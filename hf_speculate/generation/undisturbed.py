"""Whether a request leaves the target unchanged between two forwards, so that it need not be checked each time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..drafting import Drafter
from ..models import GenerativeModel


# Packages whose code does not change a target while it generates.
_PACKAGES = ("builtins", "transformers", "hf_speculate", "hf_speculate_plugins")

# Types that the caller may have put into processors and criteria of transformers.
_CALLED = (FunctionType, MethodType, partial, nn.Module)


def undisturbed(model: GenerativeModel, *others: Any) -> AbstractContextManager[None]:
    """A context for the forwards of a request. It tells a packed model that nobody changes it, if that is known.

    Args:
        others: objects that run between forwards: lists of processors and criteria, streamers, drafters. None is
            allowed.
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
    """Whether this object is known code and calls no unknown code."""
    if type(other).__module__.partition(".")[0] not in _PACKAGES or isinstance(other, _CALLED):
        return False
    parts = getattr(other, "__dict__", {}).values()
    return isinstance(other, Drafter) or not any(isinstance(part, _CALLED) for part in parts)
