"""`hf-speculate doctor`: measures whether drafts pay for this model on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

from hf_speculate.errors import SpeculateError, UnsupportedRequestError
from hf_speculate.models import GenerativeModel
from hf_speculate.scoring import backends_in_use, supported_shape
from hf_speculate.speculator import SpeculatorSpec
from hf_speculate.stats import SpeculationStats

from ..bench import (
    Method,
    Request,
    TimedRun,
    batches,
    fixed_length,
    generate_once,
    measure_in_turn,
    merged,
    num_steps,
    prefilled_cache,
    speculator_method,
    verify_ms,
)
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
    tokenize,
)
from .session import ChatTarget, default_target


DOCTOR_EXAMPLES = """
\b
Examples:
  hf-speculate doctor -t ./model -s ./eagle3-head
  hf-speculate doctor -t smollm2
"""

_NODES = 8  # nodes of the larger forward
_PROMPTS, _LEAST_PROMPTS, _NEW_TOKENS, _REPEATS = 8, 2, 48, 3
_SECONDS = 20.0  # target for all calls together, unless `_LEAST_PROMPTS` takes longer
_MIN_ROUNDS = 10  # with a draft; fewer say nothing about a drafter
_CLEAR = 1.05  # a speed-up below this is too small to draft for

_COLUMNS = {
    "backend": "{backend}",
    "drafter": "{drafter}",
    "plain,\nms per token": "{token_ms:.1f}",
    "forward\nof 1, ms": "{forward_ms[1]:.1f}",
    "forward\nof 8, ms": "{forward_ms[8]:.1f}",
    "round with\na draft, ms": "{round_ms:.1f}",
    "tokens per\ndrafted round\nto break even": "{needed:.2f}",
    "it yields": "{yields:.2f}",
    "in training": "{recorded:.2f}",
    "measured": "{speedup:.2f}x",
}


@dataclass(frozen=True)
class LoadedBackend:
    """The target on one backend, and the methods that are timed in turn.

    Attributes:
        backend: name of the GGUF backend; "" if the target is not a GGUF file.
        model: loaded target.
        plain: stock `generate`.
        drafting: `generate` with each drafter, by the drafter's text.
    """

    backend: str
    model: GenerativeModel
    plain: Method
    drafting: dict[str, Method]

    @property
    def methods(self) -> list[Method]:
        return [self.plain, *self.drafting.values()]


def doctor(
    target: ChatTarget = None,
    speculator: Annotated[
        list[str] | None,
        typer.Option(
            "--speculator",
            "-s",
            help="Head or drafter to try (repeatable; default: suffix, prompt lookup and a bundled head).",
        ),
    ] = None,
    gguf_backend: Annotated[
        str | None,
        typer.Option(
            help="Backend of a GGUF file: auto, native, native-int8, dequantize or dense (default: native and "
            "native-int8)."
        ),
    ] = None,
    dtype: TargetDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json_only: JsonOnly = False,
) -> None:
    """Measure for 20 s whether speculative decoding speeds up this model on this machine.

    Plain generation and every drafter take turns. The last line recommends the fastest. Loading comes on top.
    """
    prepare(threads)
    name, on = target or default_target(), find_device(device)
    specs = parse_specs(speculator) if speculator else default_specs(name)
    loaded = list(_loaded(name, dtype, on, gguf_backend))
    backends = [_loaded_backend(backend, model, specs) for backend, model, _ in loaded]
    requests = _requests(backends, loaded[0][2], on)
    rows = measure(backends, requests)
    advice = advise(rows)
    result = {"target": name, "prompts": len(requests), "rows": rows, "advice": advice, "environment": environment(on)}
    asked = f"{len(requests)} built-in prompts, {_NEW_TOKENS} tokens each, greedy"
    backends = backends_in_use(on)
    attention = f", attention: {backends}" if backends else ""
    title = f"{name}, {torch.get_num_threads()} threads{attention}: {asked}"
    report(result, [Grid.of(title, rows, _COLUMNS, groups=("backend",)), advice], json_only=json_only)


def measure(backends: Sequence[LoadedBackend], requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Runs stock `generate` and every drafter on every backend in turn. Returns one JSON-serialisable row for each
    drafter.

    `token_ms`: milliseconds of a token of stock `generate`. `forward_ms`: milliseconds of a bare forward, by its number
    of tokens. `round_ms`: milliseconds of a round with a draft. `needed`, `yields`: tokens per drafted round to break
    even, and as measured. `recorded`: the same in the head's folder. `speedup`: stock's seconds divided by the
    drafter's; None after few drafts.
    """
    methods = [method for each in backends for method in each.methods]
    with progress("doctor", total=num_steps(len(methods), len(requests), repeats=1)) as advance:
        runs = measure_in_turn(backends[0].model, methods, requests, fixed_length(_NEW_TOKENS), 1, advance)
    return [row for each in backends for row in _rows(each, requests, runs)]


def _rows(loaded: LoadedBackend, requests: Sequence[Request], runs: Sequence[TimedRun]) -> list[dict[str, Any]]:
    with torch.inference_mode():
        cache = prefilled_cache(loaded.model, requests[0].input_ids)
        forwards = verify_ms(loaded.model, cache, [1, _NODES], repeats=_REPEATS)
    seconds = {method.name: sum(run.seconds for run in runs if run.method == method.name) for method in loaded.methods}
    plain = seconds[loaded.plain.name]
    prompts = sum(generate_once(loaded.model, loaded.plain, each, fixed_length(1)).seconds for each in requests)
    token_ms = 1e3 * (plain - prompts) / (len(requests) * (_NEW_TOKENS - 1))
    common = {
        "backend": loaded.backend,
        "token_ms": token_ms,
        "forward_ms": {nodes: ms for (nodes, _), ms in forwards.items()},
    }
    rows = []
    for name, method in loaded.drafting.items():
        stats = merged(run.stats for run in runs if run.method == method.name and run.stats is not None)
        speedup = plain / seconds[method.name] if stats.rounds >= _MIN_ROUNDS else None
        recorded = method.arguments["speculator"].drafter.record.length
        rows.append({"drafter": name, **common, **_rounds(stats, token_ms), "recorded": recorded, "speedup": speedup})
    return rows


def _rounds(stats: SpeculationStats, token_ms: float) -> dict[str, Any]:
    if not stats.rounds:
        return {"yields": None}
    round_ms = 1e3 * statistics.median(stats.round_seconds_with_draft)
    return {
        "rounds": stats.rounds,
        "round_ms": round_ms,
        "needed": round_ms / token_ms,
        "yields": stats.mean_acceptance_length,
    }


def advise(rows: Sequence[dict[str, Any]]) -> str:
    """The advice to the user: the drafter and backend that make the most tokens per second."""
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
    """The target by backend: for a GGUF file each fast backend that runs here, for other targets only ""."""
    if not target_path(name).endswith(".gguf"):
        yield "", *load_target(name, dtype, device)
        return
    found = False
    for backend in [gguf_backend] if gguf_backend else ["native", "native-int8"]:
        try:
            loaded = load_target(name, dtype, device, backend)
        except UnsupportedRequestError:
            if gguf_backend:
                raise
            continue
        found = True
        yield backend, *loaded
    if not found:
        yield "auto", *load_target(name, dtype, device)


def _loaded_backend(backend: str, model: GenerativeModel, specs: Sequence[SpeculatorSpec]) -> LoadedBackend:
    """The target with its methods. Raises `SpeculateError` if it does not score trees, or a drafter cannot be
    loaded."""
    shape, reason = supported_shape(model, DynamicCache(config=model.config))
    if shape != "tree":
        raise SpeculateError(f"doctor needs a target that scores trees: {reason}. `generate --compare` takes any.")
    plain = Method(name=f"{backend} plain".strip(), kind="eager", model=model)
    names = {spec.text: f"{backend} {spec.label}".strip() for spec in specs}
    drafting = {spec.text: speculator_method(names[spec.text], make_spec(spec, model), model=model) for spec in specs}
    return LoadedBackend(backend, model, plain, drafting)


def _requests(backends: Sequence[LoadedBackend], tokenizer: Any, device: torch.device) -> list[Request]:
    """The built-in prompts, as many as fit into the time."""
    uses_template = bool(tokenizer.chat_template)
    chosen = builtin_prompts(_PROMPTS, chat=uses_template)
    requests = batches(tokenize(chosen, tokenizer, use_chat_template=uses_template), 1, device)
    plain = backends[0].plain
    calls = [generate_once(plain.model, plain, requests[0], fixed_length(_NEW_TOKENS)).seconds for _ in range(2)]
    count = int(_SECONDS / (min(calls) * sum(len(each.methods) for each in backends)))  # the first call warms up
    return requests[: max(count, _LEAST_PROMPTS)]
