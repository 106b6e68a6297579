"""The models that are sped up: their type, and the wrappers around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import GenerationMixin


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    class GenerativeModel(PreTrainedModel):
        """A `PreTrainedModel` that can `generate`: what every `...ForCausalLM` is.

        The methods of `GenerationMixin` declare a `self` type of their own, which checkers cannot match.
        """

        generate: Any
        prepare_inputs_for_generation: Any
        _optimize_model_for_decode: Any
        _prefill: Any
        _update_model_kwargs_for_generation: Any
        _sample: Any

else:
    GenerativeModel = nn.Module  # `PreTrainedModel` takes half a second to import; no annotation is worth that


def has_own_method(model: GenerativeModel, name: str) -> bool:
    """Whether a model's class overrides a method of `GenerationMixin`."""
    return getattr(type(model), name, None) is not getattr(GenerationMixin, name)


def num_embeddings(model: GenerativeModel) -> int:
    """Number of ids that a model has embeddings for; PEFT may have wrapped the embedding."""
    found = (getattr(module, "num_embeddings", None) for module in model.get_input_embeddings().modules())
    return next((n for n in found if isinstance(n, int)), model.config.get_text_config(decoder=True).vocab_size)


def decoder_of(model: GenerativeModel) -> Any:
    """The decoder of a model: embeddings, layers and final norm, without the output layer.

    It is `get_decoder`, or the only model inside where that finds nothing, as for Llama 4.
    """
    from transformers import PreTrainedModel

    found: Any = model.get_decoder()
    if found is not model:
        return found
    inside = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inside[0] if len(inside) == 1 else model


def held_model(holder: Any) -> GenerativeModel:
    """The transformers model of an object that holds it as `.model` (a pipeline, a trainer), or that `unwrap` finds.

    Raises:
        TypeError: the object is not a model and holds none.
    """
    if not isinstance(holder, nn.Module) and isinstance(inner := getattr(holder, "model", None), nn.Module):
        return unwrap(inner)
    return unwrap(holder)


def unwrap(model: nn.Module) -> GenerativeModel:
    """The transformers model inside `torch.compile` and PEFT wrappers; raises `TypeError` if there is none."""
    from transformers import PreTrainedModel

    seen: Any = model
    while not isinstance(seen, PreTrainedModel):
        inner = getattr(seen, "_orig_mod", None)
        if inner is None and hasattr(seen, "get_base_model"):
            inner = seen.get_base_model()
        if inner is None or inner is seen:
            raise TypeError(f"expected a transformers model (or a PEFT / compiled one), got {type(model).__name__}.")
        seen = inner
    return cast(GenerativeModel, seen)
