"""Counts of the answers to one prompt: of earlier requests, and of the rows that answer it now.

Rollouts of reinforcement learning answer each prompt several times at once, and again in every epoch. "Beat the long
tail" (DAS, arXiv:2511.13841) keeps a suffix tree for each prompt for this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .contexts import ORDERS, ContextCounts
from .store import SuffixStore


# Most tokens of earlier answers that a request counts, which takes a tenth of a second. The newest answers come first.
_MAX_TOKENS = 16_384


def answers_by_row(
    prompts: Sequence[Sequence[int]], store: SuffixStore | None, adapters: str
) -> list[ContextCounts | None]:
    """The counts of each row's prompt, shared by the rows with the same prompt.

    None if the row is the only one with its prompt and the store has no answer to it.
    """
    keys = [tuple(prompt) for prompt in prompts]
    shared: dict[tuple[int, ...], ContextCounts | None] = {}
    for prompt, num_rows in Counter(keys).items():
        earlier = [] if store is None else store.answers(adapters, prompt)
        counts = _counted(earlier, prompt)
        shared[prompt] = counts if num_rows > 1 or counts.followers else None
    return [shared[prompt] for prompt in keys]


def _counted(answers: Sequence[Sequence[int]], prompt: Sequence[int]) -> ContextCounts:
    counts, left = ContextCounts(), _MAX_TOKENS
    for tokens in answers:
        counts.extend([*prompt[-ORDERS[-1] :]], tokens[:left])
        left = max(left - len(tokens), 0)
    return counts
