"""The choice of every node's token as a function of tensors, so that it can be a part of a recorded forward.

It does what `Sampler` does in its tier "scores", and nothing that a recording forbids: no look at values, no random
numbers. Noise is drawn before and comes in by depth.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process as lp

from ..tree import DraftTree
from .processors import KnownProcessors
from .sampler import Choose, Sampler, TaintedScores, are_tainted, possible


# Deepest level for which noise is passed in, plus one. Noise of a level is as large as the vocabulary.
NOISE_LEVELS = 16

# Processors that look at no values on the host. (Eta and others ask whether probabilities are valid.)
_RECORDABLE = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
)


class BatchedChoice:
    """Chooses the tokens after all nodes of a tree at once.

    Args:
        processors: processors of the request.
        samples: whether the request samples; else it is greedy.

    Attributes:
        key: equal for choices that launch the same kernels.
    """

    def __init__(self, processors: KnownProcessors, samples: bool):
        self.processors, self.samples = processors, samples
        self.key: Hashable = samples, repr([(type(each).__name__, vars(each)) for each in processors])

    @classmethod
    def of(cls, sampler: Sampler) -> BatchedChoice | None:
        """The choice of a request, or None if tokens have to be chosen on the host."""
        processors = sampler.processors
        if type(sampler) is not Sampler or sampler.records.of_sampler or sampler.required_tier != "scores":
            return None
        if processors and type(processors) is not KnownProcessors:
            return None
        if any(type(each) not in _RECORDABLE or _holds_tensors(each) for each in processors):
            return None
        return cls(KnownProcessors(processors), sampler.noise is not None)

    def __call__(
        self, logits: Float[Tensor, "B N V"], depths: Int[Tensor, "B N"], noise: Float[Tensor, "D B V"] | None
    ) -> tuple[Int[Tensor, "B N"], Bool[Tensor, " B"]]:
        """The chosen tokens, and whether all scores of a node are NaN, for each row.

        Args:
            noise: noise of the step at which the children of a node at each depth are chosen; None for greedy requests.
        """
        flat = logits.to(copy=True, dtype=torch.float32).flatten(0, 1)
        no_text: Any = flat.new_empty(len(flat), 0, dtype=torch.long)
        scores = self.processors(no_text, flat)
        of_nodes = None
        if noise is not None:
            rows = torch.arange(len(depths), device=depths.device)[:, None]
            of_nodes = noise[depths.clamp(max=len(noise) - 1), rows].flatten(0, 1)
        return Sampler.pick(scores, of_nodes).view(depths.shape), are_tainted(logits).any(-1)


def _holds_tensors(processor: Any) -> bool:
    """Whether a processor has tensors, whose values are no part of `key`."""
    return any(isinstance(value, Tensor) for value in vars(processor).values())


def fill_noise(sampler: Sampler, num_emitted: Sequence[int], count: int, out: Float[Tensor, "D B V"]) -> None:
    """Writes the noise of the next `count` steps of every row to `out[:count]`, in one copy."""
    assert sampler.noise is not None
    rows = [row for depth in range(count) for row in sampler.noise.rows_of([step + depth for step in num_emitted])]
    torch.stack(rows, out=out[:count].view(len(rows), -1))


@runtime_checkable
class Table(Protocol):
    """The tokens that a forward has chosen after all nodes of a tree (`scoring.ScoredTable`)."""

    def read(self) -> tuple[list[list[int]], list[bool], list[list[list[Any]]]]:
        """Chosen tokens, whether a row's scores cannot be trusted, and tokens, parents and values of the tree."""
        ...


def look_up(table: Table, tree: DraftTree, *, may_be_tainted: bool) -> Choose:
    """`Sampler.chooser` for tokens that the forward has chosen; reads them together with the tree, in one transfer.

    Raises:
        TaintedScores: scores of a node are NaN, and may be tainted.
    """
    chosen, are_marked, lists = table.read()
    if tree.unread is not None:
        tree.reading.supply(lists)
    if may_be_tainted and any(are_marked):
        raise TaintedScores

    def of(rows: Sequence[int], nodes: Sequence[int]) -> list[int]:
        return possible([chosen[tree.slot(row)][node] for row, node in zip(rows, nodes, strict=True)])

    return of
