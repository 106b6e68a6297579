"""Forwards of packed models in one native call each, from token ids to states or logits.

The modules stay transformers' own. Only `forward` of the causal LM and of its decoder first ask the model's
`NativeRunner`. If it refuses, the modules run; they are the plain reference of the kernel.
"""

from __future__ import annotations

import inspect
from functools import cached_property, partial
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from hf_speculate.attention import TreeMask
from hf_speculate.cache import as_cache

from .refusals import Refused
from .runner import NativeOutput, NativeRunner, WithoutKernel


_COPIED = "a copy of the model that was loaded (`hf_speculate_gguf.fuse(copy)` lets the kernel compute it)"


def fuse(model: Any) -> bool:
    """Lets the kernel compute a packed causal LM; returns whether it can."""
    decoder = model.model
    try:
        native = NativeRunner(model)
    except Refused:
        return False
    decoder.forward, model.forward = DecoderForward(decoder, native), CausalForward(model, native)
    return True


class _NativeForward:
    """The common part of the forwards of a decoder and of its causal LM.

    Attributes:
        native: the kernel's runner of the model. The engine finds it by this name (`target.native_runner`).
    """

    def __init__(self, module: Any, native: NativeRunner | WithoutKernel):
        self.module, self.native = module, native

    def __getstate__(self):
        """The state of a copy, in which the modules compute."""
        return {"module": self.module, "native": WithoutKernel(_COPIED)}

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(type(self.module).forward, self.module))

    def _output(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> NativeOutput | None:
        """The kernel's output; None if the modules must compute, for the reason in `native.last_problem`."""
        if torch.compiler.is_compiling():
            return None
        try:
            if len(arguments) > 1:
                raise Refused("arguments without names")
            return self._run(dict(zip(("input_ids",), arguments, strict=False)) | named)
        except Refused as refused:
            self.native.last_problem = str(refused)
            return None

    def _run(self, named: dict[str, Any]) -> NativeOutput:
        """The kernel's output for named arguments; may raise `Refused`."""
        raise NotImplementedError


class DecoderForward(_NativeForward):
    """The `forward` of a decoder."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the decoder natively if possible; see `LlamaModel.forward`."""
        output = self._output(arguments, named)
        if output is None:
            return type(self.module).forward(self.module, *arguments, **named)
        parts: dict[str, Any] = {"hidden_states": output.hidden_states, **as_cache(output.cache)}
        return BaseModelOutputWithPast(last_hidden_state=output.scored.normed, **parts)

    def _run(self, named: dict[str, Any]) -> NativeOutput:
        return self.native.run(named, 0)


class CausalForward(_NativeForward):
    """The `forward` of a causal LM. Its `attention_mask` may be a `TreeMask`."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the model natively if possible; see `LlamaForCausalLM.forward`."""
        output = self._output(arguments, named)
        if output is None:
            if isinstance(mask := named.get("attention_mask"), TreeMask):
                named["attention_mask"] = mask.build()
            return type(self.module).forward(self.module, *arguments, **named)
        parts: dict[str, Any] = {"hidden_states": output.hidden_states, **as_cache(output.cache)}
        return CausalLMOutputWithPast(logits=output.scored.logits, **parts)

    def _run(self, named: dict[str, Any]) -> NativeOutput:
        to_keep, labels = named.pop("logits_to_keep", 0), named.pop("labels", None)
        if type(to_keep) is not int or labels is not None:
            raise Refused("a loss, or logits at chosen places")
        return self.native.run(named, to_keep or None)
