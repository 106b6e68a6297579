"""`hf-speculate convert`: writes a head in another published layout, or in the one that a serving engine reads."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import user_path

from ..commands import MODEL_FORMS, JsonOnly, say, say_json, target_option, target_path
from .arguments import head_argument
from .engines import EngineName, check_target, served_layout, start_command


if TYPE_CHECKING:
    from hf_speculate.drafting import SavedHead
    from hf_speculate_plugins.checkpoints import LoadReport, TargetFiles


def convert_checkpoint(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    layout: str,
    target: str | os.PathLike | TargetFiles | None = None,
    *,
    out_type: str | None = None,
) -> tuple[SavedHead, LoadReport]:
    """Writes a head in another layout, with its card's figures, provenance, recipe and curves.

    Args:
        source: folder, Hub id or GGUF file of a head in any layout that loads.
        destination: an absent or empty folder; all of it is written, or nothing.
        layout: name of the layout. EAGLE: "safeailab", "specforge" (or "sglang"), "speculators" (or "vllm"),
            "compact", "llama.cpp"; Medusa: "fasterdecoding", "vllm"; one-pass heads: "zlab", "deepspec",
            "speculators", "modelopt", "llama.cpp".
        target: folder or Hub id, of which only the config and single tensors are read; or a GGUF file or a name of
            `NAMED_TARGETS`, which is loaded. Many conversions need none; "llama.cpp" needs its tokenizer.
        out_type: type of the matrices in a llama.cpp file, a name of `hf_speculate_gguf.OUT_TYPES`; None: "f16".
    Returns:
        The head that was written, and a report on every key of `source`.
    Raises:
        CheckpointError: `destination` is not empty; `source` is unreadable or of a method without other layouts; the
            layout cannot express it; a target is needed and none was given.
        DrafterNotFoundError: there is no such source or target.
        TargetMismatchError: the head belongs to another target.
    """
    path = _checked_destination(destination, layout, out_type)
    from hf_speculate.speculator import drafter_class_for, local_folder

    from ..hub import card_facts, copy_origins, rename_card, write_card

    folder = local_folder(source)
    drafter = drafter_class_for(folder)
    convert_folder = getattr(drafter, "convert", None)
    if convert_folder is None:
        raise CheckpointError(f"{folder} is a checkpoint of {drafter.name!r}, which has no other layouts.")
    files = None if target is None else _files_of(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch, path.name or "head")
        types = {} if out_type is None else {"out_type": out_type}
        saved, report = convert_folder(folder, written, layout, files, **types)
        copy_origins(folder, written, converted={"to": saved.layout, "from": drafter.describe(folder).layout})
        if not rename_card(written, **asdict(saved), source=folder):
            write_card(written, **card_facts(written, saved))
        if path.exists():
            path.rmdir()
        written.rename(path)
    return saved, report


def _checked_destination(destination: str | os.PathLike, layout: str | None, out_type: str | None) -> Path:
    """The path of an absent or empty folder; raises `CheckpointError`."""
    if out_type is not None and layout not in (None, "llama.cpp"):
        raise CheckpointError(f"the type of the matrices can be chosen for llama.cpp; {layout!r} keeps the head's.")
    path = Path(user_path(destination))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not an empty folder: choose another destination.")
    return path


def _files_of(target: str | os.PathLike | TargetFiles) -> TargetFiles:
    from hf_speculate_plugins.checkpoints import LoadedTarget, TargetFiles

    if isinstance(target, TargetFiles):
        return target
    path = target_path(os.fspath(target))
    if not path.endswith(".gguf"):
        return TargetFiles(path)
    import torch

    from hf_speculate_gguf import load_gguf

    return LoadedTarget(load_gguf(path, dtype=torch.bfloat16, backend="dense")[0], path)


def convert(
    source: Annotated[str, head_argument("Folder, Hub id or GGUF file of a head, in any known layout.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; it must be absent or empty.")],
    layout: Annotated[
        str | None,
        typer.Option(
            help="Layout to write. EAGLE: safeailab, specforge, speculators, compact, llama.cpp. "
            "Medusa: fasterdecoding, vllm. One-pass heads: zlab, deepspec, speculators, modelopt, llama.cpp."
        ),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option("--for", help="Write the layout that this engine reads, and print the command that starts it."),
    ] = None,
    target: Annotated[
        str | None,
        target_option(f"Target: {MODEL_FORMS}. Only if an error asks for it."),
    ] = None,
    outtype: Annotated[
        str | None, typer.Option(help="Type of the weights for llama.cpp: f32, f16, bf16, q8_0 or q4_0 (default: f16).")
    ] = None,
    json_only: JsonOnly = False,
) -> None:
    """Convert a head to another project's file layout, or for a serving engine.

    The report names every key of the source and where it went.
    """
    if (layout is None) == (engine is None):
        raise SpeculateError("pass one of --layout and --for.")
    _checked_destination(destination, layout, outtype)
    from hf_speculate.speculator import drafter_class_for, local_folder

    files = None if target is None else _files_of(target)
    if engine is not None:
        source = local_folder(source)
        layout = served_layout(engine, drafter_class_for(source).describe(source).algorithm)
        if files is not None:
            check_target(engine, files.text_config.model_type)
    assert layout is not None
    saved, report = convert_checkpoint(source, destination, layout, files, out_type=outtype)
    found = {**asdict(saved), "destination": str(destination), "keys": asdict(report)}
    started = ""
    if engine is not None:
        served = saved.base_model if target is None else target_path(target)
        found["command"] = start_command(engine, saved.algorithm, user_path(destination), served)
        started = f"\n\n{found['command']}"
    if json_only:
        say_json(found)
    else:
        say(f"{report}\nwritten to {destination} in the {saved.layout} layout{started}")
