"""The forward of Medusa heads, plain or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.compilation import Buffers, Compiler, SetKey, pool_of
from hf_speculate.drafting import DraftRequest

from .head import MedusaHeads


if TYPE_CHECKING:
    from hf_speculate.gguf import RoundedLinear

    OutputsOf = Callable[[PreTrainedModel], Sequence[RoundedLinear]]


class Forward(Protocol):
    """Runs the heads of one request."""

    def __call__(self, features: Float[Tensor, "B H"], num_heads: int) -> Float[Tensor, "D B Vd"]:
        """Logits of the first `num_heads` heads."""
        ...

    def close(self) -> None:
        """Gives back what the forwards held."""


class PlainForward:
    """`Forward` as it is.

    Args:
        heads: the heads.
        lm_head: the target's output matrix, for heads without one.
    """

    def __init__(self, heads: MedusaHeads, lm_head: nn.Module | None):
        self._heads, self._lm_head = heads, lm_head

    def __call__(self, features: Tensor, num_heads: int) -> Tensor:
        return self._heads(features, self._lm_head, num_heads=num_heads)

    def close(self) -> None:
        pass


class CompiledForward:
    """`Forward` compiled. All heads run, whatever is asked for: their number is a part of the shape.

    Args:
        heads, lm_head: see `PlainForward`.
        compiler: of the request.
    """

    def __init__(self, heads: MedusaHeads, lm_head: nn.Module | None, compiler: Compiler):
        self._heads, self._lm_head, self._compiler = heads, lm_head, compiler
        self._plain = PlainForward(heads, lm_head)
        self._buffers: dict[SetKey, Buffers] = {}

    def __call__(self, features: Tensor, num_heads: int) -> Tensor:
        heads, set_key = self._heads, (len(features), 0)
        if set_key not in self._buffers:
            self._buffers[set_key] = pool_of(heads).take(set_key)

        def inputs() -> tuple[Any, ...]:
            return heads, self._lm_head, self._buffers[set_key].filled("features", features)

        def plain() -> Tensor:
            return self._plain(features, num_heads)

        key = (len(features), heads.dtype)
        return self._compiler.run(heads, heads.device, key, medusa_logits, inputs, plain)[:num_heads]

    def close(self) -> None:
        pool_of(self._heads).put_back(self._buffers)
        self._buffers = {}


def medusa_logits(heads: MedusaHeads, lm_head: nn.Module | None, features: Tensor) -> Tensor:
    return heads(features, lm_head)


def forward_of(heads: MedusaHeads, outputs_of: OutputsOf, request: DraftRequest) -> Forward:
    """The heads' forward for one request: compiled where there is a compiler and that makes it faster.

    Args:
        outputs_of: see `QuickOutputs.of`.
    """
    outputs, compiler = heads.output_weight, request.compiler
    has_many = outputs is not None and len(outputs) > 1
    if compiler and compiler.backend == "inductor" and has_many and heads.device.type == "cpu":
        compiler.refuse("Medusa heads with matrices of their own take longer compiled by inductor on a CPU")
        compiler = None
    # Asked for here and not kept in the drafter, which would keep the target alive.
    lm_head = request.target.get_output_embeddings() if outputs is None else None
    if compiler is not None:
        return CompiledForward(heads, lm_head, compiler)
    if quick := outputs_of(request.target):
        from .quick import QuickForward

        return QuickForward(heads, quick)
    return PlainForward(heads, lm_head)
