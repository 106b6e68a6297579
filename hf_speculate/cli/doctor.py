"""`hf-speculate doctor`: would drafts pay for this model on this machine?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    progress,
    report,
    target_path,
    timed,
    tokenize,
)
from ..errors import SpeculateError, UnsupportedRequestError
from ..models import GenerativeModel
from ..registry import SpeculatorSpec
from ..scoring import supported_shape
from ..speculator import Speculator
from .session import ChatTarget, default_target


DOCTOR_EXAMPLES = """
Examples:

  hf-speculate doctor -t ./model -s ./eagle3-head

  hf-speculate doctor -t smollm2
"""

_NODES = 8  # of the larger forward
_PROMPTS, _LEAST_PROMPTS, _NEW_TOKENS, _REPEATS = 8, 2, 48, 3
_SECONDS = 20.0  # after these no further prompt is begun
_MIN_ROUNDS = 10  # with a draft, before anything is said of a drafter
_CLEAR = 1.05  # a speed-up below this is no reason to draft

_COLUMNS = {
    "backend": "{backend}",
    "drafter": "{drafter}",
    "plain,\nms a token": "{token_ms:.1f}",
    "forward\nof 1, ms": "{forward_ms[1]:.1f}",
    "forward\nof 8, ms": "{forward_ms[8]:.1f}",
    "round with\na draft, ms": "{round_ms:.1f}",
    "tokens a round\nto break even": "{needed:.2f}",
    "it yields": "{yields:.2f}",
    "in training": "{recorded:.2f}",
    "measured": "{speedup:.2f}x",
}


@dataclass
class Form:
    """The target with one backend, and what is timed of it in turn.

    Attributes:
        backend: name of the GGUF backend; "" where the target is no GGUF file.
        model: the target.
        prompts: int64 [1, S] each, on the model's device.
        speculators: speculator of each drafter, by its name.
        seconds: time of the call for every prompt, by the drafter's name; "" is stock `generate`.
        prompt_seconds: time of stock `generate` for the first token of every prompt.
    """

    backend: str
    model: GenerativeModel
    prompts: Sequence[Tensor]
    speculators: dict[str, Speculator]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    prompt_seconds: list[float] = field(default_factory=list)


def doctor(
    target: ChatTarget = None,
    speculator: Annotated[
        list[str] | None,
        typer.Option("--speculator", "-s", help="Head or drafter to try (repeatable; default: what fits the target)."),
    ] = None,
    gguf_backend: Annotated[
        str | None,
        typer.Option(help="Backend of a GGUF file. The default loads native and native-int8, and compares them."),
    ] = None,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: JsonOnly = False,
) -> None:
    """Would drafts pay here? Generates with and without drafts, in turn, for about 20 s, and says what to take."""
    prepare(threads)
    name, on = target or default_target(), find_device(device)
    specs = parse_specs(speculator) if speculator else default_specs(name)
    forms = [_form(form, specs, on) for form in _loaded(name, dtype, on, gguf_backend)]
    number = measure(forms)
    rows = [row for form in forms for row in rows_of(form)]
    advice = advise(rows)
    result = {"target": name, "prompts": number, "rows": rows, "advice": advice, "environment": environment(on)}
    title = f"{name}, {torch.get_num_threads()} threads: {number} built-in prompts, {_NEW_TOKENS} tokens each, greedy"
    report(result, [Grid.of(title, rows, _COLUMNS, groups=("backend",)), advice], json_only=json_only)


def measure(forms: Sequence[Form]) -> int:
    """Times stock `generate` and every drafter of every form, prompt by prompt in an order that rotates.

    Returns:
        The number of prompts. Every speculator keeps what its policy has learnt, as in a process of the user's.
    """
    steps = [(form, name) for form in forms for name in ("", *form.speculators)]
    for form, name in steps:
        _seconds(form, name, 0)  # warm-up
        form.seconds[name] = []
    for form in forms:
        for speculator in form.speculators.values():
            speculator.drafter.forget()
            speculator.stats.reset()
    end = time.monotonic() + _SECONDS
    with progress("doctor", total=_PROMPTS * len(steps)) as advance:
        for number in range(_PROMPTS):
            if number >= _LEAST_PROMPTS and time.monotonic() > end:
                return number
            for form, name in steps[number % len(steps) :] + steps[: number % len(steps)]:
                form.seconds[name].append(_seconds(form, name, number))
                if not name:
                    form.prompt_seconds.append(_seconds(form, name, number, count=1))
                advance(name or "plain")
    return _PROMPTS


def rows_of(form: Form) -> list[dict[str, Any]]:
    """The table's rows of one backend, JSON-serialisable.

    `token_ms`: milliseconds of a token of stock `generate`. `forward_ms`: of a bare forward, by its tokens. `round_ms`:
    of a round with a draft. `needed`, `yields`: tokens a round to break even, and as measured. `recorded`:
    tokens a round in the head's folder. `speedup`: stock's seconds over the drafter's; None after few drafts.
    """
    with torch.inference_mode():
        cache = prefilled_cache(form.model, form.prompts[0])
        forwards = verify_ms(form.model, cache, [1, _NODES], repeats=_REPEATS)
    decoding = sum(form.seconds[""]) - sum(form.prompt_seconds)
    token_ms = 1e3 * decoding / (len(form.prompt_seconds) * (_NEW_TOKENS - 1))
    common = {
        "backend": form.backend,
        "token_ms": token_ms,
        "forward_ms": {nodes: ms for (nodes, _), ms in forwards.items()},
    }
    return [{"drafter": name, **common, **_drafts(form, name, token_ms)} for name in form.speculators]


def _drafts(form: Form, name: str, token_ms: float) -> dict[str, Any]:
    speculator = form.speculators[name]
    stats, recorded = speculator.stats, speculator.drafter.record.length
    if not stats.rounds:
        return {"yields": None, "recorded": recorded, "speedup": None}
    round_ms = 1e3 * statistics.median(stats.round_seconds_with_draft)
    return {
        "rounds": stats.rounds,
        "round_ms": round_ms,
        "needed": round_ms / token_ms,
        "yields": stats.mean_acceptance_length,
        "recorded": recorded,
        "speedup": sum(form.seconds[""]) / sum(form.seconds[name]) if stats.rounds >= _MIN_ROUNDS else None,
    }


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


def _loaded(
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


def _form(loaded: tuple[str, GenerativeModel, Any], specs: Sequence[SpeculatorSpec], device: torch.device) -> Form:
    """Raises `SpeculateError` where the target does not score trees, or a drafter cannot be had."""
    backend, model, tokenizer = loaded
    shape, reason = supported_shape(model, DynamicCache(config=model.config))
    if shape != "tree":
        raise SpeculateError(f"doctor needs a target that scores trees: {reason}. `generate --compare` takes any.")
    uses_template = bool(tokenizer.chat_template)
    chosen = builtin_prompts(_PROMPTS, chat=uses_template)
    prompts = [ids[None].to(device) for _, ids in tokenize(chosen, tokenizer, use_chat_template=uses_template)]
    return Form(backend, model, prompts, {spec.text: make_spec(spec, model) for spec in specs})


def _seconds(form: Form, name: str, number: int, count: int = _NEW_TOKENS) -> float:
    ids = form.prompts[number]
    # No text ends early: all are compared at the same length.
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(ids), "speculator": form.speculators.get(name)}
    return timed(lambda: form.model.generate(ids, **options), ids.device)[0]
