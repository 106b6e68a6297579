"""Options of the benchmarks, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from hf_speculate.speculator.registry import SpeculatorSpec  # the package imports torch

from ..commands import (
    BatchSizes,
    Category,
    Device,
    Exact,
    GgufBackend,
    Limit,
    NewTokens,
    PromptFiles,
    Raw,
    Repeats,
    Specs,
    TargetDtype,
    TargetOption,
    Temperatures,
    check_backend,
    default_specs,
    default_target,
    parse_specs,
)


@dataclass(kw_only=True)
class WorkloadSettings:
    """Options of every benchmark on real text.

    Without speculators: prompt lookup, and whatever is bundled for the target. With `raw`, only the first turn of a
    conversation counts.
    """

    target: TargetOption = None
    speculators: Specs = None
    prompts: PromptFiles = None
    categories: Category = None
    limit: Limit = None
    raw: Raw = False
    dtype: TargetDtype = "auto"
    gguf_backend: GgufBackend = "auto"
    max_new_tokens: int = 128
    device: Device = None

    def __post_init__(self) -> None:
        if self.gguf_backend != "auto":
            check_backend(self.target_name, self.gguf_backend)

    @property
    def target_name(self) -> str:
        return self.target or default_target()

    def specs(self) -> list[SpeculatorSpec]:
        return default_specs(self.target_name) if not self.speculators else parse_specs(self.speculators)


@dataclass(kw_only=True)
class GenerateSettings(WorkloadSettings):
    """Options of `bench generate`.

    Every pair of batch size and temperature is measured. Stock's speculative modes run at batch 1. At most `max_proofs`
    divergences of a speculator are proven. With `seconds`, as many prompts are measured as take about so long, at least
    two.
    """

    QUICK: ClassVar = {"limit": 2, "max_new_tokens": 48, "repeats": 2}

    batch_sizes: BatchSizes = field(default_factory=lambda: [1])
    temperatures: Temperatures = field(default_factory=lambda: [0.0, 1.0])
    max_new_tokens: NewTokens = 128
    repeats: Repeats = 3
    compile_baseline: Annotated[
        bool | None,
        typer.Option(
            "--compile-baseline/--no-compile-baseline",
            help="Also measure stock generate and its drafting with static cache and torch.compile "
            "(default: on accelerators).",
        ),
    ] = None
    prompt_lookup_num_tokens: Annotated[
        int, typer.Option("--lookup-tokens", min=1, help="Number of tokens that stock prompt lookup drafts per round.")
    ] = 10
    exact: Exact = False
    stock_speculative: bool = True
    max_proofs: int = 8
    seconds: float | None = None

    def specs(self) -> list[SpeculatorSpec]:
        return [spec.with_option("exact", True) if self.exact else spec for spec in super().specs()]


@dataclass(kw_only=True)
class BatchSettings(WorkloadSettings):
    """Options of `bench batch`."""

    QUICK: ClassVar = {"limit": 2, "max_new_tokens": 32, "repeats": 1}

    limit: Limit = 8
    batch_sizes: BatchSizes = field(default_factory=lambda: [1, 2, 4, 8])
    temperatures: Temperatures = field(default_factory=lambda: [0.0])
    max_new_tokens: NewTokens = 64
    repeats: Repeats = 3


@dataclass(kw_only=True)
class AcceptanceSettings(WorkloadSettings):
    """Options of `bench acceptance`.

    `nodes` become the drafter's option `max_nodes`, unless the speculator's own options set it.
    """

    QUICK: ClassVar = {"limit": 3, "max_new_tokens": 32}

    nodes: Annotated[
        list[int],
        typer.Option(min=1, help="Number of drafted tokens in a fixed tree (repeatable)."),
    ] = field(default_factory=lambda: [8, 16, 32])
    temperatures: Temperatures = field(default_factory=lambda: [0.0, 1.0])
    max_new_tokens: NewTokens = 96
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Cut every text to this many tokens (default: whole prompts)."),
    ] = None
    first_token: Annotated[int, typer.Option(min=0, help="Start the cut at this token.")] = 0

    def specs(self) -> list[SpeculatorSpec]:
        """Specs as everywhere, except that the bundled draft model drafts trees too."""
        return super().specs() if self.speculators else default_specs(self.target_name, branches=4)
