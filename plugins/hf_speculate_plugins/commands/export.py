"""`hf-speculate export`: a head for a serving engine, the command that serves it, and what it will draft there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers.utils import logging

from hf_speculate.commands import (
    Device,
    NewTokens,
    PromptFiles,
    Raw,
    TargetDtype,
    Threads,
    builtin_prompts,
    find_device,
    progress,
    read_prompts,
    say,
    say_json,
    tokenize,
)
from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.hub import drafter_class_for, local_folder, refresh_hashes
from hf_speculate.models import GenerativeModel, unwrap
from hf_speculate.speculator import AutoSpeculator
from hf_speculate.target import quantization_label

from ..checkpoints import LoadedTarget
from .check import load_measured
from .convert import convert_checkpoint
from .serving import Drafting, EngineName, Serving, refuse_quantized


SCRIPT = "serve.sh"


@dataclass(frozen=True)
class Exported:
    """What was written, and what was found.

    Attributes:
        script: of the folder, what serves it.
        mean_acceptance_length: tokens a round, drafted as the engine drafts.
        acceptance_rate_by_depth: share of the rounds that were accepted to each depth.
        warnings: what may go otherwise in the engine.
    """

    engine: str
    method: str
    layout: str
    folder: str
    script: str
    drafting: Drafting
    num_prompts: int
    temperature: float
    mean_acceptance_length: float
    acceptance_rate_by_depth: dict[int, float]
    warnings: tuple[str, ...]


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
    temperature: float = 0.0,
    seed: int = 0,
) -> Exported:
    """Measures a head drafting as an engine does, converts it and writes `serve.sh`.

    Args:
        head: folder or Hub id.
        destination: a folder that is absent or empty; it is written last, when all else is known to work.
        target: as it is to be served; what it writes is measured.
        prompts: int64 [S] each.
        target_name: what the engine is to load.
        depth, top_k, num_draft_tokens: the engine's flags, see `Serving.drafting`.
        temperature: 0 is greedy.
        seed: of sampled texts.
    Raises:
        SpeculateError: the engine does not serve such heads or such a target, or drafts otherwise than asked for; the
            layout cannot express the head; another target's head.
    """
    folder = local_folder(head)
    drafter = drafter_class_for(folder)
    method = drafter.describe(folder).algorithm
    serving = Serving.of(engine, method)
    drafting = serving.drafting(depth, top_k, num_draft_tokens, _stated_tokens(folder))
    refuse_quantized(engine, quantization_label(target))
    path = Path(destination)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not an empty folder: choose another destination.")
    options = _options(drafter.name, drafting)
    speculator = AutoSpeculator.from_pretrained(folder, target=target, adaptive=False, **options)
    _measure(target, speculator, prompts, max_new_tokens, temperature, seed)
    length = speculator.stats.mean_acceptance_length
    if length is None:
        raise SpeculateError("nothing was drafted: the prompts are answered with a single token each.")
    is_local = os.path.isdir(target_name)
    files = target_name if is_local else LoadedTarget(unwrap(target), target_name)
    saved, _ = convert_checkpoint(folder, path, serving.layout, files)
    target_name = os.path.abspath(target_name) if is_local else target_name  # the script may be run from anywhere
    sampled = f"temperature {temperature:g}" if temperature else "greedy"
    facts = (
        f"{method} head for {target_name} in {serving.title}, by hf-speculate export. Measured with transformers, "
        f"{drafting.words}: {length:.2f} tokens a round ({len(prompts)} prompts, {sampled})."
    )
    script = path / SCRIPT
    script.write_text(serving.script(target_name, drafting, facts), encoding="utf-8")
    script.chmod(0o755)
    refresh_hashes(path)
    return Exported(
        engine=engine,
        method=method,
        layout=saved.layout,
        folder=str(path),
        script=script.read_text(encoding="utf-8"),
        drafting=drafting,
        num_prompts=len(prompts),
        temperature=temperature,
        mean_acceptance_length=length,
        acceptance_rate_by_depth=speculator.stats.acceptance_rate_by_depth,
        warnings=tuple(serving.warnings(target.config, method, str(target.dtype).removeprefix("torch."))),
    )


def _options(drafter: str, drafting: Drafting) -> dict[str, Any]:
    """Of our drafter, to draft the same."""
    if drafter == "medusa":
        return {"choices": [(0,) * depth for depth in range(1, drafting.depth + 1)]}
    return {"depth": drafting.depth, "top_k": drafting.top_k, "max_nodes": drafting.max_nodes}


def _stated_tokens(folder: str) -> int | None:
    """How many tokens the head's own config has engines draft (the speculators layout)."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def _measure(
    target: GenerativeModel,
    speculator: Any,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> None:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    with progress("prompts", total=len(prompts)) as advance, torch.inference_mode():
        for prompt in prompts:
            ids = prompt[None].to(target.device)
            mask = torch.ones_like(ids)
            target.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **sampling, speculator=speculator)
            advance("prompts")


def export(
    head: Annotated[str, typer.Argument(help="Folder or Hub id of an EAGLE, Medusa or DFlash head.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; absent or empty.")],
    engine: Annotated[EngineName, typer.Option("--for", help="What is to serve it.")],
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub id of what is served (default: what the head says).")
    ] = None,
    prompts: PromptFiles = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file at most.")] = 16,
    raw: Raw = False,
    depth: Annotated[int | None, typer.Option(min=1, help="vLLM's num_speculative_tokens, SGLang's num-steps.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="SGLang's eagle-topk; 1 is a chain.")] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=2, help="SGLang's: nodes of a tree, its root counted.")
    ] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled texts.")] = 0,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Hand a head over to vLLM or SGLang: convert it, write the command that serves it, measure what it will draft."""
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    name = target or _stated_target(head)
    model, tokenizer = load_measured(name, dtype, find_device(device))
    use_template = not raw and bool(tokenizer.chat_template)
    chosen = [each for path in prompts or () for each in read_prompts(path, limit)]
    chosen = chosen or builtin_prompts(limit, chat=use_template)
    found = export_head(
        head,
        destination,
        engine,
        model,
        [ids for _, ids in tokenize(chosen, tokenizer, use_chat_template=use_template)],
        target_name=name,
        depth=depth,
        top_k=top_k,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    if json_only:
        say_json(asdict(found))
        return
    for warning in found.warnings:
        say(f"note: {warning}", err=True)
    rates = ", ".join(f"{rate:.0%}" for rate in found.acceptance_rate_by_depth.values())
    say(
        f"{found.mean_acceptance_length:.2f} tokens a round with {found.drafting.words} on {found.num_prompts} prompts "
        f"(accepted to depth 1, 2, ...: {rates})\n\n{found.script}\n{destination} holds head and {SCRIPT}."
    )


def _stated_target(head: str) -> str:
    folder = local_folder(head)
    name = drafter_class_for(folder).describe(folder).base_model
    if name is None:
        raise SpeculateError(f"{head} does not say which target it is for: give --target.")
    return name
