"""Answers of the target to the prompts of a dataset, so that a head learns the target's words and not the data's.

`regenerate` plans batches over the records and has the target answer them, speculatively; `write_self_prompts` draws
the questions from the target too. The output only grows: a run that was killed resumes where it stopped, with the same
text. `write_answers` takes any `Engine`: the target in this process, actors on a cluster, a server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .with_torch import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.with_torch"), name)
