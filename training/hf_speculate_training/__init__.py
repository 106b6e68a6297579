"""Training of speculative heads for hf_speculate: methods, data, trainer, recipes. See training/README.md."""

from .evaluation import AcceptanceEvaluation as AcceptanceEvaluation
from .evaluation import AcceptanceOptions as AcceptanceOptions
from .recipe import Recipe as Recipe
from .recipe import read_recipe as read_recipe
from .run import train_head as train_head
from .trainer import HeadTrainer as HeadTrainer
from .trainer import HeadTrainingArguments as HeadTrainingArguments
