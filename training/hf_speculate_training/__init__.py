"""Training of speculative heads for hf_speculate: methods, data, trainer, recipes. See training/README.md."""

from .run.evaluation import AcceptanceEvaluation as AcceptanceEvaluation
from .run.evaluation import AcceptanceOptions as AcceptanceOptions
from .run.recipe import Recipe as Recipe
from .run.recipe import read_recipe as read_recipe
from .run.run import train_head as train_head
from .run.trainer import HeadTrainer as HeadTrainer
from .run.trainer import HeadTrainingArguments as HeadTrainingArguments
