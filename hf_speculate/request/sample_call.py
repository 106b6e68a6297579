"""The arguments with which `generate` calls `_sample`, and facts that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..attention import Sizes
from ..cache import CACHE_NAME
from ..target import GenerativeModel, Shape, prompt_learning
from .checks import total_length


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """The arguments of `_sample`, as `generate` passes them.

    Attributes:
        model, input_ids, processors, criteria, config: positional arguments of `_sample`.
        model_kwargs: keyword arguments, without the streamer.
        streamer: streamer that was given to `generate`; None without one.
        has_callers_cache: whether the caller passed the cache in.
        shape, reason: widest draft that the model takes, and why nothing wider (`request_shape`).
        sizes: row counts for `exact_scorer`; None if exact text was not asked for.
    """

    model: GenerativeModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: Any
    has_callers_cache: bool
    shape: Shape
    reason: str
    sizes: Sizes | None = None

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def cache(self) -> Cache:
        return self.model_kwargs[CACHE_NAME]

    @property
    def shows_cache(self) -> bool:
        """Whether the caller gets to see the cache."""
        return self.has_callers_cache or bool(self.config.return_dict_in_generate)

    @cached_property
    def num_earlier(self) -> int:
        """Number of tokens in the cache that are not in `input_ids`."""
        return total_length(self.input_ids, self.config, self.model_kwargs) - self.input_ids.shape[1]

    @property
    def num_virtual(self) -> int:
        """Number of virtual tokens that a prompt-learning adapter puts before the text."""
        adapter = prompt_learning(self.model)
        return 0 if adapter is None else adapter.num_virtual_tokens

    @cached_property
    def text_mask(self) -> Tensor | None:
        """[B, T] over the text, virtual tokens apart; None when all ones. (Newer transformers drop such a mask.)"""
        mask = self.model_kwargs.get("attention_mask")
        return None if mask is None or bool((mask == 1).all()) else mask

    @cached_property
    def attention_mask(self) -> Tensor | None:
        """[B, M] over all cache entries of the prompt; None when all ones."""
        mask = self.text_mask
        return functional.pad(mask, (self.num_virtual, 0), value=1) if mask is not None and self.num_virtual else mask

    @property
    def positions(self) -> Sequence[int]:
        """Position id of each row's last prompt token."""
        length, position_ids = self.input_ids.shape[1], self.model_kwargs.get("position_ids")
        adapter = prompt_learning(self.model)
        if adapter is not None and adapter.peft_type not in ("PREFIX_TUNING", "CARTRIDGE"):
            # PEFT drops the position ids here, so positions count cache entries, padding included.
            return [self.num_virtual + length - 1] * self.batch_size
        if position_ids is None:
            return [self.num_virtual + self.num_earlier + length - 1] * self.batch_size
        of_text = position_ids[0] if position_ids.dim() == 3 else position_ids
        return [self.num_virtual + p for p in of_text[:, -1].expand(self.batch_size).tolist()]

    @property
    def position_offsets(self) -> Tensor | None:
        """int64 [kinds, B, 1], what positions of each kind have more than the first kind's, which counts text; None if
        there is one kind. Pictures take more tokens than positions, and all later text keeps the difference."""
        position_ids = self.model_kwargs.get("position_ids")
        if position_ids is None or position_ids.dim() == 2:
            return None
        last = position_ids[..., -1:].expand(-1, self.batch_size, 1)
        return last - last[:1]

    @property
    def num_expected(self) -> int | None:
        """Number of cache entries expected after the prompt; None if unknown."""
        if self.attention_mask is not None:
            return self.attention_mask.shape[1]
        if self.model_kwargs.get("inputs_embeds") is not None:
            return None
        return self.num_virtual + self.num_earlier + self.input_ids.shape[1]
