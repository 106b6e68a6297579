"""The forward over a draft tree that equals stock's single steps bit for bit, and the test that it does."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache

from ..attention import PerNodeAttention, Sizes, attending_per_node, depth_first
from ..cache import TreeCache, as_cache, is_indexable
from ..stats import RunnerRecord
from ..target import (
    GenerativeModel,
    counts_along_cache,
    filler_cache,
    foreign_hooks,
    has_length_dependent_rope,
    has_native_layers,
    input_device,
    layer_types,
    layer_windows,
    num_embeddings,
    num_positions,
    prompt_learning,
    structure_key,
    unvouched_modules,
)
from ..tree import DraftTree
from .scorer import Forward, Nodes, Scorer


class ExactForward(Forward):
    """A forward whose logits and cache entries are bit for bit those of stock's single steps.

    Args:
        model: model that verifies.
        prompt_mask: mask of the scorer, bool or int [B, M0]; None when all entries are real.
        sizes: row counts that each weight's products can be trusted with (`Sizes`).
    """

    keeps_backends = True

    def __init__(self, model: GenerativeModel, prompt_mask: Tensor | None, sizes: Sizes):
        super().__init__()
        self._sizes = sizes
        whole = None if prompt_mask is None else prompt_mask.bool()
        self._stock_mask = None if whole is None or bool(whole.all()) else whole
        windows = layer_windows(model.config)
        self._windows = windows if any(windows) else ()
        self._mask_dtype = model.dtype if model.config._attn_implementation == "eager" else None

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        """The model's output. Each node's attention is computed alone, so the model gets an empty mask."""
        tree, metadata = nodes.tree, scorer.metadata(nodes)
        if nodes.num_cached:
            raise ValueError("an exact forward runs a whole tree.")
        attention = PerNodeAttention(
            base=metadata.num_prefix,
            visits=[depth_first(parents) for parents in tree.host.parents],
            lengths=metadata.lengths,
            prompt_mask=None if self._stock_mask is None else self._stock_mask[list(scorer.cache.rows)],
            windows=self._windows,
            mask_dtype=self._mask_dtype,
        )
        rows = tree.batch_size * tree.num_nodes
        sizes = {shape: of_shape for shape, of_shape in self._sizes.items() if rows not in of_shape}
        kinds = scorer.layer_types
        with attending_per_node(attention, sizes if rows > 1 else {}, scorer.device) as mask:
            return scorer.run_model(nodes, metadata, {kind.name: mask for kind in kinds} if len(kinds) > 1 else mask)


COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Row counts to multiply at once. Other counts are put together from these."""

MAX_NATIVE_ROWS = 128
"""Most rows of a text that the kernel for packed weights takes in one forward. More rows go through modules, which
round differently."""

# Number of values to compare for each row count, unless the weights are large. Where a kernel sums 4864 products in
# another order, 3 values in 10,000 differ (torch 2.13, AMX); with 32 products, 1 in 100,000. So a million equal values
# hide such a kernel with a probability of 5e-5. For a large weight, 64 equal rows hide it with less than 1e-9.
_NUM_VALUES, _MOST_ROWS = 2_000_000, 20_000
_MIN_ROWS, _NUM_PRODUCTS = 64, 2_000_000_000

_PARENTS = (-1, 0, 1, 2, 0, 1, 5, 4)
_PATHS = (0, 1, 2, 3), (0, 1, 5, 6), (0, 4, 7)
_LENGTHS = 9, 200, 1100
_MOST_WINDOW = 4096

# Prefix length for chains that test other kinds of products.
_CHAIN_PREFIX = 200

_Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool, torch.device, int]
_sizes_of_kinds: dict[_Kind, Sequence[int]] = {}
_found: WeakKeyDictionary[GenerativeModel, dict[tuple[Any, ...], Sizes | str]] = WeakKeyDictionary()


def exact_sizes(model: GenerativeModel, cache: Cache, batch_size: int, is_padded: bool) -> Sizes | str:
    """Row counts that `ExactForward` can trust, or the reason why a model cannot be exact.

    No counts are needed if a kernel of ours computes the layers. The test runs what the request will run: the user's
    hooks are called in it, too.

    Args:
        cache: KV cache of the request.
        is_padded: whether rows of the batch have padding.
    """
    if problem := _problem(model, cache):
        return problem
    known = _found.setdefault(model, {})
    key = batch_size, is_padded, structure_key(model), tuple(map(id, foreign_hooks(model)))
    if key not in known:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(0)
            known[key] = _tried(model, batch_size, is_padded)
    return known[key]


def _problem(model: GenerativeModel, cache: Cache) -> str:
    """The reason, known without a test, why a request cannot be exact; "" if there is none."""
    name, attention = type(model).__name__, model.config._attn_implementation
    if not is_indexable(cache) or any(kind.is_chunked for kind in layer_types(model.config)):
        return f"not every layer of {name} keeps all of the text, or a window of it"
    if reason := counts_along_cache(model):
        return reason
    if has_length_dependent_rope(model.config):
        return "RoPE depends on the longest position"
    if prompt_learning(model):
        return "a prompt-learning adapter is in effect"
    if torch.is_autocast_enabled(input_device(model).type):
        return "autocast is on"
    if attention not in ("sdpa", "eager") and not has_native_layers(model):
        return f"exact attention is that of attn_implementation='sdpa' or 'eager', {name} has {attention!r}"
    return ""


def _tried(model: GenerativeModel, batch_size: int, is_padded: bool) -> Sizes | str:
    sizes = {} if has_native_layers(model) else product_sizes(model)
    if batch_size > 1:
        for shape, of_shape in sizes.items():
            if batch_size not in of_shape:
                return f"a product of {list(shape)} rounds {batch_size} rows otherwise than each alone"
    try:
        difference = first_difference(model, sizes, batch_size, is_padded)
        others = [] if difference or has_native_layers(model) else unvouched_modules(model)
        if others and (found := chain_difference(model, sizes, batch_size)):
            difference = f"{found}, where {', '.join(others)} may multiply by other means than nn.Linear"
    except Exception as error:
        return f"{type(model).__name__} could not be tried ({type(error).__name__}: {error})"
    return f"a tree differs from single steps in {difference}" if difference else sizes


def product_sizes(model: nn.Module) -> Sizes:
    """The trusted row counts of every linear layer, by weight shape [out, in], falling.

    Each shape is tested once: the choice of the kernel does not depend on the weights.
    """
    sizes: dict[tuple[int, ...], Sequence[int]] = {}
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.is_meta:
            continue
        weight, has_bias, threads = module.weight, module.bias is not None, torch.get_num_threads()
        kind = tuple(weight.shape), weight.stride(), weight.dtype, has_bias, weight.device, threads
        if kind not in _sizes_of_kinds:
            _sizes_of_kinds[kind] = _equal_counts(module)
        known = sizes.get(kind[0], COUNTS)
        sizes[kind[0]] = [count for count in _sizes_of_kinds[kind] if count in known]
    return sizes


def _equal_counts(layer: nn.Linear) -> Sequence[int]:
    """The counts up to the first one whose bits differ, falling."""
    weight = layer.weight
    num_rows = min(_NUM_VALUES // len(weight), _MOST_ROWS, _NUM_PRODUCTS // weight.numel())
    rows = torch.randn(max(num_rows, _MIN_ROWS), weight.shape[1], dtype=torch.float32, device="cpu").to(
        weight.device, weight.dtype
    )

    def multiplied(count: int) -> Tensor:
        return torch.cat([functional.linear(part, weight, layer.bias) for part in rows.split(count)])

    found, alone = [], multiplied(1)
    for count in COUNTS:
        whole = len(rows) - len(rows) % count  # leave out the last, smaller piece
        if not torch.equal(multiplied(count)[:whole], alone[:whole]):
            break
        found.insert(0, count)
    return found


def first_difference(model: GenerativeModel, sizes: Sizes, batch_size: int = 1, is_padded: bool = False) -> str:
    """The first place where a tree's states or logits differ from single steps; "" if there is none.

    Several prefix lengths are tested.
    """
    tokens = (
        torch.randperm(num_embeddings(model), dtype=torch.long, device="cpu")[: len(_PARENTS)]
        .expand(batch_size, -1)
        .contiguous()
    )
    tree = DraftTree(tokens, _PARENTS)
    for length in _prefix_lengths(model):
        mask = torch.ones(batch_size, length, dtype=torch.long, device=input_device(model))
        if is_padded:
            for row in range(1, batch_size):
                mask[row, : row % (length - 1) + 1] = 0
        prefix = filler_cache(model, batch_size, length)
        scorer = exact_scorer(model, TreeCache(copy.deepcopy(prefix), batch_size), sizes, mask)
        output = scorer(tree, mask.sum(1).tolist(), forward_kwargs={"output_hidden_states": True})
        for path in _PATHS if length == _LENGTHS[0] else _PATHS[:1]:
            steps = _Steps(model, mask, prefix)
            for node in path:
                if place := _different_place(steps.run(tokens[:, node : node + 1]), output, node):
                    return f"{place}, after {length} tokens"
    return ""


def chain_difference(model: GenerativeModel, sizes: Sizes, batch_size: int) -> str:
    """The same test, node by node, for chains of all lengths in `COUNTS`."""
    most = num_positions(model.config)
    length = _CHAIN_PREFIX if most is None else max(min(_CHAIN_PREFIX, most - COUNTS[-1]), 1)
    mask = torch.ones(batch_size, length, dtype=torch.long, device=input_device(model))
    prefix = filler_cache(model, batch_size, length)
    for count in COUNTS if most is None else [count for count in COUNTS if length + count <= most]:
        tokens = torch.randint(num_embeddings(model), (batch_size, count), dtype=torch.long, device="cpu")
        scorer = exact_scorer(model, TreeCache(copy.deepcopy(prefix), batch_size), sizes, mask)
        kwargs = {"output_hidden_states": True}
        output = scorer(DraftTree.chain(tokens), mask.sum(1).tolist(), forward_kwargs=kwargs)
        steps = _Steps(model, mask, prefix)
        for node in range(count):
            if place := _different_place(steps.run(tokens[:, node : node + 1]), output, node):
                return f"{place}, with {count} tokens at once"
    return ""


def _different_place(step: Any, output: Any, node: int) -> str:
    """The place where a node's states or logits differ from those of a single step; "" if there is none."""
    for layer, (stocks, ours) in enumerate(zip(step.hidden_states, output.hidden_states, strict=True)):
        if not torch.equal(stocks[:, -1], ours[:, node]):
            return f"layer {layer}"
    return "" if torch.equal(step.logits[:, -1], output.logits[:, node]) else "the logits"


def _prefix_lengths(model: GenerativeModel) -> Sequence[int]:
    """Lengths of the prefixes to test.

    They must fit into a model's table of positions with a path after them. Some reach the point where a sliding window
    begins to move, if it is small.
    """
    depth, most = len(_PATHS[0]), num_positions(model.config)
    ends = {window - 2 for window in layer_windows(model.config) if window is not None and 2 < window <= _MOST_WINDOW}
    return [length for length in (*_LENGTHS, *sorted(ends)) if most is None or length + depth <= most]


def exact_scorer(
    model: GenerativeModel,
    cache: TreeCache,
    sizes: Sizes,
    prompt_mask: Tensor | None = None,
    token_kwargs: Mapping[str, Tensor] | None = None,
    record: RunnerRecord | None = None,
) -> Scorer:
    """A scorer with the bits of single steps. If a kernel of ours computes the layers, any scorer is exact."""
    if has_native_layers(model):
        return Scorer(model, cache, prompt_mask, token_kwargs=token_kwargs, record=record)
    forward = ExactForward(model, prompt_mask, sizes)
    return Scorer(model, cache, prompt_mask, token_kwargs=token_kwargs, forward=forward, record=record)


class _Steps:
    """Stock's single steps of a batch, one after the other.

    Args:
        cache: KV cache of the prefix; it is copied.
    """

    def __init__(self, model: GenerativeModel, mask: Tensor, cache: Cache):
        self._model, self._mask, self._cache = model, mask, copy.deepcopy(cache)

    def run(self, tokens: Tensor) -> Any:
        first = self._cache.get_seq_length()
        mask = functional.pad(self._mask, (0, first + tokens.shape[1] - self._mask.shape[1]), value=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, first:]
        return self._model(
            input_ids=tokens.to(self._mask.device),
            attention_mask=mask,
            position_ids=positions,
            **as_cache(self._cache),
            output_hidden_states=True,
        )
