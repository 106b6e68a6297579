"""Where the time of a round goes: a real model shape with random weights and a drafter that costs nothing.

The drafter is scripted (`hf_speculate.testing.ScriptedDrafter`): it knows what plain `generate` emits and holds the
true token at a level with a set probability, so that acceptance is the same on every machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..commands.environment import environment, find_device, find_dtype
from ..commands.grid import Grid, ratio
from ..commands.shapes import ModelShape, random_prompt
from ..commands.timing import ForwardTimer, progress, timed
from ..errors import SpeculateError
from ..models import GenerativeModel
from ..speculator import Speculator
from ..stats import SpeculationStats
from ..testing import ScriptedDrafter
from .hardware import bytes_read, host_waits, memory_bandwidth
from .runs import fixed_length
from .verify_cost import branching, verify_seconds


def bench_overhead(
    nodes: Sequence[int] = (8, 16, 32),
    *,
    shape: ModelShape | None = None,
    dtype: str = "bfloat16",
    accuracy: float = 0.7,
    prompt_length: int = 256,
    max_new_tokens: int = 96,
    repeats: int = 3,
    device: str | None = None,
) -> dict[str, Any]:
    """Splits the time of greedy rounds into target, drafter and rest, for trees of N nodes (root included).

    Returns:
        JSON-serialisable. For each N, medians over repeats, milliseconds per round: `round_ms` (wall clock without
        prefill), `target_ms`, `drafter_ms`, `rest_ms` and `engine_efficiency` as `SpeculationStats` has them;
        `forward_ms` is the target's forward alone, timed by hooks in the same runs, and `forward_efficiency` =
        (forward + drafter) / round, which does not count the sampler nor the preparation of masks and positions as
        useful. `verify_ratio` is a bare forward over N nodes / over one, behind `prompt_length` entries.
        `plain` is stock `generate`: milliseconds per token and the forward's share of it. `weights_ms` is how long
        reading the weights once takes at the bandwidth of a large copy, `bandwidth_share` what part of a round that
        is; `host_waits`, a round, is counted by the profiler in a call of its own (None on a CPU).
    """
    if min(nodes, default=0) < 2 or not 0 <= accuracy <= 1 or max_new_tokens < 2 or repeats < 1:
        raise SpeculateError(
            f"bench overhead needs trees of at least 2 nodes, 0 <= accuracy <= 1, 2 new tokens and one repeat; got "
            f"nodes {list(nodes)}, accuracy {accuracy}, {max_new_tokens} new tokens, {repeats} repeats."
        )
    shape, on, torch_dtype = shape or ModelShape(), find_device(device), find_dtype(dtype)
    with progress("overhead", total=2 + repeats * (1 + len(nodes))) as advance:
        model = shape.build(torch_dtype, on)
        advance("model built")
        prompt = random_prompt(prompt_length, shape.vocab_size).to(on)
        verify = verify_seconds(model, prompt, sorted({1, *nodes}))
        advance("verify measured")
        weights_ms = 1e3 * bytes_read(model) / memory_bandwidth(on)
        script = _plain(model, prompt, max_new_tokens + max(nodes))[:, prompt_length:]
        speculators = {}
        for n in nodes:
            drafter = ScriptedDrafter(script, branching(n), accuracy=accuracy, vocab_size=shape.vocab_size)
            speculators[n] = Speculator(drafter, adaptive=False)
        plain: list[dict[str, float]] = []
        rounds: dict[int, list[dict[str, Any]]] = {n: [] for n in nodes}
        for speculator in speculators.values():  # warm-up
            model.generate(prompt, speculator=speculator, **fixed_length(8))
        for _ in range(repeats):
            plain.append(_plain_times(model, prompt, max_new_tokens, on))
            advance("plain")
            for n, speculator in speculators.items():
                rounds[n].append(_round_times(model, prompt, speculator, max_new_tokens, on))
                advance(f"N={n}")
    plain_medians = _medians(plain)
    rows = []
    for n in nodes:
        row = {"nodes": n, "branching": list(branching(n)), **_medians(rounds[n])}
        row["engine_efficiency_range"] = [f([r["engine_efficiency"] for r in rounds[n]]) for f in (min, max)]
        row["verify_ms"] = verify[n]["median"] * 1e3
        row["verify_ratio"] = verify[n]["median"] / verify[1]["median"]
        row["speedup"] = row["tokens_per_second"] / plain_medians["tokens_per_second"]
        row["bandwidth_share"] = weights_ms / row["round_ms"]
        row["host_waits"] = _host_waits(model, prompt, speculators[n], max_new_tokens, on)
        rows.append(row)
    return {
        "bench": "overhead",
        "shape": asdict(shape),
        "dtype": dtype,
        "accuracy": accuracy,
        "prompt_length": prompt_length,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "verify_1_ms": verify[1]["median"] * 1e3,
        "weights_ms": weights_ms,
        "plain": plain_medians,
        "rows": rows,
        "environment": environment(on),
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """The result as one table."""
    shape, plain = result["shape"], result["plain"]
    columns = ["nodes", "verify(N)\n/ verify(1)", "round", "forward", "target", "drafter", "rest", "engine\nefficiency"]
    columns += ["forward\nefficiency", "share of\nbandwidth", "tokens\na round", "speed-up"]
    waits = [row["host_waits"] for row in result["rows"]]
    rows = [
        [
            f"{row['nodes']}",
            f"{row['verify_ratio']:.2f}",
            *(f"{row[name]:.2f}" for name in ("round_ms", "forward_ms", "target_ms", "drafter_ms", "rest_ms")),
            f"{row['engine_efficiency']:.3f}",
            f"{row['forward_efficiency']:.3f}",
            f"{row['bandwidth_share']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            ratio(row["speedup"]),
        ]
        for row in result["rows"]
    ]
    return [
        Grid(
            title=f"Round at {shape['num_hidden_layers']} layers x {shape['hidden_size']}, vocabulary "
            f"{shape['vocab_size']}, {result['dtype']}, context {result['prompt_length']}, "
            f"{result['environment']['threads']} threads: milliseconds a round",
            columns=columns,
            rows=rows,
            caption=f"plain generate: {plain['token_ms']:.1f} ms a token, {plain['forward_ms']:.1f} of it forward "
            f"({plain['forward_share']:.1%}); one bare forward of one token: {result['verify_1_ms']:.1f} ms, "
            f"reading the weights at the speed of a copy: {result['weights_ms']:.1f} ms"
            + ("" if None in waits else f"; the host waits {max(waits):.1f} times a round"),
        )
    ]


def _plain(model: GenerativeModel, prompt: Tensor, max_new_tokens: int) -> Tensor:
    request = fixed_length(max_new_tokens) | {"speculator": None}
    return model.generate(prompt, **request)


def _plain_times(model: GenerativeModel, prompt: Tensor, max_new_tokens: int, device: torch.device) -> dict[str, float]:
    with ForwardTimer(model, device) as timer:
        seconds, _ = timed(lambda: _plain(model, prompt, max_new_tokens), device)
    decoding, forward = seconds - timer.seconds[0], sum(timer.seconds[1:])
    steps = max_new_tokens - 1
    return {
        "tokens_per_second": max_new_tokens / seconds,
        "token_ms": 1e3 * decoding / steps,
        "forward_ms": 1e3 * forward / steps,
        "forward_share": forward / decoding,
    }


def _round_times(
    model: GenerativeModel, prompt: Tensor, speculator: Speculator, max_new_tokens: int, device: torch.device
) -> dict[str, Any]:
    with ForwardTimer(model, device) as timer:
        request = fixed_length(max_new_tokens) | {"speculator": speculator, "return_dict_in_generate": True}
        seconds, output = timed(lambda: model.generate(prompt, **request), device)
    stats: SpeculationStats = output.speculation
    count = stats.target_forwards
    round_seconds = stats.target_seconds + stats.drafter_seconds + stats.rest_seconds
    forward_seconds = sum(timer.seconds[1:])
    return {
        "rounds": count,
        "tokens_per_second": max_new_tokens / seconds,
        "round_ms": 1e3 * round_seconds / count,
        "forward_ms": 1e3 * forward_seconds / count,
        "target_ms": 1e3 * stats.target_seconds / count,
        "drafter_ms": 1e3 * stats.drafter_seconds / count,
        "rest_ms": 1e3 * stats.rest_seconds / count,
        "outside_ms": 1e3 * (seconds - stats.total_seconds),
        "engine_efficiency": stats.engine_efficiency,
        "forward_efficiency": (forward_seconds + stats.drafter_seconds) / round_seconds,
        "mean_acceptance_length": stats.mean_acceptance_length or 0.0,
    }


def _host_waits(
    model: GenerativeModel, prompt: Tensor, speculator: Speculator, max_new_tokens: int, device: torch.device
) -> float | None:
    """A round, in a call that nothing else is measured in."""
    speculator.stats.reset()
    request = fixed_length(max_new_tokens) | {"speculator": speculator}
    waits = host_waits(lambda: model.generate(prompt, **request), device)
    return None if waits is None else waits / speculator.stats.target_forwards


def _medians(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(repeat[name] for repeat in repeats) for name in repeats[0]}
