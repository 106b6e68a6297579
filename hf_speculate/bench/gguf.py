"""A GGUF file with its weights packed, beside the same file dequantised, as transformers loads it."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..commands.environment import environment, find_dtype
from ..commands.grid import Grid, ratio
from ..commands.methods import neutralize
from ..commands.reporting import JsonOnly, Markdown, Out, Quick, Repeats, Threads, prepare, report
from ..commands.shapes import random_prompt
from ..commands.timing import progress, timed
from ..errors import SpeculateError
from ..models import GenerativeModel
from ..speculator import Speculator
from ..testing import ScriptedDrafter
from .llamacpp import optional_llama_cpp
from .memory import peak_memory
from .runs import fixed_length
from .verify_cost import branching, verify_seconds


PACKED, DENSE, LLAMA_CPP = "packed", "dequantised", "llama.cpp"

_VERIFIED = (1, 4, 8, 16, 32)


def bench_gguf(
    path: str | None = None,
    *,
    kind: str = "Q4_0",
    backend: str = "auto",
    dtype: str = "bfloat16",
    nodes: Sequence[int] = (4, 8),
    accuracy: float = 0.7,
    prompt_length: int = 64,
    max_new_tokens: int = 64,
    repeats: int = 3,
    llama_cpp: str | None = None,
) -> dict[str, Any]:
    """Greedy decoding of a packed and a dequantised model, plain and with a scripted drafter, on the CPU.

    Args:
        path: a file; None writes one of Qwen2-0.5B shape with random weights, of type `kind` ("Q4_K_M" is the mix).
        nodes: tree sizes, root included.
        accuracy: of the scripted drafter, a level.
        llama_cpp: an interpreter that has llama-cpp-python, which decodes the same file with as many threads.
    Returns:
        JSON-serialisable. `rows`: tokens/s over the whole call (medians over repeats), and the seconds of the
        dequantised model's plain call / those of the row within one repeat (median). `forward`: milliseconds of a bare
        forward over N nodes behind the prompt, and of the prompt. `memory`: bytes of the file, of the packed weights,
        and what loading took at most.
    """
    if min(nodes, default=0) < 2 or not 0 <= accuracy <= 1 or max_new_tokens < 2 or repeats < 1 or prompt_length < 1:
        raise SpeculateError(
            f"bench gguf needs trees of at least 2 nodes, 0 <= accuracy <= 1, 2 new tokens, a prompt and one repeat; "
            f"got nodes {list(nodes)}, accuracy {accuracy}, {max_new_tokens} new tokens, a prompt of {prompt_length}, "
            f"{repeats} repeats."
        )
    torch_dtype = find_dtype(dtype)
    with (
        _file(path, kind) as found,
        optional_llama_cpp(llama_cpp, found, prompt_length + max_new_tokens + max(_VERIFIED)) as other,
        progress("gguf", total=3 + repeats) as advance,
    ):
        memory, models = _load(found, torch_dtype, backend)
        advance("models loaded")
        prompt = random_prompt(prompt_length, models[PACKED].config.vocab_size)
        forward = {name: _forward(model, prompt) for name, model in models.items()}
        if other is not None:
            forward[LLAMA_CPP] = other.forward_costs(prompt[0].tolist(), _VERIFIED)
        advance("forwards measured")
        methods = _methods(models, prompt, nodes, accuracy, max_new_tokens)
        if other is not None:
            methods[f"{LLAMA_CPP}, plain"] = lambda count: (other.generate(prompt[0].tolist(), count)["seconds"], None)
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        found_stats: dict[str, Any] = {}
        for repeat in range(repeats + 1):
            for name, method in methods.items():
                taken, found_stats[name] = method(max_new_tokens if repeat else 4)  # the first is warm-up
                if repeat:
                    seconds[name].append(taken)
            advance(f"repeat {repeat}")
    return {
        "bench": "gguf",
        "file": os.path.basename(path) if path else f"random {kind}, Qwen2-0.5B shape",
        "dtype": dtype,
        "llama_cpp": None if other is None else other.version,
        "accuracy": accuracy,
        "prompt_length": prompt_length,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "memory": memory,
        "forward": forward,
        "rows": [_row(name, seconds, found_stats[name], max_new_tokens) for name in methods],
        "environment": environment(torch.device("cpu")),
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """Speed, cost of a forward, memory."""
    title = f"{result['file']}, {result['dtype']}, {result['environment']['threads']} threads"
    speed = Grid(
        title=f"{title}: {result['max_new_tokens']} tokens behind a prompt of {result['prompt_length']}",
        columns=["method", "tokens/s", "of dequantised\nplain", "of packed\nplain", "of llama.cpp", "tokens\na round"],
        rows=[
            [
                row["method"],
                f"{row['tokens_per_second']:.1f}",
                ratio(row["speedup"]),
                ratio(row["of_packed_plain"]),
                ratio(row["of_llama_cpp"]),
                f"{row['mean_acceptance_length']:.2f}" if row["mean_acceptance_length"] else "",
            ]
            for row in result["rows"]
        ],
        words=["method"],
        caption=f"scripted drafter, right at a level with probability {result['accuracy']}",
    )
    sizes = list(result["forward"][PACKED]["verify_ms"])
    forward = Grid(
        title="One forward over N nodes: milliseconds (of one node's)",
        columns=["weights", *(f"N={n}" for n in sizes), "prompt"],
        rows=[[name, *_cells(row)] for name, row in result["forward"].items()],
        words=["weights"],
    )
    memory = result["memory"]
    line = (
        f"file {memory['file_mb']:.0f} MB, packed weights {memory['packed_mb']:.0f} MB "
        f"({', '.join(memory['backends'])})"
    )
    if memory["peak_of_loading_mb"] is not None:
        line += f", at most {memory['peak_of_loading_mb']:.0f} MB while loading"
    return [speed, forward, line]


def _cells(row: dict[str, Any]) -> list[str]:
    times: dict[int, float] = row["verify_ms"]
    return [*(f"{ms:.1f} ({ms / times[1]:.2f}x)" for ms in times.values()), f"{row['prompt_ms']:.0f}"]


def bench_gguf_command(
    file: Annotated[Path | None, typer.Argument(help="A GGUF file (default: random weights).")] = None,
    kind: Annotated[str, typer.Option("--type", help="Of the random weights: Q4_0, Q8_0, Q4_K_M ...")] = "Q4_0",
    backend: Annotated[str, typer.Option(help="auto, native, int4, dequantize.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, float16.")] = "bfloat16",
    nodes: Annotated[list[int] | None, typer.Option(min=2, help="Tree sizes (default: 4, 8).")] = None,
    accuracy: Annotated[float, typer.Option(min=0, max=1, help="Of the scripted drafter, a level.")] = 0.7,
    context: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 64,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Default: 64.")] = None,
    repeats: Repeats = None,
    llama_cpp: Annotated[
        str | None,
        typer.Option("--llama-cpp", metavar="PYTHON", help="An interpreter with llama-cpp-python, to compare with it."),
    ] = None,
    threads: Threads = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """A GGUF file packed beside dequantised, plain and speculative; by default of Qwen2-0.5B shape, random weights."""
    prepare(threads)
    result = bench_gguf(
        None if file is None else str(file),
        kind=kind,
        backend=backend,
        dtype=dtype,
        nodes=nodes or (4, 8),
        accuracy=accuracy,
        prompt_length=context,
        max_new_tokens=max_new_tokens or (24 if quick else 64),
        repeats=repeats or (1 if quick else 3),
        llama_cpp=llama_cpp,
    )
    report(result, tables(result), json_only=json_only, markdown=markdown, out=out)


@contextmanager
def _file(path: str | None, kind: str) -> Iterator[str]:
    """The file at `path`, or one with random weights for the time of the measurement."""
    from ..gguf.random_files import FileShape, find_recipe, write_random_file

    if path is not None:
        yield path
        return
    shape = FileShape()
    recipe = find_recipe(kind, shape)
    with tempfile.TemporaryDirectory() as folder:
        written = os.path.join(folder, "random.gguf")
        # Without this llama.cpp asks for a vocabulary.
        write_random_file(written, shape, recipe, metadata={"tokenizer.ggml.model": "none"})
        yield written


def _load(path: str, dtype: torch.dtype, backend: str) -> tuple[dict[str, Any], dict[str, GenerativeModel]]:
    """What loading took, and the two models."""
    from ..gguf import load_model, packing_report

    models: dict[str, Any] = {}

    def load() -> None:
        models[PACKED] = load_model(path, dtype=dtype, backend=backend)

    peak = peak_memory(load, torch.device("cpu"))
    packing = packing_report(models[PACKED])
    folder, name = os.path.split(os.path.abspath(path))
    models[DENSE] = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype).eval()
    for model in models.values():
        neutralize(model)
    memory = {
        "file_mb": os.path.getsize(path) / 2**20,
        "packed_mb": packing.resident / 2**20,
        "peak_of_loading_mb": peak["above_start_mb"] if peak else None,
        "backends": list(packing.backends),
    }
    return memory, models


def _forward(model: GenerativeModel, prompt: Tensor) -> dict[str, Any]:
    verify = verify_seconds(model, prompt, _VERIFIED, repeats=5)
    with torch.inference_mode():
        seconds = [timed(lambda: model(prompt, logits_to_keep=1), model.device)[0] for _ in range(3)]
    return {
        "verify_ms": {n: 1e3 * spread["median"] for n, spread in verify.items()},
        "prompt_ms": 1e3 * statistics.median(seconds),
    }


# Number of new tokens -> seconds, and statistics of a speculator.
Method = Callable[[int], tuple[float, Any]]


def _method(model: GenerativeModel, speculator: Speculator | None, prompt: Tensor) -> Method:
    def run(max_new_tokens: int) -> tuple[float, Any]:
        request = fixed_length(max_new_tokens) | {"speculator": speculator, "return_dict_in_generate": True}
        taken, output = timed(lambda: model.generate(prompt, **request), model.device)
        return taken, getattr(output, "speculation", None)

    return run


def _methods(
    models: dict[str, GenerativeModel], prompt: Tensor, nodes: Sequence[int], accuracy: float, max_new_tokens: int
) -> dict[str, Method]:
    """By name; each model is drafted for from its own text."""
    methods: dict[str, Method] = {}
    for name in (DENSE, PACKED):
        model = models[name]
        methods[f"{name}, plain"] = _method(model, None, prompt)
        request = fixed_length(max_new_tokens + max(nodes)) | {"speculator": None}
        script = model.generate(prompt, **request)[:, prompt.shape[1] :]
        for n in nodes:
            drafter = ScriptedDrafter(script, branching(n), accuracy=accuracy, vocab_size=model.config.vocab_size)
            methods[f"{name}, trees of {n}"] = _method(model, Speculator(drafter, adaptive=False), prompt)
    return methods


def _row(name: str, seconds: dict[str, list[float]], stats: Any, max_new_tokens: int) -> dict[str, Any]:
    def speedup(baseline: str) -> float:
        pairs = zip(seconds[f"{baseline}, plain"], seconds[name], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    return {
        "method": name,
        "tokens_per_second": max_new_tokens / statistics.median(seconds[name]),
        "speedup": speedup(DENSE),
        "of_packed_plain": speedup(PACKED),
        "of_llama_cpp": speedup(LLAMA_CPP) if f"{LLAMA_CPP}, plain" in seconds else None,
        "mean_acceptance_length": stats.mean_acceptance_length if stats else None,
    }
