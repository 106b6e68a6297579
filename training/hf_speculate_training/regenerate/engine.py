"""What answers prompts: the target in this process, a pool of actors on a cluster, a server.

The process that calls an engine plans the batches and writes the file, alone: so nothing is lost and nothing is written
twice, whatever an engine has to do again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from .answers import Job


class Engine(ABC):
    """Answers batches of jobs.

    Class attributes:
        answers_whole_batches: whether what a row draws depends on the batch that it is in. Then batches of which some
            jobs are done already are answered again as a whole, else without these.
    """

    answers_whole_batches: ClassVar[bool]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What answers depend on besides data and options, JSON-serialisable: a file is gone on with by no other."""

    @abstractmethod
    def answered(self, batches: Iterable[list[Job]]) -> Iterator[list[Job]]:
        """Jobs with their answers, as they come, in any order and grouping.

        Raises:
            SpeculateError: some could not be answered; what came before is right.
        """

    def mean_acceptance_length(self) -> float | None:
        """Tokens that rounds with a draft emitted so far; None where nothing is known of it."""
        return None
