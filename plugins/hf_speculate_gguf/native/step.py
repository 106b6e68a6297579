"""Forwards of causal LMs in one native call each: from token ids to logits, with the states of every layer.

The ctypes structure mirrors `kernel/step.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import binding
from .layer_parts import LayerParts, epsilon_of, matrix_of, quantizes_activations, shift_of
from .layers import MOST_ROWS, NUM_TYPES, CallStructure, Entries, NativeLayers, VisibleRanges
from .memory import address_of, address_of_table, places_of
from .modules import PackedMatrix, rounded_factor
from .refusals import MIXED_WEIGHTS, Refused
from .weights import (
    MatrixStructure,
    WeightsInPlace,
    fields,
    fill_embeddings,
    fill_matrix,
    parameters_of,
    scale_of,
    unpacked,
)


# Types of RoPE whose angles depend only on the position.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def has_fixed_rope(rotary: Any) -> bool:
    """Whether all angles of a rotary embedding, of one type or one for each type of layer, depend only on positions."""
    kinds = [rotary.rope_type] if isinstance(rotary.rope_type, str) else rotary.rope_type.values()
    return all(kind in FIXED_ROPE for kind in kinds)


class AngleTable:
    """Cosines and sines of all positions up to the longest one asked for."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = ()
        self._table: tuple[Tensor, Tensor] | None = None

    def upto(
        self, rotary: Any, needed: int, dtype: torch.dtype, layer_type: str | None = None
    ) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]]:
        """Contiguous angles of at least `needed` positions. They are computed again if the frequencies have changed.

        A module with frequencies for each type of layers needs the type.
        """
        prefix, named = ("", ()) if layer_type is None else (f"{layer_type}_", (layer_type,))
        frequencies, scaling = (getattr(rotary, f"{prefix}{name}") for name in ("inv_freq", "attention_scaling"))
        version = None if frequencies.is_inference() else frequencies._version
        made_of = id(frequencies), *places_of([frequencies]), version, scaling, dtype
        if self._table is None or self._made_of != made_of or len(self._table[0]) < needed:
            with torch.no_grad():
                cos, sin = rotary(
                    torch.empty(0, dtype=dtype, device="cpu"),
                    torch.arange(max(2 * needed, 1024), dtype=torch.long, device="cpu")[None],
                    *named,
                )
            self._table, self._made_of = (cos[0].contiguous(), sin[0].contiguous()), made_of
        return self._table


Angles = tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]] | None
"""Cosines and sines of every position, contiguous."""


def num_positions(angles: Sequence[Angles]) -> int:
    """The number of positions that have angles for all types of layers."""
    return min(len(cos) for cos, _ in filter(None, angles))


@binding.mirrors("Step")
class _StepStructure(ctypes.Structure):
    _fields_ = [
        *(("layers", CallStructure), ("embeddings", MatrixStructure), ("embedding_scale", ctypes.c_double)),
        *fields(ctypes.c_void_p, "tokens", "positions"),
        *fields(ctypes.c_void_p * NUM_TYPES, "cos", "sin"),
        *fields(ctypes.c_int64, "num_positions"),
        *fields(ctypes.c_void_p, "norm"),
        *fields(ctypes.c_double, "eps", "norm_shift"),
        *fields(ctypes.c_void_p, "normed"),
        ("output", MatrixStructure),
        *fields(ctypes.c_int64, "num_scored"),
        *fields(ctypes.c_void_p, "logits"),
    ]


@dataclass(frozen=True)
class TextRows:
    """Tokens of some texts, and where their entries go. All tensors are contiguous.

    Attributes:
        call: call structure with these buffers (`NativeLayers.call`).
        num_keys: number of entries including those of the queries.
        visible_ranges: visible ranges of each query in layers without a window, and in those with one.
        num_scored: number of each text's last queries whose logits are wanted.
    """

    tokens: Int[Tensor, "B N"]
    positions: Int[Tensor, "B N"]
    buffers: Sequence[Entries]
    call: CallStructure
    num_keys: int
    visible_ranges: Sequence[VisibleRanges]
    num_scored: int

    def parts(self, layers: NativeLayers) -> list[list[TextRows]]:
        """The rows in parts that the kernel takes at once: some texts whole, or a text in pieces, in text order."""
        batch_size, num_queries = self.tokens.shape
        count = max(MOST_ROWS // num_queries, 1)  # texts at once
        pieces = [slice(start, min(start + MOST_ROWS, num_queries)) for start in range(0, num_queries, MOST_ROWS)]
        if batch_size <= count and len(pieces) == 1:
            return [[self]]
        texts = [slice(start, min(start + count, batch_size)) for start in range(0, batch_size, count)]
        calls = [
            layers.call([Entries(keys[rows], values[rows], origin) for keys, values, origin in self.buffers])
            for rows in texts
        ]
        return [[self._part(rows, piece, call) for piece in pieces] for rows, call in zip(texts, calls, strict=True)]

    def _part(self, texts: slice, piece: slice, call: CallStructure) -> TextRows:
        num_queries = self.tokens.shape[1]
        left = num_queries - piece.stop  # queries of the text after this piece
        # Offsets count from the first range of the whole batch. A piece is one of a single text, or whole texts.
        first = texts.start * num_queries
        offsets = slice(first + piece.start, first + (texts.stop - texts.start - 1) * num_queries + piece.stop + 1)
        return replace(
            self,
            tokens=self.tokens[texts, piece],
            positions=self.positions[texts, piece],
            call=call,
            num_keys=self.num_keys - left,
            visible_ranges=[ranges and (ranges[0][offsets], ranges[1]) for ranges in self.visible_ranges],
            num_scored=min(max(self.num_scored - left, 0), piece.stop - piece.start),
        )


@dataclass(frozen=True)
class Scored:
    """The result of a forward: embeddings and the outputs of each layer (empty if not wanted), the last one normed, and
    the logits of the last queries."""

    states: Float[Tensor, "L1 B N H"]
    normed: Float[Tensor, "B N H"]
    logits: Float[Tensor, "B S V"]

    @classmethod
    def joined(cls, parts: Sequence[Scored], dim: int) -> Scored:
        """The result of texts (`dim` 0), or of a text's pieces (1), from those of its parts."""
        if len(parts) == 1:
            return parts[0]
        normed, logits = (torch.cat([getattr(part, name) for part in parts], dim) for name in ("normed", "logits"))
        return cls(torch.cat([part.states for part in parts], dim + 1), normed, logits)


class NativeStep:
    """The weights of a whole causal LM at their present addresses: its layers, and the modules around them."""

    def __init__(self, layers: NativeLayers, embeddings: Any, norm: Any, output: Any):
        self.layers = layers
        self._hidden, self._num_columns = embeddings.embedding_dim, output.out_features
        self._weights = WeightsInPlace([embeddings, norm, output])
        self._fixed = _StepStructure(eps=epsilon_of(norm), norm_shift=shift_of(norm))
        self._fixed.norm = address_of(norm.weight, layers.dtype, (layers.hidden,))
        self._fixed.embedding_scale = rounded_factor(scale_of(embeddings), layers.dtype)
        fill_embeddings(self._fixed.embeddings, embeddings, layers.dtype, are_scaled=True)
        fill_matrix(self._fixed.output, output, layers.dtype)

    @classmethod
    def of(cls, layers: Sequence[LayerParts], embeddings: Any, norm: Any, output: Any) -> NativeStep:
        """The weights. Raises `Refused` if the kernel cannot compute the whole model."""
        native, matrix = NativeLayers.of(layers), matrix_of(output)
        if matrix is None or matrix is not output or quantizes_activations(matrix) is None:
            raise Refused(f"an output layer of type {type(output).__name__}, or with weights that it cannot read")
        dense = {weight.dtype for weight in unpacked(parameters_of([norm, matrix]))}
        has_type = dense == {native.dtype}
        if not has_type or not fill_embeddings(MatrixStructure(), embeddings, native.dtype, are_scaled=True):
            raise Refused(MIXED_WEIGHTS)
        if isinstance(matrix, PackedMatrix) and quantizes_activations(matrix) != native.quantizes_activations:
            raise Refused("an output layer with other products than the layers")
        return cls(native, embeddings, norm, matrix)

    def is_current(self) -> bool:
        """Whether the weights are unchanged (`WeightsInPlace.are_current`)."""
        return self.layers.is_current() and self._weights.are_current()

    def has_gradients(self) -> bool:
        """Whether a weight requires a gradient."""
        return self.layers.has_gradients() or self._weights.have_gradients()

    def run(self, rows: TextRows, angles: Sequence[Angles], keeps_states: bool) -> Scored | None:
        """The outputs for these rows. Their entries are then in the cache; committed entries never change.

        Args:
            angles: angles of layers without a window, and of those with one; None if there are no such layers.
            keeps_states: whether the states of all layers are wanted; otherwise they may be empty.

        Returns:
            The outputs; None if a token has no embedding or a position no angle.
        """
        texts, parts = [], rows.parts(self.layers)
        are_many = len(parts) * len(parts[0]) > 1
        for pieces in parts:
            of_text = []
            for part in pieces:
                scored = self._run(part, angles)
                if scored is None:
                    return None
                if are_many and not keeps_states:  # the states of a large batch take much memory
                    scored = replace(scored, states=scored.states.new_empty(0, 0, 0))
                of_text.append(scored)
            texts.append(Scored.joined(of_text, dim=1))
        return Scored.joined(texts, dim=0)

    def _run(self, rows: TextRows, angles: Sequence[Angles]) -> Scored | None:
        size, dtype = rows.tokens.shape, self.layers.dtype
        of_states, of_logits = (*size, self._hidden), (size[0], rows.num_scored, self._num_columns)
        states = torch.empty(len(self.layers) + 1, *of_states, dtype=dtype, device="cpu")
        normed = torch.empty(of_states, dtype=dtype, device="cpu")
        logits = torch.empty(of_logits, dtype=dtype, device="cpu")
        rows.call.check_rows(size[0], size[1], rows.num_keys)
        step = _StepStructure.from_buffer_copy(self._fixed)
        step.layers = rows.call
        step.layers.batch_size, step.layers.num_queries = size
        step.layers.num_keys = rows.num_keys
        step.layers.set_visible_ranges(rows.visible_ranges, size.numel())
        step.layers.x = address_of(states, dtype, states.shape)
        step.layers.y = step.layers.x + normed.nbytes
        step.tokens = address_of(rows.tokens, torch.long, size)
        step.positions = address_of(rows.positions, torch.long, size)
        step.num_positions = num_positions(angles)
        for number, of_type in enumerate(angles):
            if of_type is not None:
                table = dtype, step.num_positions, self.layers.heads[1]
                step.cos[number], step.sin[number] = (address_of_table(part, *table) for part in of_type)
        step.normed, step.logits = address_of(normed, dtype, of_states), address_of(logits, dtype, of_logits)
        step.num_scored = rows.num_scored
        done = binding.library().step(ctypes.addressof(step))
        if done < 0:
            raise MemoryError(f"Out of memory: {rows.tokens.numel()} rows after {rows.num_keys} cached tokens.")
        return Scored(states, normed, logits) if done else None
