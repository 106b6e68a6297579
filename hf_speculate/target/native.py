"""The native runner of a packed model: one object, which is all that this package knows of the kernel.

The kernel computes a whole forward in one call. It belongs to another package, and is found at the model's `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers.cache_utils import Cache

from .models import GenerativeModel, decoder_of


class NativeRunner(Protocol):
    """The kernel's runner of one model, the attribute `native` of its `forward`.

    The forward itself chooses between kernel and modules, because plain `generate` calls it too. It also takes a
    `TreeMask` for its attention mask.

    Attributes:
        last_problem: the reason why this thread's last forward of the model was not native; "" if it was. It may be
            set before a forward that perhaps never comes here.
    """

    last_problem: str

    def problem(self) -> str:
        """The reason why forwards of the model are not native now, whatever their inputs; "" if they are."""
        ...

    def assume_unchanged(self, is_threaded: bool) -> AbstractContextManager[None]:
        """A context in which the model does not change between two forwards of this thread, except by registering
        hooks. The number of PyTorch's threads is then lowered between forwards, unless something else depends on it
        (`is_threaded`)."""
        ...

    def move_entries(self, cache: Cache, sources: Sequence[int], destinations: Sequence[int]) -> bool:
        """Moves entries of a cache that native forwards write; returns whether it could (`cache.Mover`)."""
        ...


def native_runner(model: GenerativeModel) -> NativeRunner | None:
    """The native runner of `model`; None if there is none, or if the model's forward was replaced since."""
    return _runner_of(model)


def native_decoder_runner(model: GenerativeModel) -> NativeRunner | None:
    """The same, also if the model's own forward was replaced (by accelerate, say) and calls the decoder."""
    return _runner_of(decoder_of(model))


def has_native_layers(model: GenerativeModel) -> bool:
    """Whether a kernel computes the layers of `model`, which nothing has changed. It rounds otherwise than modules."""
    native = native_decoder_runner(model)
    return native is not None and not native.problem()


def _runner_of(module: Any) -> NativeRunner | None:
    return getattr(vars(module).get("forward"), "native", None)


def problem_without_kernel(model: GenerativeModel) -> str:
    """The reason why there is no kernel for a model with weights that one was asked to multiply packed; else ""."""
    return getattr(getattr(model, "hf_quantizer", None), "problem_without_kernel", "")


def takes_tree_masks(model: GenerativeModel) -> bool:
    """Whether the forward of `model` takes a `TreeMask` for its attention mask. Hooks get real masks."""
    return native_runner(model) is not None and not (model._forward_hooks or model._forward_pre_hooks)
