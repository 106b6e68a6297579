"""Answers written anew by the target, so that a head learns what the target says and not what the data say.

`regenerate` plans batches over the records and has the target answer them, speculatively. What is written only grows:
a run that was killed goes on where it stopped, with what it would have written.
"""

from .writing import RegenerateOptions, RegenerateReport, regenerate


__all__ = ["RegenerateOptions", "RegenerateReport", "regenerate"]
