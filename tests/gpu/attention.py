"""Phase `attention`: every way to compute a tree's attention, by heads, context and number of nodes.

Each way is timed in two forms. "device" is the time inside a recorded graph, where the host costs nothing. "single" is
one call at a time, where a call that prepares something shows up as the maximum. Recorded calls read other keys each
time, so that the L2 cache cannot hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from .setting import Setting, cudnn_attention, describe, synchronize
from .timing import recorded_us, single_us


# Query heads, KV heads, head size: Qwen2-0.5B and Llama-3.1-8B.
HEADS = ((14, 2, 64), (32, 8, 128))
CONTEXTS = (2048, 512, 8192)
NODES = (1, 8, 16, 32, 64)
TINY_CONTEXTS, TINY_NODES = (64, 128), (1, 4)

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
KERNEL = "kernel"
_ROTATED_BYTES, _MOST_COPIES = 1 << 27, 48
_CELL_SECONDS = 2.0  # of all ways of one cell

Way = Callable[[int], Tensor]


@dataclass(frozen=True)
class Case:
    """Random queries of a binary tree, which is the end of a context.

    Attributes:
        heads: query heads, KV heads, head size.
        context: number of keys, those of the tree included.
        nodes: number of queries.
        copies: number of different keys and values.
    """

    heads: tuple[int, int, int]
    context: int
    nodes: int
    copies: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    @property
    def groups(self) -> int:
        return self.heads[0] // self.heads[1]

    @cached_property
    def query(self) -> Tensor:
        return self._random(self.heads[0], self.nodes)

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each copy."""
        shape = self.heads[1], self.context
        return [(self._random(*shape), self._random(*shape)) for _ in range(self.copies)]

    @cached_property
    def ancestors(self) -> Tensor:
        """bool [1, N, N], whether a node sees another."""
        seen = torch.eye(self.nodes, dtype=torch.bool)
        for node in range(1, self.nodes):
            seen[node] |= seen[(node - 1) // 2]
        return seen[None].to(self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """Additive [1, 1, N, M]; None for one query, which sees everything."""
        if self.nodes == 1:
            return None
        mask = torch.zeros(1, 1, self.nodes, self.context, dtype=self.dtype, device=self.device)
        mask[..., -self.nodes :].masked_fill_(~self.ancestors[:, None], torch.finfo(self.dtype).min)
        return mask

    @cached_property
    def folded_mask(self) -> Tensor | None:
        return None if self.mask is None else self.mask.repeat(1, 1, self.groups, 1)

    def stock(self, copy: int) -> Tensor:
        """The form of transformers: KV heads are repeated where there is a mask."""
        keys, values = self.pairs[copy]
        if self.mask is None:
            return scaled_dot_product_attention(self.query, keys, values, enable_gqa=True)
        keys, values = (repeat_kv(each, self.groups) for each in (keys, values))
        return scaled_dot_product_attention(self.query, keys, values, attn_mask=self.mask)

    def folded(self, copy: int) -> Tensor:
        """The query heads of a KV head as more rows of it."""
        keys, values = self.pairs[copy]
        rows = self.query.reshape(1, self.heads[1], self.groups * self.nodes, self.heads[2])
        found = scaled_dot_product_attention(rows, keys, values, attn_mask=self.folded_mask)
        return found.reshape(self.query.shape)

    def expected(self) -> Tensor:
        """The outputs in float32 for the first copy."""
        keys, values = (repeat_kv(each.float(), self.groups) for each in self.pairs[0])
        scores = self.query.float() @ keys.mT * self.heads[2] ** -0.5
        scores = scores if self.mask is None else scores + self.mask.float()
        return scores.softmax(-1) @ values

    def _random(self, heads: int, count: int) -> Tensor:
        return torch.randn(1, heads, count, self.heads[2], dtype=self.dtype, device=self.device)


def measure(setting: Setting) -> None:
    """Writes findings about growing lengths, then one for each pair of heads and context."""
    torch.manual_seed(0)
    if setting.on_cuda:
        growing_lengths(setting)
    kernel = tree_kernel(setting)
    for context in TINY_CONTEXTS if setting.is_tiny else CONTEXTS:
        for heads in HEADS:
            with setting.guarded(heads=heads, context=context):
                _place(setting, heads, context, kernel)


def growing_lengths(setting: Setting, context: int = 2048, nodes: int = 16, steps: int = 12) -> None:
    """Times single calls whose key length grows by one each time, with cuDNN's attention allowed and not."""
    for heads in HEADS:
        case = Case(heads, context + 2 * steps, nodes, 1, setting.device)
        found: dict[str, Any] = {}
        for form in ("stock", "folded"):
            for allowed in (True, False):
                name = f"{form}, cuDNN {'allowed' if allowed else 'off'}"
                with setting.guarded(heads=heads, growing=name), cudnn_attention(allowed):
                    calls = [partial(_cut(case, context + step, form), 0) for step in range(2 * steps)]
                    for call in calls[:2]:
                        call()
                    found[name] = single_us(calls[2:], setting.device, len(calls) - 2)
        setting.report(growing_lengths_us=found, heads=heads, context=context, nodes=nodes)


def _cut(case: Case, length: int, form: str) -> Way:
    """A way on the first `length` keys, whose mask is made at every call, as a growing cache needs it."""
    heads, nodes, groups = case.heads, case.nodes, case.groups
    keys, values = (each[:, :, :length] for each in case.pairs[0])

    def call(_copy: int) -> Tensor:
        rows = nodes if form == "stock" else groups * nodes
        mask = torch.zeros(1, 1, rows, length, dtype=case.dtype, device=case.device)
        if form == "folded":
            query = case.query.reshape(1, heads[1], rows, heads[2])
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        repeated = (repeat_kv(each, groups) for each in (keys, values))
        return scaled_dot_product_attention(case.query, *repeated, attn_mask=mask)

    return call


def tree_kernel(setting: Setting) -> Callable[[Case], Way] | None:
    """Maker of the way by our Triton kernel; None where it cannot run. On a CPU its plain reference stands in."""
    try:
        from hf_speculate.attention import tree_kernel as module

        attend = module.tree_attention if setting.on_cuda else module.plain_tree_attention
        if setting.on_cuda and not module.has_kernel():
            setting.report(skipped="the Triton kernel: it cannot run here")
            return None
    except (ImportError, AttributeError) as error:
        setting.report(skipped=f"the Triton kernel: {describe(error)}")
        return None

    def make(case: Case) -> Way:
        prefix = case.context - case.nodes
        index = partial(torch.tensor, device=case.device)
        place = module.DeviceTree(index([0]), index([prefix]), index([prefix]), case.ancestors)

        def call(copy: int) -> Tensor:
            return attend(case.query, *case.pairs[copy], place).transpose(1, 2)  # from [B, N, H, D]

        return call

    return make


def _place(setting: Setting, heads: tuple[int, int, int], context: int, kernel: Callable[[Case], Way] | None) -> None:
    """Measures all numbers of nodes for a pair of heads and context, and names the fastest way of each."""
    size = 4 * heads[1] * context * heads[2]
    copies = max(1, min(_ROTATED_BYTES // size, _MOST_COPIES)) if setting.on_cuda else 2
    cells: dict[int, dict[str, Any]] = {}
    fastest = {}
    for nodes in TINY_NODES if setting.is_tiny else NODES:
        if setting.left < _CELL_SECONDS:
            setting.report(left_out=f"{nodes} nodes at context {context}", heads=heads)
            continue
        case = Case(heads, context, nodes, copies, setting.device)
        cells[nodes] = {name: _times(setting, case, *way) for name, way in _ways(case, kernel).items()}
        times = {name: found["device"] or found["single"] for name, found in cells[nodes].items() if "single" in found}
        if times:
            fastest[nodes] = _best(times)
    setting.report(heads=heads, context=context, us=cells, fastest=fastest)


def _best(times: dict[str, float]) -> str:
    name = min(times, key=lambda each: times[each])
    others = [found for each, found in times.items() if each != name]
    ahead = f", next {min(others) / times[name]:.2f}x" if others else ""
    return f"{name}: {times[name]:.1f} us{ahead}"


def _ways(case: Case, kernel: Callable[[Case], Way] | None) -> dict[str, tuple[Way, Sequence[SDPBackend]]]:
    """Name -> way, and the backends that it may use (none named: torch chooses)."""
    found: dict[str, tuple[Way, Sequence[SDPBackend]]] = {}
    for form, way in (("stock", case.stock), ("folded", case.folded)):
        found[f"{form}, torch's choice"] = way, ()
        found |= {f"{form}, {name}": (way, (backend,)) for name, backend in BACKENDS.items()}
    return found | ({} if kernel is None else {KERNEL: (kernel(case), ())})


def _times(setting: Setting, case: Case, way: Way, backends: Sequence[SDPBackend]) -> dict[str, Any]:
    """Times of one way, and its largest error over the largest output; the reason where it does not run."""
    calls = [partial(_within, way, backends, copy) for copy in range(case.copies)]
    try:
        outputs = calls[0]().float()
    except RuntimeError as error:  # the backend does not take this
        synchronize(setting.device)
        return {"refused": describe(error)[:80]}
    expected = case.expected()
    error = ((outputs - expected).abs().max() / expected.abs().max()).item()
    for call in calls[:3]:
        call()
    single = single_us(calls, setting.device, 10 if setting.on_cuda else 2)
    try:
        device = recorded_us(calls, setting.device, 7)
    except RuntimeError as problem:
        synchronize(setting.device)
        return {"device": None, "single": single["median"], "max": single["max"], "error_share": error} | {
            "not_recorded": describe(problem)[:80]
        }
    return {"device": device, "single": single["median"], "max": single["max"], "error_share": error}


def _within(way: Way, backends: Sequence[SDPBackend], copy: int) -> Tensor:
    if not backends:
        return way(copy)
    with sdpa_kernel(list(backends)):
        return way(copy)
