"""Answers of the target to the prompts of a dataset, so that a head learns the target's words and not the data's.

`regenerate` plans batches over the records and has the target answer them, speculatively; `write_self_prompts` draws
the questions from the target too. The output only grows: a run that was killed resumes where it stopped, with the same
text. `write_answers` takes any `Engine`: the target in this process, actors on a cluster, a server.
"""

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
