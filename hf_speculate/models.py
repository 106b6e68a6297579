"""The type of the models that are sped up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel


if TYPE_CHECKING:

    class GenerativeModel(PreTrainedModel):
        """A `PreTrainedModel` that can `generate`: what every `...ForCausalLM` is.

        The methods of `GenerationMixin` declare a `self` type of their own, which checkers cannot match.
        """

        generate: Any
        prepare_inputs_for_generation: Any
        _optimize_model_for_decode: Any
        _prefill: Any
        _sample: Any

else:
    GenerativeModel = PreTrainedModel
