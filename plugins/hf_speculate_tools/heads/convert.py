"""`hf-speculate convert`: writes a head in another published layout."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import CheckpointError
from hf_speculate.files import user_path
from hf_speculate.models import NAMED_TARGETS
from hf_speculate.speculator import drafter_class_for, local_folder
from hf_speculate_plugins.checkpoints import LoadedTarget, LoadReport, TargetFiles

from ..commands import JsonOnly, say, say_json, target_path
from ..hub import card_facts, copy_origins, rename_card, write_card


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
            "speculators", "llama.cpp".
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
    check_out_type(out_type, layout)
    path = check_destination(destination)
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


def check_out_type(out_type: str | None, layout: str) -> None:
    """Raises `CheckpointError` for a type of matrices that does not exist, or that a layout has no choice of."""
    if out_type is None:
        return
    if layout != "llama.cpp":
        raise CheckpointError(f"the type of the matrices can be chosen for llama.cpp; {layout!r} keeps the head's.")
    from hf_speculate_gguf import OUT_TYPES  # a slow import that other layouts do without

    if out_type not in OUT_TYPES:
        raise CheckpointError(f"unknown type {out_type!r} of matrices; possible: {', '.join(OUT_TYPES)}.")


def check_destination(destination: str | os.PathLike) -> Path:
    """The path of a folder to write; raises `CheckpointError` unless it is absent or empty."""
    path = Path(user_path(destination))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not an empty folder: choose another destination.")
    return path


def _files_of(target: str | os.PathLike | TargetFiles) -> TargetFiles:
    if isinstance(target, TargetFiles):
        return target
    path = target_path(os.fspath(target))
    if not path.endswith(".gguf"):
        return TargetFiles(path)
    from hf_speculate_gguf import load_gguf  # a slow import that other targets do without

    return LoadedTarget(load_gguf(path, dtype=torch.bfloat16, backend="dense")[0], path)


def convert(
    source: Annotated[str, typer.Argument(help="Folder, Hub id or GGUF file of a head, in any known layout.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; it must be absent or empty.")],
    layout: Annotated[
        str,
        typer.Option(
            help="Layout to write. EAGLE: safeailab, specforge (SGLang), speculators (vLLM), compact, llama.cpp. "
            "Medusa: fasterdecoding, vllm. One-pass heads: zlab, deepspec, speculators, llama.cpp."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help=f"Target: folder, Hub id, GGUF file, or {', '.join(NAMED_TARGETS)}. Only if an error asks for it."
        ),
    ] = None,
    outtype: Annotated[
        str | None, typer.Option(help="Type of the weights for llama.cpp: f32, f16, bf16, q8_0 or q4_0 (default: f16).")
    ] = None,
    json_only: JsonOnly = False,
) -> None:
    """Convert a head to another project's file layout.

    The report names every key of the source and where it went.
    """
    saved, report = convert_checkpoint(source, destination, layout, target, out_type=outtype)
    if json_only:
        say_json({**asdict(saved), "destination": str(destination), "keys": asdict(report)})
    else:
        say(f"{report}\nwritten to {destination} in the {saved.layout} layout")
