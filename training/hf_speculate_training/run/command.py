"""`hf-speculate train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_speculate.commands import console

from .dry_run import describe_run
from .recipe import read_recipe
from .run import prepare, train_head


TRAIN_EXAMPLES = """
Examples:

  hf-speculate train --config training/recipes/pycoder-eagle3.yaml

  hf-speculate train --config recipe.yaml --set training.learning_rate=3e-4 --set output.folder=runs/b --dry-run

  hf-speculate train --config recipe.yaml --resume

  accelerate launch -m hf_speculate_training train --config recipe.yaml
"""


def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, wins over the recipe (repeatable).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load everything, print sizes, steps and the first batch; write nothing.")
    ] = False,
) -> None:
    """Train a head for a target, by a recipe."""
    recipe = read_recipe(config, overrides or ())
    if dry_run:
        console().print(describe_run(prepare(recipe, write=False)))
        return
    folder = train_head(recipe, resume=resume)
    typer.echo(f"{folder} holds the head: AutoSpeculator.from_pretrained({str(folder)!r}, target=model)")
