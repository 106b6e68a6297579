"""`hf-speculate mtp`: draft layers that a model brings along, kept when it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate.files import user_path

from ..commands import JsonOnly, say, say_json


mtp_app = typer.Typer(add_completion=False, no_args_is_help=True, help="Keep a model's own draft layers (MTP).")


@mtp_app.callback()
def _group() -> None:
    """Keep a model's own draft layers (MTP)."""


@mtp_app.command(
    name="keep",
    epilog="""
\b
Example:
  hf-speculate mtp keep Qwen/Qwen3.5-0.8B runs/my-fine-tune
""",
)
def keep_layers(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of the checkpoint that holds the draft layers.")],
    folder: Annotated[Path, typer.Argument(help="Folder of the saved model, in safetensors.")],
    json_only: JsonOnly = False,
) -> None:
    """Copy draft layers (MTP) that were lost when a model was saved.

    transformers saves a model without them, also after a fine-tune, a merge or a quantisation. They are added with
    their own names, in a file of their own.
    """
    if not Path(user_path(folder), "config.json").is_file():
        raise _not_a_model(folder)
    from hf_speculate_plugins.checkpoints import read_config
    from hf_speculate_plugins.mtp import Source, keep, text_config

    depth = text_config(read_config(str(folder))).get("num_hidden_layers")
    if not isinstance(depth, int):
        raise _not_a_model(folder)
    checkpoint = Source.find(source, depth)
    names = keep(checkpoint, folder)
    if json_only:
        say_json({"folder": str(folder), "source": checkpoint.name, "layout": checkpoint.layout.name, "tensors": names})
    elif names:
        say(
            f"added {len(names)} tensors of {checkpoint.num_layers} draft layer(s), {checkpoint.layout.name} names, "
            f"to {folder}"
        )
    else:
        say(f"{folder} has its draft layers already")


def _not_a_model(folder: Path) -> SpeculateError:
    return SpeculateError(f"{folder} has no config.json of a model: give the folder of a saved model.")
