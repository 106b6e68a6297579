"""What a collator gives and a method takes: a batch of rows, each of one or more documents."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import TypedDict


# `document_ids` of padding.
NO_DOCUMENT = -1


class _Required(TypedDict):
    input_ids: Int[Tensor, "B S"]
    position_ids: Int[Tensor, "B S"]
    document_ids: Int[Tensor, "B S"]
    loss_mask: Bool[Tensor, "B S"]


class Batch(_Required, total=False):
    """B rows of S tokens.

    Attributes:
        input_ids: int64 [B, S].
        position_ids: int64 [B, S], restart at 0 in each document of a row; padding is a document of its own.
        document_ids: int64 [B, S], 0, 1, … within a row; `NO_DOCUMENT` at padding.
        loss_mask: bool [B, S], whether a token is one that the target is to emit (assistant or completion token).
        features: only from a cache, the target's hidden states [B, S, H] by layer (`TargetStates.features`).
        last_hidden: only from a cache, [B, S, H] (`TargetStates.last_hidden`).
    """

    features: dict[int, Float[Tensor, "B S H"]]
    last_hidden: Float[Tensor, "B S H"]
