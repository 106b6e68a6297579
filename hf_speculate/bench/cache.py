"""Cost of appending to and keeping a path in the KV cache as the context grows, ours beside stock's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ..cache import TreeCache
from ..commands.environment import environment, find_device, find_dtype
from ..commands.grid import Grid
from ..commands.timing import progress, spread, synchronize
from ..errors import SpeculateError


NUM_NODES = 32
PATH = (0, 3, 11, 26)
OPERATIONS = ("append_1", "append_32", "keep_4_of_32")


@dataclass(frozen=True)
class CacheShape:
    """KV entries of one row; the default is Qwen2-0.5B's."""

    num_layers: int = 24
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "bfloat16"

    def entries(self, count: int, device: torch.device) -> Tensor:
        size = (1, self.num_kv_heads, count, self.head_dim)
        return torch.randn(size, device=device).to(find_dtype(self.dtype))


class _Ours:
    """Our cache, holding T committed entries."""

    def __init__(self, shape: CacheShape, length: int, device: torch.device):
        self.tree = TreeCache(DynamicCache(), batch_size=1)
        self.cache = self.tree.cache
        _fill(self.cache, shape, length, device)
        self.tree.commit_appended()
        self.length = length
        entries = shape.entries(1, device)
        for layer in _layers(self.cache):  # growth is measured apart
            layer.reserve(length + NUM_NODES, entries, entries)

    def keep(self) -> None:
        self.tree.keep([PATH])

    def rewind(self) -> None:
        self.tree.truncate((self.length,))


class _Stock:
    """`DynamicCache` cannot keep a path: this is the cheapest way to make it, as a loop over stock caches would."""

    def __init__(self, shape: CacheShape, length: int, device: torch.device):
        self.cache = DynamicCache()
        _fill(self.cache, shape, length, device)
        self.length = length
        self.committed = [(layer.keys, layer.values) for layer in _layers(self.cache)]
        self.path = torch.tensor(PATH, device=device) + length

    def keep(self) -> None:
        for layer in _layers(self.cache):
            layer.keys = self._kept(layer.keys)
            layer.values = self._kept(layer.values)

    def _kept(self, states: Tensor) -> Tensor:
        return torch.cat([states[:, :, : self.length], states.index_select(2, self.path)], dim=2)

    def rewind(self) -> None:
        for layer, (keys, values) in zip(_layers(self.cache), self.committed, strict=True):
            layer.keys, layer.values = keys, values


def bench_cache(
    lengths: Sequence[int] = (256, 1024, 4096, 16384),
    *,
    shape: CacheShape | None = None,
    repeats: int = 30,
    device: str | None = None,
) -> dict[str, Any]:
    """Microseconds of each operation, all layers together, at each context length.

    Operations: append 1 entry, append 32, keep a path of 4 of the 32; and `grow_per_entry`, what ours pays when the
    buffer is full, divided by the entries that then fit (a growth costs a copy of everything, and is rarer the longer
    the context).

    Returns:
        JSON-serialisable; `ratio` is the time at the longest context / at the shortest.
    """
    if len(lengths) < 2 or min(lengths) < 1 or repeats < 1:
        raise SpeculateError(
            f"bench cache needs at least two context lengths >= 1 and one repeat, got {list(lengths)} and {repeats}."
        )
    shape, on = shape or CacheShape(), find_device(device)
    rows = []
    with progress("cache", total=len(lengths)) as advance:
        for length in sorted(lengths):
            rows.append({"length": length, **_measure(shape, length, repeats, on)})
            advance(f"T={length}")
    first, last = rows[0], rows[-1]
    ratio = {
        name: {op: last[name][op]["median"] / first[name][op]["median"] for op in first[name]}
        for name in ("ours", "stock")
    }
    return {
        "bench": "cache",
        "unit": "microseconds, all layers",
        "shape": asdict(shape),
        "repeats": repeats,
        "rows": rows,
        "ratio": ratio,
        "environment": environment(on),
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """The result as one table."""
    shape, ratio, contexts = result["shape"], result["ratio"], result["rows"]
    pairs = [(name, operation) for operation in OPERATIONS for name in ("ours", "stock")]
    rows = []
    for row in contexts:
        cells = [f"{row[name][operation]['median']:,.0f}" for name, operation in pairs]
        rows.append([f"{row['length']}", *cells, f"{row['ours']['grow_per_entry']['median']:.2f}"])
    cells = [f"{ratio[name][operation]:.2f}x" for name, operation in pairs]
    first, last = contexts[0]["length"], contexts[-1]["length"]
    rows.append([f"{last} / {first}", *cells, f"{ratio['ours']['grow_per_entry']:.2f}x"])
    return [
        Grid(
            title=f"KV cache, {shape['num_layers']} layers x {shape['num_kv_heads']} KV heads x {shape['head_dim']}, "
            f"{shape['dtype']}: median microseconds, all layers",
            columns=[
                "context",
                *(f"{operation.replace('_', ' ')}\n{name}" for name, operation in pairs),
                "growth\nper entry",
            ],
            rows=rows,
            breaks=[len(contexts)],
        )
    ]


def _measure(shape: CacheShape, length: int, repeats: int, device: torch.device) -> dict[str, Any]:
    subjects: dict[str, _Ours | _Stock] = {
        "ours": _Ours(shape, length, device),
        "stock": _Stock(shape, length, device),
    }
    one, many = shape.entries(1, device), shape.entries(NUM_NODES, device)
    times: dict[str, dict[str, list[float]]] = {name: {op: [] for op in OPERATIONS} for name in subjects}
    # Not in turn: stock's copies would leave ours a cold processor cache.
    for name, subject in subjects.items():
        for repeat in range(repeats + 2):
            found = (
                _microseconds(lambda s=subject: _append(s.cache, one), device, after=subject.rewind),
                _microseconds(lambda s=subject: _append(s.cache, many), device),
                _microseconds(subject.keep, device, after=subject.rewind),
            )
            if repeat >= 2:  # the first two are warm-up
                for operation, value in zip(OPERATIONS, found, strict=True):
                    times[name][operation].append(value)
    result = {name: {op: spread(values) for op, values in found.items()} for name, found in times.items()}
    result["ours"]["grow_per_entry"] = spread([_growth(shape, length, device) for _ in range(3)])
    return result


def _growth(shape: CacheShape, length: int, device: torch.device) -> float:
    """Microseconds of an append that makes full buffers grow, per entry of room that this makes."""
    tree = TreeCache(DynamicCache(), batch_size=1)
    _fill(tree.cache, shape, length, device)
    tree.commit_appended()
    for layer in _layers(tree.cache):
        layer.keys, layer.values = layer.keys, layer.values  # adopted: the next append must copy
    entry = shape.entries(1, device)
    elapsed = _microseconds(lambda: _append(tree.cache, entry), device)
    room = _layers(tree.cache)[0]._buffers["keys"].shape[-2] - length
    return elapsed / room


def _layers(cache: Cache) -> list[Any]:
    """Of these two kinds; the declared type is a union with layers that hold no keys."""
    return cache.layers


def _fill(cache: Cache, shape: CacheShape, length: int, device: torch.device) -> None:
    for index in range(shape.num_layers):
        cache.update(shape.entries(length, device), shape.entries(length, device), index)


def _append(cache: Cache, entries: Tensor) -> None:
    for index in range(len(cache.layers)):
        cache.update(entries, entries, index)


def _microseconds(call: Callable[[], None], device: torch.device, after: Callable[[], None] | None = None) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    elapsed = (time.perf_counter() - start) * 1e6
    if after is not None:
        after()
    return elapsed
