"""`hf-speculate doctor`: would drafts pay for this model on this machine?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from ..bench import prefilled_cache, verify_ms
from ..commands import (
    Device,
    Grid,
    JsonOnly,
    TargetDtype,
    Threads,
    builtin_prompts,
    default_specs,
    environment,
    find_device,
    load_target,
    make_spec,
    parse_specs,
    prepare,
    report,
    target_path,
    timed,
    tokenize,
)
from ..errors import SpeculateError, UnsupportedRequestError
from ..models import GenerativeModel
from ..policy import Fixed
from ..registry import SpeculatorSpec
from ..target import supported_shape
from .session import ChatTarget, default_target


DOCTOR_EXAMPLES = """
Examples:

  hf-speculate doctor -t ./model -s ./eagle3-head

  hf-speculate doctor -t smollm2
"""

_NODES, _DEPTH = 8, 4  # of a round's tree: the nodes with the root
_PROMPTS, _NEW_TOKENS, _REPEATS = 2, 40, 3
_PLAIN_TOKENS = 16
_MIN_ROUNDS = 10  # with a draft, before anything is said of a drafter
_CLEAR = 1.05  # a speed-up below this is no reason to draft

_COLUMNS = {
    "backend": "{backend}",
    "drafter": "{drafter}",
    "plain,\nms a token": "{token_ms:.1f}",
    "forward\nof 1, ms": "{forward_ms[1]:.1f}",
    "forward\nof 8, ms": "{forward_ms[8]:.1f}",
    "draft,\nms": "{draft_ms:.1f}",
    "tokens a round\nto break even": "{needed:.2f}",
    "it yields": "{yields:.2f}",
    "in training": "{recorded:.2f}",
    "expected": "{speedup:.2f}x",
}


def doctor(
    target: ChatTarget = None,
    speculator: Annotated[
        list[str] | None,
        typer.Option("--speculator", "-s", help="Head or drafter to try (repeatable; default: what fits the target)."),
    ] = None,
    gguf_backend: Annotated[
        str | None, typer.Option(help="Of a GGUF file (default: tries native and native-int8).")
    ] = None,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: JsonOnly = False,
) -> None:
    """Would drafts pay here? Times the model and its drafters for some seconds and says what to take."""
    prepare(threads)
    name, on = target or default_target(), find_device(device)
    specs = parse_specs(speculator) if speculator else default_specs(name)
    rows = []
    for backend, model, tokenizer in _forms(name, dtype, on, gguf_backend):
        uses_template = bool(tokenizer.chat_template)
        chosen = builtin_prompts(_PROMPTS, chat=uses_template)
        prompts = [ids[None].to(on) for _, ids in tokenize(chosen, tokenizer, use_chat_template=uses_template)]
        rows += [{"backend": backend, **found} for found in examine(model, specs, prompts)]
    advice = advise(rows)
    result = {"target": name, "rows": rows, "advice": advice, "environment": environment(on)}
    title = f"{name}, {torch.get_num_threads()} threads: rounds of {_NODES} tokens, greedy, {_PROMPTS} built-in prompts"
    report(result, [Grid.of(title, rows, _COLUMNS, groups=("backend",)), advice], json_only=json_only)


def examine(model: GenerativeModel, specs: Sequence[SpeculatorSpec], prompts: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What a round with each drafter costs and yields.

    Args:
        prompts: int64 [1, S] each, on the model's device.
    Returns:
        JSON-serialisable rows. `token_ms`: a token of stock `generate`. `forward_ms`: a bare forward by its tokens.
        `draft_ms`, `round_ms`: of a round with a draft. `needed`, `yields`: tokens a round to break even, and as
        measured; `recorded`: as the head's folder has it. `speedup`: expected over stock; None after few drafts.
    Raises:
        SpeculateError: the target does not score trees, or a drafter cannot be had.
    """
    shape, reason = supported_shape(model, DynamicCache(config=model.config))
    if shape != "tree":
        raise SpeculateError(f"doctor needs a target that scores trees: {reason}. `generate --compare` takes any.")
    forwards = verify_ms(model, prefilled_cache(model, prompts[0]), [1, _NODES], repeats=_REPEATS)
    common = {"token_ms": _token_ms(model, prompts[0]), "forward_ms": {n: ms for (n, _), ms in forwards.items()}}
    return [{"drafter": spec.text, **common, **_drafts(model, spec, prompts, common["token_ms"])} for spec in specs]


def advise(rows: Sequence[dict[str, Any]]) -> str:
    """The drafter and the backend to take: those that make the most tokens a second."""
    best = max(rows, key=lambda row: max(row["speedup"] or 1.0, 1.0) / row["token_ms"])
    backend = f" --gguf-backend {best['backend']}" if best["backend"] else ""
    speedup, plain = best["speedup"], 1e3 / best["token_ms"]
    if speedup is not None and speedup >= _CLEAR:
        speeds = f"about {speedup:.2f}x, from {plain:.0f} to {speedup * plain:.0f} tokens/s"
        return f"Take --speculator {best['drafter']}{backend}: {speeds}."
    told = f"Run plain{backend} ({plain:.0f} tokens/s): no drafter clearly yields more than it costs on these prompts."
    return f"{told} Text that repeats its prompt may still gain by prompt_lookup."


def _forms(
    name: str, dtype: str, device: torch.device, gguf_backend: str | None
) -> Iterator[tuple[str, GenerativeModel, Any]]:
    """The target by backend: for a GGUF file each of the fast ones that runs here, for others one form, ""."""
    if not target_path(name).endswith(".gguf"):
        yield "", *load_target(name, dtype, device)
        return
    found = False
    for backend in [gguf_backend] if gguf_backend else ["native", "native-int8"]:
        try:
            form = load_target(name, dtype, device, backend)
        except UnsupportedRequestError:
            if gguf_backend:
                raise
            continue
        found = True
        yield backend, *form
    if not found:
        yield "auto", *load_target(name, dtype, device)


def _generate(model: GenerativeModel, ids: Tensor, count: int, speculator: Any = None) -> None:
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), **options, speculator=speculator)


def _token_ms(model: GenerativeModel, ids: Tensor) -> float:
    """Of stock's loop, the prompt left out."""
    _generate(model, ids, 4)  # warm-up
    times = []
    for _ in range(_REPEATS):
        first, whole = (timed(lambda n=n: _generate(model, ids, n), ids.device)[0] for n in (1, 1 + _PLAIN_TOKENS))
        times.append(1e3 * (whole - first) / _PLAIN_TOKENS)
    return statistics.median(times)


def _drafts(model: GenerativeModel, spec: SpeculatorSpec, prompts: Sequence[Tensor], token_ms: float) -> dict[str, Any]:
    """Rounds of one drafter."""
    speculator = make_spec(spec, model, policy=Fixed(max_nodes=_NODES - 1, max_depth=_DEPTH))
    _generate(model, prompts[0], 2 * _NODES, speculator)  # warm-up
    speculator.drafter.forget()
    speculator.stats.reset()
    for ids in prompts:
        _generate(model, ids, _NEW_TOKENS, speculator)
    stats, recorded = speculator.stats, speculator.drafter.record.length
    if not stats.rounds:
        return {"yields": None, "recorded": recorded, "speedup": None}
    round_ms = 1e3 * statistics.median(stats.round_seconds_with_draft)
    plain_ms, ours_ms = stats.plain_steps * token_ms, stats.rounds * round_ms + stats.rounds_without_draft * token_ms
    return {
        "rounds": stats.rounds,
        "draft_ms": 1e3 * stats.drafter_seconds / stats.rounds,
        "round_ms": round_ms,
        "needed": round_ms / token_ms,
        "yields": stats.mean_acceptance_length,
        "recorded": recorded,
        "speedup": plain_ms / ours_ms if stats.rounds >= _MIN_ROUNDS else None,
    }
