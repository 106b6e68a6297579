"""Random draft trees."""

from __future__ import annotations

import random

from hf_speculate.tree import DraftTree


def random_tree(seed: int, batch_size: int, vocab_size: int, max_nodes: int = 12, roots=None) -> DraftTree:
    """Rows of random structure and width; siblings differ."""
    choose, rows = random.Random(seed), []
    for row in range(batch_size):
        root = choose.randrange(vocab_size) if roots is None else roots[row]
        tokens, parents, taken = [root], [-1], set()
        for _ in range(choose.randint(0, max_nodes)):
            parent, token = (
                choose.choice([len(tokens) - 1, choose.randrange(len(tokens))]),
                choose.randrange(vocab_size),
            )
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        rows.append((tokens, parents))
    return DraftTree.from_rows(rows)
