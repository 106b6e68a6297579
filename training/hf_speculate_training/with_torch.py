"""The names that this package exports only when they are asked for, because their modules import torch."""

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
