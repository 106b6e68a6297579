"""A run from recipe to head folder: read, prepare, train, measure, write.

A `Recipe` holds everything that a run depends on. `build` is the one way from its sections to the parts of a run, for
`train_head` and for `HeadTrainer` (transformers' loop) alike. A run measures acceptance through the decoding loop, and
writes head, card, provenance and curves. No training method is named here: each is found by the name in the recipe.
"""

from .arguments import HeadTrainingArguments as HeadTrainingArguments
from .arguments import training_arguments as training_arguments
from .builder import build_method as build_method
from .evaluation import AcceptanceEvaluation as AcceptanceEvaluation
from .evaluation import AcceptanceOptions as AcceptanceOptions
from .evaluation import prompts_of as prompts_of
from .folder import last_checkpoint as last_checkpoint
from .recipe import MethodSection as MethodSection
from .recipe import Recipe as Recipe
from .recipe import read_recipe as read_recipe
from .recipe import recipe_from as recipe_from
from .run import prepare as prepare
from .run import train_head as train_head
from .trainer import HeadTrainer as HeadTrainer
