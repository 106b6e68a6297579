"""Options of Medusa drafting, and the static tree that is best for what is known of the heads' accuracies.

Source: arXiv:2401.10774, section 2.1.2 (tree attention) and 2.3.3 (optimised tree construction).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..trees import StaticTree, TreeChoices, canonical


Accuracies = tuple[tuple[float, ...], ...]

MAX_RANKS = 10

# Top-1 accuracies of the five heads of medusa-vicuna-7b as Medusa's report gives them. Ranks below the first were not
# published: they are taken to fall with the square of the rank, which puts 75 to 90 % of a head's hits on ten ranks.
# A user's own figures (`measured_accuracies`) are better; a wrong guess costs acceptance, never text.
_TOP1 = (0.56, 0.32, 0.20, 0.15, 0.12)
DEFAULT_ACCURACIES: Accuracies = tuple(tuple(top1 / (r + 1) ** 2 for r in range(MAX_RANKS)) for top1 in _TOP1)


def computed_choices(accuracies: Sequence[Sequence[float]], max_nodes: int) -> TreeChoices:
    """The tree of `max_nodes` nodes with the highest expected number of accepted tokens.

    The value of a node is the product of the accuracies on its path, the probability that all of it is accepted if
    heads are independent. No node is worth more than its parent, so it is optimal to take the best node within reach
    again and again.

    Args:
        accuracies: share of rounds in which the token of rank k of head d is right, `accuracies[d][k]`.
        max_nodes: number of nodes without the root.
    """
    paths: list[tuple[int, ...]] = []
    within_reach: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while within_reach and len(paths) <= max_nodes:
        negative_value, parent = heapq.heappop(within_reach)
        paths.append(parent)
        for rank, accuracy in enumerate(accuracies[len(parent)] if len(parent) < len(accuracies) else ()):
            if accuracy > 0:
                heapq.heappush(within_reach, (negative_value * accuracy, (*parent, rank)))
    return canonical(paths[1:])  # without the root


def measured_accuracies(
    logits: Float[Tensor, "D T Vd"],
    token_ids: Int[Tensor, " T"],
    max_ranks: int = MAX_RANKS,
    draft_token_ids: Int[Tensor, " Vd"] | None = None,
) -> Accuracies:
    """Share of a text's tokens that each rank of each head predicts, the input of `computed_choices`.

    Args:
        logits: logits of all heads at the positions of the text (`MedusaHeads` on the target's last hidden states).
        token_ids: the text; best one that the target itself wrote.
        max_ranks: number of ranks to count.
        draft_token_ids: the heads' `token_ids`, when their vocabulary is truncated.
    """
    accuracies = []
    for head, head_logits in enumerate(logits):
        wanted = token_ids[head + 2 :].to(logits.device)
        ranked = head_logits[: len(wanted)].topk(min(max_ranks, logits.shape[-1]), dim=-1).indices
        if draft_token_ids is not None:
            ranked = draft_token_ids.to(logits.device)[ranked]
        hits = (ranked == wanted[:, None]).float()
        accuracies.append(tuple(hits.mean(0).tolist()) if len(wanted) else (0.0,) * ranked.shape[-1])
    return tuple(accuracies)


@lru_cache(maxsize=64)
def column_index(tree: StaticTree, device: torch.device) -> Int[Tensor, " N"]:
    """Column of every node but the root in the row of the heads' best tokens, `tree.widths` of each, side by side."""
    offsets = [sum(tree.widths[:depth]) for depth in range(tree.max_depth)]
    columns = [offsets[len(choice) - 1] + choice[-1] for choice in tree.choices]
    return torch.tensor(columns, dtype=torch.long, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaOptions:
    """Options of Medusa drafting.

    Attributes:
        choices: the tree as a list of rank tuples (Medusa's `medusa_choices`), cut to the number of heads. None
            computes one from `accuracies`.
        accuracies: share of rounds in which rank k of head d is right, `accuracies[d][k]` (`measured_accuracies`); None
            takes those of the published Vicuna-7B heads.
        max_nodes: nodes of the computed tree, the root not counted; None: 63 on accelerators, 15 on a CPU.
        order: heads that draft depth 1, 2, …, for files that have them otherwise: `(1, 2, 3)` leaves out a head 0 that
            repeats the target's own token. None: all, in the order of the file.
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
