"""The bridge: what makes `model.generate(..., speculator=...)` work on stock transformers models.

Three methods of `GenerationMixin` are wrapped (`install`, undone by `uninstall`). `generate` takes `speculator=` off
the arguments and notes it in a ContextVar; everything else goes through the original, which prepares inputs, cache,
processors and criteria as always; `_validate_generation_mode` refuses what cannot work before any of that; `_sample`,
which serves greedy decoding and sampling, runs our loop if the note names this model and the original otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from transformers import GenerationMixin
from transformers.utils import logging

from . import attention
from .errors import UnsupportedRequestError
from .models import GenerativeModel
from .preparation import prepare
from .prepared import PreparedCall, streamed
from .recurrent import target_shape
from .requests import (
    problem_with_acceptance,
    problem_with_arguments,
    problem_with_inputs,
    problem_with_model,
    problem_with_request,
)
from .speculator import Speculator, attached, resolve


logger = logging.get_logger(__name__)

_NOT_GIVEN: Any = object()


@dataclass(frozen=True)
class _Note:
    """What `generate` tells `_sample`: the speculator for exactly this model, and how it was asked for.

    Attributes:
        has_callers_cache: the cache was an argument, so that the caller has it.
    """

    model: GenerativeModel
    speculator: Speculator
    explicit: bool
    streamed: Literal["tokens", "text"] | None
    has_callers_cache: bool


_note: ContextVar[_Note | None] = ContextVar("hf_speculate_note", default=None)
_originals: dict[str, Callable] = {}


def install() -> None:
    """Adds `speculator=` to `generate` of every transformers model. Idempotent; done by `import hf_speculate`."""
    if _originals:
        return
    for name, wrap in (
        ("generate", _wrap_generate),
        ("_validate_generation_mode", _wrap_validate),
        ("_sample", _wrap_sample),
    ):
        original = getattr(GenerationMixin, name)
        _originals[name] = original
        setattr(GenerationMixin, name, wrap(original))
    attention.install()


def uninstall() -> None:
    """Undoes `install`. A method that somebody else has wrapped since is left alone, with a warning."""
    for name, original in _originals.items():
        if getattr(GenerationMixin, name).__dict__.get("__hf_speculate__"):
            setattr(GenerationMixin, name, original)
        else:
            logger.warning(f"GenerationMixin.{name} was wrapped again after hf_speculate; leaving it as it is.")
    _originals.clear()
    attention.uninstall()


def _wrap_generate(original: Callable) -> Callable:
    @functools.wraps(original)
    def generate(self, *args, speculator=_NOT_GIVEN, **kwargs):
        explicit = speculator is not _NOT_GIVEN
        chosen = speculator if explicit else attached(self)
        note = None
        if chosen is not None:
            has_cache = kwargs.get("past_key_values") is not None
            note = _Note(self, resolve(chosen, self), explicit, streamed.get(), has_cache)
        # Also where there is none: a call within another one (token healing) must not take that one's.
        tokens = _note.set(note), streamed.set(None)
        try:
            if note is not None:
                if problem := problem_with_model(self) or problem_with_arguments(kwargs):
                    _refuse(note, problem)
                else:
                    note.speculator.drafter.check_target(self)
            return original(self, *args, **kwargs)
        finally:
            _note.reset(tokens[0])
            streamed.reset(tokens[1])

    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    new = inspect.Parameter(
        "speculator", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Speculator | str | None"
    )
    generate.__signature__ = signature.replace(parameters=[*parameters[:-1], new, parameters[-1]])  # type: ignore
    generate.__dict__["__hf_speculate__"] = True
    return generate


def _wrap_validate(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        note = _note.get()
        if note is not None and note.model is self:
            problem = problem_with_request(generation_mode, generation_config, generation_mode_kwargs)
            if problem:
                _refuse(note, problem)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    _validate_generation_mode.__dict__["__hf_speculate__"] = True
    return _validate_generation_mode


def _wrap_sample(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        note = _note.get()
        arguments = (self, input_ids, logits_processor, stopping_criteria, generation_config)
        if note is None or note.model is not self:
            return original(*arguments, **kwargs)
        _note.set(None)  # nested calls (guidance, drafters) are plain
        problem = problem_with_inputs(self, input_ids, generation_config, kwargs)
        problem = problem or problem_with_acceptance(note.speculator, generation_config, logits_processor)
        if problem := problem or _problem_with_stream(note, input_ids, kwargs):
            _refuse(note, problem)
            return original(*arguments, **kwargs)
        shape, reason = target_shape(self, kwargs["past_key_values"])
        if shape == "single":
            note.speculator.stats.fallbacks[reason] += 1
            return original(*arguments, **kwargs)
        kwargs.pop("synced_gpus", None)
        streamer = kwargs.pop("streamer", None)
        run = prepare(note.speculator, *arguments, kwargs, has_callers_cache=note.has_callers_cache, streamer=streamer)
        call = PreparedCall(run, note.speculator, generation_config)
        if note.streamed:
            return call.start()
        with closing(call.rounds()) as rounds:
            for _ in rounds:
                pass
        if streamer is not None:
            streamer.end()
        return call.output()

    _sample.__dict__["__hf_speculate__"] = True
    return _sample


def _refuse(note: _Note, problem: str) -> None:
    """Raises for an explicit speculator; an attached one steps aside with one warning."""
    if note.explicit:
        raise UnsupportedRequestError(problem)
    note.speculator.stats.fallbacks[problem] += 1
    logger.warning_once(f"{problem} Running without the attached speculator.")
    _note.set(None)


def _problem_with_stream(note: _Note, input_ids: Tensor, kwargs: dict[str, Any]) -> str:
    """What `hf_speculate.stream` cannot do though `generate` can."""
    if note.streamed == "text" and input_ids.shape[0] > 1:
        return (
            f"stream(tokenizer=...) yields the text of one sequence, the request has {input_ids.shape[0]}; without "
            "tokenizer= it yields the tokens of every row."
        )
    shape, reason = target_shape(note.model, kwargs["past_key_values"])
    if note.streamed and shape == "single":
        return f"stream cannot run this model ({reason}); generate(streamer=...) can."
    return ""
