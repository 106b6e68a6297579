"""Sub-commands of `hf-speculate bench`."""

from __future__ import annotations

import typer

from ..commands import add_command
from ..plots import draw_generate
from . import acceptance, generate


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
add_command(
    app,
    "generate",
    generate.GenerateSettings,
    generate.bench_generate,
    generate.tables,
    _GENERATE_EXAMPLES,
    draw_generate,
)
add_command(
    app,
    "acceptance",
    acceptance.AcceptanceSettings,
    acceptance.bench_acceptance,
    acceptance.tables,
    _ACCEPTANCE_EXAMPLES,
)
add_command(app, "batch", generate.BatchSettings, generate.bench_batch, generate.tables)
