"""The native runner of a packed causal LM: forwards in one call of the kernel, and the reasons why others are not.

It refuses if a module is watched or was changed since loading (hooks, adapters, devices, gradients, autocast, attention
outputs, graphs). So it does for unknown inputs or caches, or too many rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import output_capturing

from hf_speculate.attention import grouped_sdpa
from hf_speculate.target import base_module, effective_module

from .caches import KVBuffers
from .inputs import LAYER_TYPES, Inputs
from .layer_parts import parts_of
from .refusals import GRADIENTS, Refused
from .snapshot import Snapshot, base_modules, is_captor, name_of
from .step import Angles, AngleTable, NativeStep, Scored, TextRows, has_fixed_rope, num_positions
from .thread_pool import ThreadPool


# Modules whose hooks only read a layer's output: transformers' for hidden states, and the taps of drafters.
_READERS = (output_capturing.__name__, "hf_speculate")


@dataclass(frozen=True)
class NativeOutput:
    """The output of a native forward.

    Attributes:
        scored: states of all layers, and the logits that were asked for.
        hidden_states: states in transformers' form; None if they were not asked for.
        cache: the cache, which holds the new entries.
    """

    scored: Scored
    hidden_states: tuple[Tensor | None, ...] | None
    cache: Cache


class _LastProblem(threading.local):
    """The reason why the last forward of each thread was not native; "" if it was."""

    reason = ""


class WithoutKernel:
    """The runner of a model that the kernel never computes, for a reason that is known."""

    def __init__(self, reason: str):
        self._reason = self.last_problem = reason

    def problem(self) -> str:
        return self._reason

    def run(self, named: dict[str, Any], num_scored: int | None) -> NoReturn:
        raise Refused(self._reason)

    def assume_unchanged(self, is_threaded: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def move_entries(self, cache: Cache, sources: Sequence[int], destinations: Sequence[int]) -> bool:
        return False


class NativeRunner:
    """A packed causal LM, and its state when it was loaded. All that the engine asks of the kernel, it asks here.

    Raises `Refused` if the kernel cannot compute the model.
    """

    def __init__(self, model: Any):
        self._model, self._decoder, self._layers = model, model.model, list(model.model.layers)
        decoder, layers = self._decoder, self._layers
        for layer in layers:
            parts_of(layer)  # may refuse
        around = map(base_module, (decoder.embed_tokens, decoder.norm, decoder.rotary_emb, model.lm_head))
        inner = [module for layer in layers for module in base_modules(layer)]
        self._before = Snapshot([decoder.layers, *around, *inner], [model, decoder, *layers])
        self._taps = [layer._forward_hooks for layer in layers]
        self._others = [
            hooks for part in (decoder, *layers) for hooks in (part._forward_pre_hooks, part._forward_hooks_with_kwargs)
        ]
        self._others.append(decoder._forward_hooks)
        self._stock = type(model).forward, type(decoder).forward
        self._step: NativeStep | None = None
        self._angles = [AngleTable() for _ in LAYER_TYPES]
        self._buffers: WeakKeyDictionary[Cache, KVBuffers] = WeakKeyDictionary()
        self._checks: dict[int, _ModelCheck] = {}  # by thread, within `assume_unchanged`
        self._last = _LastProblem()

    @property
    def last_problem(self) -> str:
        """The reason why this thread's last forward of the model was not native; "" if it was."""
        return self._last.reason

    @last_problem.setter
    def last_problem(self, reason: str) -> None:
        self._last.reason = reason

    def run(self, named: dict[str, Any], num_scored: int | None) -> NativeOutput:
        """The output of the model for the decoder's arguments.

        Logits are those of the last `num_scored` queries, or of all.

        Raises:
            Refused: the modules must compute it. Nothing was changed.
        """
        check = self._checks.get(threading.get_ident())
        if check is not None:
            check.thread_pool.restore()
        inputs, config = Inputs.of(named), self._decoder.config
        is_known = check is not None and check.holds()
        if check is not None and check.step is not None and is_known:
            step = check.step
        else:
            step = self._checked_step()
            if check is not None:
                check.note(step)
        if torch.is_grad_enabled() and step.has_gradients():
            raise Refused(GRADIENTS)
        cache = DynamicCache(config=config) if inputs.cache is None else inputs.cache
        buffers = self._buffers_of(step, cache, inputs.ids.shape, is_known)
        rows = inputs.rows(config, cache, buffers, num_scored)
        wanted = config.output_hidden_states if inputs.hidden_states is None else inputs.hidden_states
        scored = self._scored(step, rows, keeps_states=wanted is not False or any(self._taps))
        if check is not None:
            check.thread_pool.lower()
        buffers.count(rows.num_keys)
        self._last.reason = ""
        self._show(scored)
        return NativeOutput(scored, None if wanted is False else _selected(scored, wanted, config), cache)

    @contextmanager
    def assume_unchanged(self, is_threaded: bool) -> Iterator[None]:
        """A context in which the model does not change between two forwards of this thread, except by registering
        hooks.

        One check of the model then holds for the next forwards too. A check takes 0.6 ms, a tenth of a small model's
        step: the weights have just filled all CPU caches, so everything checked comes from memory. `is_threaded` keeps
        the number of threads between forwards (`ThreadPool`).
        """
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

    def problem(self) -> str:
        """The reason why the modules must compute the model, whatever its inputs; "" if the kernel can."""
        try:
            self._checked_step()
        except Refused as refused:
            return str(refused)
        return ""

    def change(self) -> str:
        """The first change of the model since it was loaded; "" if there is none. Hooks on layers may read outputs."""
        config = self._decoder.config
        if (type(self._model).forward, type(self._decoder).forward) != self._stock:
            return f"another forward of {type(self._model).__name__} than the one it was loaded with"
        is_ours = getattr(vars(self._decoder).get("forward"), "native", None) is self
        if not is_ours or any("forward" in vars(layer) for layer in self._layers):
            return "a module whose forward was replaced"
        if any(self._others):
            return f"a hook on the decoder or its layers ({name_of(_first(self._others))})"
        if any(self._taps) and not all(map(_only_reads, hooks := [*_all(self._taps)])):
            stranger = next(hook for hook in hooks if not _only_reads(hook))
            return f"a hook on a layer ({name_of(stranger)})"
        if any(layer.training for layer in self._layers):
            return "training mode"
        if output_capturing._active_collector.get() is not None:
            return "outputs of modules that transformers collects"
        return self._problem_with(config) or self._before.change()

    def _problem_with(self, config: Any) -> str:
        if not _is_stock_attention(config):
            return f"attention {config._attn_implementation!r}"
        if config.output_attentions:
            return "attention weights are returned"
        if config.num_hidden_layers != len(self._layers):
            return "a changed number of layers"
        if getattr(config, "final_logit_softcapping", None) is not None:
            return "soft-capped logits"
        return "" if has_fixed_rope(self._decoder.rotary_emb) else "RoPE that depends on the text's length"

    def _checked_step(self) -> NativeStep:
        """The weights, collected again if they were replaced or moved.

        Raises:
            Refused: the model was changed, or the kernel cannot compute these weights.
        """
        if change := self.change():
            raise Refused(change)
        if self._step is None or not self._step.is_current():
            around = map(effective_module, (self._decoder.embed_tokens, self._decoder.norm, self._model.lm_head))
            self._step = None  # weights that are refused are not kept alive
            self._step = NativeStep.of([parts_of(layer) for layer in self._layers], *around)
        return self._step

    def _buffers_of(self, step: NativeStep, cache: Cache, size: Sequence[int], is_known: bool) -> KVBuffers:
        buffers = self._buffers.get(cache)
        if buffers is None or not buffers.takes(step.layers, cache, *size, are_alike=is_known):
            buffers = self._buffers[cache] = KVBuffers.of(step.layers, cache, *size)
        return buffers

    def move_entries(self, cache: Cache, sources: Sequence[int], destinations: Sequence[int]) -> bool:
        """Moves entries of a cache that native forwards write (`cache.Mover`)."""
        buffers, step = self._buffers.get(cache), self._step
        if buffers is None or step is None or not buffers.takes(step.layers, cache, len(buffers.entries[0].keys), 0):
            return False
        buffers.move(sources, destinations)
        return True

    def _scored(self, step: NativeStep, rows: TextRows, keeps_states: bool) -> Scored:
        angles = self._angles_upto(1, step)
        scored = step.run(rows, angles, keeps_states)
        if scored is None and (needed := int(rows.positions.max()) + 1) > num_positions(angles):
            scored = step.run(rows, self._angles_upto(needed, step), keeps_states)
        if scored is None:
            raise Refused("a token without an embedding, or a position below zero")
        return scored

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


def _all(of_modules: Sequence[dict[int, Any]]) -> Iterator[Any]:
    for hooks in of_modules:
        yield from hooks.values()


def _first(of_modules: Sequence[dict[int, Any]]) -> Any:
    return next(_all(of_modules))


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
