"""Which static trees Medusa drafts: the best one for what is known of the heads' accuracies.

Source: arXiv:2401.10774, section 2.1.2 (tree attention) and 2.3.3 (optimised tree construction).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..trees import Choices, StaticTree, canonical


Accuracies = tuple[tuple[float, ...], ...]

MAX_RANKS = 10

# Top-1 accuracies of the five heads of medusa-vicuna-7b as Medusa's report gives them. Ranks below the first were not
# published: they are taken to fall with the square of the rank, which puts 75 to 90 % of a head's hits on ten ranks.
# A user's own figures (`measured_accuracies`) are better; a wrong guess costs acceptance, never text.
_TOP1 = (0.56, 0.32, 0.20, 0.15, 0.12)
DEFAULT_ACCURACIES: Accuracies = tuple(tuple(top1 / (r + 1) ** 2 for r in range(MAX_RANKS)) for top1 in _TOP1)


def computed_choices(accuracies: Sequence[Sequence[float]], max_nodes: int) -> Choices:
    """The tree of `max_nodes` nodes with the highest expected number of accepted tokens.

    The value of a node is the product of the accuracies on its path, the probability that all of it is accepted if
    heads are independent. As no node is worth more than its parent, taking the best node within reach again and again
    is optimal.

    Args:
        accuracies: `accuracies[d][k]`, how often the token of rank k of head d is the right one.
        max_nodes: nodes without the root.
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


@lru_cache(maxsize=64)
def column_index(tree: StaticTree, device: torch.device) -> Int[Tensor, " N"]:
    """Column of every node but the root in the row of the heads' best tokens, `tree.widths` of each, side by side."""
    offsets = [sum(tree.widths[:depth]) for depth in range(tree.max_depth)]
    columns = [offsets[len(choice) - 1] + choice[-1] for choice in tree.choices]
    return torch.tensor(columns, dtype=torch.long, device=device)
