"""The layout of packed matrices for GPUs: a permutation of the file's bits, which can be undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_speculate_gguf.gpu import LAYOUTS, TILE_ROWS, pack, tile_bytes, unpack
from hf_speculate_gguf.gpu.blocks import BLOCKS
from hf_speculate_gguf.native import FORMATS

from ..support.packed import make_matrix, reference


def shapes_of(kind):
    """Rows and columns, odd ones among them. Columns are whole blocks."""
    return [(70, 96), (64, 416), (3, 32)] if FORMATS[kind].block_size == 32 else [(70, 256), (64, 768)]


def test_every_packed_type_has_a_layout():
    assert LAYOUTS.keys() == BLOCKS.keys() == FORMATS.keys()
    for kind, blocks in BLOCKS.items():
        assert (blocks.size, blocks.num_bytes) == (FORMATS[kind].block_size, FORMATS[kind].block_bytes)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_unpack_gives_the_weights_of_the_gguf_package(kind, tmp_path):
    for rows, columns in shapes_of(kind):
        matrix = make_matrix(tmp_path, kind, rows, columns)
        tiles = pack(matrix.read(0, rows), kind)
        assert tiles.shape == (-(-rows // TILE_ROWS), tile_bytes(kind, columns))
        assert torch.equal(unpack(tiles, kind, rows, columns), reference(matrix)), f"{kind}, {rows} x {columns}"


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_first_tiles_are_those_of_the_first_rows(kind, tmp_path):
    matrix = make_matrix(tmp_path, kind, rows=130)
    tiles = pack(matrix.read(0, 130), kind)
    assert torch.equal(tiles[:1], pack(matrix.read(0, TILE_ROWS), kind))
    assert torch.equal(unpack(tiles[1:2], kind, TILE_ROWS, 512), reference(matrix)[TILE_ROWS : 2 * TILE_ROWS])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_packed_matrices_are_as_large_as_the_file(kind):
    """Only 8-bit factors in place of 6 bits cost something."""
    columns = 4096
    in_file = columns // FORMATS[kind].block_size * FORMATS[kind].block_bytes
    assert in_file * TILE_ROWS <= tile_bytes(kind, columns) <= 1.04 * in_file * TILE_ROWS


def test_planes_begin_at_multiples_of_64_bytes():
    """So threads load 16 bytes at a time."""
    for kind, layout in LAYOUTS.items():
        for columns in range(FORMATS[kind].block_size, 2049, FORMATS[kind].block_size):
            assert not any(at % 64 for at in layout.offsets(columns)), f"{kind}, {columns} columns"


@pytest.mark.parametrize(("kind", "byte"), [("Q4_1", 2), ("Q4_K", 2), ("Q6_K", 208)])
def test_pack_refuses_scales_that_are_not_finite(kind, byte, tmp_path):
    rows = make_matrix(tmp_path, kind, rows=2).read(0, 2).clone()
    rows[1, byte : byte + 2] = torch.from_numpy(np.frombuffer(np.float16("nan").tobytes(), np.uint8).copy())
    assert pack(rows, kind) is None
