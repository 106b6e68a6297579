"""Decoder layers of packed models in native calls, one each: for those whose model is not computed whole (`forwards`).

The layers stay transformers' own: only their `forward` asks first whether the kernel computes the same as the modules.
It does not where somebody looks into a layer or has changed it (hooks, adapters, devices, gradients, autocast, outputs
of attentions, graphs), nor for caches and masks that it does not know, nor for more rows than it takes. Then the
modules run; they are the plain reference of the kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..cache import CACHE_NAME
from ..scoring import grouped_sdpa
from .layer_parts import parts_of
from .layers import NativeLayers
from .rows import new_rows, served


def fuse_layers(decoder: Any) -> list[FusedForward]:
    """Lets the kernel compute those layers of a packed Llama or Qwen2 that it can; their new forwards."""
    forwards = [FusedForward(layer) for layer in decoder.layers if parts_of(layer) is not None]
    for forward in forwards:
        forward.layer.forward = forward
    return forwards


@dataclass
class _Arguments:
    """The inputs of a layer; names are those of `LlamaDecoderLayer.forward`."""

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
        layer: one that has `parts_of`.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        self._loaded: _LoadedLayer | None = _LoadedLayer(layer)

    def __getstate__(self):
        """The state of a copy, which finds its own weights: the modules compute where it is one of a layer that was
        changed."""
        return {"layer": self.layer, "_loaded": None}

    def __call__(self, hidden_states: Tensor, *positional: Any, **named: Any) -> Tensor:
        """See `LlamaDecoderLayer.forward`."""
        if not positional and not torch.compiler.is_compiling():
            output = self._computed(_Arguments.of(hidden_states, **named))
            if output is not None:
                return output
        return type(self.layer).forward(self.layer, hidden_states, *positional, **named)

    @property
    def is_native(self) -> bool:
        """Whether the layer is as it was loaded, so that the kernel serves whom it can."""
        return self._loaded is not None and self._loaded.is_untouched()

    def _computed(self, arguments: _Arguments) -> Tensor | None:
        if self._loaded is None and parts_of(self.layer) is not None:
            self._loaded = _LoadedLayer(self.layer)
        return None if self._loaded is None else self._loaded.run(arguments)


class _LoadedLayer:
    """A layer, and how it was when it was loaded."""

    def __init__(self, layer: Any):
        self._layer = layer
        self._before = Snapshot([module for module in layer.modules() if module is not layer], [layer])
        self._native: NativeLayers | None = None

    def run(self, arguments: _Arguments) -> Tensor | None:
        """[B, N, H]; None, and nothing done, where the modules are to compute it."""
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
        rows = new_rows(layers, inputs, cache, attention.layer_idx, arguments.attention_mask)
        return None if rows is None else rows.run(inputs, (cos, sin))[0]

    def _current_layers(self) -> NativeLayers | None:
        """Made anew where weights were exchanged or have moved; None if the kernel does not compute them now."""
        if self._native is None or not self._native.is_current():
            self._native = NativeLayers.of([parts_of(self._layer)])
        return self._native

    def is_untouched(self) -> bool:
        """Whether the modules are those that were loaded, and nobody watches them."""
        return not self._layer.training and self._before.holds()


class Snapshot:
    """The state of modules when they were loaded: who changes or watches them changes this.

    Args:
        modules: that nobody may watch.
        parents: of whom only the children count.
    """

    def __init__(self, modules: Sequence[nn.Module], parents: Sequence[nn.Module] = ()):
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [module.__dict__ for module in modules]
        self._children = [module._modules for module in (*modules, *parents) if module._modules]
        self._children_before = [dict(children) for children in self._children]

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            (not any(self._hooks) or _sleep(filter(None, self._hooks)))
            and not any(map(operator.contains, self._attributes, repeat("forward")))
            and self._children == self._children_before
            and not torch_modules._global_forward_hooks
            and not torch_modules._global_forward_pre_hooks
        )


def is_stock_attention(config: Any) -> bool:
    """Whether attentions are to compute what the kernel does."""
    attention = config._attn_implementation
    if attention == "sdpa":
        return ALL_ATTENTION_FUNCTIONS["sdpa"] in (grouped_sdpa, sdpa_attention_forward)
    return attention == "eager"


def only_stock_is_asked(others: dict[str, Any]) -> bool:
    """Whether further arguments, which attentions are handed, ask for nothing that the kernel does not do."""
    return not others.get("output_attentions") and "is_causal" not in others


def _sleep(hooks: Iterable[dict[int, Any]]) -> bool:
    """Whether hooks of modules are transformers' own for attentions, and none is collected.

    They stay on a model for ever once it was asked for any outputs.
    """
    collected = output_capturing._active_collector.get()
    if collected is not None and "attentions" in collected:
        return False
    return all(is_captor(hook) for of_module in hooks for hook in of_module.values())


def is_captor(hook: Any) -> bool:
    """Whether a hook is one with which transformers collects outputs."""
    return getattr(hook, "__module__", None) == output_capturing.__name__
