"""Whole drafts of EAGLE heads in one native call each: the call reads new committed entries and grows the trees.

The ctypes structure mirrors `kernel/draft.h`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from . import binding
from .growth import NativeGrowth
from .layer_parts import matrix_of, rounded, rounds_inputs
from .layers import CallStructure
from .modules import PackedMatrix
from .ranking import NativeRanking, RankingStructure, Sampling
from .rounded import RoundedMatrix
from .rounded_layers import RoundedForward
from .rows import TreeRows
from .weights import MatrixStructure, fields, fill_embeddings, fill_matrix, parameters_of, unpacked


_MOST_FEATURES = 8

_Ask = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64)


class _DraftStructure(ctypes.Structure):
    _fields_ = [
        *(("layers", CallStructure), ("ranking", RankingStructure), ("growth", ctypes.c_void_p)),
        ("embeddings", MatrixStructure),
        *fields(ctypes.c_void_p, "cos", "sin", "positions"),
        ("num_pending", ctypes.c_int64),
        *fields(ctypes.c_void_p, "pending_tokens", "pending_states"),
        *fields(ctypes.c_int64, "num_features"),
        *(("features", ctypes.c_void_p * _MOST_FEATURES), ("fusing", MatrixStructure), ("joining", MatrixStructure)),
        *fields(ctypes.c_void_p, "root", "offsets", "runs"),
        ("goes_on", _Ask),
    ]


@dataclass(frozen=True)
class PendingEntries:
    """Committed entries that the head has not read yet. All tensors are contiguous.

    Attributes:
        features: states of the entries; or several states of the target, which `fusing` projects together.
        fusing: matrix that projects `features`; None if there is one feature, the entries' states.
    """

    tokens: Int[Tensor, "B J"]
    features: Sequence[Float[Tensor, "B J H"]]
    fusing: RoundedMatrix | None = None

    @staticmethod
    def fusing_of(projection: nn.Module, num_features: int) -> RoundedMatrix | None:
        """The matrix that projects `num_features` features; None if the module must do it (no 8-bit matrix)."""
        forward = vars(projection).get("forward")
        if not isinstance(forward, RoundedForward) or num_features > _MOST_FEATURES:
            return None
        return forward.matrix()

    def fill(self, draft: _DraftStructure) -> None:
        draft.num_pending, draft.pending_tokens = self.tokens.shape[1], self.tokens.data_ptr()
        if self.fusing is None:
            draft.pending_states = self.features[0].data_ptr()
            return
        draft.num_features = len(self.features)
        for index, states in enumerate(self.features):
            draft.features[index] = states.data_ptr()
        fill_matrix(draft.fusing, self.fusing)


@dataclass(frozen=True)
class NativeDraft:
    """The native part of the drafts of one request.

    Attributes:
        angles: cosines and sines of every position, [positions, D] each, contiguous.
        joining: matrix that projects embeddings and states together (`joining_of`); None: the first layer joins them.
    """

    rows: TreeRows
    ranking: NativeRanking
    embeddings: nn.Module
    angles: tuple[Tensor, Tensor]
    joining: PackedMatrix | nn.Linear | None

    @staticmethod
    def joining_of(projection: nn.Module, dtype: torch.dtype) -> PackedMatrix | nn.Linear | None:
        """The matrix of EAGLE-1's projection, in 8 bits if it drafts in them; None if the kernel cannot use it."""
        matrix = rounded(projection) if "forward" in vars(projection) else matrix_of(projection)
        if matrix is None or rounds_inputs(matrix) is None or matrix.in_features != 2 * matrix.out_features:
            return None
        return matrix if all(weight.dtype is dtype for weight in unpacked(parameters_of([matrix]))) else None

    @staticmethod
    def looks_up(embeddings: nn.Module, dtype: torch.dtype) -> bool:
        """Whether the kernel can look tokens up in this module and dtype."""
        return fill_embeddings(MatrixStructure(), embeddings, dtype)

    def grow(
        self,
        growth: NativeGrowth,
        root: Float[Tensor, "B H"],
        pending: PendingEntries | None,
        positions: Int[Tensor, " B"],
        sampling: Sampling,
        noise: Callable[[int], Float[Tensor, "B C"] | None],
        goes_on: Callable[[], bool],
    ) -> bool:
        """Grows the trees to their full depth.

        Args:
            root: states of the last committed entry, contiguous. They are computed if `pending` is given.
            pending: committed entries to read first, already counted by `rows`; None for none.
            positions: position id of the next entry of each row.
            noise: function from a level to its log noise (`NativeRanking.call`).
            goes_on: function that is called after each level and returns whether to draft another one.

        Returns:
            Whether the draft was made. It is not if scores are not finite or a token has no embedding. Committed
            entries never change.
        """
        kept = [noise(0)]  # noise of the level to be ranked next, kept alive for the kernel
        layers = self.rows.layers.call(self.rows.buffers)
        draft = _DraftStructure(layers=layers, ranking=self.ranking.call(kept[0], sampling))
        if not fill_embeddings(draft.embeddings, self.embeddings, root.dtype):
            return False
        draft.growth, draft.root, draft.positions = growth.address, root.data_ptr(), positions.data_ptr()
        draft.cos, draft.sin = (part.data_ptr() for part in self.angles)
        draft.offsets, draft.runs = (part.data_ptr() for part in self.rows.sight_before)
        # any address: it only requests normed states
        draft.ranking.normed = root.data_ptr() if self.ranking.feeds_back_normed else None
        draft.layers.num_keys = self.rows.num_before
        if self.joining is not None:
            fill_matrix(draft.joining, self.joining)
        if pending is not None:
            pending.fill(draft)
            draft.layers.num_keys -= draft.num_pending
        errors: list[BaseException] = []

        def ask(level: int) -> bool:
            try:
                is_wanted = goes_on()
                found = noise(level) if is_wanted else None
                if found is not None:
                    kept[0] = found
                    draft.ranking.log_noise = found.data_ptr()
                return is_wanted
            except BaseException as error:  # an exception cannot pass through the kernel
                errors.append(error)
                return False

        draft.goes_on = _Ask(ask)
        with _interrupts(errors):
            done = binding.library().draft(ctypes.addressof(draft))
        draft.goes_on = _Ask()  # break the reference cycle with `ask`, which would need the garbage collector
        if errors:
            raise errors[0]
        if done < 0:
            raise MemoryError(
                f"Out of memory: {growth.values.numel()} rows after {self.rows.num_before} cached tokens."
            )
        return bool(done)


@contextmanager
def _interrupts(errors: list[BaseException]) -> Iterator[None]:
    """Adds to `errors` what a signal handler (Ctrl-C, an alarm) raises as a callback begins.

    Before the callback's first line no `try` of its own sees it, and ctypes would only print it. Python runs handlers
    in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    def keep(found: Any) -> None:
        if found.exc_value is not None and "ctypes callback function" in (found.err_msg or ""):
            errors.append(found.exc_value)
        else:
            before(found)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
