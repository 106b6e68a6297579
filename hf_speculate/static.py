"""Scoring trees with static shapes, so that `torch.compile` can capture the target's forward as one graph.

A graph is for one number of nodes, one capacity of the cache and one batch size. Trees are padded to the next of few
numbers of nodes, the cache's buffers have the next power of two of entries, and everything that a shape must not tell
(how long rows are, where nodes are written) comes in as tensors. So text may grow, trees may change and requests may
come and go without another compilation. The plain reference is `Scorer`, which also serves what has no graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from .attention import fold
from .drafter import RAW_LAST
from .layers import PreallocatedLayer
from .scoring import Scorer, has_length_dependent_rope
from .tree import DraftTree


logger = logging.get_logger(__name__)

NODE_BUCKETS = (1, 8, 16, 32, 64, 128)
MIN_CAPACITY = 512
# Of one model. Every graph takes seconds to minutes to compile; what would need more runs uncompiled.
MAX_GRAPHS = 8


class StaticLayer(CacheLayerMixin):
    """One layer's buffers during a captured forward: entries are written at given slots, all of them are shown.

    Args:
        keys, values: `[B, heads, capacity, head_dim]`, written in place.
        slots: int64 [N], where the forward's entries go; shared by all layers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self._buffers, self.slots = (keys, values), slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a static layer is made with its buffers")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._buffers
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return self._buffers[0].shape[2] - self.slots.shape[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffers[0].shape[2], 0

    def get_max_length(self) -> int:
        return self._buffers[0].shape[2]


def _forward(model: Any, cache: Cache, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Any]:
    output = model(**inputs, past_key_values=cache, use_cache=True, return_dict=True, **options)
    return output.logits, output.hidden_states


@dataclass
class Graphs:
    """The compiled forwards of one model, by batch size, nodes, capacity and what else they depend on.

    Attributes:
        by_key: None where compiling failed.
    """

    backend: str
    by_key: dict[Any, Callable[..., Any] | None] = field(default_factory=dict)

    def get(self, key: Any) -> tuple[Callable[..., Any] | None, bool]:
        """The forward for `key`, None if it must run uncompiled; and whether it is new."""
        if key in self.by_key:
            return self.by_key[key], False
        if len(self.by_key) >= MAX_GRAPHS:
            return None, False
        # Dynamo counts the graphs of a code object, and refuses the ninth: each of ours gets its own.
        name = f"forward_{len(self.by_key)}"
        own = FunctionType(_forward.__code__.replace(co_name=name), globals(), name)
        self.by_key[key] = torch.compile(own, fullgraph=True, dynamic=False, backend=self.backend)
        return self.by_key[key], True


_graphs: WeakKeyDictionary[PreTrainedModel, dict[str, Graphs]] = WeakKeyDictionary()


def graphs_of(model: PreTrainedModel, backend: str) -> Graphs:
    """What is compiled of `model`; kept as long as the model."""
    return _graphs.setdefault(model, {}).setdefault(backend, Graphs(backend))


def compiled(scorer: Scorer, backend: str, feature_layers: Sequence[int], fallbacks: Counter[str]) -> Scorer:
    """A scorer that does what `scorer` does with compiled forwards; `scorer` itself where that cannot be.

    Args:
        backend: of `torch.compile`.
        feature_layers: of the target, that the drafter taps.
        fallbacks: counts what is not compiled, by reason.
    """
    problem = problem_with_static(scorer)
    if RAW_LAST in feature_layers:
        problem = "the drafter reads the last layer by a hook, which breaks the graph"
    if problem:
        fallbacks[f"not compiled: {problem}"] += 1
        return scorer
    return StaticScorer(scorer, backend, fallbacks)


def problem_with_static(scorer: Scorer) -> str:
    """Why forwards of `scorer` cannot be captured, "" if they can."""
    model, name = scorer.model, type(scorer.model).__name__
    if type(scorer) is not Scorer or scorer.shape != "tree" or scorer.has_windows:
        return f"not every layer of {name} keeps all of the text"
    if not model._can_compile_fullgraph:
        return f"transformers does not compile {name} as one graph"
    if has_length_dependent_rope(model.config):
        return "RoPE that depends on the longest position"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model lies on several devices"
    return ""


class StaticScorer(Scorer):
    """A `Scorer` whose forwards are compiled.

    Args:
        scorer: whose work it does; one that has no `problem_with_static`.
        backend: of `torch.compile`.
        fallbacks: counts the rounds that run uncompiled, by reason.

    Attributes:
        was_compiled: whether the last forward was the first of its graph, and so took very much longer than others.
    """

    def __init__(self, scorer: Scorer, backend: str, fallbacks: Counter[str]):
        self.__dict__.update(vars(scorer))
        self.was_compiled = False
        self._graphs = graphs_of(scorer.model, backend)
        self._fallbacks = fallbacks

    def leave_out(self, finished: Sequence[int]) -> bool:
        """Nobody: another number of rows is another graph."""
        return False

    def __call__(
        self,
        tree: DraftTree,
        root_positions: Sequence[int],
        *,
        num_cached: int = 0,
        forward_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options, self.was_compiled = {**self._forward_kwargs, **(forward_kwargs or {})}, False
        problem = self._problem(tree, num_cached, options)
        if not problem:
            # In one grad mode, whatever the caller's: it is a part of what a graph is compiled for.
            with torch.inference_mode(False), torch.no_grad():
                output = self._captured(tree, root_positions, options)
            if output is not None:
                return output
            problem = f"more than {MAX_GRAPHS} graphs, or one that did not compile"
        self._fallbacks[f"not compiled: {problem}"] += 1
        return super().__call__(tree, root_positions, num_cached=num_cached, forward_kwargs=forward_kwargs)

    def _problem(self, tree: DraftTree, num_cached: int, options: Mapping[str, Any]) -> str:
        if num_cached or tree.num_nodes > NODE_BUCKETS[-1]:
            return f"a tree of more than {NODE_BUCKETS[-1]} nodes, or a part of one"
        if any(name != "output_hidden_states" or value is True for name, value in options.items()):
            return f"arguments {sorted(options)}"
        layers = self._layers
        if not all(type(layer) is PreallocatedLayer and layer.is_initialized for layer in layers):
            return "layers that hold nothing"
        return "" if all(layer.device == self.device for layer in layers) else "a cache on several devices"

    def _captured(self, tree: DraftTree, root_positions: Sequence[int], options: dict[str, Any]) -> Any:
        num_nodes, num_prefix = tree.num_nodes, self.cache.append_index
        width = next(bucket for bucket in NODE_BUCKETS if bucket >= num_nodes)
        capacity = capacity_for(num_prefix + width)
        key = (tree.batch_size, width, capacity, self._attention_dtype, self.attention.form, repr(options))
        forward, self.was_compiled = self._graphs.get(key)
        if forward is None:
            return None
        inputs = self._inputs(tree, root_positions, width, capacity)
        slots = torch.arange(num_prefix, num_prefix + width, device=self.device)
        cache = Cache(layers=[StaticLayer(*_buffers(layer, capacity), slots) for layer in self._layers])
        try:
            logits, states = forward(self.model, cache, inputs, options)
        except TorchDynamoException as error:
            if not self.was_compiled:
                raise
            self._graphs.by_key[key] = None
            first_line = str(error).strip().splitlines()[0]
            logger.warning(f"{type(self.model).__name__} runs uncompiled, torch.compile failed: {first_line}")
            return None
        for layer in self._layers:
            layer.length = num_prefix + num_nodes
        if states is not None:
            states: Any = tuple(None if state is None else state[:, :num_nodes] for state in states)
        return CausalLMOutputWithPast(
            logits=logits[:, :num_nodes], past_key_values=self.cache.cache, hidden_states=states
        )

    @property
    def _layers(self) -> list[Any]:
        return self.cache.cache.layers

    def _inputs(self, tree: DraftTree, root_positions: Sequence[int], width: int, capacity: int) -> dict[str, Tensor]:
        """Tensors of static shape. Padding nodes are copies of the root: what they write is as finite as its entry."""
        missing = width - tree.num_nodes
        depths = functional.pad(tree.plan.depths, (0, missing)).to(self.device)
        positions = torch.tensor(root_positions, device=self.device)[:, None] + depths
        tokens = tree.token_ids.to(self.device)
        return {
            "input_ids": torch.cat([tokens, tokens[:, :1].expand(-1, missing)], dim=1),
            "position_ids": positions,
            "attention_mask": self._static_mask(tree, width, capacity),
        }

    def _static_mask(self, tree: DraftTree, width: int, capacity: int) -> Tensor:
        """Additive [B, 1, width, capacity], folded where that is the form of the model's attention."""
        num_nodes, seen, dtype = tree.num_nodes, self.cache.append_index + tree.num_nodes, self._attention_dtype
        mask = torch.full(
            (tree.batch_size, 1, width, capacity), torch.finfo(dtype).min, dtype=dtype, device=self.device
        )
        found = self.mask(tree)
        assert not isinstance(found, dict)
        mask[:, :, :num_nodes, :seen] = 0 if found is None else found
        mask[:, :, num_nodes:] = mask[:, :, :1]
        return mask if self.attention.form == "stock" else fold(mask, self.attention.groups)


def capacity_for(length: int) -> int:
    """The least capacity for so many entries: a power of two."""
    return max(MIN_CAPACITY, 1 << (length - 1).bit_length())


def _buffers(layer: PreallocatedLayer, capacity: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer in buffers of exactly `capacity`; they replace its own, which grow by other steps."""
    for name, buffer in layer._buffers.items():
        if buffer.shape[2] != capacity or not buffer.is_contiguous() or buffer.is_inference():
            # Zeros: an entry that no row sees has the weight 0, and 0 x NaN is not 0.
            grown = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
            grown[:, :, : layer.length] = buffer[:, :, : layer.length]
            layer._buffers[name] = grown
    layer._is_owned = True
    return layer._buffers["keys"], layer._buffers["values"]
