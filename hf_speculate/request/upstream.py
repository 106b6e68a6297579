"""Signatures of the transformers methods that the bridge wraps and the loop calls, checked before wrapping."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter

from transformers import GenerationMixin

from ..compatibility import incompatible


# Wrapped methods get all of these arguments. A new argument would be unknown to our loop.
_WRAPPED = {
    "_validate_generation_mode": "self, generation_mode, generation_config, generation_mode_kwargs",
    "_sample": "self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, "
    "**model_kwargs",
}
# Called methods get these arguments. Others must be optional.
_CALLED = {
    "_prefill": "self, input_ids, generation_config, model_kwargs",
    "_optimize_model_for_decode": "self",
    "_update_model_kwargs_for_generation": "self, outputs, model_kwargs, is_encoder_decoder, num_new_tokens",
    "prepare_inputs_for_generation": "self, input_ids, next_sequence_length",
}
_STARS = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


def check_transformers() -> None:
    """Raises `IncompatibleTransformersError` if a method is missing or takes other arguments."""
    _check_generate(_method("generate"))
    for name, expected in _WRAPPED.items():
        parameters = _parameters(_method(name))
        if _listed(parameters) != expected and not _takes_anything(parameters):
            raise _changed(name, parameters, expected)
    for name, expected in _CALLED.items():
        parameters = _parameters(_method(name))
        num_given = expected.count(",") + 1
        given, others = parameters[:num_given], parameters[num_given:]
        if (_listed(given) != expected or any(map(_is_needed, others))) and not _takes_anything(parameters):
            raise _changed(name, parameters, f"{expected}, …")


def _check_generate(generate: Callable) -> None:
    """Checks that `generate` takes keywords and has no `speculator` of its own."""
    parameters = _parameters(generate)
    if not parameters or parameters[-1].kind is not Parameter.VAR_KEYWORD:
        raise _changed("generate", parameters, "self, …, **kwargs")
    if any(parameter.name == "speculator" for parameter in parameters):
        raise incompatible("GenerationMixin.generate has a `speculator` of its own, or of another package")


def _method(name: str) -> Callable:
    method = getattr(GenerationMixin, name, None)
    if not callable(method):
        raise incompatible(f"GenerationMixin has no `{name}`")
    return method


def _parameters(method: Callable) -> list[Parameter]:
    return list(inspect.signature(method).parameters.values())


def _listed(parameters: list[Parameter]) -> str:
    return ", ".join(_STARS.get(parameter.kind, "") + parameter.name for parameter in parameters)


def _takes_anything(parameters: list[Parameter]) -> bool:
    """Whether the parameters are `(*args, **kwargs)`, perhaps with self: a wrapper by other code."""
    return [parameter.kind for parameter in parameters[-2:]] == list(_STARS) and len(parameters) <= 3


def _is_needed(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind not in _STARS


def _changed(name: str, parameters: list[Parameter], expected: str) -> Exception:
    return incompatible(f"GenerationMixin.{name} takes ({_listed(parameters)}) instead of ({expected})")
