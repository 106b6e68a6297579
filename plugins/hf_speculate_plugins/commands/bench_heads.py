"""`hf-speculate bench heads`: what heads cost a round, at real model shapes with random weights.

The head's weights are random: it does its work every round, and what is verified is a tree of set acceptance instead
(`ScriptedDrafter`; by default nothing is ever accepted). It says what a round costs, where time goes, and how fast
a head that is accepted so often would decode. Shapes that do not fit are run with fewer layers: the time inside the
decoder layers is then scaled to the full depth, and the table says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from hf_speculate.bench import AcceptanceProfile, fixed_length, read_profile
from hf_speculate.commands import (
    Context,
    Device,
    Dtype,
    Grid,
    JsonOnly,
    Layers,
    Markdown,
    ModelShape,
    Out,
    Rates,
    Repeats,
    Rounds,
    Shape,
    Threads,
    check_counts,
    environment,
    find_device,
    find_dtype,
    find_shape,
    prepare,
    progress,
    random_prompt,
    ratio,
    report,
    synchronize,
    timed,
)
from hf_speculate.errors import SpeculateError
from hf_speculate.models import GenerativeModel
from hf_speculate.speculator import Speculator
from hf_speculate.stats import SpeculationStats

from .random_heads import HEADS


# More does not fit beside other work on a CPU: two layers are run then, and scaled.
_CPU_PARAMETERS = 3e9
_CPU_LAYERS = 2

NOTHING_ACCEPTED = "0,0,0,0,0"


def measure_heads(
    shape_name: str = "0.5B",
    heads: Sequence[str] = tuple(HEADS),
    *,
    profile: AcceptanceProfile | None = None,
    layers: int | None = None,
    dtype: str = "bfloat16",
    prompt_length: int = 256,
    rounds: int = 16,
    repeats: int = 3,
    device: str | None = None,
) -> dict[str, Any]:
    """Times greedy rounds of heads with random weights.

    Args:
        profile: acceptance, and the nodes that are verified; None: 16 nodes, nothing accepted.
        layers: that are run; None: all, or two of a large shape on a CPU.
    Returns:
        JSON-serialisable. For each head, medians over repeats, milliseconds a round: `target_ms` (its decoder layers
        scaled to the full depth), `drafter_ms`, `rest_ms`; `drafter_share` = drafter / round, `drafter_in_tokens` =
        drafter / plain decoding of one token, `engine_efficiency` = (target + drafter) / round, and `speedup` over
        plain decoding at this acceptance, prefill left out.
    Raises:
        SpeculateError: an unknown shape or head.
    """
    check_counts(prompt_length=prompt_length, rounds=rounds, repeats=repeats, layers=layers)
    if unknown := [name for name in heads if name not in HEADS]:
        raise SpeculateError(f"bench heads knows the heads {', '.join(HEADS)}; not {', '.join(unknown)}.")
    whole, on = find_shape(shape_name), find_device(device)
    profile = profile or read_profile(NOTHING_ACCEPTED, 16)
    shape = whole.with_layers(layers or _layers_that_fit(whole, on))
    count = round(rounds * profile.mean_length)
    with progress("heads", total=1 + len(heads) * (repeats + 1)) as advance:
        bench = _Bench(shape.build(find_dtype(dtype), on), whole, shape, prompt_length, count + len(profile.widths))
        plain: list[float] = []
        rows = []
        for name in heads:
            advance(name)
            speculator = bench.speculator(name, profile)
            bench.round(speculator)  # warm-up
            measured = []
            for _ in range(repeats):
                plain.append(bench.plain_token(count))
                measured.append(bench.round(speculator))
                advance(name)
            medians = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
            rows.append({"head": name, "what": HEADS[name][0], **medians})
    token_ms = statistics.median(plain)
    for row in rows:
        row["drafter_in_tokens"] = row["drafter_ms"] / token_ms
        row["speedup"] = row["tokens_a_round"] * token_ms / row["round_ms"]
    return {
        "bench": "heads",
        "shape": shape_name,
        "layers_run": shape.num_hidden_layers,
        "layers": whole.num_hidden_layers,
        "acceptance": list(profile.rates),
        "dtype": dtype,
        "prompt_length": prompt_length,
        "plain_token_ms": token_ms,
        "rows": rows,
        "environment": environment(on),
    }


def _layers_that_fit(shape: ModelShape, device: torch.device) -> int | None:
    return _CPU_LAYERS if device.type == "cpu" and shape.num_parameters > _CPU_PARAMETERS else None


class _LayerTimer:
    """Seconds inside the decoder layers of a target after the prefill, summed over a `generate` call."""

    def __init__(self, target: GenerativeModel):
        decoder: Any = target.get_decoder()
        self.layers: list[nn.Module] = list(decoder.layers)
        self.device = target.device
        self.calls: list[float] = []  # one a forward

    def __enter__(self) -> _LayerTimer:
        first, last = self.layers[0], self.layers[-1]
        self._hooks = (first.register_forward_pre_hook(self._begin), last.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def seconds(self) -> float:
        return sum(self.calls[1:])  # the first is the prefill

    def _begin(self, *_: object) -> None:
        self._started = self._now()

    def _end(self, *_: object) -> None:
        self.calls.append(self._now() - self._started)

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


class _Bench:
    """A target with random weights, a prompt, and what it goes on with."""

    def __init__(self, target: GenerativeModel, whole: ModelShape, shape: ModelShape, prompt_length: int, count: int):
        self.target = target
        self.shape = shape
        self.prompt: Tensor = random_prompt(prompt_length, shape.vocab_size).to(target.device)
        self.deeper = whole.num_hidden_layers / shape.num_hidden_layers - 1  # of the layers' time
        # Trees are cut to the tokens that may still be emitted: a budget beyond the rounds that are looked at.
        self.count = count
        self.text = self._plain(count)[0, prompt_length:].tolist()

    def speculator(self, head: str, profile: AcceptanceProfile) -> Speculator:
        texts = {tuple(self.prompt[0].tolist()): self.text}
        paid = HEADS[head][1](self.target, self.shape)
        drafter = profile.drafter(texts, vocab_size=self.shape.vocab_size, paid=paid)
        return Speculator(drafter, adaptive=False)

    def round(self, speculator: Speculator) -> dict[str, float]:
        with _LayerTimer(self.target) as timer:
            output = self.target.generate(
                self.prompt, **fixed_length(self.count), return_dict_in_generate=True, speculator=speculator
            )
        stats: SpeculationStats = output.speculation
        count = stats.target_forwards
        target, drafter, rest = (
            stats.target_seconds + timer.seconds * self.deeper,
            stats.drafter_seconds,
            stats.rest_seconds,
        )
        whole = target + drafter + rest
        return {
            "rounds": count,
            "nodes": 1 + stats.drafted_tokens / max(stats.rounds, 1),
            "round_ms": 1e3 * whole / count,
            "target_ms": 1e3 * target / count,
            "drafter_ms": 1e3 * drafter / count,
            "rest_ms": 1e3 * rest / count,
            "drafter_share": drafter / whole,
            "engine_efficiency": (target + drafter) / whole,
            "mean_acceptance_length": stats.mean_acceptance_length or 0.0,
            "tokens_a_round": stats.emitted_tokens / count,
        }

    def plain_token(self, count: int) -> float:
        """Milliseconds of one token of stock `generate`, its layers scaled as those of rounds."""
        with _LayerTimer(self.target) as timer:
            short, _ = timed(lambda: self._plain(1), self.target.device)
            timer.calls.clear()
            long, _ = timed(lambda: self._plain(count + 1), self.target.device)
        return 1e3 * (long - short + timer.seconds * self.deeper) / count

    def _plain(self, count: int) -> Tensor:
        return self.target.generate(self.prompt, **fixed_length(count), speculator=None)


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """The result as one table."""
    run, layers, rates = result["layers_run"], result["layers"], result["acceptance"]
    scaled = "" if run == layers else f" ({run} of {layers} layers timed, scaled to {layers})"
    accepted = " ".join(f"{rate:.2f}" for rate in rates) if any(rates) else ""
    columns = ("nodes", "round", "target", "drafter", "rest", "share of\nthe drafter", "drafter /\nplain token")
    rows = []
    for row in result["rows"]:
        line = [
            row["what"],
            f"{row['nodes']:.0f}",
            *(f"{row[name]:.1f}" for name in ("round_ms", "target_ms", "drafter_ms", "rest_ms")),
            f"{row['drafter_share']:.1%}",
            f"{row['drafter_in_tokens']:.2f}",
            f"{row['engine_efficiency']:.3f}",
        ]
        rows.append([*line, f"{row['tokens_a_round']:.2f}", ratio(row["speedup"])] if accepted else line)
    return [
        Grid(
            title=f"Rounds at {result['shape']} shape{scaled}, random weights, {result['dtype']}, context "
            f"{result['prompt_length']}, {result['environment']['threads']} threads: milliseconds a round; plain: "
            f"{result['plain_token_ms']:.1f} a token",
            columns=["head", *columns, "engine\nefficiency", *(("tokens\na round", "x plain") if accepted else ())],
            rows=rows,
            words={"head"},
            caption=f"Accepted to depth 1, 2, …: {accepted} of the rounds (set, not measured)." if accepted else "",
        )
    ]


def bench_heads(
    shape: Shape = "0.5B",
    head: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(HEADS)} (repeatable; default: all).")
    ] = None,
    acceptance: Rates = None,
    nodes: Annotated[int, typer.Option(min=1, help="Draft nodes that are verified.")] = 16,
    layers: Layers = None,
    dtype: Dtype = "bfloat16",
    context: Context = 256,
    rounds: Rounds = 16,
    repeats: Repeats = 3,
    threads: Threads = None,
    device: Device = None,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """What heads cost a round at real shapes with random weights, and their speed-up at a set acceptance."""
    prepare(threads)
    result = measure_heads(
        shape,
        head or tuple(HEADS),
        profile=read_profile(acceptance or NOTHING_ACCEPTED, nodes),
        layers=layers,
        dtype=dtype,
        prompt_length=context,
        rounds=rounds,
        repeats=repeats,
        device=device,
    )
    report(result, tables(result), json_only=json_only, markdown=markdown, out=out)
