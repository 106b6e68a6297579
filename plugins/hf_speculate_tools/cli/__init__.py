"""The command `hf-speculate`.

Other packages add sub-commands through the entry-point group `hf_speculate.commands`: a `typer.Typer` app, or a
function with typer's annotations. They are imported when a user calls them.
"""

from ..overview import COMMANDS_GROUP as COMMANDS_GROUP
from .app import app as app
