"""`hf-speculate convert`: writes a head in another published layout, or in the one that a serving engine reads."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import section, user_path
from hf_speculate.messages import get_logger
from hf_speculate_gguf.named import known_target

from ..commands import MODEL_FORMS, JsonOnly, say, say_json, target_option, target_path
from .arguments import head_argument
from .engines import EngineName, check_target, served_layout, start_command


if TYPE_CHECKING:
    from hf_speculate.drafting import Drafter, SavedHead
    from hf_speculate_plugins.checkpoints import LoadReport, TargetFiles, TargetNeededError


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
            `NAMED_TARGETS`, which is loaded. Many conversions need none; "llama.cpp" needs its tokenizer. None: the
            target that the head names, if it is needed and on this machine.
        out_type: type of the matrices in a llama.cpp file, a name of `hf_speculate_gguf.OUT_TYPES`; None: "f16".
    Returns:
        The head that was written, and a report on every key of `source`.
    Raises:
        CheckpointError: `destination` is not empty; `source` is unreadable or of a method without other layouts; the
            layout cannot express it; a target is needed, none was given and the named one is not here.
        DrafterNotFoundError: there is no such source or target.
        TargetMismatchError: the head belongs to another target.
    """
    path = _checked_destination(destination, layout, out_type)
    from hf_speculate.speculator import drafter_class_for, local_folder
    from hf_speculate_plugins.checkpoints import TargetNeededError

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
        try:
            saved, report = convert_folder(folder, written, layout, files, **types)
        except TargetNeededError as error:
            saved, report = convert_folder(folder, written, layout, _named_target(folder, drafter, error), **types)
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


def _named_target(folder: str, drafter: type[Drafter], error: TargetNeededError) -> TargetFiles:
    """The files of the target that a head names.

    Args:
        error: error to raise, with that name, if the target is not on this machine.
    """
    from hf_speculate_plugins.checkpoints import TargetNeededError
    from hf_speculate_plugins.origin import read_provenance

    name = drafter.describe(folder).base_model or section(read_provenance(folder) or {}, "target").get("name")
    if not name:
        raise error
    known = known_target(name)
    place = (known.find() if known else None) or user_path(name)
    if not os.path.exists(place):
        raise TargetNeededError(f"{error} The head names {name!r}, which is not on this machine.") from error
    get_logger(__name__).info(f"{folder}: the target is {place}, which the head names")
    return _files_of(place)


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
    from hf_speculate_plugins.checkpoints import TargetNeededError

    files = None if target is None else _files_of(target)
    if engine is not None:
        source = local_folder(source)
        drafter = drafter_class_for(source)
        layout = served_layout(engine, drafter.describe(source).algorithm)
        if files is None and engine == "llama.cpp":  # it serves heads of some targets only
            error = TargetNeededError(f"{engine} needs the tokenizer of the target of {source}: give it (--target).")
            files = _named_target(source, drafter, error)
        if files is not None:
            check_target(engine, files.text_config.model_type)
    assert layout is not None
    saved, report = convert_checkpoint(source, destination, layout, files, out_type=outtype)
    facts = {**asdict(saved), "destination": str(destination), "keys": asdict(report)}
    started = ""
    if engine is not None:
        served = target_path(target) if target is not None else saved.base_model if files is None else files.name
        facts["command"] = start_command(engine, saved.algorithm, user_path(destination), served)
        started = f"\n\n{facts['command']}"
    if json_only:
        say_json(facts)
    else:
        say(f"{report}\nwritten to {destination} in the {saved.layout} layout{started}")
