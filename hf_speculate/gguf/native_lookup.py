"""Rows of packed matrices as embeddings want them, in one native call: in torch a row is eight operations."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from . import native


def look_up(
    rows: UInt8[Tensor, "V bytes"], block_type: str, num_columns: int, ids: Int[Tensor, " N"]
) -> Float[Tensor, "N K"] | None:
    """`BlockFormat.dequantize` of some rows, bit for bit, in float32; None where one of them is not there.

    Args:
        rows: blocks as in the file.
        ids: from 0 on; torch's negative ones are none here.
    """
    library, ids = native.library(), ids.long().contiguous()
    values = torch.empty(len(ids), num_columns)
    places = ids.data_ptr(), len(ids), values.data_ptr()
    is_done = library.look_up(library.kinds[block_type], rows.data_ptr(), len(rows), num_columns, *places)
    return values if is_done else None
