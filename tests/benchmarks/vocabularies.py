"""A draft model of another vocabulary: ours, and stock's universal assisted decoding with the same two models.

Both get the same prompts and the same number of new tokens, one after the other in an order that rotates. A round is a
forward of the target, the prompt's included. Nats per token are those of the target's own distribution: text that is
distributed like the target's has as many as plain decoding.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from hf_speculate import AutoSpeculator
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.bench.methods import Method, eager_method, speculator_method
from hf_speculate_tools.bench.runs import Request, TimedRun, batches, fixed_length, measure_in_turn, num_steps
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
    tokenize,
)

from .command import Dtype, TargetSettings, against_plain, run


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
    total = len(settings.temperatures) * num_steps(len(methods), len(requests), settings.repeats)
    with progress("vocabularies", total=total) as advance:
        for temperature in settings.temperatures:
            arguments = fixed_length(settings.max_new_tokens, temperature)
            with _forwards_of(target) as counts:

                def note(name: str, counts: list[int] = counts) -> None:
                    counts.append(0)  # the next run begins
                    advance(name)

                runs = measure_in_turn(target, methods, requests, arguments, settings.repeats, note)
            forwards = counts[len(methods) :]  # without those of the warm-ups
            rows += [_row(target, requests, runs, forwards, method.name, temperature) for method in methods]
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
                "tokens/s": "{tokens_per_second[median]:.0f}",
                "speed-up": "{speedup[median]:.2f}x",
                "same\ntexts": "{same}/{num_texts}",
                "nats\na token": "{nats_per_token:.2f}",
            },
            groups=("temperature",),
        )
    ]


@torch.no_grad()
def _nats_per_token(target: GenerativeModel, request: Request, tokens: list[int], temperature: float) -> float:
    new = torch.tensor([tokens], dtype=torch.long, device=request.input_ids.device)
    logits = target(torch.cat([request.input_ids, new], dim=1)).logits[0, request.length - 1 : -1].float()
    return -(logits / temperature).log_softmax(-1).gather(1, new[0, :, None]).mean().item()


@contextmanager
def _forwards_of(model: Any) -> Iterator[list[int]]:
    """Counts a model's forwards, in the last number of a list."""
    counts = [0]

    def note(*_arguments: Any) -> None:
        counts[-1] += 1

    handle = model.register_forward_hook(note)
    try:
        yield counts
    finally:
        handle.remove()


def _row(
    target: GenerativeModel,
    requests: Sequence[Request],
    runs: Sequence[TimedRun],
    forwards: Sequence[int],
    method: str,
    temperature: float,
) -> dict[str, Any]:
    """The figures of a method. `forwards` are those of the target in each run, and maybe more."""
    own = [(run, count) for run, count in zip(runs, forwards, strict=False) if run.method == method]
    plain = {(run.request, run.repeat): run for run in runs if run.method == "eager"}
    surprise = [_nats_per_token(target, requests[run.request], run.rows[0], temperature or 1.0) for run, _ in own]
    return {
        "method": method,
        "temperature": temperature,
        "tokens_per_round": sum(run.num_tokens for run, _ in own) / sum(count for _, count in own),
        **against_plain(runs, method),
        "nats_per_token": statistics.mean(surprise),
        "same": sum(run.rows == plain[run.request, run.repeat].rows for run, _ in own),
        "num_texts": len(own),
    }


if __name__ == "__main__":
    run(VocabularySettings, bench_vocabularies, tables)
