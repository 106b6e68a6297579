"""What readers of heads with conventions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from .checking import Alternative, Options
from .texts import Text


Loaded = TypeVar("Loaded")


class ConventionReader(ABC, Generic[Loaded]):
    """Reads the head in `folder` anew for every set of conventions: the same way as a user who passes them."""

    def __init__(self, folder: str, target: PreTrainedModel):
        self._folder, self._target = folder, target
        self._num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self._options: Options = {}
        self._loaded = self.read({})

    @abstractmethod
    def read(self, options: Options) -> Loaded:
        """The head as these conventions have it."""

    @abstractmethod
    def accepted_in(self, loaded: Loaded, text: Text, depth: int) -> Int[Tensor, " P"]:
        """Accepted tokens of the greedy chains at all roots of a text."""

    @torch.inference_mode()
    def accepted(self, options: Options, texts: Sequence[Text], depth: int) -> Int[Tensor, " P"]:
        """See `Reader`."""
        loaded = self.load(options)
        return torch.cat([self.accepted_in(loaded, text, depth) for text in texts])

    def load(self, options: Options) -> Loaded:
        """The head as last time, or read anew."""
        if options != self._options:
            self._loaded = self.read(options)
            self._options = dict(options)
        return self._loaded

    def other_bases(self, rope: dict[str, Any]) -> list[Alternative]:
        """10000, which some trainers use whatever the config says; the target's; Llama 3's and Qwen's."""
        targets = (getattr(self._target.config, "rope_parameters", None) or {}).get("rope_theta")
        bases = dict.fromkeys(float(base) for base in (1e4, targets, 5e5, 1e6) if base)
        return [
            Alternative({"rope_theta": base}, f"RoPE base {base:g}" + (" (the target's)" if base == targets else ""))
            for base in bases
            if base != rope["rope_theta"]
        ]
