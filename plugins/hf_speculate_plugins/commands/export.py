"""`hf-speculate export`: a head for vLLM or SGLang, the command that serves it, and the acceptance to expect there.

Facts of vLLM (docs "EAGLE Draft Models", `vllm/config/speculative.py`) and SGLang (docs "Speculative Decoding") were
read in November 2026; neither was run.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import typer
from torch import Tensor

from hf_speculate.commands import (
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
)
from hf_speculate.errors import SpeculateError, TargetMismatchError
from hf_speculate.hub import drafter_class_for, local_folder
from hf_speculate.models import GenerativeModel, unwrap
from hf_speculate.scoring import quantization_label
from hf_speculate.speculator import AutoSpeculator, Speculator

from ..checkpoints import LoadedTarget
from ..medusa import MedusaDrafter, StaticTree
from .check import load_measured, tokenized_prompts
from .convert import check_destination, convert_checkpoint


SCRIPT = "serve.sh"

EngineName: TypeAlias = Literal["vllm", "sglang"]

_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
# Method -> layout that the engine reads, and its own name of the method.
_SERVED: Mapping[EngineName, Mapping[str, tuple[str, str]]] = {
    "vllm": {
        "eagle3": ("speculators", "eagle3"),
        "eagle": ("safeailab", "eagle"),
        "dflash": ("speculators", "dflash"),
        "medusa": ("vllm", "medusa"),
    },
    "sglang": {"eagle3": ("specforge", "EAGLE3"), "eagle": ("safeailab", "EAGLE")},
}
# Targets whose states both engines hand to EAGLE-3 heads: parts of `model_type`, in vLLM's list since 0.11. Lists grow.
_EAGLE3_TARGETS = ("llama", "qwen", "minicpm", "gpt_oss")


@dataclass(frozen=True)
class EngineDrafts:
    """The drafts of an engine.

    Attributes:
        depth: tokens along a branch: `num_speculative_tokens`, `--speculative-num-steps`.
        top_k: branches of a level; 1 is a chain.
        max_nodes: draft nodes without the root; 0: `depth`.
    """

    depth: int
    top_k: int = 1
    max_nodes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_nodes", self.max_nodes or self.depth)

    @property
    def words(self) -> str:
        return f"chains of {self.depth}" if self.top_k == 1 else f"trees of {self.max_nodes} nodes, {self.depth} deep"


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
) -> dict[str, Any]:
    """Measures a head with the drafts of an engine, converts it and writes `serve.sh`.

    Args:
        head: folder or Hub id.
        destination: an absent or empty folder; it is written last, when everything else is known to work.
        engine: the engine.
        target: the model as it is to be served; its greedy texts are measured.
        prompts: token ids, int64 [S] each.
        target_name: folder or Hub id that the engine is to load.
        depth, top_k, num_draft_tokens: flags of the engine, see `engine_drafts`.
        max_new_tokens: tokens that the target writes after each prompt.
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
    layout, engine_method = _served(engine, method)
    drafts = engine_drafts(engine, depth, top_k, num_draft_tokens, _stated_tokens(folder))
    refuse_quantized(engine, quantization_label(target))
    path = check_destination(destination)
    options = {} if drafter.name == "medusa" else asdict(drafts)  # Medusa drafts static trees
    speculator = AutoSpeculator.from_pretrained(folder, target=target, adaptive=False, **options)
    _refuse_added_tokens(engine, speculator.drafter, target.config.get_text_config(decoder=True).vocab_size)
    if isinstance(speculator.drafter, MedusaDrafter):
        speculator.drafter.tree = StaticTree.chain(min(drafts.depth, speculator.drafter.heads.num_heads))
    length = _measured_length(target, speculator, prompts, max_new_tokens)
    is_local = os.path.isdir(target_name)
    files = target_name if is_local else LoadedTarget(unwrap(target), target_name)
    saved, _ = convert_checkpoint(folder, path, layout, files)
    target_name = os.path.abspath(target_name) if is_local else target_name  # the script may be run from anywhere
    facts = (
        f"{method} head for {target_name} in {_TITLES[engine]}, by hf-speculate export. Measured with transformers, "
        f"{drafts.words}: {length:.2f} tokens a round ({len(prompts)} prompts, greedy)."
    )
    script = (
        f'#!/bin/sh\n# {facts}\nhead=$(cd "$(dirname "$0")" && pwd)\n'
        f'exec {_command(engine, engine_method, shlex.quote(target_name), drafts)} "$@"\n'
    )
    (path / SCRIPT).write_text(script, encoding="utf-8")
    (path / SCRIPT).chmod(0o755)
    return {
        "engine": engine,
        "method": method,
        "layout": saved.layout,
        "folder": str(path),
        "script": script,
        "drafting": asdict(drafts),
        "num_prompts": len(prompts),
        "mean_acceptance_length": length,
        "acceptance_rate_by_depth": speculator.stats.acceptance_rate_by_depth,
        "warnings": engine_warnings(engine, target.config, method, str(target.dtype).removeprefix("torch.")),
    }


def _served(engine: EngineName, method: str) -> tuple[str, str]:
    """Layout and the engine's name of a method; raises `SpeculateError` if the engine serves no such heads."""
    if method not in _SERVED[engine]:
        others = [_TITLES[name] for name, methods in _SERVED.items() if method in methods]
        elsewhere = f"{' and '.join(others)} does" if others else "nobody known here does"
        served = ", ".join(_SERVED[engine])
        raise SpeculateError(f"{_TITLES[engine]} serves heads of {served}, not of {method}; {elsewhere}.")
    return _SERVED[engine][method]


def engine_drafts(
    engine: EngineName, depth: int | None, top_k: int | None, num_draft_tokens: int | None, stated: int | None
) -> EngineDrafts:
    """The drafts of an engine with these flags; None: the engine's defaults, for vLLM those that the head states.

    Args:
        num_draft_tokens: nodes of a tree with its root, as SGLang counts them.
        stated: `speculative_tokens` in the head's config.
    Raises:
        SpeculateError: vLLM, which drafts chains, is asked for a tree; a tree has no room for its depth.
    """
    if engine == "vllm":
        if (top_k or 1) > 1 or num_draft_tokens is not None:
            raise SpeculateError("vLLM drafts chains: --top-k and --num-draft-tokens are SGLang's.")
        return EngineDrafts(depth or stated or 5)
    depth, top_k = depth or 5, top_k or 4
    nodes = num_draft_tokens - 1 if num_draft_tokens is not None else depth if top_k == 1 else 7
    if nodes < depth:
        raise SpeculateError(
            f"a tree of --num-draft-tokens {nodes + 1} (its root among them) cannot be {depth} deep: at least "
            f"{depth + 1}, or fewer --depth."
        )
    return EngineDrafts(depth, top_k, nodes)


def _command(engine: EngineName, method: str, target: str, drafts: EngineDrafts) -> str:
    """The shell command that serves the head in `$head`."""
    if engine == "vllm":
        config = {"method": method, "model": "$head", "num_speculative_tokens": drafts.depth}
        quoted = json.dumps(config).replace('"', '\\"')
        return f'vllm serve {target} --speculative-config "{quoted}"'
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} "
        f'--speculative-draft-model-path "$head" --speculative-num-steps {drafts.depth} '
        f"--speculative-eagle-topk {drafts.top_k} --speculative-num-draft-tokens {drafts.max_nodes + 1}"
    )


def engine_warnings(engine: EngineName, config: Any, method: str, dtype: str) -> list[str]:
    """Differences that the engine may show, by the target's config and the dtype in which the head was measured."""
    found, kind = [], config.get_text_config(decoder=True).model_type
    if method == "eagle3" and not any(part in kind for part in _EAGLE3_TARGETS):
        found.append(
            f"{_TITLES[engine]} hands out the states that EAGLE-3 heads read for targets in a list of its own; "
            f"{kind!r} was not in it when this was written."
        )
    if dtype == "float32":
        found.append(f"measured in float32; {_TITLES[engine]} serves in 16 bit unless it is told otherwise (--dtype).")
    return found


def refuse_quantized(engine: EngineName, label: str) -> None:
    """Raises `SpeculateError` for a target whose weights an engine does not load as they are here.

    Args:
        label: result of `quantization_label`; "" for none.
    """
    if label:
        raise SpeculateError(
            f"the target's weights are quantised ({label}), and {_TITLES[engine]} would serve other ones: the head "
            "reads the states of those. Possible: --target the checkpoint that is to be served (its acceptance is "
            "measured then), or serve this one here."
        )


def _refuse_added_tokens(engine: EngineName, drafter: Any, vocab_size: int) -> None:
    """Raises `TargetMismatchError` for a target with tokens that the head does not know."""
    heads = drafter.heads if isinstance(drafter, MedusaDrafter) else drafter.spec
    if getattr(heads, "token_ids", None) is None and heads.vocab_size not in (None, vocab_size):
        raise TargetMismatchError(
            f"the head knows {heads.vocab_size} tokens and the target has {vocab_size}: {_TITLES[engine]} may read "
            "rows that the head does not have. Use the head here, or train one for this target."
        )


def _stated_tokens(folder: str) -> int | None:
    """Number of tokens that the head's own config has engines draft (speculators layout)."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def _measured_length(
    target: GenerativeModel, speculator: Speculator, prompts: Sequence[Tensor], max_new_tokens: int
) -> float:
    """Tokens a round over greedy texts behind the prompts."""
    with progress("prompts", total=len(prompts)) as advance, torch.inference_mode():
        for prompt in prompts:
            ids = prompt[None].to(target.device)
            given: dict[str, Any] = {"do_sample": False, "speculator": speculator, "max_new_tokens": max_new_tokens}
            target.generate(ids, attention_mask=torch.ones_like(ids), **given)
            advance("prompts")
    if (length := speculator.stats.mean_acceptance_length) is None:
        raise SpeculateError("nothing was drafted: the prompts are answered with a single token each.")
    return length


def export(
    head: Annotated[str, typer.Argument(help="Folder or Hub id of an EAGLE, Medusa or DFlash head.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; absent or empty.")],
    engine: Annotated[EngineName, typer.Option("--for", help="Engine that is to serve the head.")],
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the model to serve (default: the one that the head names).")
    ] = None,
    prompts: PromptFiles = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts of each file.")] = 16,
    raw: Raw = False,
    depth: Annotated[
        int | None, typer.Option(min=1, help="vLLM's num_speculative_tokens, SGLang's num-steps (default 5).")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="SGLang's eagle-topk; 1 is a chain (default 4).")] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=2, help="SGLang's num-draft-tokens: nodes of a tree with its root (default 8).")
    ] = None,
    max_new_tokens: NewTokens = 128,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: JsonOnly = False,
) -> None:
    """Hand a head over to vLLM or SGLang: convert it, write the command that serves it, measure its acceptance."""
    prepare(threads)
    name = target or _stated_target(head)
    model, tokenizer = load_measured(name, dtype, find_device(device))
    _, ids, _ = tokenized_prompts(prompts, limit, tokenizer, raw)
    flags = {"depth": depth, "top_k": top_k, "num_draft_tokens": num_draft_tokens}
    found = export_head(head, destination, engine, model, ids, target_name=name, max_new_tokens=max_new_tokens, **flags)
    if json_only:
        say_json(found)
        return
    for warning in found["warnings"]:
        say(f"note: {warning}", err=True)
    rates = ", ".join(f"{rate:.0%}" for rate in found["acceptance_rate_by_depth"].values())
    say(
        f"{found['mean_acceptance_length']:.2f} tokens a round with {EngineDrafts(**found['drafting']).words} on "
        f"{found['num_prompts']} prompts (accepted to depth 1, 2, ...: {rates})\n\n{found['script']}\n{destination} "
        f"holds head and {SCRIPT}."
    )


def _stated_target(head: str) -> str:
    folder = local_folder(head)
    name = drafter_class_for(folder).describe(folder).base_model
    if name is None:
        raise SpeculateError(f"{head} does not say which target it is for: give --target.")
    return name
