"""The sub-commands of `hf-speculate bench`."""

from __future__ import annotations

import typer

from ..commands import add_command
from . import acceptance, costs, edits, generate_tables, gguf, loss
from .acceptance import AcceptanceSettings, bench_acceptance
from .batch import BatchSettings, bench_batch
from .costs import CostSettings, bench_costs
from .edits import EditSettings, bench_edits
from .everything import bench_all
from .generate import GenerateSettings, bench_generate
from .gguf import GgufSettings, bench_gguf
from .loss import LossSettings, bench_loss
from .plots import draw_costs, draw_generate


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

_EDITS_EXAMPLES = """
Examples:

  hf-speculate bench edits

  hf-speculate bench edits --target ./model -s suffix -s ./head+suffix --nodes 8 --nodes 16
"""

_LOSS_EXAMPLES = """
Examples:

  hf-speculate bench loss --threads 2

  hf-speculate bench loss --target ./model --drafter random --always

  hf-speculate bench loss -s draft_model:model=./another-tongue
"""

_COSTS_EXAMPLES = """
Examples:

  hf-speculate bench costs --threads 2

  hf-speculate bench costs --nodes 8 --nodes 60 --context 256 --shape 8B --layers 4

  hf-speculate bench costs --target ./model -s ./head --context 512
"""

_GGUF_EXAMPLES = """
Examples:

  hf-speculate bench gguf --threads 1

  hf-speculate bench gguf model-Q4_K_M.gguf --nodes 4 --nodes 16

  hf-speculate bench gguf --type Q4_K_M --quick
"""


app = typer.Typer(
    help="Measure, beside stock transformers in the same run. The last line of stdout is one line of JSON.",
    epilog=_GENERATE_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
add_command(
    app, "generate", GenerateSettings, bench_generate, generate_tables.tables, _GENERATE_EXAMPLES, draw_generate
)
add_command(app, "acceptance", AcceptanceSettings, bench_acceptance, acceptance.tables, _ACCEPTANCE_EXAMPLES)
add_command(app, "edits", EditSettings, bench_edits, edits.tables, _EDITS_EXAMPLES)
add_command(app, "batch", BatchSettings, bench_batch, generate_tables.tables)
add_command(app, "loss", LossSettings, bench_loss, loss.tables, _LOSS_EXAMPLES)
add_command(app, "costs", CostSettings, bench_costs, costs.tables, _COSTS_EXAMPLES, draw_costs)
add_command(app, "gguf", GgufSettings, bench_gguf, gguf.tables, _GGUF_EXAMPLES)
app.command("all")(bench_all)
