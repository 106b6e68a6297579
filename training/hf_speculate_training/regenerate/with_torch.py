"""The names that this package exports only when they are asked for, because their modules import torch."""

from .planning import Planner, RegenerateOptions
from .self_prompts import write_self_prompts
from .writing import regenerate, write_answers


__all__ = [
    "Planner",
    "RegenerateOptions",
    "regenerate",
    "write_answers",
    "write_self_prompts",
]
