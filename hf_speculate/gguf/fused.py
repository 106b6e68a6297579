"""Decoder layers of packed models in native calls: one for all of them where nobody steps in between, else one each.

The layers stay transformers' own: only their `forward` asks first whether the kernel computes the same as the modules,
and so does their list when the decoder walks through it.
It does not where somebody looks into a layer or has changed it (hooks, adapters, devices, gradients, autocast, outputs
of attentions, graphs), nor for caches and masks that it does not know, nor for more rows than it takes. Then the
modules run; they are the plain reference of the kernel.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from ..target import grouped_sdpa
from .decoder_layers import parts_of
from .native_layers import NativeLayers
from .native_rows import new_rows, served


# Whose hooks on a layer only read what it computes: transformers' for hidden states, and the taps of drafters.
_READERS = (output_capturing.__name__, "hf_speculate")


def fuse_layers(decoder: Any) -> int:
    """Lets the kernel compute those layers of a packed Llama or Qwen2 that it can; how many they are."""
    layers = list(decoder.layers)
    forwards = [FusedForward(layer) for layer in layers if parts_of(layer) is not None]
    for forward in forwards:
        forward.layer.forward = forward
    if forwards and len(forwards) == len(layers):
        stack = _Stack(decoder, forwards)
        decoder.layers.__class__ = StackedLayers
        decoder.layers.stack = stack
        decoder.register_forward_pre_hook(_Visit(stack, "enter"))
        decoder.register_forward_hook(_Visit(stack, "leave"), always_call=True)
    return len(forwards)


@dataclass
class _Arguments:
    """What a layer is called with; names are those of `LlamaDecoderLayer.forward`."""

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
        self._span: _Span | None = _Span([layer])

    def __getstate__(self):
        """Of a copy, which finds its own weights: the modules compute where it is one of a layer that was changed."""
        return {"layer": self.layer, "_span": None}

    def __call__(self, hidden_states: Tensor, *positional: Any, **named: Any) -> Tensor:
        """As `LlamaDecoderLayer.forward`."""
        if not positional and not torch.compiler.is_compiling():
            outputs = self._computed(_Arguments.of(hidden_states, **named))
            if outputs is not None:
                return outputs[0]
        return type(self.layer).forward(self.layer, hidden_states, *positional, **named)

    @property
    def is_native(self) -> bool:
        """Whether the layer is as it was loaded, so that the kernel serves whom it can."""
        return self._span is not None and self._span.is_untouched()

    def _computed(self, arguments: _Arguments) -> Tensor | None:
        if self._span is None and parts_of(self.layer) is not None:
            self._span = _Span([self.layer])
        return None if self._span is None else self._span.run(arguments)


class _Span:
    """Consecutive layers, and how they were when they were loaded: who changes or watches them changes this."""

    def __init__(self, layers: Sequence[Any]):
        inner = [module for layer in layers for module in layer.modules() if module is not layer]
        self._layers = layers
        self._hooks = [hooks for module in inner for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [module.__dict__ for module in inner]
        self._children = [module._modules for layer in layers for module in layer.modules() if module._modules]
        self._children_before = [dict(children) for children in self._children]
        self._native: NativeLayers | None = None

    def run(self, arguments: _Arguments) -> Tensor | None:
        """[L, B, N, H]: the outputs of each layer; None, and nothing done, where the modules are to compute them."""
        inputs, cache, rotary = arguments.hidden_states, arguments.cache, arguments.position_embeddings
        if cache is None or rotary is None or not (served(inputs) and self.is_untouched()):
            return None
        attention = self._layers[0].self_attn
        if not _is_stock_attention(attention.config, arguments.others):
            return None
        layers = self._current_layers()
        cos, sin = (states.contiguous() for states in rotary)
        if layers is None or not cos.dtype is sin.dtype is inputs.dtype:
            return None
        rows = new_rows(layers, inputs, cache, attention.layer_idx, arguments.attention_mask)
        return None if rows is None else rows.run(inputs, (cos, sin))

    def _current_layers(self) -> NativeLayers | None:
        """Made anew where weights were exchanged or have moved; None if the kernel does not compute them now."""
        if self._native is None or not self._native.is_current():
            self._native = NativeLayers.of([parts_of(layer) for layer in self._layers])
        return self._native

    def is_untouched(self) -> bool:
        """Whether the modules are those that were loaded, and nobody watches them."""
        return (
            all(map(_sleeps, filter(None, self._hooks)))
            and not any(map(operator.contains, self._attributes, repeat("forward")))
            and self._children == self._children_before
            and not any(layer.training for layer in self._layers)
            and not torch_modules._global_forward_hooks
            and not torch_modules._global_forward_pre_hooks
        )


class StackedLayers(nn.ModuleList):
    """The list of layers that a decoder walks through: to the decoder it may be one step that computes them all."""

    stack: _Stack | None = None

    def __getstate__(self):
        """A copy's layers are computed one by one."""
        return self.__dict__ | {"stack": None}

    def __getitem__(self, index: Any) -> Any:
        stack = None if torch.compiler.is_compiling() else self.stack
        if stack is not None and index == slice(None, len(self)) and stack.is_entered and stack.is_whole:
            return _Walk(stack)
        return super().__getitem__(index)

    def _get_name(self) -> str:
        return "ModuleList"


class _Walk:
    """Through the layers of a stack: all in the first step, or if that cannot be one after the other."""

    def __init__(self, stack: _Stack):
        self._stack = stack
        self._is_done = False

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        yield self._first_step
        if not self._is_done:
            yield from self._stack.layers[1:]

    def _first_step(self, hidden_states: Tensor, **named: Any) -> Tensor:
        outputs = self._stack.outputs(_Arguments.of(hidden_states, **named))
        if outputs is None:
            return self._stack.layers[0](hidden_states, **named)
        self._is_done = True
        return outputs


class _Stack:
    """All layers of a decoder, computed in one call where it calls them, and nobody may change anything between them.

    Layers that somebody else calls are computed one by one.

    Attributes:
        layers: in their order.
    """

    def __init__(self, decoder: Any, forwards: Sequence[FusedForward]):
        self._decoder = decoder
        self.layers = [forward.layer for forward in forwards]
        self._forwards = list(forwards)
        self._span = _Span(self.layers)
        self._hooks = [layer._forward_hooks for layer in self.layers]
        self._others = [
            hooks for layer in self.layers for hooks in (layer._forward_pre_hooks, layer._forward_hooks_with_kwargs)
        ]
        self._entered: set[int] = set()

    def enter(self) -> None:
        self._entered.add(threading.get_ident())

    def leave(self) -> None:
        self._entered.discard(threading.get_ident())

    @property
    def is_entered(self) -> bool:
        """Whether it is the decoder, in this thread, that asks."""
        return threading.get_ident() in self._entered

    def outputs(self, arguments: _Arguments) -> Tensor | None:
        """What the last layer answers, and the hooks have read of each; None, and nothing done, where the layers are to
        be called."""
        outputs = self._span.run(arguments)
        if outputs is None:
            return None
        found = outputs.unbind()
        before = (arguments.hidden_states, *found)
        for layer, hooks, seen, output in zip(self.layers, self._hooks, before[:-1], found, strict=True):
            for hook in tuple(hooks.values()):
                hook(layer, (seen,), output)
        return found[-1]

    @property
    def is_whole(self) -> bool:
        """Whether these are the decoder's layers as they were, and nobody may change anything between them."""
        return (
            list(self._decoder.layers._modules.values()) == self.layers
            and all(
                layer.__dict__.get("forward") is own for layer, own in zip(self.layers, self._forwards, strict=True)
            )
            and not any(self._others)
            and all(_only_reads(hook) for hooks in self._hooks if hooks for hook in hooks.values())
        )


class _Visit:
    """A hook that tells a stack whether its decoder calls the layers. A copy, for the decoder's copy, tells nobody."""

    def __init__(self, stack: _Stack | None, event: str):
        self._stack, self._event = stack, event

    def __getstate__(self):
        return {"_stack": None, "_event": self._event}

    def __call__(self, *_: Any) -> None:
        if self._stack is not None and not torch.compiler.is_compiling():
            getattr(self._stack, self._event)()


def _is_stock_attention(config: Any, others: dict[str, Any]) -> bool:
    """Whether the model is to compute what the kernel does, and nothing else is asked of it."""
    if others.get("output_attentions") or "is_causal" in others:
        return False
    attention = config._attn_implementation
    if attention == "sdpa":
        return ALL_ATTENTION_FUNCTIONS["sdpa"] in (grouped_sdpa, sdpa_attention_forward)
    return attention == "eager"


def _sleeps(hooks: dict[int, Any]) -> bool:
    """Whether hooks of an inner module are transformers' own for attentions, and none is collected.

    They stay on a model for ever once it was asked for any outputs.
    """
    collected = output_capturing._active_collector.get()
    if collected is not None and "attentions" in collected:
        return False
    return all(getattr(hook, "__module__", None) == output_capturing.__name__ for hook in hooks.values())


def _only_reads(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    name = getattr(hook, "__module__", None) or ""
    return any(name == reader or name.startswith(f"{reader}.") for reader in _READERS)
