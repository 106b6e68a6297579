"""Answers written anew by the target, so that a head learns what the target says and not what the data say.

`regenerate` plans batches over the records and has the target answer them, speculatively; `write_self_prompts` draws
the questions from the target too. What is written only grows: a run that was killed goes on where it stopped, with what
it would have written. `write_answers` has an `Engine` answer: the target here, actors on a cluster, a server.
"""

from .planning import Planner, RegenerateOptions
from .self_prompts import SelfPromptOptions, write_self_prompts
from .writing import RegenerateReport, regenerate, write_answers


__all__ = [
    "Planner",
    "RegenerateOptions",
    "RegenerateReport",
    "SelfPromptOptions",
    "regenerate",
    "write_answers",
    "write_self_prompts",
]
