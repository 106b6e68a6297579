"""The command `hf-speculate train`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate.files import replace_files, text_writer, user_path
from hf_speculate_tools.commands import check_target, checked, console, say, target_option
from hf_speculate_tools.endings import INTERRUPTED

from ..names import check_method, check_source, find_recipe, recipe_content, recipe_names


_METHOD = "eagle3"

TRAIN_EXAMPLES = """
\b
Examples:
  hf-speculate train --target Qwen/Qwen2-0.5B-Instruct --data own.jsonl
  hf-speculate train --target M --data own.jsonl --method medusa --init recipe.yaml
  hf-speculate train --config recipe.yaml --set training.learning_rate=3e-4 --output runs/b --dry-run
  hf-speculate train --config qwen2-0.5b-eagle3 --data own.jsonl
  hf-speculate train --config recipe.yaml --resume
  accelerate launch -m hf_speculate_training train --config recipe.yaml
"""


def train(
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            "-c",
            help="Recipe: a YAML file, or the name of a shipped recipe (default: one that fits the target's size).",
            callback=checked(recipe_content),
        ),
    ] = None,
    target: Annotated[
        str | None, target_option("Model to draft for: a folder, Hub id or GGUF file.", is_checked=False)
    ] = None,
    data: Annotated[str | None, typer.Option(help="Training data: a file, folder, pattern or Hub id.")] = None,
    method: Annotated[
        str | None, typer.Option(help=f"Training method, e.g. eagle3 or medusa (default without a recipe: {_METHOD}).")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the head (default: runs/TARGET-METHOD).")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set section.key=value of the recipe; this overrides all other options (repeatable)."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last complete checkpoint.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Load everything and print sizes, steps and the first batch, but write nothing."
        ),
    ] = False,
    init: Annotated[
        Path | None, typer.Option(help="Write the recipe with comments to this file (- prints it), and do not train.")
    ] = None,
) -> None:
    """Train a head for a target model.

    Target and data are enough; a recipe sets everything else. Run the command again with --resume to resume.
    """
    if init is not None:
        if overrides or (config and (target or data or method or output)):
            raise SpeculateError("--init writes a recipe as it is: edit the file instead of giving other options.")
        _write_recipe(_initial_recipe(config, target, data, method, output), init)
        return
    if config is None:
        _check_given(target, data)
    values = {"target.path": target, "data.train": data, "method.name": method, "output.folder": output and str(output)}
    _check_names(values, overrides or ())
    from hf_speculate_plugins.origin import read_provenance

    from .arguments import end_process_group, process_index
    from .defaults import default_choices, recipe_values
    from .evaluation import ACCEPTANCE
    from .folder import checkpoints_note
    from .guards import InterruptedTrainingError
    from .preflight import describe_run
    from .recipe import read_recipe, recipe_from
    from .run import prepare, train_head

    leads = process_index() == 0
    given = [f"{place}={json.dumps(value)}" for place, value in values.items() if value is not None]
    if config is not None:
        recipe = read_recipe(config, [*given, *(overrides or ())])
    else:
        choices = default_choices(str(target), str(data), method or _METHOD, output and str(output))
        recipe = recipe_from(recipe_values(choices), overrides or ())
        if leads:
            say(f"the recipe for {recipe.target.path} goes by its size (--init - shows it): {recipe.output.folder}")
    if dry_run:
        description = describe_run(prepare(recipe, write=False))
        if leads:
            console().print(description)
        end_process_group()
        return
    try:
        folder = train_head(recipe, resume=resume)
    except InterruptedTrainingError as error:
        say(str(error), err=True)
        raise typer.Exit(INTERRUPTED) from error
    end_process_group()
    if leads:
        say(f"{folder} holds the head: AutoSpeculator.from_pretrained({str(folder)!r}, target=model)")
        length = ((read_provenance(folder) or {}).get("metrics") or {}).get(f"eval_{ACCEPTANCE}")
        if length is not None:
            say(f"On held-out prompts it yields {length:.2f} tokens per drafted round.")
        if note := checkpoints_note(folder):
            say(note)
        say(f"next: hf-speculate doctor -t {recipe.target.path} -s {folder}    (does it pay on this machine?)")


def _initial_recipe(
    config: str | None, target: str | None, data: str | None, method: str | None, output: Path | None
) -> str:
    """Text of the recipe that `--init` writes."""
    if config is not None:
        return find_recipe(config).read_text("utf-8")
    _check_given(target, data)
    from .defaults import commented_recipe, default_choices

    return commented_recipe(default_choices(str(target), str(data), method or _METHOD, output and str(output)))


def _check_given(target: str | None, data: str | None) -> None:
    """Raises `SpeculateError` unless target and data are given: there is no recipe without them."""
    if target is None or data is None:
        missing = " and ".join(name for name, value in (("--target", target), ("--data", data)) if value is None)
        raise SpeculateError(
            f"{missing} must be given, or a recipe with --config: a file, or one of {', '.join(recipe_names())}."
        )


def _check_names(values: Mapping[str, str | None], overrides: Iterable[str]) -> None:
    """Checks names before torch is imported; raises `SpeculateError`. Those that `--set` overrides do not count."""
    overridden = {override.partition("=")[0].strip() for override in overrides}
    checks = {"target.path": check_target, "data.train": check_source, "method.name": check_method}
    for place, check in checks.items():
        if place not in overridden and (value := values[place]) is not None:
            check(value)


def _write_recipe(text: str, path: Path) -> None:
    if str(path) == "-":
        say(text.removesuffix("\n"))
        return
    path = Path(user_path(path))
    if os.path.lexists(path):
        raise SpeculateError(f"cannot write the recipe {path}: it exists. Give another file, or remove it.")
    replace_files(path.parent, {path.name: text_writer(text)})
    say(f"wrote {path}; continue with: hf-speculate train --config {path}", err=True)


# An app, so that the help shows the examples.
train_app = typer.Typer(add_completion=False)
train_app.command("train", epilog=TRAIN_EXAMPLES)(train)
