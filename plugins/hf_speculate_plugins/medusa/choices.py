"""Static draft trees of Medusa: which nodes there are, fixed before generation.

A node is a *choice* (`hf_speculate_plugins.choices`): `(0, 2)` is the third best token of head 1 below the best one of
head 0.
Source: arXiv:2401.10774, section 2.1.2 (tree attention) and 2.3.3 (optimised tree construction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.planning import best_first

from ..trees.static import Choices, canonical, parents_of


Accuracies = tuple[tuple[float, ...], ...]

MAX_RANKS = 10

# Top-1 accuracies of the five heads of medusa-vicuna-7b as Medusa's report gives them. Ranks below the first were not
# published: they are taken to fall with the square of the rank, which puts 75 to 90 % of a head's hits on ten ranks.
# A user's own figures (`measured_accuracies`) are better; a wrong guess costs acceptance, never text.
_TOP1 = (0.56, 0.32, 0.20, 0.15, 0.12)
DEFAULT_ACCURACIES: Accuracies = tuple(tuple(top1 / (r + 1) ** 2 for r in range(MAX_RANKS)) for top1 in _TOP1)

# Ranks under the likely paths to every head: enough to learn how often each rank of each head is right.
EXPLORED_CHOICES: Choices = tuple(
    (*path, rank)
    for paths, ranks in (
        (((),), 10),
        (((0,), (1,), (2,)), 8),
        (((0, 0), (0, 1), (1, 0)), 6),
        (((0, 0, 0),), 6),
        (((0, 0, 0, 0),), 6),
    )
    for path in paths
    for rank in range(ranks)
)


def computed_choices(accuracies: Sequence[Sequence[float]], max_nodes: int) -> Choices:
    """The tree of `max_nodes` nodes with the highest expected number of accepted tokens, see `best_first`.

    Args:
        accuracies: `accuracies[d][k]`, how often the token of rank k of head d is the right one.
        max_nodes: nodes without the root.
    """
    return canonical(path for path, _ in best_first(accuracies, max_nodes))


def measured_accuracies(
    logits: Float[Tensor, "D T Vd"],
    token_ids: Int[Tensor, " T"],
    max_ranks: int = MAX_RANKS,
    draft_token_ids: Int[Tensor, " Vd"] | None = None,
) -> Accuracies:
    """How often each rank of each head was right on a text, the input of `computed_choices`.

    Args:
        logits: of all heads at the positions of the text (`MedusaHeads` on the target's last hidden states).
        token_ids: the text; best one that the target itself wrote.
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


@dataclass(frozen=True, eq=False)  # compared by identity: `static_tree` makes each once, and it is a cache key
class StaticTree:
    """Choices compiled for drafting.

    Attributes:
        choices: one a node, in node order, the root left out.
        parents: parent of every node, root first.
        widths: `widths[d]`, how many of head d's tokens are used.
        columns: column of every node but the root in the row of the heads' best tokens, heads one after the other.
    """

    choices: Choices
    parents: tuple[int, ...]
    widths: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    def to_depth(self, max_depth: int) -> StaticTree:
        """The tree without the nodes below `max_depth`."""
        if max_depth >= self.max_depth:
            return self
        return static_tree(tuple(choice for choice in self.choices if len(choice) <= max_depth))


@lru_cache(maxsize=256)
def static_tree(choices: Choices) -> StaticTree:
    """Compiles choices in canonical order."""
    max_depth = max(map(len, choices), default=0)
    widths = [1 + max(c[-1] for c in choices if len(c) == depth) for depth in range(1, max_depth + 1)]
    offsets = [sum(widths[:depth]) for depth in range(max_depth)]
    return StaticTree(
        choices=choices,
        parents=parents_of(choices),
        widths=tuple(widths),
        columns=tuple(offsets[len(choice) - 1] + choice[-1] for choice in choices),
    )


@lru_cache(maxsize=64)
def column_index(tree: StaticTree, device: torch.device) -> Int[Tensor, " N"]:
    """`tree.columns` on a device, made once."""
    return torch.tensor(tree.columns, dtype=torch.long, device=device)
