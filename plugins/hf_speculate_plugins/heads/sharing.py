"""A head that uses modules of its target instead of copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checkpoints import HeadSizes
from .layers import LayerSpec, call_beside


class HeadSpec(HeadSizes, LayerSpec, Protocol):
    """What is known of every head of decoder layers."""

    @property
    def target_hidden_size(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...


Spec = TypeVar("Spec", bound=HeadSpec)


class SharingHead(nn.Module, Generic[Spec]):
    """What heads of decoder layers have beside their layers.

    Args:
        spec: what the head computes.
        embed_tokens, lm_head: the target's own modules where the head has none; they are referenced, neither copied
            nor registered as submodules (`state_dict` and `.to` do not reach them).

    Attributes:
        shared: those modules of the target by name, None where the head has its own.

    Do not cast the whole module with `.to(dtype)`: the rotary frequencies stay in float32. Load weights of the wanted
    dtype instead (`checkpoint`).
    """

    fc: nn.Linear  # what the target's features are projected with
    rotary: nn.Module

    def __init__(self, spec: Spec, embed_tokens: nn.Module | None = None, lm_head: nn.Module | None = None):
        super().__init__()
        self.spec = spec
        self.shared: dict[str, Any] = {"embed_tokens": embed_tokens, "lm_head": lm_head}
        if embed_tokens is None:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if lm_head is None:
            self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self._quick: dict[str, nn.Module] | None = None

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def windows(self) -> Sequence[int | None]:
        return self.spec.windows

    def embed(self, token_ids: Int[Tensor, "B N"]) -> Float[Tensor, "B N Hd"]:
        """Token embeddings, on the head's device (the target's embeddings may lie elsewhere)."""
        return call_beside(self.embeddings, token_ids).to(device=self.device, dtype=self.dtype)

    @property
    def embeddings(self) -> Any:
        """The module that looks tokens up: the head's own or the target's."""
        return self.shared["embed_tokens"] or self.embed_tokens

    @property
    def output(self) -> Any:
        """The module that makes draft logits: the head's own or the target's."""
        return self.shared["lm_head"] or self.lm_head

    @property
    def draft_output(self) -> Any:
        """The same for drafting, see `quicken`."""
        return (self._quick or {}).get("lm_head") or self.output

    @property
    def is_quick(self) -> bool:
        """Whether it was quickened."""
        return self._quick is not None

    def quicken(self) -> None:
        """From now on matrices are multiplied in 8 bits where few rows are drafted, on a CPU that has the kernel. The
        weights stay what they are, and so does the target."""
        from hf_speculate.gguf import RoundedLinear, has_kernel, quicken  # and the room of packed targets

        if not self.is_quick and self.device.type == "cpu" and has_kernel():
            quicken(self)
            self._quick = {}  # not registered, as what is shared
            if RoundedLinear.suits(self.shared["lm_head"]):
                self._quick["lm_head"] = RoundedLinear(self.shared["lm_head"])
