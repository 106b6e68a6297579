"""Throughput over the batch size, with automatic drafting on and off, beside plain `generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..commands import BatchSizes, Limit, NewTokens, Repeats, Temperatures
from .generate import GenerateSettings, bench_generate
from .workload import WorkloadSettings


@dataclass(kw_only=True)
class BatchSettings(WorkloadSettings):
    """What to measure: as for `bench_generate`."""

    QUICK: ClassVar = {"limit": 2, "max_new_tokens": 32, "repeats": 1}

    limit: Limit = 8
    batch_sizes: BatchSizes = field(default_factory=lambda: [1, 2, 4, 8])
    temperatures: Temperatures = field(default_factory=lambda: [0.0])
    max_new_tokens: NewTokens = 64
    repeats: Repeats = 3


def bench_batch(settings: BatchSettings) -> dict[str, Any]:
    """Throughput at several batch sizes beside plain generate, with the automatic switch on and off.

    Returns:
        as `bench_generate`; every speculator runs twice, adaptive and with fixed drafts.
    """
    texts = [spec.text for spec in settings.specs()]
    both = [f"{text}{',' if ':' in text else ':'}adaptive={how}" for text in texts for how in ("true", "false")]
    given: dict[str, Any] = vars(settings) | {"speculators": both}
    only = GenerateSettings(**given, compile_baseline=False, stock_speculative=False, max_proofs=0)
    return bench_generate(only) | {"bench": "batch"}
