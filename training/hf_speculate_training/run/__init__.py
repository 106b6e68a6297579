"""A run from recipe to head folder: read, prepare, train, measure, write.

A `Recipe` is everything that a run depends on; `prepare` loads what it names, and `train_head` trains with
`HeadTrainer` (transformers' loop), measures acceptance through the decoding loop, and writes head, card, provenance and
curves. No training method is named here: each is found by the name in the recipe and reached through `TrainingMethod`.
"""

from .arguments import HeadTrainingArguments
from .building import adapted_target, build_method, training_arguments
from .checkpoints import last_checkpoint, step_of
from .defaults import default_choices, recipe_values
from .evaluation import AcceptanceEvaluation, AcceptanceOptions, Prompt, prompts_of
from .guards import DivergedError, InterruptedTrainingError
from .recipe import MethodSection, Recipe, read_recipe, recipe_from
from .run import Run, prepare, train_head, train_prepared
from .shipped import recipe_names
from .trainer import HeadTrainer


__all__ = [
    "AcceptanceEvaluation",
    "AcceptanceOptions",
    "DivergedError",
    "HeadTrainer",
    "HeadTrainingArguments",
    "InterruptedTrainingError",
    "MethodSection",
    "Prompt",
    "Recipe",
    "Run",
    "adapted_target",
    "build_method",
    "default_choices",
    "last_checkpoint",
    "prepare",
    "prompts_of",
    "read_recipe",
    "recipe_from",
    "recipe_names",
    "recipe_values",
    "step_of",
    "train_head",
    "train_prepared",
    "training_arguments",
]
