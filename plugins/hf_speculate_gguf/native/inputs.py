"""Inputs of a decoder that the kernel knows, and which entries of the cache are visible to its queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from hf_speculate.attention import TreeMask
from hf_speculate.cache import CACHE_NAME, as_cache

from .caches import KVBuffers
from .layers import MOST_ROWS, VisibleRanges
from .refusals import Refused
from .rows import check_not_intercepted, num_hidden, read_mask
from .step import TextRows


# Layers without a window, and with one, by the names of transformers; the functions that make their masks.
LAYER_TYPES = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


# Most entries of a text for which the kernel takes more rows than at once; for more, PyTorch's attention is faster.
MOST_KEYS = 1024


# Arguments that the kernel does not know, and whether a value needs it to.
_NEEDS: dict[str, Callable[[Any], bool]] = {
    "inputs_embeds": lambda value: value is not None,
    "output_attentions": bool,
    "is_causal": lambda value: True,
}

_POSITIONS = "position ids that are not an int64 matrix with the shape of the token ids"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a decoder that the kernel knows."""

    ids: Tensor
    cache: Cache | None
    mask: Tensor | TreeMask | dict[str, Any] | None
    positions: Tensor | None
    hidden_states: Any

    @classmethod
    def of(cls, named: dict[str, Any]) -> Inputs:
        """The inputs. Raises `Refused` if the arguments need anything else."""

        def take(name: str) -> Any:
            return named.pop(name, None)

        uses_cache, returns_dict = take("use_cache"), take("return_dict")
        texts = take("input_ids"), take(CACHE_NAME), take("attention_mask"), take("position_ids")
        inputs = cls(*texts, take("output_hidden_states"))
        for name, is_needed in _NEEDS.items():
            if name in named and is_needed(named[name]):
                raise Refused(f"the argument {name}")
        if returns_dict is False:
            raise Refused("the argument return_dict=False")
        if not isinstance(inputs.cache, Cache | None):
            raise Refused(f"a cache of type {type(inputs.cache).__name__}")
        if inputs.cache is None and (uses_cache is not True or (inputs.mask is None and inputs.positions is not None)):
            raise Refused("no cache")  # positions may mean that several texts are in one row
        _check_ids(inputs.ids)
        inputs._check_length()
        return inputs

    def _check_length(self) -> None:
        """Raises `Refused` unless the kernel takes so many rows after so many entries."""
        if (count := self.ids.shape[1]) <= MOST_ROWS:
            return
        if count + (0 if self.cache is None else self.cache.get_seq_length()) > MOST_KEYS:
            raise Refused(f"a part of a prompt that ends after {MOST_KEYS} entries, for which modules are faster")

    def rows(self, config: Any, cache: Cache, buffers: KVBuffers, num_scored: int | None) -> TextRows:
        """The rows of the forward. Raises `Refused` if the kernel does not take these positions or masks."""
        (batch_size, count), past = self.ids.shape, buffers.length
        positions = (
            torch.arange(past, past + count, dtype=torch.long, device="cpu")[None]
            if self.positions is None
            else self.positions
        )
        if type(positions) is not Tensor or positions.dim() != 2 or positions.dtype is not torch.long:
            raise Refused(_POSITIONS)
        if positions.shape[0] not in (1, batch_size) or positions.shape[1] != count or not positions.is_cpu:
            raise Refused(_POSITIONS)
        visible = self._visible_ranges(config, cache, buffers, positions, past)
        positions = positions.expand(batch_size, -1).contiguous()
        num_scored = count if num_scored is None else min(num_scored, count)
        return TextRows(
            self.ids.contiguous(), positions, buffers.entries, buffers.call, past + count, visible, num_scored
        )

    def _visible_ranges(
        self, config: Any, cache: Cache, buffers: KVBuffers, positions: Tensor, past: int
    ) -> Sequence[VisibleRanges]:
        """The visible ranges of queries, for each type of layer. Raises `Refused` if the kernel cannot read masks."""
        size, given, windows = self.ids.shape, self.mask, buffers.native.windows
        if isinstance(given, TreeMask):
            trees = given.metadata
            if trees.num_prefix != past or (len(trees.lengths), trees.num_nodes) != tuple(size) or any(windows):
                raise Refused("a tree that does not follow the entries of the cache")
            return [trees.visible_ranges()] * len(LAYER_TYPES)
        visible: list[VisibleRanges] = []
        for is_windowed, layer_type in enumerate(LAYER_TYPES):
            examples = [index for index, window in enumerate(windows) if (window is not None) == bool(is_windowed)]
            if not examples:
                visible.append(None)
                continue
            mask = self._mask(layer_type, config, cache, positions, past + size[1], is_alone=not any(windows))
            hidden = num_hidden(buffers.layers[examples[0]])
            # Without a mask all that comes before it is visible to every query.
            visible.append(None if mask is None else read_mask(mask, size, past + size[1], hidden))
        return visible

    def _mask(
        self, layer_type: str, config: Any, cache: Cache, positions: Tensor, num_keys: int, is_alone: bool
    ) -> Any:
        """The mask in the form for layers of a type; of a kind that no layer takes if it is not known.

        `is_alone` tells that all layers are of that type, and without a window.
        """
        mask = self.mask
        if isinstance(mask, dict):
            return mask.get(layer_type, mask)
        if type(mask) is not Tensor or mask.dim() != 2:
            return mask if mask is None or is_alone else {}
        if mask.shape[1] == num_keys and bool(mask.all()):
            return None
        like = torch.empty(*self.ids.shape, 0, dtype=config.dtype, device="cpu")
        return LAYER_TYPES[layer_type](
            config=config, inputs_embeds=like, attention_mask=mask, position_ids=positions, **as_cache(cache)
        )


def _check_ids(ids: Any) -> None:
    """Raises `Refused` unless the kernel takes these token ids."""
    if type(ids) is not Tensor or ids.dim() != 2 or not ids.is_cpu or ids.dtype is not torch.long or not ids.numel():
        raise Refused("token ids that are not an int64 matrix on the CPU")
    check_not_intercepted()
