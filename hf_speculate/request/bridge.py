"""The bridge, which makes `model.generate(..., speculator=...)` work on stock transformers models.

`install` wraps three methods of `GenerationMixin`, and `uninstall` undoes that. `generate` takes `speculator=` off the
arguments and notes it in a ContextVar. The original does the rest: it prepares inputs, cache, processors and criteria.
`_validate_generation_mode` refuses what cannot work before any of that. `_sample`, which serves greedy decoding and
sampling, runs our loop if the note names this model, and the original otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from transformers import GenerationMixin

from ..attention import Sizes, uninstall_attention
from ..cache import CACHE_NAME, OLD_CACHE_NAME
from ..drafting import check_taps
from ..errors import PromptError, SpeculateError, TargetMismatchError, UnsupportedRequestError
from ..messages import get_logger
from ..speculator import Speculator, attached_to, resolve
from ..target import GenerativeModel, Shape, keep_saveable
from .call import PreparedCall, streamed
from .checks import (
    check_acceptance,
    check_arguments,
    check_inputs,
    check_model,
    check_options,
    check_request,
    check_stream,
    exact_sizes_of,
    with_our_cache,
)
from .preparation import prepare
from .sample_call import SampleCall
from .trial import checked_shape
from .unchanged import assume_unchanged
from .upstream import check_transformers


logger = get_logger(__name__)

_NOT_GIVEN: Any = object()


@dataclass(frozen=True)
class _Note:
    """The note that `generate` leaves for `_sample`: the speculator for exactly this model, and how it was given.

    Attributes:
        has_callers_cache: whether the caller passed the cache in.
    """

    model: GenerativeModel
    speculator: Speculator
    explicit: bool
    streamed: Literal["rounds", "text"] | None
    has_callers_cache: bool


_note: ContextVar[_Note | None] = ContextVar("hf_speculate_note", default=None)
# Whether a request that stepped aside is running: what stock calls below it (assistants, early exit) is plain, too.
_is_aside: ContextVar[bool] = ContextVar("hf_speculate_is_aside", default=False)
_originals: dict[str, Callable] = {}


def install() -> None:
    """Adds `speculator=` to `generate` of every transformers model. `import hf_speculate` calls it; a second call does
    nothing. Another import of this package, whose modules were dropped since, gives way to this one.

    Raises:
        IncompatibleTransformersError: a method to wrap is missing or has changed. Nothing is wrapped then.
    """
    if _originals:
        return
    for name in ("generate", "_validate_generation_mode", "_sample"):
        method = getattr(GenerationMixin, name, None)
        if (original := _unwrapped(method)) is not method:
            setattr(GenerationMixin, name, original)
    check_transformers()
    for name, wrap in (
        ("generate", _wrap_generate),
        ("_validate_generation_mode", _wrap_validate),
        ("_sample", _wrap_sample),
    ):
        original = getattr(GenerationMixin, name)
        _originals[name] = original
        setattr(GenerationMixin, name, wrap(original))


def _unwrapped(method: Any) -> Any:
    """The method that imports of this package have wrapped."""
    while callable(original := getattr(method, "__dict__", {}).get("__hf_speculate__")):
        method = original
    return method


def uninstall() -> None:
    """Undoes `install`. A method that other code has wrapped since is left alone, with a warning."""
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
        chosen = speculator if explicit else None if _is_aside.get() else attached_to(self)
        note = None
        if chosen is not None:
            check_options(self, chosen, kwargs)
            has_cache = any(kwargs.get(name) is not None for name in (CACHE_NAME, OLD_CACHE_NAME))
            note = _Note(self, resolve(chosen, self), explicit, streamed.get(), has_cache)
        # Set it even to None: a `generate` call within another one (token healing) must not take the outer note.
        tokens = _note.set(note), streamed.set(None), _is_aside.set(_is_aside.get())
        num_layers = getattr(self.config, "num_hidden_layers", None)
        try:
            if note is not None:
                with _stepping_aside(note, UnsupportedRequestError, TargetMismatchError):
                    check_model(self)
                    check_arguments(kwargs)
                    note.speculator.drafter.check_target(self)  # an attached drafter may no longer fit
            return original(self, *args, **kwargs)
        finally:
            _note.reset(tokens[0])
            streamed.reset(tokens[1])
            _is_aside.reset(tokens[2])
            if note is not None:
                keep_saveable(self)
                if num_layers != getattr(self.config, "num_hidden_layers", None):  # an interrupted early exit
                    self.config.num_hidden_layers = num_layers

    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    new = inspect.Parameter(
        "speculator", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Speculator | str | None"
    )
    generate.__signature__ = signature.replace(parameters=[*parameters[:-1], new, parameters[-1]])  # type: ignore
    generate.__dict__["__hf_speculate__"] = original
    # `__wrapped__` leads past `torch.no_grad`, as it did before.
    generate.__wrapped__ = getattr(original, "__wrapped__", original)
    return generate


def _wrap_validate(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        note = _note.get()
        if note is not None and note.model is self:
            with _stepping_aside(note, UnsupportedRequestError):
                check_request(generation_mode, generation_config, generation_mode_kwargs)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    _validate_generation_mode.__dict__["__hf_speculate__"] = original
    return _validate_generation_mode


def _wrap_sample(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        note = _note.get()
        arguments = (self, input_ids, logits_processor, stopping_criteria, generation_config)
        if note is None or note.model is not self:
            with assume_unchanged(self, logits_processor, stopping_criteria, kwargs.get("streamer")):
                return original(*arguments, **kwargs)
        _note.set(None)  # nested calls (guidance, drafters) are plain
        ours, shape, sizes = with_our_cache(self, generation_config, kwargs), None, None
        with _stepping_aside(note, UnsupportedRequestError):
            check_inputs(self, input_ids, generation_config, ours)
            check_taps(self, note.speculator.drafter.feature_layers, note.speculator.drafter.name)
            check_acceptance(note.speculator, generation_config, logits_processor)
            check_stream(note.streamed, input_ids.shape[0])
            sizes = exact_sizes_of(note.speculator, self, input_ids, generation_config, ours)
            shape = checked_shape(self, ours[CACHE_NAME])
        if shape is not None:
            with _stepping_aside(note, PromptError):
                return _speculate(note, arguments, dict(ours), *shape, sizes)
        return original(*arguments, **kwargs)

    _sample.__dict__["__hf_speculate__"] = original
    return _sample


def _speculate(
    note: _Note, arguments: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape, reason: str, sizes: Sizes | None
) -> Any:
    """The result of `_sample`, or the prepared call for a stream."""
    model, input_ids, processors, criteria, config = arguments
    kwargs.pop("synced_gpus", None)
    streamer = kwargs.pop("streamer", None)
    call = SampleCall(
        model=model,
        input_ids=input_ids,
        processors=processors,
        criteria=criteria,
        config=config,
        model_kwargs=kwargs,
        streamer=streamer,
        has_callers_cache=note.has_callers_cache,
        shape=shape,
        reason=reason,
        sizes=sizes,
    )
    prepared = PreparedCall(prepare(note.speculator.serving(processors, model), call), note.speculator, config)
    if note.streamed:
        return prepared.start()
    others = (processors, criteria, streamer, note.speculator.drafter)
    is_threaded = note.speculator.options.ahead or bool(note.speculator.options.compile)
    with assume_unchanged(model, *others, is_threaded=is_threaded), closing(prepared.rounds()) as rounds:
        for _ in rounds:
            pass
    if streamer is not None:
        streamer.end()
    return prepared.output()


@contextmanager
def _stepping_aside(note: _Note, *errors: type[SpeculateError]) -> Iterator[None]:
    """Handles errors of a request that cannot run: raises them for an explicit speculator.

    For an attached one it warns once and lets the request run without.
    """
    try:
        yield
    except errors as error:
        if note.explicit:
            raise
        note.speculator.stats.fallbacks[str(error)] += 1
        logger.warning_once(f"{error} Running without the attached speculator.")
        _note.set(None)
        _is_aside.set(True)
