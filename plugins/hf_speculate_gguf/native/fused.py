"""Decoder layers of packed models in one native call each, for models that are not computed whole (`forwards`).

The layers stay transformers' own. Only their `forward` first checks whether the kernel computes the same as the
modules. It does not if a layer is watched or was changed (hooks, adapters, devices, gradients, autocast, attention
outputs, graphs). Nor does it for unknown caches or masks, or too many rows. Then the modules run; they are the plain
reference of the kernel. PEFT's layers do not count while they only pass results on (`effective_module`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import output_capturing

from hf_speculate.cache import CACHE_NAME
from hf_speculate.scoring import adapter_layers_around, base_module, grouped_sdpa, pass_on

from .layer_parts import parts_of
from .layers import NativeLayers
from .rows import new_rows, served


def fuse_layers(decoder: Any) -> list[FusedForward]:
    """Lets the kernel compute the layers of a packed decoder that it can; returns their new forwards."""
    forwards = [FusedForward(layer) for layer in decoder.layers if parts_of(layer) is not None]
    for forward in forwards:
        forward.layer.forward = forward
    return forwards


@dataclass
class _Arguments:
    """The inputs of a layer, named as in `LlamaDecoderLayer.forward`."""

    hidden_states: Tensor
    attention_mask: Tensor | None
    cache: Cache | None
    position_embeddings: tuple[Tensor, Tensor] | None
    others: dict[str, Any]

    @classmethod
    def of(cls, hidden_states: Tensor, **named: Any) -> _Arguments:
        known = [named.pop(name, None) for name in ("attention_mask", CACHE_NAME, "position_embeddings")]
        return cls(hidden_states, *known, others=named)


class FusedForward:
    """The `forward` of one layer.

    Args:
        layer: decoder layer that has `parts_of`.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        self._loaded: _LoadedLayer | None = _LoadedLayer(layer)

    def __getstate__(self):
        """The state of a copy, which collects its own weights. If the copied layer was changed, its modules compute."""
        return {"layer": self.layer, "_loaded": None}

    def __call__(self, hidden_states: Tensor, *positional: Any, **named: Any) -> Tensor:
        """Runs the layer natively if possible; see `LlamaDecoderLayer.forward`."""
        if not positional and not torch.compiler.is_compiling():
            output = self._computed(_Arguments.of(hidden_states, **named))
            if output is not None:
                return output
        return type(self.layer).forward(self.layer, hidden_states, *positional, **named)

    @property
    def is_native(self) -> bool:
        """Whether the kernel computes the layer: it is as loaded, and its attention is stock's."""
        loaded = self._loaded
        return loaded is not None and loaded.is_untouched() and is_stock_attention(self.layer.self_attn.config)

    def _computed(self, arguments: _Arguments) -> Tensor | None:
        if self._loaded is None and parts_of(self.layer) is not None:
            self._loaded = _LoadedLayer(self.layer)
        return None if self._loaded is None else self._loaded.run(arguments)


class _LoadedLayer:
    """A layer, and its state when it was loaded."""

    def __init__(self, layer: Any):
        self._layer = layer
        self._before = Snapshot(base_modules(layer), [layer])
        self._native: NativeLayers | None = None

    def run(self, arguments: _Arguments) -> Tensor | None:
        """The output [B, N, H]; None if the modules must compute it. Nothing was changed then."""
        inputs, cache, rotary = arguments.hidden_states, arguments.cache, arguments.position_embeddings
        if cache is None or rotary is None or not (served(inputs) and self.is_untouched()):
            return None
        attention = self._layer.self_attn
        if not (is_stock_attention(attention.config) and only_stock_is_asked(arguments.others)):
            return None
        layers = self._current_layers()
        cos, sin = (states.contiguous() for states in rotary)
        if layers is None or not cos.dtype is sin.dtype is inputs.dtype:
            return None
        # Embeddings of another width, and positions of another number of rows, are the modules' to judge: the kernel
        # would read what is not there.
        (batch_size, num_queries, width), (_, head_dim) = inputs.shape, layers.heads
        angles = [(rows, num_queries, head_dim) for rows in (1, batch_size)]
        if width != layers.width or cos.shape != sin.shape or cos.shape not in angles:
            return None
        rows = new_rows(layers, inputs, cache, attention.layer_idx, arguments.attention_mask)
        return None if rows is None else rows.run(inputs, (cos, sin))[0]

    def _current_layers(self) -> NativeLayers | None:
        """The weights, collected again if they were replaced or moved; None if the kernel cannot compute them now."""
        if self._native is None or not self._native.is_current():
            self._native = NativeLayers.of([parts_of(self._layer)])
        return self._native

    def is_untouched(self) -> bool:
        """Whether the modules are those that were loaded, and are not watched."""
        return not self._layer.training and self._before.holds()


class Snapshot:
    """The state of modules when they were loaded, to notice changes and hooks.

    Children are noted without PEFT's layers around them, whose effect may change from forward to forward.

    Args:
        modules: modules that must not be watched or changed, without PEFT's layers.
        parents: modules of which only the children must stay the same.
    """

    def __init__(self, modules: Sequence[nn.Module], parents: Sequence[nn.Module] = ()):
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [module.__dict__ for module in modules]
        self._children = [module._modules for module in (*modules, *parents) if module._modules]
        self._children_before = _bases(self._children)
        self._adapted = _NOT_ADAPTED

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return (
            (not any(self._hooks) or _sleep(filter(None, self._hooks)))
            and not any(map(operator.contains, self._attributes, repeat("forward")))
            and self._are_children_the_same()
            and not torch_modules._global_forward_hooks
            and not torch_modules._global_forward_pre_hooks
        )

    def _are_children_the_same(self) -> bool:
        """Whether the children are those before, or in layers of PEFT that only pass results on."""
        if self._children == self._children_before:
            self._adapted = _NOT_ADAPTED  # keeps no adapters alive
            return True
        watched, known, layers = self._adapted
        if not known or watched != known:
            around = [adapter_layers_around(child) for of in self._children for child in of.values()]
            layers = list(chain.from_iterable(around))
            watched = [*self._children, *(layer._modules for layer in layers)]
            layers = layers if _bases(self._children) == self._children_before else None
            self._adapted = watched, [dict(of) for of in watched], layers
        return layers is not None and pass_on(layers)


_Children = list[dict[str, Any]]
_NOT_ADAPTED: tuple[_Children, _Children, list[Any] | None] = [], [], None
"""Children that were looked at, a copy of them, and the layers of PEFT around them; None if other modules changed."""


def _bases(children: Sequence[dict[str, Any]]) -> _Children:
    return [{name: base_module(child) for name, child in of.items()} for of in children]


def base_modules(module: nn.Module) -> list[nn.Module]:
    """All modules below another one, each once, without PEFT's layers."""
    children = [base_module(child) for child in module.children()]
    return list(dict.fromkeys(chain(children, *map(base_modules, children))))


def is_stock_attention(config: Any) -> bool:
    """Whether the configured attention is one that the kernel computes."""
    attention = config._attn_implementation
    if attention == "sdpa":
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] in (grouped_sdpa, sdpa_attention_forward)
    return attention == "eager"


def only_stock_is_asked(others: dict[str, Any]) -> bool:
    """Whether further arguments for attentions need nothing that the kernel cannot do."""
    return not others.get("output_attentions") and "is_causal" not in others


def _sleep(hooks: Iterable[dict[int, Any]]) -> bool:
    """Whether the hooks are transformers' own for attentions, and no attention is being collected.

    They stay on a model for ever after any outputs were asked for.
    """
    collected = output_capturing._active_collector.get()
    if collected is not None and "attentions" in collected:
        return False
    return all(is_captor(hook) for of_module in hooks for hook in of_module.values())


def is_captor(hook: Any) -> bool:
    """Whether a hook is one of transformers' for collecting outputs."""
    return getattr(hook, "__module__", None) == output_capturing.__name__
