"""Whole drafts of EAGLE-3 heads, one native call each: what was committed is read, and trees grow behind it.

Structure: that of `kernel/draft.h`. The reference is the calls of `TreeRows`, `NativeRanking` and `NativeGrowth`, level
by level.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from . import binding
from .growth import NativeGrowth
from .layers import CallStructure
from .ranking import NativeRanking, RankingStructure, Sampling
from .rounded import RoundedMatrix
from .rounded_layers import RoundedForward
from .rows import TreeRows
from .weights import MatrixStructure, fields, fill_embeddings, fill_matrix


_MOST_FEATURES = 8

_Ask = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64)


class _Draft(ctypes.Structure):
    _fields_ = [
        *(("layers", CallStructure), ("ranking", RankingStructure), ("growth", ctypes.c_void_p)),
        ("embeddings", MatrixStructure),
        *fields(ctypes.c_void_p, "cos", "sin", "positions"),
        ("num_pending", ctypes.c_int64),
        *fields(ctypes.c_void_p, "pending_tokens", "pending_states"),
        *fields(ctypes.c_int64, "num_features"),
        *(("features", ctypes.c_void_p * _MOST_FEATURES), ("fusing", MatrixStructure)),
        *fields(ctypes.c_void_p, "root", "offsets", "runs"),
        ("goes_on", _Ask),
    ]


@dataclass(frozen=True)
class Unread:
    """Entries that were committed and are yet to be read; everything contiguous.

    Attributes:
        tokens: of the entries.
        features: their states; or several of the target's, which `fusing` projects together.
        fusing: None: there is but one, which is their states.
    """

    tokens: Int[Tensor, "B J"]
    features: Sequence[Float[Tensor, "B J H"]]
    fusing: RoundedMatrix | None = None

    @staticmethod
    def fusing_of(projection: nn.Module, num_features: int) -> RoundedMatrix | None:
        """The matrix that projects so many features; None where that is to be done before (no matrix in 8 bits)."""
        forward = vars(projection).get("forward")
        if not isinstance(forward, RoundedForward) or num_features > _MOST_FEATURES:
            return None
        return forward.matrix()

    def fill(self, draft: _Draft) -> None:
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
        rows: where entries go. Its layers are those of a head, the first one joins embeddings.
        ranking: what follows the layers.
        embeddings: looks tokens up.
        angles: cosines and sines of every position, [positions, D] each, contiguous.
    """

    rows: TreeRows
    ranking: NativeRanking
    embeddings: nn.Module
    angles: tuple[Tensor, Tensor]

    @staticmethod
    def looks_up(embeddings: nn.Module, dtype: torch.dtype) -> bool:
        """Whether the kernel looks tokens up as this module does, in this type."""
        return fill_embeddings(MatrixStructure(), embeddings, dtype)

    def grow(
        self,
        growth: NativeGrowth,
        root: Float[Tensor, "B H"],
        unread: Unread | None,
        positions: Int[Tensor, " B"],
        sampling: Sampling,
        noise: Callable[[int], Float[Tensor, "B C"] | None],
        goes_on: Callable[[], bool],
    ) -> bool:
        """Grows trees as deep as they may be.

        Args:
            growth: to which nothing was proposed yet.
            root: contiguous, states of the entry that was committed last. Found, where something is to be read.
            unread: is read first; counted by `rows`.
            positions: of the next entry of each row.
            noise: of each level, see `NativeRanking.run`.
            goes_on: whether another level is wanted, after each.
        Returns:
            False where scores are not finite or a token has no embedding. No entry that was committed has changed.
        Raises:
            MemoryError: there is none left.
        """
        kept = [noise(0)]  # of the level that is ranked next
        layers = self.rows.layers.call(self.rows.buffers)
        draft = _Draft(layers=layers, ranking=self.ranking.call(kept[0], sampling))
        if not fill_embeddings(draft.embeddings, self.embeddings, root.dtype):
            return False
        draft.growth, draft.root, draft.positions = growth.address, root.data_ptr(), positions.data_ptr()
        draft.cos, draft.sin = (part.data_ptr() for part in self.angles)
        draft.offsets, draft.runs = (part.data_ptr() for part in self.rows.sight_before)
        draft.ranking.normed = root.data_ptr() if self.ranking.feeds_back_normed else None  # anything: it is wanted
        draft.layers.num_keys = self.rows.num_before
        if unread is not None:
            unread.fill(draft)
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
            except BaseException as error:  # it cannot pass through the kernel
                errors.append(error)
                return False

        draft.goes_on = _Ask(ask)
        done = binding.library().draft(ctypes.addressof(draft))
        draft.goes_on = _Ask()  # a cycle with `ask` would be the garbage collector's work, round after round
        if errors:
            raise errors[0]
        if done < 0:
            raise MemoryError(f"no memory for {growth.tokens.numel()} rows behind {self.rows.num_before} entries")
        return bool(done)
