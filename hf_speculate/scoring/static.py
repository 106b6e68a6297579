"""Scoring of trees with static shapes, so that `torch.compile` can capture the target's forward as one graph.

A graph is for one number of nodes, one cache capacity and one batch size. Trees are padded to the next of a few sizes,
and cache buffers have a power of two of entries. What may not be part of a shape, such as row lengths and slots of
nodes, comes in as tensors with fixed addresses (`buffers`). So texts may grow, and trees and requests may change,
without another compilation. The plain reference is `Scorer`, which also runs what has no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache import PreallocatedLayer, as_cache
from ..compilation import Compiler, capacity_for, lease_of, padded, padded_mask, pool_of
from ..transfers import to_device
from ..tree import DraftTree
from .attention import fold
from .positions import has_length_dependent_rope
from .scoring import Forward, Nodes, Scorer


NODE_BUCKETS = (1, 8, 16, 32, 64, 128)


def width_for(num_nodes: int) -> int:
    """The smallest bucket for `num_nodes` nodes."""
    return _widths(num_nodes)[0]


def _widths(num_nodes: int) -> list[int]:
    """The smallest bucket for `num_nodes` nodes and the next one, which also works if it is already compiled."""
    return [bucket for bucket in NODE_BUCKETS if bucket >= num_nodes][:2]


def _forward(model: Any, cache: Cache, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Any]:
    output = model(**inputs, **as_cache(cache), use_cache=True, return_dict=True, **options)
    return output.logits, output.hidden_states


def compiled(scorer: Scorer, compiler: Compiler, *, has_taps: bool, is_private: bool) -> Scorer:
    """The scorer, changed to compile its forwards where possible.

    Args:
        compiler: compiler of the request.
        has_taps: whether the drafter reads a layer through a hook.
        is_private: whether only this request sees its cache, so that buffers of earlier requests can be used.
    """
    if has_native_layers(scorer.model):
        return scorer
    problem = problem_with_static(scorer)
    if has_taps:
        problem = "the drafter reads the last layer by a hook, which breaks the graph"
    if problem:
        compiler.refuse(problem)
        return scorer
    scorer.forward = StaticForward(scorer, compiler, is_private)
    return scorer


def has_native_layers(model: Any) -> bool:
    """Whether a kernel computes the layers (`native.fused`). Modules in a graph are slower and round differently."""
    layers = getattr(model.get_decoder(), "layers", ())
    return any(getattr(layer.__dict__.get("forward"), "is_native", False) for layer in layers)


def problem_with_static(scorer: Scorer) -> str:
    """The reason why forwards of `scorer` cannot be captured; "" if they can."""
    model, name = scorer.model, type(scorer.model).__name__
    if type(scorer.forward) is not Forward or scorer.shape != "tree" or scorer.has_windows:
        return f"not every layer of {name} keeps all of the text"
    if not model._can_compile_fullgraph:
        return f"transformers does not compile {name} as one graph"
    if has_length_dependent_rope(model.config):
        return "RoPE that depends on the longest position"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model lies on several devices"
    return ""


class StaticForward(Forward):
    """A compiled forward.

    Args:
        scorer: scorer whose inputs it runs. `problem_with_static` must be "" for it.
        compiler: compiler of the request.
        is_private: whether only this request sees the cache (`compiled`).
    """

    can_leave_rows_out = False  # another number of rows is another graph

    def __init__(self, scorer: Scorer, compiler: Compiler, is_private: bool):
        self._compiler = compiler
        self._pool = pool_of(scorer.model) if is_private else None
        lease_of(scorer.cache.cache, self._pool)

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        tree, cache = nodes.tree, scorer.cache
        options = {**scorer.forward_kwargs, **nodes.forward_kwargs}
        if problem := self._problem(scorer, nodes, options):
            self._compiler.refuse(problem)
            return super().run(scorer, nodes)
        num_nodes, num_prefix = tree.num_nodes, cache.append_index
        form = scorer.attention_dtype, scorer.attention.form, repr(options)
        reserved = max(layer.reserved for layer in _layers(scorer))
        keys = [
            (tree.batch_size, width, capacity_for(max(num_prefix + width, reserved)), *form)
            for width in _widths(num_nodes)
        ]
        key: Any = self._compiler.choose(scorer.model, scorer.device, _forward, keys)
        _, width, capacity = key[:3]

        def inputs() -> tuple[Any, ...]:
            return scorer.model, *self._inputs(scorer, nodes, width, capacity), options

        def plain() -> Any:
            return Forward.run(self, scorer, nodes)

        output = self._compiler.run(scorer.model, scorer.device, key, _forward, inputs, plain)
        if not isinstance(output, tuple):
            return output
        logits, states = output
        for layer in _layers(scorer):
            layer.length = num_prefix + num_nodes
        if states is not None:
            states: Any = tuple(None if state is None else state[:, :num_nodes] for state in states)
        return CausalLMOutputWithPast(logits=logits[:, :num_nodes], **as_cache(cache.cache), hidden_states=states)

    def settle(self, scorer: Scorer) -> None:
        """Releases the buffers: plain `generate` makes its own when the cache grows."""
        for layer in _layers(scorer):
            layer.allocate = None

    def _problem(self, scorer: Scorer, nodes: Nodes, options: Mapping[str, Any]) -> str:
        if scorer.token_kwargs:
            return f"arguments {sorted(scorer.token_kwargs)}"
        if nodes.num_cached or nodes.tree.num_nodes > NODE_BUCKETS[-1]:
            return f"a tree of more than {NODE_BUCKETS[-1]} nodes, or a part of one"
        if any(name != "output_hidden_states" or value is True for name, value in options.items()):
            return f"arguments {sorted(options)}"
        layers = _layers(scorer)
        if not all(type(layer) is PreallocatedLayer and layer.is_initialized for layer in layers):
            return "layers that hold nothing"
        return "" if all(layer.device == scorer.device for layer in layers) else "a cache on several devices"

    def _inputs(self, scorer: Scorer, nodes: Nodes, width: int, capacity: int) -> tuple[Cache, dict[str, Tensor]]:
        """The inputs as tensors of static shape.

        Padding nodes are copies of the root, so the entries that they write are finite if the root's is.
        """
        tree, device, attention = nodes.tree, scorer.device, scorer.attention
        mask = _static_mask(scorer, tree, width, capacity)
        lease = lease_of(scorer.cache.cache, self._pool)
        layers = lease.place(_layers(scorer), capacity)
        buffers = lease.buffers(tree.batch_size, capacity)
        first = scorer.cache.append_index
        slots = buffers.filled(("slots", width), torch.arange(first, first + width, device=device))
        depths = padded(to_device(tree.plan.depths, device), width)
        inputs = {
            "input_ids": padded(to_device(tree.token_ids, device), width),
            "position_ids": to_device(nodes.root_positions, device)[:, None] + depths,
            "attention_mask": mask if attention.form == "stock" else fold(mask, attention.groups),
        }
        inputs = {name: buffers.filled((name, width), values) for name, values in inputs.items()}
        return buffers.cache(layers, slots), inputs


def _layers(scorer: Scorer) -> list[Any]:
    return scorer.cache.cache.layers


def _static_mask(scorer: Scorer, tree: DraftTree, width: int, capacity: int) -> Tensor:
    """The additive mask [B, 1, width, capacity]."""
    found, num_seen = scorer.mask(tree), scorer.cache.append_index + tree.num_nodes
    assert not isinstance(found, dict)
    like = torch.empty(tree.batch_size, tree.num_nodes, dtype=scorer.attention_dtype, device=scorer.device)
    return padded_mask(found, like, num_seen, width, capacity)
