"""Training of speculative heads for hf_speculate: methods, data, trainer, recipes. See training/README.md.

`train_head(read_recipe(...))` runs a recipe. `HeadTrainer` trains from target, method and data set, as TRL's trainers
do, or with parts of your own. A training method of your own is a `TrainingMethod`; `hf_speculate_training.methods` has
the parts of the built-in ones.
"""

from . import extras as extras  # first: it names missing packages
from .data import Batch, DataOptions
from .methods import StepOutput, TrainingMethod
from .run import (
    AcceptanceOptions,
    HeadTrainer,
    HeadTrainingArguments,
    MethodSection,
    Recipe,
    read_recipe,
    train_head,
)
from .sections import RecipeError
from .states import TargetStates


__all__ = [
    "AcceptanceOptions",
    "Batch",
    "DataOptions",
    "HeadTrainer",
    "HeadTrainingArguments",
    "MethodSection",
    "Recipe",
    "RecipeError",
    "StepOutput",
    "TargetStates",
    "TrainingMethod",
    "read_recipe",
    "train_head",
]
