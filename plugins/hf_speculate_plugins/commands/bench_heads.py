"""`hf-speculate bench heads`: what heads cost a round, at real model shapes with random weights.

The head's weights are random, so hardly anything is accepted: this says what a round costs and where the time goes, not
how fast a trained head decodes. Shapes that do not fit are run with fewer layers: the time inside the decoder layers is
then scaled to the full depth, and the table says so.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

from hf_speculate.bench.commands import console
from hf_speculate.bench.environment import environment, find_device, find_dtype
from hf_speculate.bench.timing import progress, synchronize, timed
from hf_speculate.drafter import Drafter
from hf_speculate.errors import SpeculateError
from hf_speculate.models import GenerativeModel
from hf_speculate.speculator import Speculator
from hf_speculate.stats import SpeculationStats

from ..checkpoints import LoadReport
from ..eagle import EagleDrafter, EagleHead, EagleSpec, LoadedHead
from ..medusa import MedusaDrafter, MedusaHeads


@dataclass(frozen=True)
class TargetShape:
    """A target by its sizes.

    Attributes:
        num_layers: of the real model.
        num_run: layers that are built and timed.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_run: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool

    def build(self, dtype: torch.dtype, device: torch.device) -> GenerativeModel:
        """A model with random weights and `num_run` layers."""
        config = Qwen2Config(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_run,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.tied,
            max_position_embeddings=32768,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False).to(device)


SHAPES = {
    "0.5B": TargetShape(896, 4864, 24, 24, 14, 2, 151936, True),  # Qwen2-0.5B
    "8B": TargetShape(4096, 14336, 32, 2, 32, 8, 128256, False),  # Llama-3.1-8B (two of its layers)
}


def _eagle3(target: GenerativeModel, shape: TargetShape, draft_vocab_size: int | None) -> Drafter:
    """An EAGLE-3 head of one layer of the target's shape; without a draft vocabulary it uses the target's lm_head."""
    spec = EagleSpec(
        dialect="safeailab",
        version=3,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab_size or shape.vocab_size,
        num_layers=1,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        feature_layers=(0, 1, shape.num_run - 1),  # those of a model with few layers, too: which ones costs nothing
    )
    lm_head = None if draft_vocab_size else target.get_output_embeddings()
    with torch.device("meta"):
        head = EagleHead(spec, target.get_input_embeddings(), lm_head)
    weights = {name: torch.randn(p.shape, dtype=target.dtype).mul_(0.02) for name, p in head.named_parameters()}
    head.load_state_dict({name: weight.to(target.device) for name, weight in weights.items()}, assign=True)
    head.rotary.to(target.device)
    ids = torch.arange(draft_vocab_size, device=target.device) if draft_vocab_size else None
    return EagleDrafter(LoadedHead(head.requires_grad_(False).eval(), ids, LoadReport("random weights")), target)


def _medusa(target: GenerativeModel, shape: TargetShape, own_output: bool) -> Drafter:
    """Five Medusa heads of one block, with output matrices of their own or the target's."""
    size = shape.hidden_size
    output = torch.randn(5, shape.vocab_size, size, dtype=target.dtype).mul_(0.02) if own_output else None
    blocks = torch.randn(5, 1, size, size, dtype=target.dtype).mul_(0.02)
    heads = MedusaHeads(blocks, torch.zeros(5, 1, size, dtype=target.dtype), output)
    return MedusaDrafter(heads.to(target.device), target)


HEADS: dict[str, tuple[str, Callable[[GenerativeModel, TargetShape], Drafter]]] = {
    "eagle3-32k": (
        "EAGLE-3, own output matrix of 32000 tokens",
        lambda t, s: _eagle3(t, s, min(32000, s.vocab_size // 2)),
    ),
    "eagle3-shared": ("EAGLE-3, the target's output matrix", lambda t, s: _eagle3(t, s, None)),
    "medusa": ("Medusa, 5 heads with matrices of their own", lambda t, s: _medusa(t, s, True)),
    "medusa-v2": ("Medusa, 5 heads, the target's output matrix", lambda t, s: _medusa(t, s, False)),
}


def measure_heads(
    shape_name: str = "0.5B",
    heads: Sequence[str] = tuple(HEADS),
    *,
    dtype: str = "bfloat16",
    prompt_length: int = 256,
    rounds: int = 16,
    repeats: int = 3,
    device: str | None = None,
) -> dict[str, Any]:
    """Times greedy rounds of heads with random weights.

    Returns:
        JSON-serialisable. For each head, medians over repeats, milliseconds a round: `target_ms` (its decoder layers
        scaled to the full depth), `drafter_ms`, `rest_ms`; `drafter_share` = drafter / round, `drafter_in_tokens` =
        drafter / plain decoding of one token, `engine_efficiency` = (target + drafter) / round.
    Raises:
        SpeculateError: an unknown shape or head.
    """
    unknown = [name for name in heads if name not in HEADS]
    if shape_name not in SHAPES or unknown:
        raise SpeculateError(
            f"bench heads knows the shapes {', '.join(SHAPES)} and the heads {', '.join(HEADS)}; got {shape_name!r} "
            f"and {list(heads)}."
        )
    shape, on, torch_dtype = SHAPES[shape_name], find_device(device), find_dtype(dtype)
    with progress("heads", total=1 + len(heads) * (repeats + 1)) as advance:
        target = shape.build(torch_dtype, on)
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, shape.vocab_size, (1, prompt_length), generator=generator).to(on)
        plain: list[float] = []
        rows = []
        for name in heads:
            advance(name)
            speculator = Speculator(HEADS[name][1](target, shape), adaptive=False)
            _round(target, prompt, speculator, 4, shape)  # warm-up
            measured = []
            for _ in range(repeats):
                plain.append(_plain_token(target, prompt, rounds, shape))
                measured.append(_round(target, prompt, speculator, rounds, shape))
                advance(name)
            medians = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
            rows.append({"head": name, "what": HEADS[name][0], **medians})
    token_ms = statistics.median(plain)
    for row in rows:
        row["drafter_in_tokens"] = row["drafter_ms"] / token_ms
    return {
        "bench": "heads",
        "shape": shape_name,
        "layers_run": shape.num_run,
        "layers": shape.num_layers,
        "dtype": dtype,
        "prompt_length": prompt_length,
        "plain_token_ms": token_ms,
        "rows": rows,
        "environment": environment(on),
    }


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


def _request(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _round(
    target: GenerativeModel, prompt: Tensor, speculator: Speculator, rounds: int, shape: TargetShape
) -> dict[str, float]:
    # Trees are cut to the tokens that may still be emitted: a budget beyond the rounds that are looked at, and a head
    # that is hardly ever right, keep them whole.
    depth = 8
    with _LayerTimer(target) as timer:
        output = target.generate(
            prompt, **_request(rounds + depth), return_dict_in_generate=True, speculator=speculator
        )
    stats: SpeculationStats = output.speculation
    count = stats.target_forwards
    deeper = timer.seconds * (shape.num_layers / shape.num_run - 1)
    target_seconds, drafter, rest = stats.target_seconds + deeper, stats.drafter_seconds, stats.rest_seconds
    whole = target_seconds + drafter + rest
    return {
        "rounds": count,
        "nodes": 1 + stats.drafted_tokens / max(stats.rounds, 1),
        "round_ms": 1e3 * whole / count,
        "target_ms": 1e3 * target_seconds / count,
        "drafter_ms": 1e3 * drafter / count,
        "rest_ms": 1e3 * rest / count,
        "drafter_share": drafter / whole,
        "engine_efficiency": (target_seconds + drafter) / whole,
        "mean_acceptance_length": stats.mean_acceptance_length or 0.0,
    }


def _plain_token(target: GenerativeModel, prompt: Tensor, count: int, shape: TargetShape) -> float:
    """Milliseconds of one token of stock `generate`, its layers scaled as those of rounds."""
    with _LayerTimer(target) as timer:
        short, _ = timed(lambda: target.generate(prompt, **_request(1), speculator=None), target.device)
        timer.calls.clear()
        long, _ = timed(lambda: target.generate(prompt, **_request(count + 1), speculator=None), target.device)
    return 1e3 * (long - short + timer.seconds * (shape.num_layers / shape.num_run - 1)) / count


def table(result: dict[str, Any]) -> Table:
    """The result as one table for the terminal."""
    run, layers = result["layers_run"], result["layers"]
    scaled = "" if run == layers else f" ({run} of {layers} layers timed, scaled to {layers})"
    title = (
        f"Rounds at {result['shape']} shape{scaled}, random weights, {result['dtype']}, context "
        f"{result['prompt_length']}, {result['environment']['threads']} threads: milliseconds a round; plain: "
        f"{result['plain_token_ms']:.1f} a token"
    )
    rendered = Table(title=title, title_justify="left")
    rendered.add_column("head", overflow="fold")
    columns = ("nodes", "round", "target", "drafter", "rest", "share of\nthe drafter", "drafter /\nplain token")
    for column in (*columns, "engine\nefficiency"):
        rendered.add_column(column, justify="right")
    for row in result["rows"]:
        rendered.add_row(
            row["what"],
            f"{row['nodes']:.0f}",
            *(f"{row[name]:.1f}" for name in ("round_ms", "target_ms", "drafter_ms", "rest_ms")),
            f"{row['drafter_share']:.1%}",
            f"{row['drafter_in_tokens']:.2f}",
            f"{row['engine_efficiency']:.3f}",
        )
    return rendered


def bench_heads(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "0.5B",
    head: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(HEADS)} (repeatable; default: all).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "bfloat16",
    context: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 256,
    rounds: Annotated[int, typer.Option(min=2, help="About as many are timed.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; figures are medians over them.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch (default: torch's own).")] = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator if there is one.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """What heads cost a round at 0.5B and 8B shapes, with random weights."""
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    result = measure_heads(
        shape,
        head or tuple(HEADS),
        dtype=dtype,
        prompt_length=context,
        rounds=rounds,
        repeats=repeats,
        device=device,
    )
    if not json_only:
        console().print(table(result))
    typer.echo(json.dumps(result))
