"""Costs of a round by nodes and by context: verifying, drafting, the cache, and what the engine adds to that.

A shape with random weights and a scripted drafter that costs nothing, its acceptance set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from hf_speculate.cache import TreeCache, as_cache
from hf_speculate.forward import Scorer
from hf_speculate.target import GenerativeModel, filler_cache
from hf_speculate_tools.bench import fixed_length
from hf_speculate_tools.bench.methods import Method, eager_method
from hf_speculate_tools.bench.runs import (
    Request,
    TimedRun,
    batches,
    generate_once,
    measure_in_turn,
    merged,
    num_steps,
)
from hf_speculate_tools.bench.workload import Workload
from hf_speculate_tools.commands import Device, Exact, Grid, NewTokens, Repeats, TargetDtype, progress, synchronize

from .command import against_plain, run
from .forwards import medians_in_turn, verify_ms
from .scripted import DEFAULT_RATES, Rates, plain_texts, read_profile, scripted_methods
from .shapes import Layers, Shape, random_prompt, shape_workload


_COPIED_BYTES = 1 << 28
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")

_STEP = {
    "context": "{context:d}",
    "nodes": "{nodes:d}",
    "verify,\nstock attention": "{verify_ms[stock]:.1f}",
    "verify,\nfolded attention": "{verify_ms[folded]:.1f}",
    "stock /\nfolded": lambda row: f"{row['verify_ms']['stock'] / row['verify_ms']['folded']:.2f}x",
    "/ verify\nof one": "{verify_ratio:.2f}",
    "verify,\nexact": "{verify_ms[exact]:.1f}",
    "append and\nkeep": "{cache_ms[ours]:.2f}",
    "stock's\ncache": "{cache_ms[stock]:.2f}",
}
_ROUND = {
    "context": "{context:d}",
    "method": "{method}",
    "nodes": "{nodes:.1f}",
    "target": "{target_ms:.2f}",
    "draft": "{draft_ms:.2f}",
    "rest": "{rest_ms:.2f}",
    "engine\nefficiency": "{engine_efficiency:.3f}",
    "host waits": "{host_waits:.1f}",
    "tokens\nper round": "{tokens_per_round:.2f}",
    "tokens/s": "{tokens_per_second[median]:.1f}",
    "x plain": "{speedup[median]:.2f}x",
    "(range)": "{speedup[min]:.2f}-{speedup[max]:.2f}",
}


@dataclass(kw_only=True)
class CostSettings:
    """Options; the context is made up."""

    QUICK: ClassVar = {"contexts": [256, 2048], "nodes": [8, 32], "max_new_tokens": 24, "repeats": 1}

    shape: Shape = "0.5B"
    layers: Layers = None
    contexts: Annotated[list[int], typer.Option("--context", min=1, help="Entries in the cache (repeatable).")] = field(
        default_factory=lambda: [256, 2048, 8192]
    )
    nodes: Annotated[list[int], typer.Option(min=2, help="Nodes of a tree, root included (repeatable).")] = field(
        default_factory=lambda: [8, 16, 32]
    )
    acceptance: Rates = DEFAULT_RATES
    exact: Exact = False
    max_new_tokens: NewTokens = 48
    repeats: Repeats = 3
    dtype: TargetDtype = "auto"
    device: Device = None


def bench_costs(settings: CostSettings) -> dict[str, Any]:
    """Costs of verifying, drafting, the cache and the engine per round, by nodes and by context.

    Returns:
        JSON-serialisable. `rows`, one for each context and number of nodes: `verify_ms` of a bare forward by form of
        attention ("exact": with the bits of single steps) and `verify_ratio` over one node's; `cache_ms` of appending
        that many entries to all layers and keeping a path, ours and stock's. `rounds`, one for each context and method:
        means of milliseconds per round (`target_ms`, `draft_ms`, `rest_ms`), `engine_efficiency`, `tokens_per_round`,
        `nodes` per round, `host_waits` per round (None on a CPU), and `speedup` over plain decoding of the same call.
        `weights_ms`: reading the weights once at the speed of a copy.
    """
    workload = shape_workload(settings.shape, settings.layers, settings.dtype, settings.device)
    model, contexts = workload.model, sorted(settings.contexts)
    rows, rounds = [], []
    num_methods = len(settings.nodes) + 2
    with progress("costs", total=len(contexts) * (1 + num_steps(num_methods, 1, settings.repeats))) as advance:
        for length in contexts:
            advance(f"context {length}")
            place = _Place(workload, settings, length)
            rows += place.steps()
            rounds += place.rounds(lambda what, length=length: advance(f"context {length}, {what}"))
    return {
        "bench": "costs",
        **workload.describe(),
        "max_new_tokens": settings.max_new_tokens,
        "acceptance": settings.acceptance,
        "repeats": settings.repeats,
        "weights_ms": 1e3 * bytes_read(model) / memory_bandwidth(model.device),
        "rows": rows,
        "rounds": rounds,
    }


class _Place:
    """One context of a workload, at which everything is measured."""

    def __init__(self, workload: Workload, settings: CostSettings, length: int):
        self.settings, self.length = settings, length
        self.model, self.vocab_size = workload.model, workload.vocab_size
        self.prompt, self.cache = random_prompt(length + 1, self.vocab_size)[0], filler_cache(self.model, 1, length)

    def steps(self) -> list[dict[str, Any]]:
        """Rows of bare forwards, and of the cache."""
        nodes, repeats = [1, *sorted(self.settings.nodes)], 2 * self.settings.repeats + 1
        forms = attention_forms(self.model, self.cache)
        times = verify_ms(self.model, self.cache, nodes, (*forms, *(["exact"] if self.settings.exact else ())), repeats)
        return [
            {
                "context": self.length,
                "nodes": n,
                "verify_ms": {form: found for (count, form), found in times.items() if count == n},
                "verify_ratio": times[n, forms[-1]] / times[1, forms[-1]],
                "cache_ms": cache_ms(self.cache, n, self.model.device, repeats),
            }
            for n in nodes
        ]

    def rounds(self, advance: Callable[[str], None]) -> list[dict[str, Any]]:
        """Rows of plain decoding and every drafter, with trees of every size and with automatic ones."""
        (request,) = batches([("costs", self.prompt)], 1, self.model.device)
        arguments = fixed_length(self.settings.max_new_tokens)
        methods = self._methods(request, arguments)
        runs = measure_in_turn(self.model, methods, [request], arguments, self.settings.repeats, advance)
        found = []
        for method in methods:
            row = {"context": self.length, "method": method.name, **figures(runs, method.name)}
            if method.kind == "speculator":
                row["host_waits"] = self._host_waits(method, request, arguments)
            found.append(row)
        return found

    def _methods(self, request: Request, arguments: dict[str, Any]) -> list[Method]:
        def fresh() -> dict[str, Any]:
            return as_cache(deepcopy(self.cache))

        texts, methods = plain_texts(self.model, [request], arguments | fresh()), [eager_method()]
        for n in sorted(self.settings.nodes):
            profile = read_profile(self.settings.acceptance or DEFAULT_RATES, n - 1)
            automatic, fixed = scripted_methods(texts, profile, self.vocab_size)
            methods += [replace(fixed, name=f"{n} nodes")] + [automatic] * (n == max(self.settings.nodes))
        return [replace(method, fresh=fresh) for method in methods]

    def _host_waits(self, method: Method, request: Request, arguments: dict[str, Any]) -> float | None:
        """Waits per round, in a call that measures nothing else."""
        runs: list[TimedRun] = []
        call = lambda: runs.append(generate_once(self.model, method, request, arguments))  # noqa: E731
        waits = host_waits(call, self.model.device)
        return None if waits is None else waits / merged(run.stats for run in runs if run.stats).target_forwards


def figures(runs: Sequence[TimedRun], name: str) -> dict[str, Any]:
    """Figures of one method at one context."""
    found = against_plain(runs, name)
    stats = merged(run.stats for run in runs if run.method == name and run.stats is not None)
    if count := stats.target_forwards:
        found |= {
            "target_ms": 1e3 * stats.target_seconds / count,
            "draft_ms": 1e3 * stats.drafter_seconds / count,
            "rest_ms": 1e3 * stats.rest_seconds / count,
            "engine_efficiency": stats.engine_efficiency,
            "tokens_per_round": stats.emitted_tokens / count,
            "nodes": 1 + stats.drafted_tokens / count,
        }
    return found


def tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    """A table by context and number of nodes, and one by context and method."""
    env, acceptance = result["environment"], result["acceptance"]
    title = f"{result['target']}, {result['dtype']}, {env['device']}, {env['threads']} threads: milliseconds"
    caption = f"A drafter that costs nothing, accepted to depth 1, 2, … in {acceptance} of the rounds."
    weights = f"Reading the weights once, as fast as a copy: {result['weights_ms']:.1f} ms."
    return [
        Grid.of(f"One step, {title}", result["rows"], _STEP, groups=("context",), caption=weights),
        Grid.of(f"A round, {title}", result["rounds"], _ROUND, groups=("context",), caption=caption),
    ]


def attention_forms(model: GenerativeModel, context: DynamicCache) -> tuple[str, ...]:
    """Forms of tree masks for this model: "stock", and "folded" where KV heads would be repeated."""
    has_groups = Scorer(model, TreeCache(deepcopy(context), batch_size=1)).attention.groups > 1
    return ("stock", "folded") if has_groups else ("stock",)


def cache_ms(context: DynamicCache, nodes: int, device: torch.device, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of appending N entries to all layers and keeping a path of up to four: "ours", and stock's way.

    `DynamicCache` cannot keep a path: a loop over stock caches would do it in this way, the cheapest. Growing is left
    out: buffers are large enough.
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
    """Bytes of weights that a forward over a few tokens has to read: all but embeddings that are not tied."""
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if embeddings is output else embeddings.nbytes
    parameters: Iterable[nn.Parameter] = model.parameters()
    return sum(parameter.nbytes for parameter in parameters) - unread


def host_waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """Number of times that the host waited for the device during `call`; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
    return count_waits(event.name for event in found.events() or ())


def count_waits(names: Iterable[str]) -> int:
    """Number of waits among the runtime's calls (`cudaStreamSynchronize`, `hipStreamSynchronize`, ...)."""
    return sum(name.endswith(_WAITS) for name in names)


if __name__ == "__main__":
    run(CostSettings, bench_costs, tables)
