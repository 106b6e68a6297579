"""`hf-speculate bench all`: the figures of the README."""

from __future__ import annotations

from typing import Any

from ..commands.methods import default_target, table_specs
from ..commands.reporting import Device, JsonOnly, Markdown, Out, Quick, Threads, prepare, report, show
from . import acceptance, batch, cache, context, generate_tables, loss, overhead
from .acceptance import AcceptanceSettings, bench_acceptance
from .batch import BATCH_SIZES, bench_batch
from .cache import bench_cache
from .context import ContextSettings, bench_context
from .generate import GenerateSettings, bench_generate
from .loss import LossSettings, bench_loss
from .overhead import bench_overhead


def bench_all_command(
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """What the README shows: bundled target and Qwen2-0.5B shape, with the defaults of each benchmark."""
    prepare(threads)
    target = default_target()  # absent: say so before the long part
    repeats, tokens = (1, 32) if quick else (3, 96)
    real: dict[str, Any] = {"target": target, "device": device}
    shared = real | {"limit": 3 if quick else None, "max_new_tokens": tokens}

    def batches() -> dict[str, Any]:
        settings = GenerateSettings(**shared, batch_sizes=BATCH_SIZES, temperatures=(0.0,), repeats=repeats)
        return bench_batch(settings)

    # Compiling takes minutes.
    speculators = None if quick else [spec.text for spec in table_specs(target)]
    first = GenerateSettings(**shared, repeats=repeats, speculators=speculators)
    contexts = ContextSettings(device=device, max_new_tokens=24 if quick else 48, repeats=repeats)
    parts = {
        "generate": (generate_tables.tables, lambda: bench_generate(first)),
        "acceptance": (acceptance.tables, lambda: bench_acceptance(AcceptanceSettings(**shared))),
        "batch": (batch.tables, batches),
        "loss": (loss.tables, lambda: bench_loss(LossSettings(**real, repeats=1 if quick else 7))),
        "overhead": (overhead.tables, lambda: bench_overhead(device=device, max_new_tokens=tokens, repeats=repeats)),
        "context": (context.tables, lambda: bench_context(contexts)),
        "cache": (cache.tables, lambda: bench_cache(device=device, repeats=5 if quick else 30)),
    }
    results = {}
    for name, (tables, measure) in parts.items():
        results[name] = measure()
        if not json_only:
            show(tables(results[name]), markdown)
    report({"bench": "all", "speedup": results["generate"]["speedup"], **results}, json_only=json_only, out=out)
