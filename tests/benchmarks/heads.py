"""Costs of a round with each kind of head, at real model shapes with random weights.

The head does its work every round, and the target verifies a tree of set acceptance instead (`ScriptedDrafter`; by
default nothing is ever accepted).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor

from hf_speculate.drafting import Drafter
from hf_speculate.errors import SpeculateError
from hf_speculate.speculator import Speculator
from hf_speculate.stats import SpeculationStats
from hf_speculate.target import GenerativeModel
from hf_speculate_plugins import block
from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.eagle import EagleDrafter, EagleHead, EagleSpec, LoadedHead
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads
from hf_speculate_tools.bench import fixed_length
from hf_speculate_tools.commands import Device, Grid, Repeats, environment, find_device, find_dtype, progress, timed

from .command import Context, Dtype, Rounds, run
from .scripted import AcceptanceProfile, Rates, read_profile
from .shapes import ModelShape, Shape, find_shape, random_prompt


NOTHING_ACCEPTED = "0,0,0,0,0"


def _sizes(shape: ModelShape) -> dict[str, int]:
    """Fields that EAGLE's and block heads' descriptions share."""
    return {
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "intermediate_size": shape.intermediate_size,
        "num_heads": shape.num_attention_heads,
        "num_kv_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
    }


def _eagle3(target: GenerativeModel, shape: ModelShape, draft_vocab_size: int | None) -> Drafter:
    """An EAGLE-3 head of one layer of the target's shape; without a draft vocabulary it uses the target's lm_head."""
    spec = EagleSpec(
        dialect="safeailab",
        version=3,
        draft_vocab_size=draft_vocab_size or shape.vocab_size,
        num_layers=1,
        feature_layers=(0, 1, shape.num_hidden_layers - 1),  # as models with few layers have them; all cost the same
        **_sizes(shape),
    )
    lm_head = None if draft_vocab_size else target.get_output_embeddings()
    with torch.device("meta"):
        head = EagleHead(spec, target.get_input_embeddings(), lm_head)
    _fill(head, target)
    ids = torch.arange(draft_vocab_size, device=target.device) if draft_vocab_size else None
    return EagleDrafter(LoadedHead(head, ids, LoadReport("random weights")), target)


def _block(target: GenerativeModel, shape: ModelShape, num_layers: int, block_size: int, markov_rank: int) -> Drafter:
    """A one-pass head of the target's width: DSpark with a Markov head, else DFlash; the target's output matrix."""
    is_dspark = markov_rank > 0
    spec = block.BlockSpec(
        dialect="deepspec" if is_dspark else "zlab",
        method="dspark" if is_dspark else "dflash",
        draft_vocab_size=shape.vocab_size,
        num_layers=num_layers,
        block_size=block_size,
        mask_token_id=shape.vocab_size - 1,
        feature_layers=(1,) * 5,  # five, as the published ones; all cost the same
        first_slot=0 if is_dspark else 1,
        causal=(False,) * num_layers,
        windows=(None,) * num_layers,
        markov="vanilla" if is_dspark else None,
        markov_rank=markov_rank,
        **_sizes(shape),
    )
    with torch.device("meta"):
        head = block.BlockHead(spec, target.get_input_embeddings(), target.get_output_embeddings())
    _fill(head, target)
    loaded = block.LoadedHead(head, None, LoadReport("random weights"))
    return block.BlockDrafter(loaded, target, block.BlockOptions(max_nodes=16))


def _fill(head: EagleHead | block.BlockHead, target: GenerativeModel) -> None:
    """Gives a head random weights of the target's dtype, on its device."""
    weights = {name: torch.randn(p.shape, dtype=target.dtype).mul_(0.02) for name, p in head.named_parameters()}
    head.load_state_dict({name: weight.to(target.device) for name, weight in weights.items()}, assign=True)
    head.rotary.to(target.device)
    head.requires_grad_(False).eval()


def _medusa(target: GenerativeModel, shape: ModelShape, own_output: bool) -> Drafter:
    """Five Medusa heads of one block, with output matrices of their own or the target's."""
    size = shape.hidden_size
    output = torch.randn(5, shape.vocab_size, size, dtype=target.dtype).mul_(0.02) if own_output else None
    blocks = torch.randn(5, 1, size, size, dtype=target.dtype).mul_(0.02)
    heads = MedusaHeads(blocks, torch.zeros(5, 1, size, dtype=target.dtype), output)
    return MedusaDrafter(heads.to(target.device), target)


HEADS: dict[str, tuple[str, Callable[[GenerativeModel, ModelShape], Drafter]]] = {
    "eagle3-32k": (
        "EAGLE-3, own output matrix of 32000 tokens",
        lambda t, s: _eagle3(t, s, min(32000, s.vocab_size // 2)),
    ),
    "eagle3-shared": ("EAGLE-3, the target's output matrix", lambda t, s: _eagle3(t, s, None)),
    "dflash": ("DFlash, 5 layers, block of 16, the target's output matrix", lambda t, s: _block(t, s, 5, 16, 0)),
    "dspark": ("DSpark, 2 layers, block of 7, Markov rank 256", lambda t, s: _block(t, s, 2, 7, 256)),
    "medusa": ("Medusa, 5 heads with matrices of their own", lambda t, s: _medusa(t, s, True)),
    "medusa-v2": ("Medusa, 5 heads, the target's output matrix", lambda t, s: _medusa(t, s, False)),
}


@dataclass(kw_only=True)
class HeadSettings:
    """Options."""

    QUICK: ClassVar = {"rounds": 4, "repeats": 1}

    shape: Shape = "0.5B"
    heads: Annotated[list[str], typer.Option("--head", help=f"Repeatable (default: all): {', '.join(HEADS)}.")] = field(
        default_factory=lambda: list(HEADS)
    )
    acceptance: Rates = None
    nodes: Annotated[int, typer.Option(min=1, help="Draft nodes that the target verifies.")] = 16
    dtype: Dtype = "bfloat16"
    context: Context = 256
    rounds: Rounds = 16
    repeats: Repeats = 3
    device: Device = None


def bench_heads(settings: HeadSettings) -> dict[str, Any]:
    """Costs of heads per round at real shapes with random weights, and their speed-up at a set acceptance.

    Returns:
        JSON-serialisable. For each head, medians over repeats, milliseconds per round: `target_ms`, `drafter_ms`,
        `rest_ms`; `drafter_share` = drafter / round, `drafter_in_tokens` = drafter / plain decoding of one token,
        `engine_efficiency` = (target + drafter) / round, and `speedup` over plain decoding at this acceptance, prefill
        left out.
    """
    if unknown := [name for name in settings.heads if name not in HEADS]:
        raise SpeculateError(f"bench heads knows the heads {', '.join(HEADS)}; not {', '.join(unknown)}.")
    shape, on = find_shape(settings.shape), find_device(settings.device)
    profile = read_profile(settings.acceptance or NOTHING_ACCEPTED, settings.nodes)
    count = round(settings.rounds * profile.mean_length)
    with progress("heads", total=len(settings.heads) * (settings.repeats + 1)) as advance:
        target = shape.build(find_dtype(settings.dtype), on)
        bench = _Bench(target, shape, settings.context, count + len(profile.widths))
        plain: list[float] = []
        rows: list[dict[str, Any]] = []
        for name in settings.heads:
            advance(name)
            speculator = bench.speculator(name, profile)
            bench.round(speculator)  # warm-up
            measured = []
            for _ in range(settings.repeats):
                plain.append(bench.plain_token(count))
                measured.append(bench.round(speculator))
                advance(name)
            medians = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
            rows.append({"head": name, "what": HEADS[name][0], **medians})
    token_ms = statistics.median(plain)
    for row in rows:
        row["drafter_in_tokens"] = row["drafter_ms"] / token_ms
        row["speedup"] = row["tokens_per_round"] * token_ms / row["round_ms"]
    return {
        "bench": "heads",
        "shape": settings.shape,
        "acceptance": list(profile.rates),
        "dtype": settings.dtype,
        "prompt_length": settings.context,
        "plain_token_ms": token_ms,
        "rows": rows,
        "environment": environment(on),
    }


class _Bench:
    """A target with random weights, a prompt, and the text behind it.

    Args:
        count: tokens of a request. Trees are cut to the tokens that may still be emitted, so it has to leave room
            beyond the rounds that are looked at.
    """

    def __init__(self, target: GenerativeModel, shape: ModelShape, prompt_length: int, count: int):
        self.target, self.shape, self.count = target, shape, count
        self.prompt: Tensor = random_prompt(prompt_length, shape.vocab_size).to(target.device)
        self.text = self._plain(count)[0, prompt_length:].tolist()

    def speculator(self, head: str, profile: AcceptanceProfile) -> Speculator:
        texts = {tuple(self.prompt[0].tolist()): self.text}
        paid = HEADS[head][1](self.target, self.shape)
        return Speculator(profile.drafter(texts, vocab_size=self.shape.vocab_size, paid=paid), adaptive=False)

    def round(self, speculator: Speculator) -> dict[str, float]:
        arguments = {**fixed_length(self.count), "return_dict_in_generate": True, "speculator": speculator}
        stats: SpeculationStats = self.target.generate(self.prompt, **arguments).speculation
        count, target = stats.target_forwards, stats.target_seconds
        drafter, rest = stats.drafter_seconds, stats.rest_seconds
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
            "tokens_per_round": stats.emitted_tokens / count,
        }

    def plain_token(self, count: int) -> float:
        """Milliseconds of one token of stock `generate`."""
        short, _ = timed(lambda: self._plain(1), self.target.device)
        long, _ = timed(lambda: self._plain(count + 1), self.target.device)
        return 1e3 * (long - short) / count

    def _plain(self, count: int) -> Tensor:
        return self.target.generate(self.prompt, **fixed_length(count), speculator=None)


def tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    """The result as one table."""
    rates = result["acceptance"]
    accepted = " ".join(f"{rate:.2f}" for rate in rates) if any(rates) else ""
    title = (
        f"Rounds at {result['shape']} shape, random weights, {result['dtype']}, context "
        f"{result['prompt_length']}, {result['environment']['threads']} threads: milliseconds per round; plain: "
        f"{result['plain_token_ms']:.1f} a token"
    )
    columns = {
        "head": "{what}",
        "nodes": "{nodes:.0f}",
        "round": "{round_ms:.1f}",
        "target": "{target_ms:.1f}",
        "drafter": "{drafter_ms:.1f}",
        "rest": "{rest_ms:.1f}",
        "share of\nthe drafter": "{drafter_share:.1%}",
        "drafter /\nplain token": "{drafter_in_tokens:.2f}",
        "engine\nefficiency": "{engine_efficiency:.3f}",
    }
    if accepted:
        columns |= {"tokens\nper round": "{tokens_per_round:.2f}", "x plain": "{speedup:.2f}x"}
    caption = f"Accepted to depth 1, 2, …: {accepted} of the rounds (set, not measured)." if accepted else ""
    return [Grid.of(title, result["rows"], columns, caption=caption)]


if __name__ == "__main__":
    run(HeadSettings, bench_heads, tables)
