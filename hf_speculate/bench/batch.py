"""Throughput over the batch size, with the automatic switch on and off, beside plain `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..commands.grid import Grid, group_breaks
from .generate import GenerateSettings, bench_generate
from .workload import describe_target


BATCH_SIZES = (1, 2, 4, 8)


def bench_batch(settings: GenerateSettings) -> dict[str, Any]:
    """`bench_generate` at several batch sizes; every speculator runs twice, adaptive and with fixed drafts.

    Returns:
        as `bench_generate`.
    """
    texts = [spec.text for spec in settings.specs()]
    both = [f"{text}{',' if ':' in text else ':'}adaptive={how}" for text in texts for how in ("true", "false")]
    return bench_generate(replace(settings, speculators=both, stock_speculative=False, max_proofs=0, apart=False)) | {
        "bench": "batch"
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """One line a method, one column a batch size: tokens per second of all rows, and times plain's."""
    rows = result["rows"]
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    cells = {(row["temperature"], row["method"], row["batch_size"]): row for row in rows}
    lines = list(dict.fromkeys((row["temperature"], row["method"]) for row in rows))
    return [
        Grid(
            title=f"Tokens per second of all rows (x plain), {describe_target(result)}, median of {result['repeats']}",
            columns=["T", "method", *(f"batch {size}" for size in sizes)],
            rows=[[f"{t:g}", name, *_cells(cells, t, name, sizes)] for t, name in lines],
            words={"method"},
            breaks=group_breaks([t for t, _ in lines]),
        )
    ]


def _cells(cells: dict, temperature: float, name: str, sizes: Sequence[int]) -> list[str]:
    found = []
    for size in sizes:
        row = cells.get((temperature, name, size))
        rate = "" if row is None else f"{row['tokens_per_second']['median']:.0f}"
        found.append(rate if row is None or row["kind"] == "eager" else f"{rate} ({row['speedup']['eager']:.2f}x)")
    return found
