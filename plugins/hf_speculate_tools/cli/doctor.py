"""`hf-speculate doctor`: measures whether drafts pay for this model on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_speculate.attention import backends_in_use
from hf_speculate.errors import UnsupportedRequestError

from ..bench import GenerateSettings, bench_generate
from ..commands import Grid, default_specs, find_device, prepare, report, target_path


_PROMPTS, _NEW_TOKENS = 8, 48
_SECONDS = 20.0  # for all calls together
_MIN_ROUNDS = 10  # with a draft; fewer say nothing about a drafter
_CLEAR = 1.05  # a speed-up below this is too small to draft for

_COLUMNS = {
    "backend": "{backend}",
    "drafter": "{drafter}",
    "plain,\nms per token": "{token_ms:.1f}",
    "round with\na draft, ms": "{round_ms:.1f}",
    "tokens per\ndrafted round\nto break even": "{needed:.2f}",
    "it yields": "{yields:.2f}",
    "in training": "{recorded:.2f}",
    "measured": "{speedup:.2f}x",
}


def diagnose(
    name: str,
    speculators: Sequence[str],
    gguf_backend: str | None,
    *,
    dtype: str,
    device: str | None,
    threads: int | None,
    json_only: bool,
) -> None:
    """Runs the command `doctor` on the target of this name."""
    prepare(threads)
    on = find_device(device)
    settings = GenerateSettings(
        target=name,
        speculators=list(speculators) or [spec.text for spec in default_specs(name)],
        limit=_PROMPTS,
        dtype=dtype,
        device=device,
        max_new_tokens=_NEW_TOKENS,
        temperatures=[0.0],
        repeats=1,
        compile_baseline=False,
        stock_speculative=False,
        max_proofs=0,
    )
    results = _by_backend(settings, gguf_backend)
    rows = [row for backend, result in results.items() for row in _rows(backend, result)]
    advice, first = advise(rows), next(iter(results.values()))
    result = {key: first[key] for key in ("target", "num_prompts", "environment")} | {"rows": rows, "advice": advice}
    backends = backends_in_use(on)
    attention = f", attention: {backends}" if backends else ""
    asked = f"{first['num_prompts']} built-in prompts, {_NEW_TOKENS} tokens each, greedy"
    title = f"{name}, {first['environment']['threads']} threads{attention}: {asked}"
    grid = Grid.of(title, rows, _COLUMNS, groups=("backend",))
    report(result, [grid, *fallbacks_of(rows), advice], json_only=json_only)


def _by_backend(settings: GenerateSettings, gguf_backend: str | None) -> dict[str, dict[str, Any]]:
    """Results of `bench generate`: for a GGUF file of each fast backend that runs here, for other targets of ""."""
    assert settings.target is not None
    if not target_path(settings.target).endswith(".gguf"):
        return {"": bench_generate(replace(settings, seconds=_SECONDS))}
    if gguf_backend is not None:
        return {gguf_backend: bench_generate(replace(settings, gguf_backend=gguf_backend, seconds=_SECONDS))}
    results, fast = {}, ("native", "native-int8")
    for backend in fast:
        try:
            results[backend] = bench_generate(
                replace(settings, gguf_backend=backend, seconds=_SECONDS / len(fast)),
            )
        except UnsupportedRequestError:
            continue
    return results or {"auto": bench_generate(replace(settings, seconds=_SECONDS))}


def _rows(backend: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each drafter.

    `token_ms`: milliseconds of a token of stock `generate` after the prompt. `round_ms`: milliseconds of a round with a
    draft. `needed`, `yields`: tokens per drafted round to break even, and as measured. `recorded`: the same in the
    head's training. `speedup`: stock's seconds divided by the drafter's; None after few drafts. `fallback`: sentence on
    what keeps forwards from their fastest runner; "" if nothing does.
    """
    plain, *ours = result["rows"]
    rows = []
    for row in ours:
        stats = row["speculation"]
        tokens = stats["calls"] * _NEW_TOKENS
        plain_seconds = tokens / plain["tokens_per_second"]["median"] - stats["prefill_seconds"]
        token_ms = 1e3 * plain_seconds / (tokens - stats["calls"])
        measured = {"backend": backend, "drafter": row["spec"], "token_ms": token_ms, "rounds": stats["rounds"]}
        if stats["rounds"]:
            round_ms = 1e3 * statistics.median(stats["round_seconds_with_draft"])
            measured |= {"round_ms": round_ms, "needed": round_ms / token_ms}
        speedup = row["speedup"]["eager"] if stats["rounds"] >= _MIN_ROUNDS else None
        recorded = {"yields": stats["mean_acceptance_length"], "recorded": row["recorded_length"]}
        rows.append(measured | recorded | {"speedup": speedup, "fallback": stats["dearest_fallback"]})
    return rows


def fallbacks_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each drafter with forwards that a faster runner did not run."""
    slower = [row for row in rows if row["fallback"]]
    return [f"{row['backend']} {row['drafter']}: {row['fallback']}".lstrip() for row in slower]


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
