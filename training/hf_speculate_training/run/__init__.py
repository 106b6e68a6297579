"""A run from recipe to head folder: read, prepare, train, measure, write.

A `Recipe` holds everything that a run depends on. `build` is the one way from its sections to the parts of a run, for
`train_head` and for `HeadTrainer` (transformers' loop) alike. A run measures acceptance through the decoding loop, and
writes head, card, provenance and curves. No training method is named here: each is found by the name in the recipe.
"""

from .arguments import HeadTrainingArguments as HeadTrainingArguments
from .arguments import training_arguments as training_arguments
from .builder import TrainingRun as TrainingRun
from .builder import build_method as build_method
from .defaults import default_choices as default_choices
from .defaults import recipe_values as recipe_values
from .evaluation import AcceptanceEvaluation as AcceptanceEvaluation
from .evaluation import AcceptanceOptions as AcceptanceOptions
from .evaluation import PromptIds as PromptIds
from .evaluation import prompts_of as prompts_of
from .folder import last_checkpoint as last_checkpoint
from .folder import step_of as step_of
from .guards import DivergedError as DivergedError
from .guards import InterruptedTrainingError as InterruptedTrainingError
from .recipe import MethodSection as MethodSection
from .recipe import Recipe as Recipe
from .recipe import read_recipe as read_recipe
from .recipe import recipe_from as recipe_from
from .recipe import recipe_names as recipe_names
from .run import prepare as prepare
from .run import train_head as train_head
from .run import train_prepared as train_prepared
from .trainer import HeadTrainer as HeadTrainer
