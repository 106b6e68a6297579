"""The command `hf-speculate`.

Other packages add sub-commands through the entry-point group `hf_speculate.commands`, and benchmarks through
`hf_speculate.bench_commands`: a `typer.Typer` app, or a function with typer's annotations, imported when asked for.
"""

from .app import app as app
from .groups import BENCH_COMMANDS_GROUP as BENCH_COMMANDS_GROUP
from .groups import COMMANDS_GROUP as COMMANDS_GROUP
