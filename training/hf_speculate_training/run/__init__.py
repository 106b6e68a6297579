"""A run from recipe to head folder: read, prepare, train, measure, write.

A `Recipe` holds everything that a run depends on. `build` is the one way from its sections to the parts of a run, for
`train_head` and for `HeadTrainer` (transformers' loop) alike. A run measures acceptance through the decoding loop, and
writes head, card, provenance and curves. No training method is named here: each is found by the name in the recipe.
"""

from .arguments import HeadTrainingArguments, training_arguments
from .builder import Run, adapted_target, build_method
from .defaults import default_choices, recipe_values
from .evaluation import AcceptanceEvaluation, AcceptanceOptions, Prompt, prompts_of
from .folder import last_checkpoint, step_of
from .guards import DivergedError, InterruptedTrainingError
from .recipe import MethodSection, Recipe, read_recipe, recipe_from, recipe_names
from .run import prepare, train_head, train_prepared
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
