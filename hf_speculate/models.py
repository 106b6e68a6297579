"""The type of the models that are sped up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin, PreTrainedModel


if TYPE_CHECKING:

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
    GenerativeModel = PreTrainedModel


def has_own_method(model: GenerativeModel, name: str) -> bool:
    """Whether the class of a model has a method of its own where `GenerationMixin` has one for all."""
    return getattr(type(model), name, None) is not getattr(GenerationMixin, name)


def num_embeddings(model: PreTrainedModel) -> int:
    """Ids that a model has embeddings for; the embedding itself may be wrapped (PEFT)."""
    found = (getattr(module, "num_embeddings", None) for module in model.get_input_embeddings().modules())
    return next((n for n in found if isinstance(n, int)), model.config.get_text_config(decoder=True).vocab_size)
