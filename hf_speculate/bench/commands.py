"""Sub-commands of `hf-speculate bench`."""

from __future__ import annotations

import typer

from ..commands import add_command
from . import acceptance, generate, loss
from .plots import draw_generate


_GENERATE_EXAMPLES = """
Every method emits exactly --max-new-tokens tokens (EOS is taken out of the requests), prompt by prompt in turn.
Definitions of the figures: `python -m pydoc hf_speculate.bench`.

Examples:

  hf-speculate bench generate --quick

  hf-speculate bench generate --target ./model -s prompt_lookup -s ./head

  hf-speculate bench generate -s draft_model:model=./draft,depth=4,top_k=2

  hf-speculate bench generate --prompts spec_bench.jsonl --category math_reasoning --category rag --limit 60

  hf-speculate bench generate --target smollm2 --llama-cpp PYTHON

  hf-speculate bench generate --shape 8B --acceptance 0.8,0.6,0.45,0.3 --compile-baseline
"""

_ACCEPTANCE_EXAMPLES = """
Examples:

  hf-speculate bench acceptance -s ./head:depth=6,top_k=6 -s draft_model:model=./draft,top_k=4

  hf-speculate bench acceptance --prompts files.jsonl --prompt-tokens 64 --first-token 200 --nodes 16
"""

_LOSS_EXAMPLES = """
Examples:

  hf-speculate bench loss --threads 2

  hf-speculate bench loss --target ./model --drafter random --always

  hf-speculate bench loss -s draft_model:model=./another-tongue
"""


app = typer.Typer(
    help="Measure speculators beside stock transformers, in the same run. Pipes get one line of JSON last.",
    epilog=_GENERATE_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
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
add_command(app, "loss", loss.LossSettings, loss.bench_loss, loss.tables, _LOSS_EXAMPLES)
