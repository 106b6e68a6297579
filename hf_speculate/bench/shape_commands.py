"""The sub-commands of `hf-speculate bench` that need no trained weights."""

from __future__ import annotations

from typing import Annotated

import typer

from ..commands.reporting import (
    Device,
    JsonOnly,
    Layers,
    Markdown,
    Out,
    Quick,
    Rates,
    Repeats,
    Shape,
    Threads,
    prepare,
    report,
)
from ..commands.shapes import SHAPES, ModelShape, find_shape
from . import attention, cache, context, overhead
from .attention import CONTEXTS, NODES, AttentionSettings, bench_attention
from .cache import bench_cache
from .context import ContextSettings, bench_context
from .gguf import bench_gguf_command
from .overhead import bench_overhead
from .profiles import DEFAULT_RATES, read_profile


_OVERHEAD_EXAMPLES = """
Examples:

  hf-speculate bench overhead --threads 2

  hf-speculate bench overhead --nodes 8 --nodes 64 --accuracy 0.8 --dtype float32

  hf-speculate bench overhead --layers 2 --vocab 4000
"""

_CACHE_EXAMPLES = """
Examples:

  hf-speculate bench cache

  hf-speculate bench cache --lengths 256 --lengths 32768 --json
"""


_CONTEXT_EXAMPLES = """
Examples:

  hf-speculate bench context --threads 2

  hf-speculate bench context --contexts 256 --contexts 4096 --nodes 32 --acceptance 0.8,0.6,0.5,0.4

  hf-speculate bench context --shape 8B --layers 4 --acceptance measured.json@pycoder-eagle3
"""


_GGUF_EXAMPLES = """
Examples:

  hf-speculate bench gguf --threads 1

  hf-speculate bench gguf model-Q4_K_M.gguf --nodes 4 --nodes 16

  hf-speculate bench gguf --type Q4_K_M --quick
"""


_ATTENTION_EXAMPLES = """
Examples:

  hf-speculate bench attention --threads 2

  hf-speculate bench attention --shape 8B --layers 0

  hf-speculate bench attention --contexts 4096 --nodes 64 --dtype float32
"""


def add_shape_commands(app: typer.Typer) -> None:
    """Adds them to the app."""
    app.command("overhead", epilog=_OVERHEAD_EXAMPLES)(bench_overhead_command)
    app.command("context", epilog=_CONTEXT_EXAMPLES)(bench_context_command)
    app.command("attention", epilog=_ATTENTION_EXAMPLES)(bench_attention_command)
    app.command("cache", epilog=_CACHE_EXAMPLES)(bench_cache_command)
    app.command("gguf", epilog=_GGUF_EXAMPLES)(bench_gguf_command)


def bench_overhead_command(
    nodes: Annotated[list[int] | None, typer.Option(min=2, help="Tree sizes (default: 8, 16, 32).")] = None,
    accuracy: Annotated[float, typer.Option(min=0, max=1, help="Of the scripted drafter, a level.")] = 0.7,
    shape: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(SHAPES)}, instead of --hidden and --vocab.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Default: the shape's; 24.")] = None,
    hidden: Annotated[int, typer.Option(help="Hidden size; heads have 64 channels.", min=128)] = 896,
    vocab: Annotated[int, typer.Option(min=64)] = 151936,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "bfloat16",
    context: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 256,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Default: 96.")] = None,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """Where the time of a round goes, by default at Qwen2-0.5B shape, with random weights and a scripted drafter."""
    prepare(threads)
    scaled = ModelShape.scaled(hidden_size=hidden, num_hidden_layers=layers or 24, vocab_size=vocab)
    result = bench_overhead(
        nodes or (8, 16, 32),
        shape=scaled if shape is None else find_shape(shape).with_layers(layers),
        dtype=dtype,
        accuracy=accuracy,
        prompt_length=context,
        max_new_tokens=max_new_tokens or (32 if quick else 96),
        repeats=repeats or (1 if quick else 3),
        device=device,
    )
    report(result, overhead.tables(result), json_only=json_only, markdown=markdown, out=out)


def bench_cache_command(
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Context lengths (default: 256, 1024, 4096, 16384).")
    ] = None,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """Cost of append and keep over the context length, beside stock DynamicCache."""
    prepare(threads)
    result = bench_cache(
        lengths or (256, 1024, 4096, 16384),
        repeats=repeats or (5 if quick else 30),
        device=device,
    )
    report(result, cache.tables(result), json_only=json_only, markdown=markdown, out=out)


def bench_attention_command(
    contexts: Annotated[
        list[int] | None, typer.Option(min=1, help="Cache entries (default: 256, 1024, 2048, 4096, 8192, 16384).")
    ] = None,
    nodes: Annotated[list[int] | None, typer.Option(min=1, help="Of the tree (default: 1, 8, 16, 32, 64).")] = None,
    shape: Shape = "0.5B",
    layers: Annotated[
        int | None, typer.Option(min=0, help="Of the model whose forward is timed (default: all; 0: no forward).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "bfloat16",
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """Attention over a tree behind a long prefix: stock sdpa beside the forms that do not repeat KV heads."""
    prepare(threads)
    settings = AttentionSettings(
        shape=shape,
        contexts=contexts or (CONTEXTS[:3] if quick else CONTEXTS),
        nodes=nodes or ((1, 16, 64) if quick else NODES),
        dtype=dtype,
        forward_layers=layers,
        repeats=repeats or (3 if quick else 9),
        device=device,
    )
    result = bench_attention(settings)
    report(result, attention.tables(result), json_only=json_only, markdown=markdown, out=out)


def bench_context_command(
    contexts: Annotated[
        list[int] | None, typer.Option(min=1, help="Cache entries (default: 256, 2048, 8192, 16384).")
    ] = None,
    shape: Shape = "0.5B",
    layers: Layers = None,
    acceptance: Rates = None,
    nodes: Annotated[int, typer.Option(min=1, help="Of the fixed tree; the automatic one may draft fewer.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "bfloat16",
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Default: 48.")] = None,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """Speed over plain decoding as the context grows: automatic trees beside a fixed one, synthetic acceptance."""
    prepare(threads)
    settings = ContextSettings(
        contexts=contexts or (256, 2048, 8192, 16384),
        shape=shape,
        layers=layers,
        profile=read_profile(acceptance or DEFAULT_RATES, nodes),
        dtype=dtype,
        max_new_tokens=max_new_tokens or (24 if quick else 48),
        repeats=repeats or (1 if quick else 3),
        device=device,
    )
    result = bench_context(settings)
    report(result, context.tables(result), json_only=json_only, markdown=markdown, out=out)
