"""Attention over draft trees: stock sdpa with the full mask beside the forms that do not repeat KV heads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention import TreeAttention, fold, grouped_sdpa
from ..cache import TreeCache
from ..commands.environment import environment, find_device, find_dtype
from ..commands.grid import Grid
from ..commands.shapes import ModelShape, find_shape
from ..commands.timing import progress, timed
from ..errors import SpeculateError
from ..models import GenerativeModel
from ..scoring import Scorer
from ..tree import DraftTree


CONTEXTS = (256, 1024, 2048, 4096, 8192, 16384)
NODES = (1, 8, 16, 32, 64)
FORMS = ("stock", "folded", "split")

# Of wall clock, for the runs of one form at one place: long contexts get fewer.
_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """What is measured.

    Attributes:
        shape: name of a model shape; its heads are what one layer's attention is measured with.
        contexts: committed entries.
        nodes: of the tree, root included.
        dtype: of queries, keys and values.
        forward_layers: layers of the model whose whole forward is measured too; 0: none, None: all of the shape's.
        repeats: at most so many runs of each form; medians count.
        device: None for the accelerator if there is one.
    """

    shape: str = "0.5B"
    contexts: Sequence[int] = CONTEXTS
    nodes: Sequence[int] = NODES
    dtype: str = "bfloat16"
    forward_layers: int | None = None
    repeats: int = 9
    device: str | None = None


def bench_attention(settings: AttentionSettings) -> dict[str, Any]:
    """Milliseconds of one layer's attention, and of a whole forward over a tree, in every form.

    A tree of one node over a whole prefix has no mask; it is what plain decoding runs.

    Returns:
        JSON-serialisable. Of each context and tree: `layer_ms`, `forward_ms` (with `forward_layers`) by form, and
        `layer_error`, the largest difference of an output from stock's in fp64. `chosen` is the form that the library
        takes on this device by itself.
    """
    shape, device, dtype = find_shape(settings.shape), find_device(settings.device), find_dtype(settings.dtype)
    if min(*settings.contexts, *settings.nodes, settings.repeats) < 1:
        raise SpeculateError(
            f"bench attention needs contexts, nodes and repeats of at least 1; got {list(settings.contexts)}, "
            f"{list(settings.nodes)} and {settings.repeats}."
        )
    places = [(context, nodes) for context in sorted(settings.contexts) for nodes in sorted(settings.nodes)]
    rows: list[dict[str, Any]] = []
    with progress("attention", total=len(places)) as advance, torch.inference_mode():
        probe = shape.with_layers(1).build(dtype, device) if settings.forward_layers == 0 else None
        model = probe or shape.with_layers(settings.forward_layers).build(dtype, device)
        chosen = TreeAttention(model, device).form
        for context, nodes in places:
            row: dict[str, Any] = {"context": context, "nodes": nodes}
            row |= _layer_times(shape, dtype, device, context, nodes, settings.repeats)
            if probe is None:
                row["forward_ms"] = _forward_times(model, shape, context, nodes, settings.repeats)
            rows.append(row)
            advance(f"context {context}, {nodes} nodes")
    return {
        "bench": "attention",
        "shape": {"name": settings.shape, **asdict(shape)},
        "dtype": settings.dtype,
        "forward_layers": 0 if probe else model.config.num_hidden_layers,
        "repeats": settings.repeats,
        "chosen": chosen,
        "rows": rows,
        "environment": environment(device),
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """One row for each context and tree."""
    shape, rows, has_forward = result["shape"], [], result["forward_layers"] > 0
    for row in result["rows"]:
        cells = [f"{row['context']}", f"{row['nodes']}"]
        for times in [row["layer_ms"], *([row["forward_ms"]] if has_forward else [])]:
            cells += [f"{times[form]:.2f}" for form in FORMS]
            cells += [f"{times['stock'] / times[form]:.2f}x" for form in FORMS[1:]]
        rows.append(cells)
    measured = ["layer", *(["forward"] if has_forward else [])]
    contexts = [row["context"] for row in result["rows"]]
    return [
        Grid(
            title=f"Attention over a tree, {shape['num_attention_heads']} heads over {shape['num_key_value_heads']} KV "
            f"heads, {result['dtype']}: milliseconds of one layer's attention"
            + (f" and of a forward of {result['forward_layers']} layers" if has_forward else ""),
            columns=[
                "context",
                "nodes",
                *(
                    column
                    for what in measured
                    for column in (*(f"{what}\n{form}" for form in FORMS), "stock /\nfolded", "stock /\nsplit")
                ),
            ],
            rows=rows,
            breaks=[index for index in range(1, len(contexts)) if contexts[index] != contexts[index - 1]],
            caption=f"Taken on this device: {result['chosen']} (HF_SPECULATE_ATTENTION names another).",
        )
    ]


def _layer_times(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, context: int, nodes: int, repeats: int
) -> dict[str, Any]:
    groups = shape.num_attention_heads // shape.num_key_value_heads
    module = nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]
    query = torch.randn(1, nodes, shape.num_attention_heads, shape.head_dim, device=device).to(dtype).transpose(1, 2)
    size = (1, shape.num_key_value_heads, context + nodes, shape.head_dim)
    key, value = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    mask = _mask(_tree(nodes), context, dtype, device)
    masks: dict[str, Tensor | None] = dict.fromkeys(FORMS)
    if nodes > 1:
        masks = {"stock": mask, "folded": fold(mask, groups), "split": fold(mask, groups, nodes)}
    else:
        masks["folded"] = TreeAttention.without_mask(groups, device)
    options = {"scaling": shape.head_dim**-0.5, "is_causal": False}

    def attend(form: str) -> Tensor:
        return grouped_sdpa(module, query, key, value, masks[form], **options)[0]

    full = None if masks["stock"] is None else mask.double()
    expected = sdpa_attention_forward(module, query.double(), key.double(), value.double(), full, **options)[0]
    errors = {form: (attend(form) - expected).abs().max().item() for form in FORMS}
    del expected
    times = _medians({form: lambda form=form: attend(form) for form in FORMS}, device, repeats)
    return {"layer_ms": times, "layer_error": errors}


def _forward_times(
    model: GenerativeModel, shape: ModelShape, context: int, nodes: int, repeats: int
) -> dict[str, float]:
    """Whole forwards as the decoding loop runs them: positions, mask and logits included."""
    cache, device = TreeCache(DynamicCache(), batch_size=1), model.device
    size = (1, shape.num_key_value_heads, context, shape.head_dim)
    for index in range(model.config.num_hidden_layers):
        keys, values = (torch.randn(size, device=device).to(model.dtype) for _ in range(2))
        cache.cache.update(keys, values, index)
    cache.commit_appended()
    tree, calls = _tree(nodes), {}
    for form in FORMS:
        scorer = Scorer(model, cache)
        scorer.attention.form = form if scorer.attention.groups > 1 else "stock"
        calls[form] = lambda scorer=scorer: (cache.restore(), scorer(tree, (context,)))
    return _medians(calls, device, repeats)


def _medians(calls: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds of each; in turn, so that drift of the machine hits all alike."""
    first = {name: timed(call, device)[0] for name, call in calls.items()}  # warm-up
    count = max(3, min(repeats, int(_SECONDS / max(first.values()))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            call()  # the form before it leaves other memory behind
            times[name].append(timed(call, device)[0] * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def _tree(nodes: int) -> DraftTree:
    """Binary, so that there is something to mask."""
    return DraftTree(torch.arange(3, 3 + nodes)[None], [(node - 1) // 2 if node else -1 for node in range(nodes)])


def _mask(tree: DraftTree, context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(1, 1, tree.num_nodes, context + tree.num_nodes, dtype=dtype, device=device)
    mask[..., context:] = tree.plan.bias(dtype, device)
    return mask
