"""What single steps of a round cost: a forward over a tree, appending to the cache, reading the weights, waiting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from ..cache import TreeCache, as_cache
from ..commands import synchronize, timed
from ..errors import SpeculateError
from ..models import GenerativeModel
from ..target import Scorer, exact_scorer, exact_sizes
from ..tree import DraftTree


_COPIED_BYTES = 1 << 28
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


def prefilled_cache(model: GenerativeModel, prompt: Tensor) -> DynamicCache:
    """Of a prompt (int64 [1, S])."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():  # not inference mode: entries are written in place later
        model(prompt, **as_cache(cache), use_cache=True, logits_to_keep=1)
    return cache


def attention_forms(model: GenerativeModel, context: DynamicCache) -> tuple[str, ...]:
    """How tree masks can be handed to this model: "stock", and "folded" where KV heads would be repeated."""
    has_groups = Scorer(model, TreeCache(deepcopy(context), batch_size=1)).attention.groups > 1
    return ("stock", "folded") if has_groups else ("stock",)


def verify_ms(
    model: GenerativeModel,
    context: DynamicCache,
    nodes: Sequence[int],
    forms: Sequence[str | None] = (None,),
    repeats: int = 5,
) -> dict[tuple[int, Any], float]:
    """Milliseconds of one bare forward over N nodes, root included, as the decoding loop runs it.

    Args:
        context: what stands before; it is left as it is.
        forms: of attention; None is what the library takes on this device; "exact" is a forward with the bits of
            single steps, products included.
    Returns:
        by nodes and form.
    Raises:
        SpeculateError: "exact" cannot be had.
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
    """Milliseconds of each; one after the other, so that drift of the machine hits all alike."""
    times: dict[Any, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            call()  # warm-up; the one before it leaves other memory behind
            times[key].append(1e3 * timed(call, device)[0])
    return {key: statistics.median(found) for key, found in times.items()}


def cache_ms(context: DynamicCache, nodes: int, device: torch.device, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of appending N entries to all layers and keeping a path of up to four: "ours", and stock's way.

    `DynamicCache` cannot keep a path: the cheapest way to make it is taken, as a loop over stock caches would. Growing
    is left out: buffers are large enough.
    """
    path = list(range(0, nodes, max(nodes // 4, 1)))[:4]
    stock, tree = deepcopy(context), TreeCache(deepcopy(context), batch_size=1)
    layers: list[Any] = stock.layers
    length, before = tree.append_index, [(layer.keys, layer.values) for layer in layers]
    new = [tuple(states[:, :, :1].repeat(1, 1, nodes, 1) for states in pair) for pair in before]
    kept = torch.tensor([length + node for node in path], device=device)

    def append(cache: Any) -> None:
        for index, (keys, values) in enumerate(new):
            cache.update(keys, values, index)

    def ours() -> None:
        append(tree.cache)
        tree.keep([path])
        tree.truncate((length,))

    def theirs() -> None:
        append(stock)
        for layer, states in zip(layers, before, strict=True):
            for found in (layer.keys, layer.values):
                torch.cat([found[:, :, :length], found.index_select(2, kept)], dim=2)
            layer.keys, layer.values = states

    # Not in turn: stock's copies would leave ours a cold processor cache.
    return {
        name: medians_in_turn({name: call}, device, repeats)[name] for name, call in (("ours", ours), ("stock", theirs))
    }


def memory_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = medians_in_turn({"copy": lambda: target.copy_(source)}, device, repeats)["copy"]
    return 2e3 * _COPIED_BYTES / taken


def bytes_read(model: Any) -> int:
    """Bytes of weights that a forward over a few tokens has to read: all, but of embeddings that are not tied."""
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if embeddings is output else embeddings.nbytes
    parameters: Iterable[nn.Parameter] = model.parameters()
    return sum(parameter.nbytes for parameter in parameters) - unread


def host_waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often the host waited for the device during `call`; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
    return count_waits(event.name for event in found.events() or ())


def count_waits(names: Iterable[str]) -> int:
    """Of names of the runtime's calls (`cudaStreamSynchronize`, `hipStreamSynchronize`, ...)."""
    return sum(name.endswith(_WAITS) for name in names)
