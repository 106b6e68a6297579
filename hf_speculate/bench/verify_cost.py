"""What one target forward over a tree costs, without drafter and loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache import TreeCache
from ..commands.timing import spread, timed
from ..models import GenerativeModel
from ..scoring import Scorer
from ..tree import DraftTree


def branching(num_nodes: int) -> tuple[int, ...]:
    """Children a depth of a scripted tree with `num_nodes` nodes, root included: log2(N) + 1 levels, evenly filled."""
    depth = min(num_nodes.bit_length(), num_nodes - 1)
    return tuple((num_nodes - 1 - level + depth - 1) // depth for level in range(depth))


def verify_seconds(
    model: GenerativeModel, prompt: Tensor, nodes: Sequence[int], repeats: int = 8
) -> dict[int, dict[str, float]]:
    """Seconds of one bare forward over N nodes, root included, behind the prompt (int64 [1, S])."""
    cache = TreeCache(DynamicCache(config=model.config), batch_size=1)
    with torch.inference_mode():
        model(prompt, past_key_values=cache.cache, use_cache=True, logits_to_keep=1)
        cache.commit_appended()
        scorer = Scorer(model, cache)
        trees = {n: _tree(n, prompt) for n in nodes}
        times: dict[int, list[float]] = {n: [] for n in nodes}
        for repeat in range(repeats + 1):
            for n, tree in trees.items():
                seconds, _ = timed(lambda tree=tree: scorer(tree, [prompt.shape[1]]), model.device)
                cache.restore()
                if repeat:  # the first is warm-up
                    times[n].append(seconds)
    return {n: spread(values) for n, values in times.items()}


def _tree(num_nodes: int, prompt: Tensor) -> DraftTree:
    if num_nodes == 1:
        return DraftTree.root_only(prompt[:, -1].cpu())
    parents, node = [-1], 0
    for count in branching(num_nodes):
        first = len(parents)
        parents += [node] * count
        node = first
    return DraftTree(torch.arange(3, 3 + num_nodes)[None], parents)
