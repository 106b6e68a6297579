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
from .layer_parts import matrix_of, quantized, quantizes_activations
from .layers import CallStructure, addresses_of_ranges
from .memory import address_of, address_of_table, check_range
from .modules import PackedMatrix
from .quantized import QuantizedMatrix
from .quantized_layers import QuantizedForward
from .ranking import NativeRanking, RankingStructure, Sampling
from .rows import TreeRows
from .weights import MatrixStructure, fields, fill_embeddings, fill_matrix, parameters_of, unpacked


_MOST_FEATURES = 8

_Ask = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64)


@binding.mirrors("Draft")
class _DraftStructure(ctypes.Structure):
    _fields_ = [
        *(("layers", CallStructure), ("ranking", RankingStructure), ("growth", ctypes.c_void_p)),
        ("embeddings", MatrixStructure),
        *fields(ctypes.c_void_p, "cos", "sin", "positions"),
        ("num_pending", ctypes.c_int64),
        *fields(ctypes.c_void_p, "pending_tokens", "pending_states"),
        *fields(ctypes.c_int64, "num_features"),
        *(("features", ctypes.c_void_p * _MOST_FEATURES), ("fusing", MatrixStructure), ("joining", MatrixStructure)),
        *fields(ctypes.c_void_p, "root", "offsets", "ranges"),
        ("num_positions", ctypes.c_int64),
        ("should_continue", _Ask),
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
    fusing: QuantizedMatrix | None = None

    @staticmethod
    def fusing_of(projection: nn.Module, num_features: int) -> QuantizedMatrix | None:
        """The matrix that projects `num_features` features; None if the module must do it (no 8-bit matrix)."""
        forward = vars(projection).get("forward")
        if not isinstance(forward, QuantizedForward) or num_features > _MOST_FEATURES:
            return None
        return forward.matrix()

    def fill(self, draft: _DraftStructure, dtype: torch.dtype, hidden: int) -> None:
        size = self.tokens.shape
        draft.num_pending, draft.pending_tokens = size[1], address_of(self.tokens, torch.long, size)
        if self.fusing is None:
            draft.pending_states = address_of(self.features[0], dtype, (*size, hidden))
            return
        draft.num_features = len(self.features)
        check_range("the width of fused features", self.fusing.out_features, hidden, hidden)
        width = self.fusing.in_features // len(self.features)
        for index, states in enumerate(self.features):
            draft.features[index] = address_of(states, dtype, (*size, width))
        fill_matrix(draft.fusing, self.fusing, dtype)


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
        matrix = quantized(projection) if "forward" in vars(projection) else matrix_of(projection)
        if matrix is None or quantizes_activations(matrix) is None or matrix.in_features != 2 * matrix.out_features:
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
        should_continue: Callable[[], bool],
    ) -> bool:
        """Grows the trees to their full depth.

        Args:
            root: states of the last committed entry, contiguous. They are computed if `pending` is given.
            pending: committed entries to read first, already counted by `rows`; None for none.
            positions: position id of the next entry of each row.
            noise: function from a level to its log noise (`NativeRanking.call`).
            should_continue: function that is called after each level and returns whether to draft another one.

        Returns:
            Whether the draft was made. It is not if scores are not finite or a token has no embedding. Committed
            entries never change.
        """
        kept = [noise(0)]  # noise of the level to be ranked next, kept alive for the kernel
        layers = self.rows.layers.call(self.rows.buffers)
        draft = _DraftStructure(layers=layers, ranking=self.ranking.call(kept[0], sampling, len(root)))
        if not fill_embeddings(draft.embeddings, self.embeddings, root.dtype):
            return False
        self._place(draft, layers, growth, root, positions)
        if pending is not None:
            pending.fill(draft, root.dtype, self.rows.layers.hidden)
            draft.layers.num_keys -= draft.num_pending
        errors: list[BaseException] = []

        def ask(level: int) -> bool:
            try:
                is_wanted = should_continue()
                log_noise = noise(level) if is_wanted else None
                if log_noise is not None:
                    kept[0] = log_noise
                    self.ranking.set_noise(draft.ranking, log_noise, len(root))
                return is_wanted
            except BaseException as error:  # an exception cannot pass through the kernel
                errors.append(error)
                return False

        draft.should_continue = _Ask(ask)
        with _interrupts(errors):
            done = binding.library().draft(ctypes.addressof(draft))
        draft.should_continue = _Ask()  # break the reference cycle with `ask`, which would need the garbage collector
        if errors:
            raise errors[0]
        if done < 0:
            raise MemoryError(
                f"Out of memory: {growth.values.numel()} rows after {self.rows.num_before} cached tokens."
            )
        return bool(done)

    def _place(
        self, draft: _DraftStructure, layers: CallStructure, growth: NativeGrowth, root: Tensor, positions: Tensor
    ) -> None:
        """Sets the addresses of trees, states, angles and of what is visible before; raises `WrongBufferError`."""
        (batch_size, width, depth), hidden = growth.size, self.rows.layers.hidden
        dtype, head_dim = self.rows.layers.dtype, self.rows.layers.heads[1]
        num_queries = width if depth > 1 else 1  # the last level is ranked, but not run
        layers.check_rows(batch_size, num_queries, self.rows.num_before + width * (depth - 1))
        growth.check_columns(draft.ranking.num_columns)
        check_range("the width of embeddings", draft.embeddings.in_features, hidden, hidden)
        check_range("the width of ranked states", draft.ranking.output.in_features, hidden, hidden)
        draft.growth, draft.root = growth.address, address_of(root, dtype, (batch_size, hidden))
        draft.positions = address_of(positions, torch.long, (batch_size,))
        draft.num_positions = min(map(len, self.angles))
        table = dtype, draft.num_positions, head_dim
        draft.cos, draft.sin = (address_of_table(part, *table) for part in self.angles)
        draft.offsets, draft.ranges = addresses_of_ranges(self.rows.ranges_before, batch_size)
        # any address: it only requests normed states
        draft.ranking.normed = draft.root if self.ranking.feeds_back_normed else None
        draft.layers.num_keys = self.rows.num_before
        if self.joining is not None:
            check_range("the width of joined states", self.joining.in_features, 2 * hidden, 2 * hidden)
            fill_matrix(draft.joining, self.joining, dtype)


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

    def keep(unraisable: Any) -> None:
        if unraisable.exc_value is not None and "ctypes callback function" in (unraisable.err_msg or ""):
            errors.append(unraisable.exc_value)
        else:
            before(unraisable)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
