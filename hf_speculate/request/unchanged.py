"""Whether a request leaves the target unchanged between two forwards, so that it need not be checked each time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers.generation.logits_process import (
    EtaLogitsWarper,
    SynthIDTextWatermarkLogitsProcessor,
    TopHLogitsWarper,
    TypicalLogitsWarper,
)

from ..drafting import Drafter
from ..target import GenerativeModel, native_runner


# Packages whose code does not change a target while it generates.
_PACKAGES = ("builtins", "transformers", "hf_speculate", "hf_speculate_plugins", "hf_speculate_tools")

# Processors that sum over the whole vocabulary. The number of threads changes the last bits of such a sum.
_SUM_UP = (TypicalLogitsWarper, EtaLogitsWarper, TopHLogitsWarper, SynthIDTextWatermarkLogitsProcessor)

# Types that the caller may have put into processors and criteria of transformers.
_CALLED = (FunctionType, MethodType, partial, nn.Module)


def assume_unchanged(model: GenerativeModel, *others: Any, is_threaded: bool = False) -> AbstractContextManager[None]:
    """A context for the forwards of a request. It promises a packed model that it will not be changed, if that is
    known.

    Args:
        others: objects that run between forwards: lists of processors and criteria, streamers, drafters. None is
            allowed.
        is_threaded: whether the number of PyTorch's threads must not be lowered between forwards: something else sets
            it meanwhile, or compiled code depends on it.
    """
    native = native_runner(model)
    if native is None or not all(map(_is_known, _each(others))):
        return nullcontext()
    return native.assume_unchanged(is_threaded or any(type(other) in _SUM_UP for other in _each(others)))


def _each(others: Iterable[Any]) -> Iterable[Any]:
    for other in others:
        yield other
        if isinstance(other, list):
            yield from other


def _is_known(other: Any) -> bool:
    """Whether this object is known code and calls no unknown code."""
    if not _is_ours(type(other)) or isinstance(other, _CALLED):
        return False
    parts = getattr(other, "__dict__", {}).values()
    return isinstance(other, Drafter) or not any(isinstance(part, _CALLED) and not _is_own(part) for part in parts)


def _is_own(part: Any) -> bool:
    """Whether this is a function of known code that holds nothing of anybody else."""
    return isinstance(part, FunctionType) and part.__closure__ is None and _is_ours(part)


def _is_ours(part: Any) -> bool:
    return (part.__module__ or "").partition(".")[0] in _PACKAGES  # a function made by `exec` has no module
