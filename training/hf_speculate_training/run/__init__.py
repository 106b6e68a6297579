"""A run from recipe to head folder: read, prepare, train, measure, write.

A `Recipe` holds everything that a run depends on. `build` is the one way from its sections to the parts of a run, for
`train_head` and for `HeadTrainer` (transformers' loop) alike. A run measures acceptance through the decoding loop, and
writes head, card, provenance and curves. No training method is named here: each is found by the name in the recipe.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .with_torch import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.with_torch"), name)
