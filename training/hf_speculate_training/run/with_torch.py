"""The names that this package exports only when they are asked for, because their modules import torch."""

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
