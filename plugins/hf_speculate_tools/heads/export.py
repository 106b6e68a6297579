"""`hf-speculate export`: a head for a serving engine, the command that serves it, and the acceptance to expect."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError, TargetMismatchError
from hf_speculate.files import user_path
from hf_speculate.models import GenerativeModel, unwrap
from hf_speculate.scoring import quantization_label
from hf_speculate.speculator import AutoSpeculator, Speculator, drafter_class_for, local_folder
from hf_speculate_plugins.block import BlockDrafter
from hf_speculate_plugins.checkpoints import GGUF_FILE, LoadedTarget

from ..commands import (
    Device,
    JsonOnly,
    NewTokens,
    PromptFiles,
    Raw,
    TargetDtype,
    Threads,
    find_device,
    prepare,
    progress,
    say,
    say_json,
    target_path,
)
from .check import load_measured, tokenized_prompts
from .convert import check_destination, check_out_type, convert_checkpoint
from .engines import (
    TITLES,
    EngineDrafts,
    EngineName,
    command,
    engine_drafts,
    engine_warnings,
    refuse_quantized,
    refuse_target,
    served,
)


SCRIPT = "serve.sh"


def export_head(
    head: str | os.PathLike,
    destination: str | os.PathLike,
    engine: EngineName,
    target: GenerativeModel,
    prompts: Sequence[Tensor],
    *,
    target_name: str,
    depth: int | None = None,
    top_k: int | None = None,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 128,
    out_type: str | None = None,
) -> dict[str, Any]:
    """Measures a head with the drafts of an engine, converts it and writes `serve.sh`.

    Args:
        head: folder, Hub id or GGUF file.
        destination: an absent or empty folder; it is written last, when everything else is known to work. For llama.cpp
            it may also be the name of a GGUF file, which is written without a script.
        engine: the engine.
        target: the model as it is to be served; its greedy texts are measured.
        prompts: token ids, int64 [S] each.
        target_name: folder or Hub id that the engine is to load.
        depth, top_k, num_draft_tokens: flags of the engine, see `engine_drafts`.
        max_new_tokens: tokens that the target writes after each prompt.
        out_type: type of the matrices for llama.cpp, see `convert_checkpoint`. The head is measured as it is.
    Returns:
        JSON-serialisable: the `layout` of the head, the `script` that serves it, its `drafting`, the figures
        `mean_acceptance_length` and `acceptance_rate_by_depth`, and `warnings` about what the engine may do otherwise.
    Raises:
        SpeculateError: the engine does not serve such heads or such a target, or cannot draft as asked; the layout
            cannot express the head; the head belongs to another target.
    """
    folder = local_folder(head)
    drafter = drafter_class_for(folder)
    method = drafter.describe(folder).algorithm
    layout, engine_method = served(engine, method)
    drafts = engine_drafts(engine, depth, top_k, num_draft_tokens, _stated_tokens(folder, drafter))
    check_out_type(out_type, layout)
    refuse_quantized(engine, quantization_label(target))
    refuse_target(engine, target.config)
    is_file = engine == "llama.cpp" and os.fspath(destination).endswith(".gguf")
    path = _absent_file(destination) if is_file else check_destination(destination)
    target_name = target_path(target_name)
    speculator = AutoSpeculator.from_pretrained(folder, target=target, adaptive=False, **asdict(drafts))
    _refuse_added_tokens(engine, speculator.drafter, target.config.get_text_config(decoder=True).vocab_size)
    speculator.drafter.check_layout(layout)
    length = _measured_length(target, speculator, prompts, max_new_tokens)
    is_local = os.path.exists(target_name)
    files = target_name if is_local else LoadedTarget(unwrap(target), target_name)
    if is_file:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            saved, _ = convert_checkpoint(folder, Path(scratch, "head"), layout, files, out_type=out_type)
            Path(scratch, "head", GGUF_FILE).rename(path)
    else:
        saved, _ = convert_checkpoint(folder, path, layout, files, out_type=out_type)
    target_name = os.path.abspath(target_name) if is_local else target_name  # the script may be run from anywhere
    facts = (
        f"{method} head for {target_name} in {TITLES[engine]}, by hf-speculate export. Measured with transformers, "
        f"{drafts.words}: {length:.2f} tokens per drafted round ({len(prompts)} prompts, greedy)."
    )
    line = command(engine, engine_method, _served_target(engine, target_name), drafts)
    if is_file:
        script = line.replace(f'"$head/{GGUF_FILE}"', shlex.quote(os.path.abspath(path))) + "\n"
    else:
        script = _script(facts, line)
        (path / SCRIPT).write_text(script, encoding="utf-8")
        (path / SCRIPT).chmod(0o755)
    return {
        "engine": engine,
        "method": method,
        "layout": saved.layout,
        "folder": str(path.parent if is_file else path),
        "script": script,
        "drafting": asdict(drafts),
        "num_prompts": len(prompts),
        "mean_acceptance_length": length,
        "acceptance_rate_by_depth": speculator.stats.acceptance_rate_by_depth,
        "warnings": engine_warnings(
            engine, target.config, method, str(target.dtype).removeprefix("torch."), target_name
        ),
    }


def _absent_file(destination: str | os.PathLike) -> Path:
    """The path of a file to write; raises `CheckpointError` if something is there already."""
    path = Path(user_path(destination))
    if path.exists():
        raise CheckpointError(f"{path} exists: choose another destination.")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _script(facts: str, line: str) -> str:
    return f'#!/bin/sh\n# {facts}\nhead=$(cd "$(dirname "$0")" && pwd)\nexec {line} "$@"\n'


def _served_target(engine: EngineName, name: str) -> str:
    """The target in the script. llama.cpp takes a GGUF file; if the target was none, the user names one."""
    if engine == "llama.cpp" and not name.endswith(".gguf"):
        return '"${TARGET:?set TARGET to the target as a GGUF file}"'
    return shlex.quote(name)


def _refuse_added_tokens(engine: EngineName, drafter: Any, vocab_size: int) -> None:
    """Raises `TargetMismatchError` for a target with tokens that the head does not know."""
    known = drafter.spec.vocab_size
    if known != vocab_size:
        raise TargetMismatchError(
            f"the head knows {known} tokens and the target has {vocab_size}: {TITLES[engine]} may read "
            "rows that the head does not have. Use the head here, or train one for this target."
        )


def _stated_tokens(folder: str, drafter: Any) -> int | None:
    """Number of tokens that the head's files have engines draft: a whole block, or a speculators config's number."""
    if drafter is BlockDrafter:
        return BlockDrafter.head_files.open(folder).spec.max_depth
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def _measured_length(
    target: GenerativeModel, speculator: Speculator, prompts: Sequence[Tensor], max_new_tokens: int
) -> float:
    """The mean acceptance length over greedy texts after the prompts."""
    with progress("prompts", total=len(prompts)) as advance, torch.inference_mode():
        for prompt in prompts:
            ids = prompt[None].to(target.device)
            given: dict[str, Any] = {"do_sample": False, "speculator": speculator, "max_new_tokens": max_new_tokens}
            target.generate(ids, attention_mask=torch.ones_like(ids), **given)
            advance("prompts")
    if (length := speculator.stats.mean_acceptance_length) is None:
        raise SpeculateError("nothing was drafted: the target answers every prompt with a single token.")
    return length


def export(
    head: Annotated[str, typer.Argument(help="Folder, Hub id or GGUF file of an EAGLE, DFlash or DSpark head.")],
    destination: Annotated[
        Path, typer.Argument(help="Folder to write; it must be absent or empty. For llama.cpp also a file, OUT.gguf.")
    ],
    engine: Annotated[EngineName, typer.Option("--for", help="Engine that will serve the head.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="Model to serve: folder, Hub id, for llama.cpp a GGUF file (default: the one that the head names)."
        ),
    ] = None,
    prompts: PromptFiles = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts of each file.")] = 16,
    raw: Raw = False,
    depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft this many tokens deep: vLLM's num_speculative_tokens, SGLang's num-steps, llama.cpp's n-max "
            "(default: what the head states, else 5; for llama.cpp 3).",
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="SGLang's eagle-topk; 1 is a chain (default: 4).")] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="SGLang's num-draft-tokens: nodes of a tree, root included (default: 8; with --top-k 1, depth + 1).",
        ),
    ] = None,
    max_new_tokens: NewTokens = 128,
    outtype: Annotated[
        str | None, typer.Option(help="Type of the weights for llama.cpp: f32, f16, bf16, q8_0 or q4_0 (default: f16).")
    ] = None,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: JsonOnly = False,
) -> None:
    """Prepare a head for vLLM, SGLang or llama.cpp, and measure its acceptance.

    Writes the head in the engine's layout and the command that serves it.
    """
    destination = Path(user_path(destination))
    prepare(threads)
    name = target or _stated_target(head)
    model, tokenizer = load_measured(name, dtype, find_device(device))
    _, ids, _ = tokenized_prompts(prompts, limit, tokenizer, raw)
    flags = {"depth": depth, "top_k": top_k, "num_draft_tokens": num_draft_tokens}
    given: dict[str, Any] = {"target_name": name, "max_new_tokens": max_new_tokens, "out_type": outtype, **flags}
    found = export_head(head, destination, engine, model, ids, **given)
    if json_only:
        say_json(found)
        return
    for warning in found["warnings"]:
        say(f"note: {warning}", err=True)
    rates = ", ".join(f"{rate:.0%}" for rate in found["acceptance_rate_by_depth"].values())
    drafting = EngineDrafts(**found["drafting"]).words
    say(
        f"{found['mean_acceptance_length']:.2f} tokens per drafted round with {drafting} on "
        f"{found['num_prompts']} prompts (accepted to depth 1, 2, ...: {rates})\n\n{found['script']}\n{destination} "
        f"{'is the head' if destination.is_file() else f'holds head and {SCRIPT}'}."
    )


def _stated_target(head: str) -> str:
    folder = local_folder(head)
    name = drafter_class_for(folder).describe(folder).base_model
    if name is None:
        raise SpeculateError(f"{head} does not name its target: pass --target.")
    return name
