"""Tokens per second of speculators beside stock `generate`, on real prompts. Definitions: the package's docstring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SpeculateError
from ..models import GenerativeModel
from ..stats import SpeculationStats
from .environment import environment, find_device
from .identity import compare_texts
from .methods import (
    Method,
    SpeculatorSpec,
    default_speculators,
    default_target,
    draft_model_of,
    load_target,
    speculator_methods,
    stock_methods,
)
from .prompts import builtin_prompts, read_prompts, tokenize
from .summary import Run, headline, summarize
from .timing import progress, timed


@dataclass(kw_only=True)
class GenerateSettings:
    """What to measure.

    Attributes:
        target: path or Hub id; None is the bundled target.
        speculators: `NAME_OR_PATH[:option=value,...]`; None is prompt lookup (and the bundled draft model for the
            bundled target).
        prompts: JSON-lines files; none is the built-in set.
        limit: at most this many prompts of each file.
        raw: leave the tokenizer's chat template aside.
        dtype: of the target, "auto" is the checkpoint's.
        batch_sizes, temperatures: every pair is measured; 0 is greedy.
        max_new_tokens: each row emits exactly this many.
        repeats: passes over the prompts.
        prompt_lookup_num_tokens: of stock prompt lookup (10 is what its documentation uses).
        max_proofs: how many divergences of a speculator are looked at again.
        device: None is the accelerator if there is one.
    """

    target: str | None = None
    speculators: Sequence[str] | None = None
    prompts: Sequence[str | Path] = ()
    limit: int | None = None
    raw: bool = False
    dtype: str = "auto"
    batch_sizes: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 128
    repeats: int = 3
    prompt_lookup_num_tokens: int = 10
    max_proofs: int = 8
    device: str | None = None

    def check(self) -> None:
        """Raises `SpeculateError` for values that cannot be measured."""
        counts = {"max_new_tokens": self.max_new_tokens, "repeats": self.repeats, "batch size": min(self.batch_sizes)}
        if self.limit is not None:
            counts["limit"] = self.limit
        for name, value in counts.items():
            if value < 1:
                raise SpeculateError(f"{name} must be at least 1, got {value}.")
        if min(self.temperatures) < 0:
            raise SpeculateError(f"a temperature must be 0 (greedy) or more, got {min(self.temperatures)}.")


@dataclass(frozen=True)
class Request:
    """One `generate` call: prompts of one category, left-padded to a batch."""

    index: int
    category: str
    input_ids: Tensor
    attention_mask: Tensor


@dataclass
class Cell:
    """Everything measured at one batch size and temperature."""

    batch_size: int
    temperature: float
    runs: list[Run] = field(default_factory=list)
    texts: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)


def bench_generate(settings: GenerateSettings) -> dict[str, Any]:
    """Measures every method at every batch size and temperature.

    Returns:
        JSON-serialisable: `rows`, one for each method, batch size and temperature; and `temperatures`, for each
        temperature the fastest speculator (at the first batch size) with its `speedup` over `eager` and
        `best_stock_speculative`.
    """
    settings.check()
    device = find_device(settings.device)
    target_name = settings.target or default_target()
    specs = [SpeculatorSpec.parse(text) for text in settings.speculators or default_speculators(target_name)]
    groups = [read_prompts(path, settings.limit) for path in settings.prompts] or [builtin_prompts(settings.limit)]
    model, tokenizer = load_target(target_name, settings.dtype, device)
    ours = speculator_methods(specs, model)
    methods = stock_methods(draft_model_of(ours), settings.prompt_lookup_num_tokens) + ours
    use_chat_template = bool(tokenizer.chat_template) and not settings.raw
    prompts = tokenize([p for group in groups for p in group], tokenizer, use_chat_template=use_chat_template)
    fitting = _fitting(prompts, model, settings.max_new_tokens)
    cells = [Cell(batch_size, t) for batch_size in settings.batch_sizes for t in settings.temperatures]
    requests = {size: _requests(fitting, size, device) for size in settings.batch_sizes}
    total = sum(
        (settings.repeats * len(requests[cell.batch_size]) + 1) * sum(m.runs_at(cell.batch_size) for m in methods)
        for cell in cells
    )
    rows: list[dict[str, Any]] = []
    with progress("generate", total=total) as advance:
        for cell in cells:
            _measure(cell, model, methods, requests[cell.batch_size], settings, advance)
            identity = {
                method.name: compare_texts(
                    model, method, cell.texts, requests[cell.batch_size], _request(cell, settings), settings.max_proofs
                )
                for method in methods
                if method.runs_at(cell.batch_size)
            }
            rows += summarize(cell.batch_size, cell.temperature, cell.runs, methods, identity)
    return {
        "bench": "generate",
        "target": target_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt_sets": [str(path) for path in settings.prompts] or ["built-in"],
        "num_prompts": len(fitting),
        "num_skipped_prompts": len(prompts) - len(fitting),
        "mean_prompt_length": sum(len(ids) for _, ids in fitting) / len(fitting),
        "chat_template": use_chat_template,
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "rows": rows,
        "temperatures": {
            f"{t:g}": headline([r for r in rows if r["temperature"] == t and r["batch_size"] == cells[0].batch_size])
            for t in settings.temperatures
        },
        "environment": environment(device),
    }


def _measure(
    cell: Cell,
    model: GenerativeModel,
    methods: Sequence[Method],
    requests: Sequence[Request],
    settings: GenerateSettings,
    advance: Callable[[str], None],
) -> None:
    active = [method for method in methods if method.runs_at(cell.batch_size)]
    where = f"batch {cell.batch_size}, T={cell.temperature:g}"
    warm_up = _request(cell, settings) | {"max_new_tokens": min(settings.max_new_tokens, 16)}
    for method in active:
        _run(model, method, requests[0], warm_up)
        advance(f"{where}, warm-up")
    for repeat in range(settings.repeats):
        for request in requests:
            first = (repeat + request.index) % len(active)
            for method in active[first:] + active[:first]:
                seconds, rows, stats = _run(model, method, request, _request(cell, settings))
                _expect_length(rows, settings.max_new_tokens, method)
                cell.runs.append(Run(method.name, request.category, repeat, seconds, sum(map(len, rows)), stats))
                if repeat == 0:
                    cell.texts[method.name, request.index] = rows
                advance(f"{where}, {method.name}")


def _request(cell: Cell, settings: GenerateSettings) -> dict[str, Any]:
    """The arguments that all methods share. `top_k=0`: the library's default of 50 is not plain sampling."""
    sampling = {"do_sample": True, "temperature": cell.temperature, "top_k": 0} if cell.temperature else {}
    return {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        **sampling,
    }


def _run(
    model: GenerativeModel, method: Method, request: Request, arguments: dict[str, Any]
) -> tuple[float, list[list[int]], SpeculationStats | None]:
    """Seconds, new tokens of every row, statistics of a speculator."""
    arguments = {"speculator": None, "return_dict_in_generate": True, **arguments, **method.arguments}
    torch.manual_seed(request.index)

    def call():
        return model.generate(request.input_ids, attention_mask=request.attention_mask, **arguments)

    seconds, output = timed(call, model.device)
    new_tokens = output.sequences[:, request.input_ids.shape[1] :].tolist()
    return seconds, new_tokens, getattr(output, "speculation", None)


def _expect_length(rows: list[list[int]], wanted: int, method: Method) -> None:
    lengths = {len(row) for row in rows}
    if lengths != {wanted}:
        raise SpeculateError(
            f"{method.name} emitted {sorted(lengths)} tokens instead of {wanted}: tokens/s would not be comparable."
        )


def _fitting(
    prompts: Sequence[tuple[str, Tensor]], model: GenerativeModel, max_new_tokens: int
) -> list[tuple[str, Tensor]]:
    """The prompts that leave room for the new tokens in the target's context."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    fitting = [p for p in prompts if len(p[1]) and (context is None or len(p[1]) + max_new_tokens <= context)]
    if not fitting:
        shortest = min(len(ids) for _, ids in prompts)
        raise SpeculateError(
            f"no prompt fits: the shortest has {shortest} tokens and {max_new_tokens} new ones are asked for, the "
            f"target's context is {context}."
        )
    return fitting


def _requests(prompts: Sequence[tuple[str, Tensor]], batch_size: int, device: torch.device) -> list[Request]:
    """Batches within a category; the last of a category is filled up with its first prompts."""
    groups: dict[str, list[Tensor]] = {}
    for category, ids in prompts:
        groups.setdefault(category, []).append(ids)
    requests = []
    for category, group in groups.items():
        for start in range(0, len(group), batch_size):
            members = [group[i % len(group)] for i in range(start, start + batch_size)]
            width = max(map(len, members))
            rows = [torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in members]
            mask = [torch.nn.functional.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in members]
            request = Request(len(requests), category, torch.stack(rows).to(device), torch.stack(mask).to(device))
            requests.append(request)
    return requests
