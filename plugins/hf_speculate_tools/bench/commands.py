"""Sub-commands of `hf-speculate bench`. What measures is imported when a command runs: it needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ..commands import Grid, add_command
from .settings import AcceptanceSettings, BatchSettings, GenerateSettings


_GENERATE_EXAMPLES = """
Every method generates exactly --max-new-tokens tokens (EOS does not end a text). Methods take turns on each prompt.
Definitions of the figures: `python -m pydoc hf_speculate_tools.bench`.

\b
Examples:
  hf-speculate bench generate --quick
  hf-speculate bench generate --target ./model -s prompt_lookup -s ./head
  hf-speculate bench generate -s draft_model:model=./draft,depth=4,top_k=2
  hf-speculate bench generate --prompts spec_bench.jsonl --category math_reasoning --category rag --limit 60
"""

_ACCEPTANCE_EXAMPLES = """
\b
Examples:
  hf-speculate bench acceptance -s ./head:depth=6,top_k=6 -s draft_model:model=./draft,top_k=4
  hf-speculate bench acceptance --prompts files.jsonl --prompt-tokens 64 --first-token 200 --nodes 16
"""


app = typer.Typer(
    help="Compare speculators with stock transformers: speed and acceptance.\n\n"
    "Every baseline is measured in the same run. In a pipe, the last line of the output is JSON.",
    epilog=_GENERATE_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _measure_generate(settings: GenerateSettings) -> dict[str, Any]:
    """Measure tokens per second of speculators and of stock generate."""
    from .generate import bench_generate

    return bench_generate(settings)


def _measure_batch(settings: BatchSettings) -> dict[str, Any]:
    """Measure throughput at several batch sizes, with speculators and without."""
    from .generate import bench_batch

    return bench_batch(settings)


def _generate_tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    from .generate import tables

    return tables(result)


def _draw_generate(result: dict[str, Any], folder: Path) -> Sequence[Path]:
    from ..plots import draw_generate

    return draw_generate(result, folder)


def _measure_acceptance(settings: AcceptanceSettings) -> dict[str, Any]:
    """Measure how many drafts of each speculator are accepted. Times nothing."""
    from .acceptance import bench_acceptance

    return bench_acceptance(settings)


def _acceptance_tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    from .acceptance import tables

    return tables(result)


add_command(app, "generate", GenerateSettings, _measure_generate, _generate_tables, _GENERATE_EXAMPLES, _draw_generate)
add_command(app, "acceptance", AcceptanceSettings, _measure_acceptance, _acceptance_tables, _ACCEPTANCE_EXAMPLES)
add_command(app, "batch", BatchSettings, _measure_batch, _generate_tables)
