"""A GGUF file with its weights packed, beside the same file dequantised, as transformers loads it; on the CPU."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel
from hf_speculate_gguf import load_model, packing_report
from hf_speculate_gguf.native import PackedMatrix
from hf_speculate_tools.bench import fixed_length
from hf_speculate_tools.bench.methods import Method, speculator_method
from hf_speculate_tools.bench.runs import Request, batches, measure_in_turn, num_steps
from hf_speculate_tools.bench.summary import summarize
from hf_speculate_tools.commands import (
    Grid,
    NewTokens,
    Repeats,
    environment,
    find_dtype,
    neutralize,
    progress,
    target_path,
    timed,
)

from ..support.random_gguf import FileShape
from .command import Context, Dtype, random_file, run
from .engines import LLAMA_CPP, EngineKind, LlamaCppPython, engine_methods
from .forwards import medians_in_turn, prefilled_cache, verify_ms
from .scripted import DEFAULT_RATES, Rates, plain_texts, read_profile
from .shapes import random_prompt


OPENVINO = EngineKind(
    "OpenVINO",
    "--openvino",
    Path(__file__).with_name("openvino_worker.py"),
    {"OpenVINO": "none", "OpenVINO, prompt lookup": "prompt_lookup"},
)
OpenVinoPython = Annotated[
    str | None,
    typer.Option("--openvino", metavar="PYTHON", help="Measure OpenVINO too: an interpreter with openvino-genai."),
]

PACKED, DENSE = "packed", "dequantised"
_ENGINES = (LLAMA_CPP.name, OPENVINO.name)

_VERIFIED = (1, 4, 8, 16, 32)
_CPU = torch.device("cpu")


@dataclass(kw_only=True)
class GgufSettings:
    """Options; without a file, one of Qwen2-0.5B shape with random weights is written."""

    QUICK: ClassVar = {"max_new_tokens": 24, "repeats": 1}

    file: Annotated[Path | None, typer.Argument(help="A GGUF file, or smollm2 (default: random weights).")] = None
    kind: Annotated[str, typer.Option("--type", help="Type of the random weights: Q4_0, Q8_0, Q4_K_M ...")] = "Q4_0"
    backend: Annotated[str, typer.Option(help="auto, native, native-int8, dequantize, triton.")] = "auto"
    dtype: Dtype = "bfloat16"
    nodes: Annotated[list[int], typer.Option(min=2, help="Nodes of a tree, root included (repeatable).")] = field(
        default_factory=lambda: [4, 8]
    )
    acceptance: Rates = DEFAULT_RATES
    llama_cpp: LlamaCppPython = None
    openvino: OpenVinoPython = None
    context: Context = 64
    max_new_tokens: NewTokens = 64
    repeats: Repeats = 3


def bench_gguf(settings: GgufSettings) -> dict[str, Any]:
    """A GGUF file packed beside dequantised, plain and speculative, greedily, with a scripted drafter.

    Returns:
        JSON-serialisable. `rows`, as those of `bench_generate`: the whole call, `speedup` against every plain one.
        `forward`: milliseconds of a bare forward over N nodes behind the prompt, of its matrix products alone, and of
        the prompt. `memory`: of the file and of the packed weights.
    """
    shape = FileShape()
    given = nullcontext(target_path(str(settings.file)))
    with given if settings.file else random_file(shape, settings.kind, _vocabulary(shape.vocab_size)) as path:
        memory, models = _load(path, find_dtype(settings.dtype), settings.backend)
        prompt = random_prompt(settings.context, models[PACKED].config.vocab_size)
        requests, arguments = batches([("random", prompt[0])], 1, _CPU), fixed_length(settings.max_new_tokens)
        forward = {name: _forward(model, prompt) for name, model in models.items()}
        methods = [m for name in (DENSE, PACKED) for m in _methods(name, models[name], requests, arguments, settings)]
        longest = settings.context + settings.max_new_tokens
        pythons = {LLAMA_CPP: settings.llama_cpp, OPENVINO: settings.openvino}
        with engine_methods(pythons, path, longest) as others:
            methods += others
            with progress("gguf", total=num_steps(len(methods), 1, settings.repeats)) as advance:
                runs = measure_in_turn(models[PACKED], methods, requests, arguments, settings.repeats, advance)
    return {
        "bench": "gguf",
        "file": settings.file.name if settings.file else f"random {settings.kind}, Qwen2-0.5B shape",
        "dtype": settings.dtype,
        "acceptance": settings.acceptance,
        "prompt_length": settings.context,
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "memory": memory,
        "forward": forward,
        "rows": summarize(1, 0.0, runs, methods, {}),
        "environment": environment(_CPU),
    }


def tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    """Tables of speed and of the cost of a forward, and a line on memory."""
    title = f"{result['file']}, {result['dtype']}, {result['environment']['threads']} threads"
    baselines = [row["method"] for row in result["rows"] if row["kind"] == "eager" or row["method"] in _ENGINES]
    speed = Grid.of(
        f"{title}: {result['max_new_tokens']} tokens behind a prompt of {result['prompt_length']}",
        result["rows"],
        {
            "method": "{method}",
            "tokens/s": "{tokens_per_second[median]:.1f}",
            **{f"x {name}": f"{{speedup[{name}]:.2f}}x" for name in baselines},
            "tokens\na round": "{speculation[mean_acceptance_length]:.2f}",
        },
        caption=f"Scripted drafter, accepted to depth 1, 2, … in {result['acceptance']} of the rounds.",
    )
    rows = [{"weights": name, **found} for name, found in result["forward"].items()]
    sizes = {f"N={n}": lambda row, n=n: _of_one(row["verify_ms"], n) for n in _VERIFIED}
    products: dict[str, Any] = {
        f"products\nof N={n}": lambda row, n=n: f"{row['products_ms'][n]:.1f}" for n in _VERIFIED[::2]
    }
    columns: dict[str, Any] = {"weights": "{weights}", **sizes, **products, "prompt": "{prompt_ms:.0f}"}
    forward = Grid.of("One forward over N nodes: milliseconds (of one node's)", rows, columns)
    memory = result["memory"]
    packed = f"packed weights {memory['packed_mb']:.0f} MB ({', '.join(memory['backends'])})"
    return [speed, forward, f"file {memory['file_mb']:.0f} MB, {packed}"]


def _of_one(times: dict[int, float], nodes: int) -> str:
    return f"{times[nodes]:.1f} ({times[nodes] / times[1]:.2f}x)"


def _vocabulary(size: int) -> dict[str, Any]:
    """Metadata that other engines want: a tokenizer of bytes, a pair, and words that nobody says."""
    of_bytes, end = sorted(ByteLevel.alphabet()), "<|end|>"
    words = [f"<w{number}>" for number in range(size - len(of_bytes) - 2)]
    return {
        "general.file_type": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*of_bytes, end, "ab", *words],
        "tokenizer.ggml.token_type": [1] * len(of_bytes) + [3] + [1] * (1 + len(words)),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": len(of_bytes),
    }


def _load(path: str, dtype: torch.dtype, backend: str) -> tuple[dict[str, Any], dict[str, GenerativeModel]]:
    """Loads the file both ways; sizes, and the two models."""
    models: dict[str, Any] = {PACKED: load_model(path, dtype=dtype, backend=backend)}
    packing = packing_report(models[PACKED])
    folder, name = os.path.split(os.path.abspath(path))
    models[DENSE] = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype).eval()
    for model in models.values():
        neutralize(model)
    memory = {
        "file_mb": os.path.getsize(path) / 2**20,
        "packed_mb": packing.resident / 2**20,
        "backends": list(packing.backends),
    }
    return memory, models


def _forward(model: GenerativeModel, prompt: Tensor) -> dict[str, Any]:
    verify = verify_ms(model, prefilled_cache(model, prompt), _VERIFIED)
    with torch.inference_mode():
        seconds = [timed(lambda: model(prompt, logits_to_keep=1), model.device)[0] for _ in range(3)]
    return {
        "verify_ms": {n: ms for (n, _), ms in verify.items()},
        "products_ms": _products_ms(model, _VERIFIED),
        "prompt_ms": 1e3 * statistics.median(seconds),
    }


def _products_ms(model: GenerativeModel, sizes: Sequence[int], repeats: int = 5) -> dict[int, float]:
    """Milliseconds of all matrix products of a forward over N tokens, without anything between them."""
    modules = [m for m in model.modules() if isinstance(m, PackedMatrix) or type(m) is torch.nn.Linear]

    def products(inputs: dict[int, Tensor]) -> None:
        for module in modules:
            module(inputs[module.in_features])

    widths = {module.in_features for module in modules}
    inputs = {n: {width: torch.randn(1, n, width, dtype=model.dtype) for width in widths} for n in sizes}
    with torch.inference_mode():
        return medians_in_turn({n: partial(products, inputs[n]) for n in sizes}, model.device, repeats)


def _methods(
    name: str, model: GenerativeModel, requests: list[Request], arguments: dict[str, Any], settings: GgufSettings
) -> list[Method]:
    """Plain decoding, and trees of every size; each model is drafted for from its own text."""
    texts = plain_texts(model, requests, arguments)
    methods = [Method(name=f"{name}, plain", kind="eager", model=model)]
    for n in settings.nodes:
        profile = read_profile(settings.acceptance or DEFAULT_RATES, n - 1)
        speculator = Speculator(profile.drafter(texts, vocab_size=model.config.vocab_size), adaptive=False)
        methods.append(speculator_method(f"{name}, trees of {n}", speculator, model=model))
    return methods


if __name__ == "__main__":
    run(GgufSettings, bench_gguf, tables)
