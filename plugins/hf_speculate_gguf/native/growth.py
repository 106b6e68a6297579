"""Dynamic draft trees, grown natively from a head's proposals.

The ctypes structure mirrors `kernel/growth.h`.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import binding
from .memory import address_of, check_range
from .weights import fields


# Largest number of nodes in a level, and of levels (MOST_WIDTH of the kernel).
MOST_WIDTH = 128


@binding.mirrors("Growth")
class GrowthStructure(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "batch_size", "width", "depth", "num_levels"),
        *fields(ctypes.c_void_p, "token_ids", "pool_values", "pool_tokens", "pool_parents"),
        *fields(ctypes.c_void_p, "values", "tokens", "previous", "in_pool", "run_parents"),
    ]


class NativeGrowth:
    """The draft trees of one round. Columns are token ids, unless `token_ids` has the id of each.

    Attributes:
        values: path log-probabilities of the frontier [B, K]: the nodes that the next level runs, best first.
        previous: index of each one's parent in the previous frontier, [B, K].
    """

    def __init__(self, batch_size: int, width: int, depth: int, token_ids: Int[Tensor, " W"] | None):
        check_range("the width of a tree", width, 1, MOST_WIDTH)
        check_range("the depth of a tree", depth, 1, MOST_WIDTH)
        self.depth = depth
        pool_capacity = width + (depth - 1) * width**2
        self.values, self._pool_values = (
            torch.empty(batch_size, width, dtype=torch.float32, device="cpu"),
            torch.empty(batch_size, pool_capacity, dtype=torch.float32, device="cpu"),
        )
        self._tokens, self.previous, self._in_pool = torch.empty(3, batch_size, width, dtype=torch.long, device="cpu")
        self._pool_tokens, self._pool_parents = torch.empty(
            2, batch_size, pool_capacity, dtype=torch.long, device="cpu"
        )
        self._run_parents = torch.empty(batch_size, depth, width, dtype=torch.long, device="cpu")
        self._token_ids = token_ids
        self._structure = GrowthStructure(
            batch_size=batch_size,
            width=width,
            depth=depth,
            token_ids=None if token_ids is None else address_of(token_ids, torch.long, (len(token_ids),)),
            pool_values=address_of(self._pool_values, torch.float32, (batch_size, pool_capacity)),
            pool_tokens=address_of(self._pool_tokens, torch.long, (batch_size, pool_capacity)),
            pool_parents=address_of(self._pool_parents, torch.long, (batch_size, pool_capacity)),
            values=address_of(self.values, torch.float32, (batch_size, width)),
            tokens=address_of(self._tokens, torch.long, (batch_size, width)),
            previous=address_of(self.previous, torch.long, (batch_size, width)),
            in_pool=address_of(self._in_pool, torch.long, (batch_size, width)),
            run_parents=address_of(self._run_parents, torch.long, (batch_size, depth, width)),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._structure)

    @property
    def size(self) -> tuple[int, int, int]:
        """Batch size, width and depth."""
        return self._structure.batch_size, self._structure.width, self.depth

    def check_columns(self, num_columns: int) -> None:
        """Raises `WrongBufferError` unless all of the ranked columns have a token id, and a level its children."""
        check_range("the number of ranked tokens", num_columns, self._structure.width, 1 << 40)
        if self._token_ids is not None:
            check_range("the number of token ids", len(self._token_ids), num_columns, 1 << 40)

    @property
    def num_levels(self) -> int:
        return self._structure.num_levels

    def best(
        self, root_ids: Int[Tensor, " B"], most: int
    ) -> tuple[Int[Tensor, "B n"], Int[Tensor, "B n"], Float[Tensor, "B n"]]:
        """Tokens, parents and values of the root and the best `most` nodes (or all, if fewer), best first."""
        structure = self._structure
        size = structure.width + (self.num_levels - 1) * structure.width**2
        count = min(most, size)
        tokens, parents = torch.empty(2, structure.batch_size, count + 1, dtype=torch.long, device="cpu")
        tokens[:, 0] = root_ids
        values = torch.empty(tokens.shape, dtype=torch.float32, device="cpu")
        kinds = (tokens, torch.long), (parents, torch.long), (values, torch.float32)
        pointers = [address_of(tensor, dtype, (structure.batch_size, count + 1)) for tensor, dtype in kinds]
        if not binding.library().cut(self.address, count, *pointers):
            raise MemoryError(f"no memory for a tree of {size} candidates")
        return tokens, parents, values
