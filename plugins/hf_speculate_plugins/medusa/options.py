"""Which tree Medusa heads draft, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..trees import StaticTree


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaOptions:
    """Options of Medusa drafting.

    Attributes:
        choices: the tree as a list of rank tuples, as Medusa's `medusa_choices`; parts deeper than there are heads are
            cut off. None computes one from `accuracies`.
        accuracies: `accuracies[d][k]`, how often rank k of head d is right (`measured_accuracies`); None takes those of
            the published Vicuna-7B heads.
        max_nodes: nodes of the computed tree, the root not counted; None: 63 on accelerators, 15 on a CPU.
        order: which heads draft depth 1, 2, …, for files that have them otherwise: `(1, 2, 3)` leaves out a head 0 that
            repeats what the target itself says. None: all, as they are in the file.
        before_final_norm: the heads were trained on the last layer's output before the target's final norm.
        check_backbone: refuse a target that is not the model that Medusa-2 heads were trained with.
    """

    choices: Sequence[Sequence[int]] | None = None
    accuracies: Sequence[Sequence[float]] | None = None
    max_nodes: int | None = None
    order: Sequence[int] | None = None
    before_final_norm: bool = False
    check_backbone: bool = True

    def __post_init__(self) -> None:
        if self.order is not None:
            object.__setattr__(self, "order", tuple(self.order))
            if not self.order or min(self.order) < 0 or len(set(self.order)) != len(self.order):
                raise ValueError(f"medusa: order must name different heads, got {list(self.order)}.")
        if self.choices is not None:
            if self.accuracies is not None or self.max_nodes is not None:
                raise ValueError("medusa: choices are a whole tree; accuracies and max_nodes are for a computed one.")
            object.__setattr__(self, "choices", StaticTree.of(self.choices, "medusa").choices)
        if self.accuracies is not None:
            object.__setattr__(self, "accuracies", tuple(tuple(head) for head in self.accuracies))
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ValueError(f"medusa: max_nodes must be at least 1, got {self.max_nodes}.")
