"""`hf-speculate check`: is a head read as it was trained?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor, nn
from transformers.utils import logging

from hf_speculate.commands import (
    Prompt,
    builtin_prompts,
    console,
    find_device,
    load_target,
    read_prompts,
    say,
    say_json,
    tokenize,
)
from hf_speculate.errors import CheckpointError
from hf_speculate.hub import drafter_class_for, head_record, local_folder, refresh_hashes
from hf_speculate.models import unwrap
from hf_speculate.target import quantization_label

from ..block import BlockReader
from ..calibration import AcceptanceRates, HeadCheck, Reader, check_head, measure_calibration, write_texts
from ..eagle import EagleReader
from ..medusa import MedusaReader
from .conditions import HeadMeasure, Use, find_conditions, with_adapter


_READERS: dict[str, type] = {reader.name: reader for reader in (BlockReader, EagleReader, MedusaReader)}


def check_checkpoint(
    head: str | os.PathLike,
    target: nn.Module,
    prompts: Sequence[Tensor],
    *,
    depth: int = 5,
    max_new_tokens: int = 64,
    try_alternatives: bool | None = None,
) -> HeadCheck:
    """Measures the acceptance of a head on texts that the target writes, as stated and under other conventions.

    Args:
        head: folder or Hub id.
        target: the model that it was trained for.
        prompts: token ids, int64 [S] each.
        depth: of the chains that are drafted at every position.
        max_new_tokens: length of what the target writes after each prompt.
        try_alternatives: whether to try other conventions; None: if the acceptance is suspiciously low.
    Raises:
        CheckpointError: no head of a method that can be checked, or a broken one.
        DrafterNotFoundError, TargetMismatchError: no such head; another target's.
    """
    model, folder = unwrap(target), local_folder(head)
    drafter = drafter_class_for(folder)
    if drafter.name not in _READERS:
        raise CheckpointError(f"{head} is a checkpoint of {drafter.name!r}; only {', '.join(_READERS)} can be checked.")
    reader: Reader = _READERS[drafter.name](folder, model)  # a broken head fails before the target writes anything
    record = head_record(folder, model)
    texts = write_texts(model, prompts, max_new_tokens=max_new_tokens)
    return check_head(reader, os.fspath(head), texts, depth=depth, try_alternatives=try_alternatives, record=record)


def check(
    head: Annotated[str, typer.Argument(help="Folder or Hub id of an EAGLE, Medusa or one-pass head.")],
    target: Annotated[
        str, typer.Option(help="Folder, GGUF file, Hub id, or smollm2: the model that it was trained for.")
    ],
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter of the target: a folder or Hub id.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines (prompt, text, question, turns or messages) or plain text, one prompt a line (repeatable)."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file at most.")] = 16,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")] = False,
    depth: Annotated[int, typer.Option(min=1, help="Tokens that are drafted at every position.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="That the target writes after each prompt.")] = 64,
    alternatives: Annotated[
        bool | None,
        typer.Option("--alternatives/--no-alternatives", help="Other conventions (default: if acceptance is low)."),
    ] = None,
    conditions: Annotated[
        bool | None,
        typer.Option(
            "--conditions/--no-conditions",
            help="Other templates, adapters, dtypes, dequantised (default: if acceptance is low).",
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Write what its values mean into its folder (calibration.json).")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: the accelerator if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch (default: torch's own).")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Is a head read as it was trained? Measures its acceptance, finds mis-labelled conventions and what lowers it.

    That is: prompts, chat template, thinking, adapter, quantisation, dtype, context.
    """
    logging.disable_progress_bar()
    if calibrate:
        _writable(head)
    if threads is not None:
        torch.set_num_threads(threads)
    given = None if not prompts else [prompt for path in prompts for prompt in _prompts(path, limit)]
    on = find_device(device)

    def load(dtype: str, dense: bool = False) -> Any:
        return load_measured(target, dtype, on, dense)[0]

    model, tokenizer = load_measured(target, dtype, on)
    without_adapter = None
    if adapter is not None:
        model, without_adapter = with_adapter(model, adapter)
    use_template = not raw and bool(tokenizer.chat_template)
    chosen = builtin_prompts(limit, chat=use_template) if given is None else given
    tokens = [ids for _, ids in tokenize(chosen, tokenizer, use_chat_template=use_template)]
    found = check_checkpoint(
        head, model, tokens, depth=depth, max_new_tokens=max_new_tokens, try_alternatives=alternatives
    )
    measure = HeadMeasure(local_folder(head), _READERS[found.drafter], depth, max_new_tokens, found.fix)
    use = Use(model, tokenizer, chosen, tokens, use_template, load, without_adapter)
    findings = find_conditions(measure, use, others=found.is_low if conditions is None else conditions)
    found = replace(found, findings=findings)
    if calibrate:
        write_calibration(head, model, tokens, max_new_tokens=max_new_tokens, **found.fix)
    if json_only:
        say_json(as_json(found))
        return
    console().print(table(found))
    say(found.message)
    if found.fix:
        say(f"\n    {found.code}\n")


def write_calibration(
    head: str | os.PathLike, target: nn.Module, prompts: Sequence[Tensor], *, max_new_tokens: int = 64, **options: Any
) -> None:
    """Writes what the values of a head mean (`calibration.json`) into its folder, so that the policy of a new process
    does not begin blind.

    Args:
        head, target, prompts, max_new_tokens: as of `check_checkpoint`.
        options: of the drafter.
    Raises:
        CheckpointError: the head is no local folder, or nothing can be written there.
    """
    folder, model = _writable(head), unwrap(target)
    # Not `AutoSpeculator`, which would refuse the broken table that is to be written anew.
    drafter = drafter_class_for(folder).from_folder(folder, model, **options)
    table = measure_calibration(model, drafter, prompts, max_new_tokens=max_new_tokens)
    try:
        table.save(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write calibration.json to {folder}: {error}") from error
    refresh_hashes(folder)


def _writable(head: str | os.PathLike) -> str:
    """The folder of a head to which a table can be written."""
    folder = os.fspath(head)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is no local folder: calibration.json is written beside a head's files.")
    if not os.access(folder, os.W_OK):
        raise CheckpointError(f"calibration.json cannot be written to {folder}: no right to write there.")
    return folder


def load_measured(target: str, dtype: str, device: torch.device, dense: bool = False) -> tuple[Any, Any]:
    """Target and tokenizer; dense: dequantised."""
    model, tokenizer = load_target(target, dtype, device, gguf_backend="dense" if dense else "auto")
    if dense and quantization_label(model):
        model = model.dequantize()
    _stop_at_the_end(model, tokenizer)
    return model, tokenizer


def _stop_at_the_end(model: Any, tokenizer: Any) -> None:
    """What a target writes after its own end of text is no text that a head was trained on."""
    ends = model.config.get_text_config(decoder=True).eos_token_id
    ends = {*(ends if isinstance(ends, list | tuple) else [ends]), tokenizer.eos_token_id} - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    model.generation_config.pad_token_id = min(ends, default=0)


def as_json(found: HeadCheck) -> dict[str, Any]:
    """The outcome with its verdict, JSON-serialisable."""
    code = {"code": found.code} if found.fix else {}
    return {**asdict(found), "verdict": found.verdict, "message": found.message, **code}


def table(found: HeadCheck) -> RenderableType:
    """Acceptance by depth of every way to read the head."""
    depth = len(found.stated.by_depth)
    title = (
        f"{found.head} ({found.drafter}): greedy chains at {found.stated.num_positions} positions of the target's own "
        "text; share accepted to each depth (of those accepted to the depth before)"
    )
    rendered = Table(title=title, title_justify="left")
    rendered.add_column("read as", overflow="fold")
    for column in (*(f"depth {d}" for d in range(1, depth + 1)), "tokens\na round", "gain"):
        rendered.add_column(column, justify="right")
    rendered.add_row("stated in the files", *_cells(found.stated), "")
    for trial in found.trials:
        style = "bold" if found.fix and trial.options == found.fix else None
        if trial.acceptance is None:
            rendered.add_row(trial.meaning, *["-"] * (depth + 1), "cannot be read so", style="dim")
        else:
            gain = f"{trial.gain:+.2f} ({trial.sigmas:+.0f} sigma)"
            rendered.add_row(trial.meaning, *_cells(trial.acceptance), gain, style=style)
    return rendered


def _cells(acceptance: AcceptanceRates) -> list[str]:
    pairs = zip(acceptance.by_depth, acceptance.conditional, strict=True)
    cells = [f"{share:.2f}" + ("" if rate is None else f" ({rate:.2f})") for share, rate in pairs]
    return [*cells, f"{acceptance.mean_length:.2f}"]


def _prompts(path: Path, limit: int) -> list[Prompt]:
    if path.suffix == ".txt":
        return _lines_of(path)[:limit]
    return read_prompts(path, limit)


def _lines_of(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read prompts from {path}: {error}") from error
    found = [Prompt(path.stem, line) for line in lines if line.strip()]
    if not found:
        raise CheckpointError(f"no prompts in {path}.")
    return found
