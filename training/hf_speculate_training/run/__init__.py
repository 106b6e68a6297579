"""A run from recipe to head folder: read, prepare, train, measure, write.

A `Recipe` is everything that a run depends on; `prepare` loads what it names, and `train_head` trains with
`HeadTrainer` (transformers' loop), measures acceptance through the decoding loop, and writes head, card, provenance and
curves. No training method is named here: each is found by the name in the recipe and reached through `TrainingMethod`.
"""

from .building import adapted_target, build_method, training_arguments
from .evaluation import AcceptanceEvaluation, AcceptanceOptions, Prompt, prompts_of
from .recipe import MethodSection, Recipe, read_recipe, recipe_from
from .run import Run, prepare, train_head
from .trainer import DivergedError, HeadTrainer, HeadTrainingArguments, last_checkpoint


__all__ = [
    "AcceptanceEvaluation",
    "AcceptanceOptions",
    "DivergedError",
    "HeadTrainer",
    "HeadTrainingArguments",
    "MethodSection",
    "Prompt",
    "Recipe",
    "Run",
    "adapted_target",
    "build_method",
    "last_checkpoint",
    "prepare",
    "prompts_of",
    "read_recipe",
    "recipe_from",
    "train_head",
    "training_arguments",
]
