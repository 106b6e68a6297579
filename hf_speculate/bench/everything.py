"""`hf-speculate bench all`: the figures of the documentation."""

from __future__ import annotations

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
    """What needs no files, with defaults: generate, acceptance, batch, loss on the bundled target; costs of a shape."""
    prepare(threads)
    target = default_target()  # absent: say so before the long part

    def made(settings: type[Any], **given: Any) -> Any:
        return settings(device=device, **given, **(settings.QUICK if quick else {}))

    # Compiling takes minutes.
    ours = None if quick else [spec.text for spec in table_specs(target)]
    parts: dict[str, tuple[Any, Any, Any]] = {
        "generate": (bench_generate, made(GenerateSettings, target=target, speculators=ours), generate_tables),
        "acceptance": (bench_acceptance, made(AcceptanceSettings, target=target), acceptance),
        "batch": (bench_batch, made(BatchSettings, target=target), generate_tables),
        "loss": (bench_loss, made(LossSettings, target=target), loss),
        "costs": (bench_costs, made(CostSettings), costs),
    }
    results = {}
    for name, (measure, settings, module) in parts.items():
        results[name] = measure(settings)
        if not json_only:
            show(module.tables(results[name]), markdown)
    report({"bench": "all", "speedup": results["generate"]["speedup"], **results}, json_only=json_only, out=out)
