"""`hf-speculate check`: diagnoses a head whose drafts are rarely accepted."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from ..commands import (
    MODEL_FORMS,
    Device,
    JsonOnly,
    PromptFiles,
    Raw,
    TargetDtype,
    Threads,
    builtin_prompts,
    console,
    load_target,
    new_tokens_option,
    prepare,
    read_prompts,
    say,
    say_json,
    target_option,
    tokenize,
)
from .arguments import head_argument


if TYPE_CHECKING:
    import torch

    from ..check import AcceptanceRates, HeadCheck


def check(
    head: Annotated[str, head_argument("Folder, Hub id or GGUF file of an EAGLE, Medusa or one-pass head.")],
    target: Annotated[str, target_option(f"Model that the head was trained for: {MODEL_FORMS}.")],
    prompts: PromptFiles = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts of each file.")] = 16,
    raw: Raw = False,
    depth: Annotated[int, typer.Option(min=1, help="Draft this many tokens at every position.")] = 5,
    max_new_tokens: Annotated[
        int, new_tokens_option("Let the target write this many tokens after each prompt.", 8)
    ] = 64,
    alternatives: Annotated[
        bool | None,
        typer.Option(
            "--alternatives/--no-alternatives",
            help="Read the head by other conventions, too (default: if acceptance is low).",
        ),
    ] = None,
    conditions: Annotated[
        bool | None,
        typer.Option(
            "--conditions/--no-conditions",
            help="Measure with the chat template and without, thinking and not (default: if acceptance is low).",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Write calibration.json into the head's folder; new processes start with its figures."
        ),
    ] = False,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: JsonOnly = False,
) -> None:
    """Diagnose a head whose drafts are rarely accepted.

    It tries other conventions to read the head with, and prompts with another chat template. It compares positions
    before and beyond the context length in training.
    """
    from hf_speculate.speculator import local_folder

    from ..check import check_head, has_other_template, other_forms, writable_folder, write_calibration
    from ..commands import find_device

    if calibrate:
        writable_folder(head)
    prepare(threads)
    model, tokenizer = _load(target, dtype, find_device(device))
    uses_template = not raw and bool(tokenizer.chat_template)
    chosen = [prompt for path in prompts or () for prompt in read_prompts(path, limit)]
    chosen = chosen or builtin_prompts(limit, chat=uses_template)
    ids = [tokens for _, tokens in tokenize(chosen, tokenizer, use_chat_template=uses_template)]
    if uses_template and has_other_template(local_folder(head), tokenizer):
        say("note: the target's chat template is not the one that the head was trained with.", err=True)
    outcome = check_head(
        head,
        model,
        ids,
        depth=depth,
        max_new_tokens=max_new_tokens,
        try_alternatives=alternatives,
        other_forms=other_forms(chosen, ids, tokenizer, uses_template=uses_template),
        try_forms=conditions,
        uses_template=uses_template,
    )
    if calibrate:
        write_calibration(head, model, ids, max_new_tokens=max_new_tokens, **outcome.fix)
    if json_only:
        say_json(as_json(outcome))
        return
    console().print(_table(outcome))
    say(outcome.message)
    if outcome.fix:
        say(f"\n    {outcome.code}\n")


def _load(target: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """Loads a target and its tokenizer; texts end where the target's own end, as those that heads are trained on."""
    model, tokenizer = load_target(target, dtype, device)
    of_config: Any = model.config.get_text_config(decoder=True).eos_token_id
    of_tokenizer: Any = tokenizer.eos_token_id
    ends = {*(of_config if isinstance(of_config, list | tuple) else [of_config]), of_tokenizer} - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    model.generation_config.pad_token_id = min(ends, default=0)
    return model, tokenizer


def as_json(outcome: HeadCheck) -> dict[str, Any]:
    """The outcome with its verdict, JSON-serialisable."""
    code = {"code": outcome.code} if outcome.fix else {}
    return {**asdict(outcome), "verdict": outcome.verdict, "message": outcome.message, **code}


def _table(outcome: HeadCheck) -> RenderableType:
    """Acceptance by depth for every way to read the head."""
    depth = len(outcome.stated.by_depth)
    title = (
        f"{outcome.head} ({outcome.drafter}): greedy chains at {outcome.stated.num_positions} positions of the "
        "target's own text; share accepted to each depth (of those accepted to the depth before)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("read as", overflow="fold")
    for column in (*(f"depth {d}" for d in range(1, depth + 1)), "tokens\na round", "gain"):
        table.add_column(column, justify="right")
    table.add_row("stated in the files", *_cells(outcome.stated), "")
    for trial in outcome.trials:
        style = "bold" if outcome.fix and trial.options == outcome.fix else None
        if trial.acceptance is None:
            table.add_row(trial.meaning, *["-"] * (depth + 1), "cannot be read so", style="dim")
        else:
            gain = f"{trial.gain:+.2f} ({trial.sigmas:+.0f} sigma)"
            table.add_row(trial.meaning, *_cells(trial.acceptance), gain, style=style)
    return table


def _cells(acceptance: AcceptanceRates) -> list[str]:
    pairs = zip(acceptance.by_depth, acceptance.conditional, strict=True)
    cells = [f"{share:.2f}" + ("" if rate is None else f" ({rate:.2f})") for share, rate in pairs]
    return [*cells, f"{acceptance.mean_length:.2f}"]
