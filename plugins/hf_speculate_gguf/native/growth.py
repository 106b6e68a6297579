"""Dynamic draft trees, grown natively from a head's proposals.

The ctypes structure mirrors `kernel/growth.h`.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import binding
from .weights import fields


# Largest number of nodes in a level, and of levels (MOST_WIDTH of the kernel).
MOST_WIDTH = 128


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
        self.depth = depth
        pool_room = width + (depth - 1) * width**2
        self.values, self._pool_values = torch.empty(batch_size, width), torch.empty(batch_size, pool_room)
        self._tokens, self.previous, self._in_pool = torch.empty(3, batch_size, width, dtype=torch.long)
        self._pool_tokens, self._pool_parents = torch.empty(2, batch_size, pool_room, dtype=torch.long)
        self._run_parents = torch.empty(batch_size, depth, width, dtype=torch.long)
        self._token_ids = token_ids
        self._structure = GrowthStructure(
            batch_size=batch_size,
            width=width,
            depth=depth,
            token_ids=None if token_ids is None else token_ids.data_ptr(),
            pool_values=self._pool_values.data_ptr(),
            pool_tokens=self._pool_tokens.data_ptr(),
            pool_parents=self._pool_parents.data_ptr(),
            values=self.values.data_ptr(),
            tokens=self._tokens.data_ptr(),
            previous=self.previous.data_ptr(),
            in_pool=self._in_pool.data_ptr(),
            run_parents=self._run_parents.data_ptr(),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._structure)

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
        tokens, parents = torch.empty(2, structure.batch_size, count + 1, dtype=torch.long)
        tokens[:, 0] = root_ids
        values = torch.empty(tokens.shape)
        pointers = tokens.data_ptr(), parents.data_ptr(), values.data_ptr()
        if not binding.library().cut(self.address, count, *pointers):
            raise MemoryError(f"no memory for a tree of {size} candidates")
        return tokens, parents, values
