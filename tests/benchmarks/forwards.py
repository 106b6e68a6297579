"""Costs of single forwards, which the benchmarks weigh a draft against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_speculate.cache import TreeCache, as_cache
from hf_speculate.errors import SpeculateError
from hf_speculate.forward import Scorer, exact_scorer, exact_sizes
from hf_speculate.target import GenerativeModel
from hf_speculate.tree import DraftTree
from hf_speculate_tools.commands import timed


def prefilled_cache(model: GenerativeModel, prompt: Tensor) -> DynamicCache:
    """Cache with the entries of a prompt, int64 [1, S]."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():  # not inference mode: entries are written in place later
        model(prompt, **as_cache(cache), use_cache=True, logits_to_keep=1)
    return cache


def verify_ms(
    model: GenerativeModel,
    context: DynamicCache,
    nodes: Sequence[int],
    forms: Sequence[str | None] = (None,),
    repeats: int = 5,
) -> dict[tuple[int, Any], float]:
    """Milliseconds of one bare forward over N nodes, root included, as the decoding loop runs it.

    Args:
        context: cache before the root; it is left as it is.
        nodes: sizes of the trees.
        forms: forms of attention. None is the one that the library takes on this device. "exact" is a forward with the
            bits of single steps, products included.
        repeats: times that each forward is timed.
    Returns:
        (nodes, form) -> milliseconds.
    Raises:
        SpeculateError: this model has no "exact" forward.
    """
    cache = TreeCache(deepcopy(context), batch_size=1)
    length, calls = cache.append_index, {}
    for n in nodes:
        # Binary, so that there is something to mask.
        tree = DraftTree(torch.arange(3, 3 + n)[None], [(node - 1) // 2 if node else -1 for node in range(n)])
        for form in forms:
            scorer = _exact_scorer(model, cache) if form == "exact" else Scorer(model, cache)
            if form not in (None, "exact"):
                scorer.attention.form = form  # type: ignore[assignment]
            calls[n, form] = lambda scorer=scorer, tree=tree: (scorer(tree, (length,)), cache.restore())
    with torch.inference_mode():
        return medians_in_turn(calls, model.device, repeats)


def _exact_scorer(model: GenerativeModel, cache: TreeCache) -> Scorer:
    sizes = exact_sizes(model, cache.cache, 1, is_padded=False)
    if isinstance(sizes, str):
        raise SpeculateError(f"an exact forward cannot be measured: {sizes}.")
    return exact_scorer(model, cache, sizes)


def medians_in_turn(calls: dict[Any, Callable[[], Any]], device: torch.device, repeats: int) -> dict[Any, float]:
    """Median milliseconds of each call. The calls take turns, so that drift of the machine hits all alike."""
    times: dict[Any, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            call()  # warm-up: the call before left other memory in the caches
            times[key].append(1e3 * timed(call, device)[0])
    return {key: statistics.median(found) for key, found in times.items()}
