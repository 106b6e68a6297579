"""`hf-speculate bench all`: the figures of the documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..commands import (
    Device,
    JsonOnly,
    Markdown,
    Out,
    Quick,
    Threads,
    default_target,
    prepare,
    report,
    show,
    table_specs,
)
from . import acceptance, costs, generate_tables, loss
from .acceptance import AcceptanceSettings, bench_acceptance
from .batch import BatchSettings, bench_batch
from .costs import CostSettings, bench_costs
from .generate import GenerateSettings, bench_generate
from .loss import LossSettings, bench_loss


def bench_all(
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """What needs no files: generate, acceptance, batch and loss on the bundled target, costs at Qwen2-0.5B shape."""
    prepare(threads)
    target = default_target()  # absent: say so before the long part
    real: dict[str, Any] = {"target": target, "device": device}
    shared: dict[str, Any] = real | {"limit": 3 if quick else None, "max_new_tokens": 32 if quick else 96}
    timed: dict[str, Any] = shared | {"repeats": 1 if quick else 3}
    # Compiling takes minutes.
    speculators = None if quick else [spec.text for spec in table_specs(target)]
    sizes: dict[str, Any] = CostSettings.QUICK if quick else {}
    parts: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
        "generate": (generate_tables, lambda: bench_generate(GenerateSettings(**timed, speculators=speculators))),
        "acceptance": (acceptance, lambda: bench_acceptance(AcceptanceSettings(**shared))),
        "batch": (generate_tables, lambda: bench_batch(BatchSettings(**timed))),
        "loss": (loss, lambda: bench_loss(LossSettings(**real, repeats=1 if quick else 7))),
        "costs": (costs, lambda: bench_costs(CostSettings(device=device, **sizes))),
    }
    results = {}
    for name, (module, measure) in parts.items():
        results[name] = measure()
        if not json_only:
            show(module.tables(results[name]), markdown)
    report({"bench": "all", "speedup": results["generate"]["speedup"], **results}, json_only=json_only, out=out)
