"""A draft model of another vocabulary: ours, and stock's universal assisted decoding with the same two models.

Both get the same prompts and the same number of new tokens, one after the other in an order that rotates. A round is a
forward of the target, the prompt's included. Nats per token are those of the target's own distribution: text that is
distributed like the target's has as many as plain decoding.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from hf_speculate import AutoSpeculator
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.bench.methods import Method, eager_method, speculator_method
from hf_speculate_tools.bench.runs import Request, TimedRun, batches, fixed_length, generate_once, rotated
from hf_speculate_tools.commands import (
    Grid,
    Limit,
    NewTokens,
    Repeats,
    Temperatures,
    builtin_prompts,
    environment,
    find_device,
    load_target,
    progress,
    read_prompts,
    spread,
    tokenize,
)

from .command import Dtype, TargetSettings, run


STOCK, ADAPTIVE, FIXED = "stock assisted, both tokenizers", "draft_model", "draft_model, adaptive=False"


@dataclass(kw_only=True)
class VocabularySettings(TargetSettings):
    """Options. The draft model and its tokenizer come from one folder."""

    QUICK: ClassVar = {"limit": 2, "max_new_tokens": 24, "repeats": 1}

    model: Annotated[str, typer.Option(help="Folder or Hub id of the draft model.")]
    prompts: Annotated[Path | None, typer.Option(help="Prompts (JSON lines; default: the built-in ones).")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Put every prompt into the target's chat template.")] = False
    limit: Limit = 8
    max_new_tokens: NewTokens = 96
    temperatures: Temperatures = field(default_factory=lambda: [0.0, 1.0])
    repeats: Repeats = 2
    dtype: Dtype = "float32"


def bench_vocabularies(settings: VocabularySettings) -> dict[str, Any]:
    """Tokens per round and speed of drafts by a model of another vocabulary."""
    name = settings.target or "examples/pycoder"
    device = find_device(settings.device)
    target, tokenizer = load_target(name, settings.dtype, device)
    draft, draft_tokenizer = load_target(settings.model, settings.dtype, device)
    prompts = read_prompts(settings.prompts, settings.limit) if settings.prompts else builtin_prompts(settings.limit)
    requests = batches(tokenize(prompts, tokenizer, use_chat_template=settings.chat), 1, device)
    options = {"target": target, "model": draft, "tokenizer": tokenizer, "draft_tokenizer": draft_tokenizer}
    # Stock puts other embeddings into its draft model in requests that sample, so each has a copy.
    assistant, _ = load_target(settings.model, settings.dtype, device)
    assisted = {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": draft_tokenizer}
    methods = [
        eager_method(),
        Method(name=STOCK, kind="stock_speculative", arguments=assisted),
        speculator_method(ADAPTIVE, AutoSpeculator.from_name("draft_model", **options)),
        speculator_method(FIXED, AutoSpeculator.from_name("draft_model", adaptive=False, **options)),
    ]
    rows = []
    num_steps = len(settings.temperatures) * settings.repeats * len(requests) * len(methods)
    with progress("vocabularies", total=num_steps) as advance:
        for temperature in settings.temperatures:
            arguments = fixed_length(settings.max_new_tokens, temperature)
            runs = []
            for repeat in range(settings.repeats):
                for request in requests:
                    for method in rotated(methods, repeat + request.index):
                        runs.append(_counted(target, method, request, arguments, repeat))
                        advance(method.name)
            rows += [_row(runs, method.name, temperature) for method in methods]
    return {
        "bench": "vocabularies",
        "target": name,
        "model": settings.model,
        "vocabularies": [len(tokenizer), len(draft_tokenizer)],
        "num_prompts": len(requests),
        "max_new_tokens": settings.max_new_tokens,
        "environment": environment(device),
        "rows": rows,
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """A table with one line for each temperature and method."""
    sizes = " and ".join(map(str, result["vocabularies"]))
    return [
        Grid.of(
            f"{result['model']} drafts for {result['target']}: vocabularies of {sizes} tokens, {result['num_prompts']} "
            f"prompts, {result['max_new_tokens']} tokens each",
            result["rows"],
            {
                "temperature": "{temperature:g}",
                "method": "{method}",
                "tokens\na round": "{tokens_per_round:.2f}",
                "tokens/s": "{tokens_per_second:.0f}",
                "speed-up": lambda row: f"{row['speedup']['median']:.2f}x",
                "same\ntexts": "{same}/{num_texts}",
                "nats\na token": "{nats_per_token:.2f}",
            },
            groups=("temperature",),
        )
    ]


@dataclass(frozen=True)
class _Run:
    """A run, the number of the target's forwards in it, and the target's surprise at its text in nats per token."""

    timed: TimedRun
    num_forwards: int
    nats_per_token: float


def _counted(target: GenerativeModel, method: Method, request: Request, arguments: dict[str, Any], repeat: int) -> _Run:
    with _forwards_of(target) as count:
        timed = generate_once(target, method, request, arguments, repeat)
    return _Run(timed, count[0], _nats_per_token(target, request, timed.rows[0], arguments.get("temperature", 1.0)))


@torch.no_grad()
def _nats_per_token(target: GenerativeModel, request: Request, tokens: list[int], temperature: float) -> float:
    new = torch.tensor([tokens], dtype=torch.long, device=request.input_ids.device)
    logits = target(torch.cat([request.input_ids, new], dim=1)).logits[0, request.length - 1 : -1].float()
    return -(logits / temperature).log_softmax(-1).gather(1, new[0, :, None]).mean().item()


@contextmanager
def _forwards_of(model: Any):
    """Counts a model's forwards, in a list of one number."""
    count = [0]

    def note(*_arguments: Any) -> None:
        count[0] += 1

    handle = model.register_forward_hook(note)
    try:
        yield count
    finally:
        handle.remove()


def _row(runs: Sequence[_Run], method: str, temperature: float) -> dict[str, Any]:
    """The figures of a method; speed-ups are over plain decoding in the same repeat."""
    own = [run for run in runs if run.timed.method == method]
    plain = {(run.timed.request, run.timed.repeat): run.timed for run in runs if run.timed.method == "eager"}
    repeats = sorted({run.timed.repeat for run in own})

    def seconds(kind: str, repeat: int) -> float:
        return sum(run.timed.seconds for run in runs if run.timed.method == kind and run.timed.repeat == repeat)

    num_tokens = sum(run.timed.num_tokens for run in own)
    return {
        "method": method,
        "temperature": temperature,
        "tokens_per_round": num_tokens / sum(run.num_forwards for run in own),
        "tokens_per_second": statistics.median(
            num_tokens / len(repeats) / seconds(method, repeat) for repeat in repeats
        ),
        "speedup": spread([seconds("eager", repeat) / seconds(method, repeat) for repeat in repeats]),
        "nats_per_token": statistics.mean(run.nats_per_token for run in own),
        "same": sum(run.timed.rows == plain[run.timed.request, run.timed.repeat].rows for run in own),
        "num_texts": len(own),
    }


if __name__ == "__main__":
    run(VocabularySettings, bench_vocabularies, tables)
