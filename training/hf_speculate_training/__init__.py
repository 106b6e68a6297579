"""Training of speculative heads for hf_speculate: methods, data, trainer, recipes. See training/README.md.

`train_head(read_recipe(...))` runs a recipe. `HeadTrainer` trains from target, method and data set, as TRL's trainers
do, or with parts of your own. A training method of your own is a `TrainingMethod`; `hf_speculate_training.methods` has
the parts of the built-in ones.

Its command line is read without torch: names are imported when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import extras as extras  # first: it names missing packages


if TYPE_CHECKING:
    from .with_torch import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.with_torch"), name)
