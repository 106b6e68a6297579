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

from ..errors import PromptError, TargetMismatchError, UnsupportedRequestError
from ..models import GenerativeModel
from ..speculator import Speculator, attached, resolve
from ..target import Shape, install_attention, uninstall_attention
from .call import PreparedCall, streamed
from .preparation import prepare
from .requests import (
    problem_with_acceptance,
    problem_with_arguments,
    problem_with_features,
    problem_with_inputs,
    problem_with_model,
    problem_with_request,
)
from .trial import request_shape


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
    install_attention()


def uninstall() -> None:
    """Undoes `install`. A method that somebody else has wrapped since is left alone, with a warning."""
    for name, original in _originals.items():
        if getattr(GenerationMixin, name).__dict__.get("__hf_speculate__"):
            setattr(GenerationMixin, name, original)
        else:
            logger.warning(f"GenerationMixin.{name} was wrapped again after hf_speculate; leaving it as it is.")
    _originals.clear()
    uninstall_attention()


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
                problem = problem_with_model(self) or problem_with_arguments(kwargs)
                if problem := problem or _problem_with_target(note):
                    _refuse(note, problem)
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
    # The way past `torch.no_grad` leads where it did, not to the decorated original.
    generate.__wrapped__ = getattr(original, "__wrapped__", original)
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
        problem = problem or problem_with_features(note.speculator, self)
        problem = problem or problem_with_acceptance(note.speculator, generation_config, logits_processor)
        if problem := problem or _problem_with_stream(note, input_ids):
            _refuse(note, problem)
            return original(*arguments, **kwargs)
        shape, reason = request_shape(self, kwargs["past_key_values"])
        if shape == "single":
            _refuse(note, f"{reason}.")
            return original(*arguments, **kwargs)
        try:
            return _speculate(note, arguments, dict(kwargs), shape, reason)
        except PromptError as error:
            _refuse(note, str(error))
            return original(*arguments, **kwargs)

    _sample.__dict__["__hf_speculate__"] = True
    return _sample


def _speculate(note: _Note, arguments: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape, reason: str) -> Any:
    """What `_sample` returns, or the prepared call of a stream."""
    kwargs.pop("synced_gpus", None)
    streamer = kwargs.pop("streamer", None)
    run = prepare(
        note.speculator,
        arguments,
        kwargs,
        shape=shape,
        reason=reason,
        has_callers_cache=note.has_callers_cache,
        streamer=streamer,
    )
    call = PreparedCall(run, note.speculator, arguments[-1])
    if note.streamed:
        return call.start()
    with closing(call.rounds()) as rounds:
        for _ in rounds:
            pass
    if streamer is not None:
        streamer.end()
    return call.output()


def _problem_with_target(note: _Note) -> str:
    """Why an attached drafter does not fit (any more); for an explicit one that is its own error."""
    try:
        note.speculator.drafter.check_target(note.model)
    except TargetMismatchError as error:
        if note.explicit:
            raise
        return str(error)
    return ""


def _refuse(note: _Note, problem: str) -> None:
    """Raises for an explicit speculator; an attached one steps aside with one warning."""
    if note.explicit:
        raise UnsupportedRequestError(problem)
    note.speculator.stats.fallbacks[problem] += 1
    logger.warning_once(f"{problem} Running without the attached speculator.")
    _note.set(None)


def _problem_with_stream(note: _Note, input_ids: Tensor) -> str:
    """What `hf_speculate.stream` cannot do though `generate` can."""
    if note.streamed == "text" and input_ids.shape[0] > 1:
        return (
            f"stream(tokenizer=...) yields the text of one sequence, the request has {input_ids.shape[0]}; without "
            "tokenizer= it yields the tokens of every row."
        )
    return ""
