"""The next step of stock's loop: the inputs that it would give the model, made by the model's own methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..cache import CACHE_NAME, as_cache
from ..compatibility.stock import PROMPT_INPUTS
from ..errors import PromptError
from ..target import GenerativeModel
from ..verification import Sequences


# Arguments with a value for each token; stock extends them token by token.
TOKEN_KWARGS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Arguments of `_sample` that the loop makes for every forward, or that concern only the prompt.
OWN_KWARGS = (
    "attention_mask",
    "position_ids",
    CACHE_NAME,
    "use_cache",
    "logits_to_keep",
    "inputs_embeds",
    "tokenizer",  # for stop strings; stock passes it to the model, which ignores it
    "output_attentions",
    "output_hidden_states",
    *TOKEN_KWARGS,
    *PROMPT_INPUTS,
)


class StockStep:
    """The next step of one request, as stock's loop makes it.

    Args:
        model: model that verifies.
        sequences: texts of the rows, which must have equal lengths.
        model_kwargs: keyword arguments of `_sample`.
    """

    def __init__(self, model: GenerativeModel, sequences: Sequences, model_kwargs: Mapping[str, Any]):
        self._model = model
        self._sequences = sequences
        self._kwargs = dict(model_kwargs)

    def inputs(self, cache: Cache) -> dict[str, Any]:
        """The inputs of the model for the last token of the text."""
        sequences = self._sequences
        return self._inputs(sequences.view(range(sequences.batch_size)), sequences.num_emitted[0], cache)

    def forward_kwargs(self, cache: Cache) -> dict[str, Any]:
        """Further arguments of every forward after the prompt. Call it when the prompt has run.

        These are the arguments of `generate` that are left after the model's own preparation of inputs, which drops
        `labels`, or an image that is already in the cache.

        Raises:
            PromptError: the model changes these arguments, perhaps at every step.
        """
        given = {name: v for name, v in self._kwargs.items() if v is not None and name not in OWN_KWARGS}
        more = [name for name in PROMPT_INPUTS if self._kwargs.get(name) is not None]
        if not (given or more):
            return {}
        prompt = self._sequences.prompt
        name = type(self._model).__name__
        try:
            inputs = self._inputs(torch.cat([prompt, prompt.new_zeros(len(prompt), 1)], dim=1), 1, cache)
        except Exception as error:  # the model's own methods expect to be called by stock's loop
            raise PromptError(f"{name} cannot prepare {sorted((*given, *more))}: {error}") from error
        kwargs = {key: v for key, v in inputs.items() if v is not None and key not in (*OWN_KWARGS, "input_ids")}
        own = sorted(key for key, value in kwargs.items() if key not in given or not _is_same(value, given[key]))
        if own:
            raise PromptError(
                f"{name} prepares its own {', '.join(own)} for every step after this prompt: trees cannot follow."
            )
        return kwargs

    def _inputs(self, text: Tensor, num_new: int, cache: Cache) -> dict[str, Any]:
        kwargs = self._kwargs | as_cache(cache)
        kwargs = self._model._update_model_kwargs_for_generation(
            {}, kwargs, is_encoder_decoder=False, num_new_tokens=num_new
        )
        return self._model.prepare_inputs_for_generation(text, next_sequence_length=1, **kwargs)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value is other or (value.shape == other.shape and torch.equal(value, other))
    return value is other or (not isinstance(value, Tensor) and not isinstance(other, Tensor) and value == other)
