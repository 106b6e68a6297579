"""Forwards of packed models in one native call each, from token ids to states or logits.

The modules stay transformers' own. Only `forward` of the causal LM and of its decoder first check whether the kernel
computes the same. It does not if a module is watched or was changed (hooks, adapters, devices, gradients, autocast,
attention outputs, graphs). Nor does it for unknown inputs or caches, or too many rows. Then the modules run; they are
the plain reference of the kernel.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import output_capturing

from hf_speculate.attention import TreeMask, grouped_sdpa
from hf_speculate.cache import as_cache
from hf_speculate.target import base_module, effective_module

from . import binding
from .caches import KVBuffers
from .inputs import LAYER_TYPES, Inputs
from .layer_parts import parts_of
from .snapshot import Snapshot, base_modules, is_captor
from .step import Angles, AngleTable, NativeStep, Scored, TextRows, has_fixed_rope, num_positions


# Modules whose hooks only read a layer's output: transformers' for hidden states, and the taps of drafters.
_READERS = (output_capturing.__name__, "hf_speculate")


def fuse(model: Any) -> bool:
    """Lets the kernel compute a packed causal LM; returns whether it can."""
    decoder = model.model
    if any(parts_of(layer) is None for layer in decoder.layers):
        return False
    whole = _Whole(model)
    decoder.forward, model.forward = DecoderForward(decoder, whole), CausalForward(model, whole)
    return True


class _NativeForward:
    """The common part of the forwards of a decoder and of its causal LM. Without `whole` the modules compute."""

    def __init__(self, module: Any, whole: _Whole | None):
        self.module, self._whole = module, whole

    def __getstate__(self):
        """The state of a copy, in which the modules compute."""
        return {"module": self.module, "_whole": None}

    @property
    def is_native(self) -> bool:
        """Whether the kernel computes the model, as nothing in it was changed. Only forwards of ours have this name."""
        return self._whole is not None and self._whole.is_untouched()

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(type(self.module).forward, self.module))

    def _computed(self, arguments: tuple[Any, ...], named: dict[str, Any], num_scored: int | None) -> _Output | None:
        if self._whole is None or len(arguments) > 1 or torch.compiler.is_compiling():
            return None
        return self._whole.run(dict(zip(("input_ids",), arguments, strict=False)) | named, num_scored)


class DecoderForward(_NativeForward):
    """The `forward` of a decoder."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the decoder natively if possible; see `LlamaModel.forward`."""
        found = self._computed(arguments, named, 0)
        if found is None:
            return type(self.module).forward(self.module, *arguments, **named)
        parts: dict[str, Any] = {"hidden_states": found.hidden_states, **as_cache(found.cache)}
        return BaseModelOutputWithPast(last_hidden_state=found.scored.normed, **parts)


class CausalForward(_NativeForward):
    """The `forward` of a causal LM."""

    takes_tree_masks = True
    """A mark that `attention_mask` may be a `TreeMask`."""

    def assume_unchanged(self, is_threaded: bool) -> AbstractContextManager[None]:
        """A context in which the model does not change between two forwards of this thread, except by registering
        hooks.

        One check of the model then holds for the next forwards too. A check takes 0.6 ms, a tenth of a small model's
        step: the weights have just filled all CPU caches, so everything checked comes from memory. `is_threaded` keeps
        the number of threads between forwards (`ThreadPool`).
        """
        return nullcontext() if self._whole is None else self._whole.assume_unchanged(is_threaded)

    def move_entries(self, cache: Cache, sources: Sequence[int], destinations: Sequence[int]) -> bool:
        """Moves entries of a cache that native forwards write (`cache.Mover`)."""
        return self._whole is not None and self._whole.move_entries(cache, sources, destinations)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the model natively if possible; see `LlamaForCausalLM.forward`."""
        found = None
        to_keep = named.get("logits_to_keep", 0)
        if type(to_keep) is int and named.get("labels") is None:
            others = {name: value for name, value in named.items() if name not in ("logits_to_keep", "labels")}
            found = self._computed(arguments, others, to_keep or None)
        if found is None:
            if isinstance(mask := named.get("attention_mask"), TreeMask):
                named["attention_mask"] = mask.build()
            return type(self.module).forward(self.module, *arguments, **named)
        parts: dict[str, Any] = {"hidden_states": found.hidden_states, **as_cache(found.cache)}
        return CausalLMOutputWithPast(logits=found.scored.logits, **parts)


@dataclass(frozen=True)
class _Output:
    scored: Scored
    hidden_states: tuple[Tensor | None, ...] | None
    cache: Cache


class _Whole:
    """A packed causal LM, and its state when it was loaded."""

    def __init__(self, model: Any):
        self._model, self._decoder, self._layers = model, model.model, list(model.model.layers)
        decoder, layers = self._decoder, self._layers
        around = map(base_module, (decoder.embed_tokens, decoder.norm, decoder.rotary_emb, model.lm_head))
        inner = [module for layer in layers for module in base_modules(layer)]
        self._before = Snapshot([decoder.layers, *around, *inner], [model, decoder, *layers])
        self._taps = [layer._forward_hooks for layer in layers]
        self._others = [
            hooks for each in (decoder, *layers) for hooks in (each._forward_pre_hooks, each._forward_hooks_with_kwargs)
        ]
        self._others.append(decoder._forward_hooks)
        self._stock = type(model).forward, type(decoder).forward
        self._step: NativeStep | None = None
        self._angles = [AngleTable() for _ in LAYER_TYPES]
        self._buffers: WeakKeyDictionary[Cache, KVBuffers] = WeakKeyDictionary()
        self._checks: dict[int, _ModelCheck] = {}  # by thread, within `assume_unchanged`

    def run(self, named: dict[str, Any], num_scored: int | None) -> _Output | None:
        """The output of the model for the decoder's arguments; None, and nothing changed, if modules must compute it.

        Logits are those of the last `num_scored` queries, or of all.
        """
        check = self._checks.get(threading.get_ident())
        if check is not None:
            check.thread_pool.restore()
        inputs, config = Inputs.of(named), self._decoder.config
        if inputs is None:
            return None
        is_known = check is not None and check.holds()
        if check is not None and is_known:
            step = check.step
        else:
            step = self._current_step() if self.is_untouched() else None
            if check is not None and step is not None:
                check.note(step)
        if step is None or (torch.is_grad_enabled() and step.has_gradients()):
            return None
        cache = DynamicCache(config=config) if inputs.cache is None else inputs.cache
        buffers = self._buffers_of(step, cache, inputs.ids.shape, is_known)
        rows = None if buffers is None else inputs.rows(config, cache, buffers, num_scored)
        if buffers is None or rows is None:
            return None
        wanted = config.output_hidden_states if inputs.hidden_states is None else inputs.hidden_states
        scored = self._scored(step, rows, keeps_states=wanted is not False or any(self._taps))
        if scored is None:
            return None
        if check is not None:
            check.thread_pool.lower()
        buffers.count(rows.num_keys)
        self._show(scored)
        return _Output(scored, None if wanted is False else _selected(scored, wanted, config), cache)

    @contextmanager
    def assume_unchanged(self, is_threaded: bool) -> Iterator[None]:
        """The context of `CausalForward.assume_unchanged`."""
        thread = threading.get_ident()
        before = self._checks.get(thread)
        if before is not None:
            before.thread_pool.restore()
        check = self._checks[thread] = _ModelCheck(ThreadPool(is_fixed=is_threaded))
        try:
            yield
        finally:
            check.thread_pool.restore()
            del self._checks[thread]
            if before is not None:
                self._checks[thread] = before

    def is_untouched(self) -> bool:
        """Whether everything is as loaded, and hooks on layers only read outputs."""
        config = self._decoder.config
        return (
            (type(self._model).forward, type(self._decoder).forward) == self._stock
            and type(vars(self._decoder).get("forward")) is DecoderForward
            and not any("forward" in vars(layer) for layer in self._layers)
            and not any(self._others)
            and (not any(self._taps) or all(_only_reads(hook) for hooks in self._taps for hook in hooks.values()))
            and not any(layer.training for layer in self._layers)
            and output_capturing._active_collector.get() is None
            and _is_stock_attention(config)
            and not config.output_attentions
            and config.num_hidden_layers == len(self._layers)
            and getattr(config, "final_logit_softcapping", None) is None
            and has_fixed_rope(self._decoder.rotary_emb)
            and self._before.holds()
        )

    def _current_step(self) -> NativeStep | None:
        """The weights, collected again if they were replaced or moved; None if the kernel cannot compute them now."""
        if self._step is None or not self._step.is_current():
            around = map(effective_module, (self._decoder.embed_tokens, self._decoder.norm, self._model.lm_head))
            self._step = NativeStep.of([parts_of(layer) for layer in self._layers], *around)
        return self._step

    def _buffers_of(self, step: NativeStep, cache: Cache, size: Sequence[int], is_known: bool) -> KVBuffers | None:
        buffers = self._buffers.get(cache)
        if buffers is None or not buffers.takes(step.layers, cache, *size, are_alike=is_known):
            buffers = KVBuffers.of(step.layers, cache, *size)
            if buffers is not None:
                self._buffers[cache] = buffers
        return buffers

    def move_entries(self, cache: Cache, sources: Sequence[int], destinations: Sequence[int]) -> bool:
        """Moves entries of a cache that native forwards write (`cache.Mover`)."""
        buffers, step = self._buffers.get(cache), self._step
        if buffers is None or step is None or not buffers.takes(step.layers, cache, len(buffers.entries[0].keys), 0):
            return False
        buffers.move(sources, destinations)
        return True

    def _scored(self, step: NativeStep, rows: TextRows, keeps_states: bool) -> Scored | None:
        angles = self._angles_upto(1, step)
        scored = step.run(rows, angles, keeps_states)
        if scored is not None or (needed := int(rows.positions.max()) + 1) <= num_positions(angles):
            return scored
        return step.run(rows, self._angles_upto(needed, step), keeps_states)

    def _angles_upto(self, needed: int, step: NativeStep) -> list[Angles]:
        rotary, dtype = self._decoder.rotary_emb, step.layers.dtype
        if isinstance(rotary.rope_type, str):
            table = self._angles[0].upto(rotary, needed, dtype)
            return [table, table if any(step.layers.windows) else None]
        return [
            table.upto(rotary, needed, dtype, layer_type) if layer_type in rotary.rope_type else None
            for table, layer_type in zip(self._angles, LAYER_TYPES, strict=True)
        ]

    def _show(self, scored: Scored) -> None:
        """Calls the hooks that read layer outputs."""
        if not any(self._taps):
            return
        for index, (layer, hooks) in enumerate(zip(self._layers, self._taps, strict=True)):
            for hook in tuple(hooks.values()):
                if not is_captor(hook):  # transformers' own hooks are not needed: the output has hidden states
                    hook(layer, (scored.states[index],), scored.states[index + 1])


class ThreadPool:
    """The number of PyTorch's threads in the calling thread, lowered after a forward and restored before the next one.

    While other processes use the cores, the kernel computes with fewer threads (`threads.h`). PyTorch would still
    divide its small operations (copies and maxima of logits) among all of them. Each would wait for a thread that
    another process keeps from running: some milliseconds, in a step of twenty.

    Forwards always have all threads, as the results of PyTorch's products depend on their number. If what runs between
    them does, too, the number is fixed.
    """

    def __init__(self, is_fixed: bool) -> None:
        self._is_fixed = is_fixed
        self._given = 0  # the number to restore; 0: nothing is lowered

    def restore(self) -> None:
        """Called before a forward, and when the request ends."""
        if self._given:
            binding.library().set_threads(self._given, self._given)
            self._given = 0

    def lower(self) -> None:
        """Called after a forward."""
        if self._is_fixed:
            return
        library, given = binding.library(), torch.get_num_threads()
        if (number := library.thread_pool_size(given)) < given:
            self._given = given
            library.set_threads(number, given)


class _ModelCheck:
    """The result of checking the model before a forward."""

    def __init__(self, thread_pool: ThreadPool) -> None:
        self.thread_pool = thread_pool
        self.step: NativeStep | None = None
        self._num_hooks = -1

    def note(self, step: NativeStep) -> None:
        """Notes that the model was not changed, and its weights."""
        self.step, self._num_hooks = step, RemovableHandle.next_id

    def holds(self) -> bool:
        """Whether no hook was registered since, on any module."""
        return self._num_hooks == RemovableHandle.next_id


def _selected(scored: Scored, wanted: Any, config: Any) -> tuple[Tensor | None, ...]:
    """Hidden states in transformers' form: embeddings, the output of each layer, the last one normed.

    They are None except for the `wanted` ones: True for all, or indices.
    """
    count, is_tied = len(scored.states), vars(config).get("tie_last_hidden_states")
    last = scored.states[-1] if is_tied is False else scored.normed
    indices = range(-count, count) if wanted is True else [wanted] if isinstance(wanted, int) else wanted
    chosen = {index % count for index in indices if -count <= index < count}
    return tuple(
        (last if index == count - 1 else scored.states[index]) if index in chosen else None for index in range(count)
    )


def _is_stock_attention(config: Any) -> bool:
    """Whether the configured attention is one that the kernel computes."""
    attention = config._attn_implementation
    if attention == "sdpa":
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] in (grouped_sdpa, sdpa_attention_forward)
    return attention == "eager"


def _only_reads(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    name = getattr(hook, "__module__", None) or ""
    return any(name == reader or name.startswith(f"{reader}.") for reader in _READERS)
