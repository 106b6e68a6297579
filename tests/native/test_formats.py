"""Packed matrices: blocks mean what the `gguf` package says; products and memory do not depend on neighbours."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from hf_speculate.errors import CheckpointError, UnsupportedRequestError
from hf_speculate_gguf.matrices import Matrix, half_split_order
from hf_speculate_gguf.native import backends, large_pages
from hf_speculate_gguf.native.backends import BACKENDS, choose_backend
from hf_speculate_gguf.native.formats import FORMATS
from hf_speculate_gguf.native.modules import FusedLinear, PackedEmbedding, Projection

from ..support.packed import CPU, make_matrix, pack, quantized, reference
from ..support.tiers import quick


ON_CPUS = [name for name in BACKENDS if name != "triton"]  # tests/gguf/test_gpu_products.py has that one


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantize_equals_the_gguf_package(kind):
    block_format = FORMATS[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (block_format.block_size, block_format.block_bytes)
    raw = np.random.default_rng(0).integers(0, 256, (64, 2 * block_format.block_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    rows = torch.from_numpy(raw)
    found = block_format.dequantize(rows)
    finite = expected.isfinite()  # random bytes make some infinite scales
    assert finite.float().mean() > 0.5
    assert torch.equal(found[finite], expected[finite]), f"{kind}: weights differ from those of the gguf package"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("backend", ON_CPUS)
def test_packed_products_are_those_of_the_dequantised_matrix(kind, backend, tmp_path):
    """float32 keeps the scales: what is left is the order of sums. bfloat16 rounds scales, inputs and products.
    "native-int8" quantises inputs before that, as said, and nothing else."""
    matrix = make_matrix(tmp_path, kind, rows=80, parts=2)
    weights, inputs = reference(matrix), torch.randn(7, 512)
    for dtype, allowed in ((torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 6e-3)):
        cast = inputs.to(dtype)
        expected = (quantized(cast) if backend == "native-int8" else cast.double()) @ weights.double().T
        found = pack(matrix, backend, dtype)(cast)
        assert found.dtype == dtype
        error = ((found.double() - expected).norm() / expected.norm()).item()
        assert error < allowed, f"{kind}, {backend}, {dtype}: relative error {error:.1e}"


BACKEND_KINDS = [
    ("native", ("Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K")),
    ("native-int8", ("Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K")),
    ("dequantize", ("Q4_0",)),
]


@pytest.mark.parametrize("threads", quick([1, 2]))
@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float32, torch.float16]), ids=str)
@pytest.mark.parametrize(("backend", "kinds"), BACKEND_KINDS)
def test_packed_products_of_a_row_are_the_same_in_every_batch(backend, kinds, dtype, threads, tmp_path, set_threads):
    """Decoding (one row), verification (many) and a prompt must give the same bits."""
    set_threads(threads)
    for kind in kinds:
        layer = pack(make_matrix(tmp_path, kind, rows=208, columns=512), backend, dtype)
        inputs = torch.randn(131, 512).to(dtype)
        every = layer(inputs)
        different = [m for m in (*range(1, 65), 128, 129) if not torch.equal(layer(inputs[:m]), every[:m])]
        different += [-m for m in range(64) if not torch.equal(layer(inputs[m : m + 1]), every[m : m + 1])]
        assert not different, f"{backend}, {kind}, {dtype}: other bits with these numbers of rows: {different}"


def test_dequantize_backend_stays_within_its_buffer(tmp_path, monkeypatch):
    matrix = make_matrix(tmp_path, "Q8_0", rows=96)
    layer, inputs, seen = pack(matrix, "dequantize", torch.float32), torch.randn(5, 512), []
    expected = layer(inputs)
    monkeypatch.setattr(backends, "BUFFER_WEIGHTS", 10 * 512)
    linear = torch.nn.functional.linear
    monkeypatch.setattr(backends.functional, "linear", lambda x, w: seen.append(w.shape[0]) or linear(x, w))
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-5, atol=1e-4)
    assert max(seen) == 10
    assert sum(seen) == 96


@pytest.mark.parametrize("backend", ON_CPUS)
def test_pack_refuses_scales_that_are_not_finite(backend, tmp_path):
    def spoil(data):
        data[36:38] = np.frombuffer(np.float16("inf").tobytes(), np.uint8)

    matrix = make_matrix(tmp_path, "Q4_0", rows=16, change=spoil)
    with pytest.raises(CheckpointError, match=r"t0 \(Q4_0\): some scales are not finite"):
        pack(matrix, backend, torch.float32)


def test_fused_projections_equal_separate_ones(tmp_path):
    """Bit for bit; and only the calls that belong together share a product."""
    matrix = make_matrix(tmp_path, "Q4_0", rows=96, parts=3)
    fused = FusedLinear(pack(matrix, "dequantize", torch.bfloat16), matrix.sizes)
    projections = [Projection(fused, i) for i in range(3)]
    alone = [pack(Matrix((part,)), "dequantize", torch.bfloat16) for part in matrix.parts]
    first, second = torch.randn(2, 4, 512).bfloat16(), torch.randn(2, 4, 512).bfloat16()
    calls = [0]
    fused.linear.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    for inputs in (first, second):
        for projection, other in zip(projections, alone, strict=True):
            assert torch.equal(projection(inputs), other(inputs))
    assert calls == [2]
    assert torch.equal(projections[1](first), alone[1](first)), "a projection called alone"
    projections[0](first)
    assert torch.equal(projections[1](second), alone[1](second)), "another input than that of the first projection"
    projections[0](first)
    first += 1
    assert torch.equal(projections[0](first), alone[0](first)), "an input that was changed in place"


def test_choose_backend_finds_backends_by_name_or_refuses():
    fastest = None if BACKENDS["native"].problem(CPU, torch.float32) else BACKENDS["native"]
    assert choose_backend("auto", CPU, torch.float32) is fastest
    assert choose_backend("auto", CPU, torch.float64) is BACKENDS["dequantize"]
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16) is BACKENDS["dequantize"]
    assert choose_backend("dense", CPU, torch.bfloat16) is None
    with pytest.raises(UnsupportedRequestError, match="possible: auto, native, native-int8, dequantize, triton, dense"):
        choose_backend("int3", CPU, torch.bfloat16)
    with pytest.raises(UnsupportedRequestError, match="computes on the CPU, not on 'cuda'"):
        choose_backend("native", torch.device("cuda"), torch.bfloat16)


def test_llama_rows_are_in_the_order_of_transformers():
    """Neighbours 2i, 2i + 1 of a head of llama.cpp are i and i + d / 2 in transformers."""
    assert half_split_order(12, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


ROWS, COLUMNS = 12, 512


@pytest.mark.parametrize("token", [ROWS, -1, -100, -ROWS, -ROWS - 1])
def test_packed_embedding_refuses_tokens_as_torchs_embedding_does(tmp_path, token):
    packed = PackedEmbedding(make_matrix(tmp_path, "Q8_0", ROWS, COLUMNS).read(0, ROWS), "Q8_0", torch.float32)
    for embedding in (packed, torch.nn.Embedding(ROWS, COLUMNS)):
        with pytest.raises(IndexError, match="index out of range"):
            embedding(torch.tensor([1, token]))


@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize("chunk", [1 << 25, 4096])
def test_large_pages_hold_matrices_without_overlap(chunk, monkeypatch):
    monkeypatch.setattr(large_pages, "_CHUNK", chunk)
    shapes = [(3, 100), (1, 1), (70, 64), (2, 33), (5, 2000)]
    with large_pages.together():
        found = [large_pages.zeros(*shape) for shape in shapes]
    for number, matrix in enumerate(found, start=1):
        assert not matrix.any()
        assert matrix.is_contiguous()
        matrix.fill_(number)
    assert [tuple(matrix.shape) for matrix in found] == shapes
    assert [matrix.unique().tolist() for matrix in found] == [[number] for number in range(1, len(found) + 1)]
    storages = {matrix.untyped_storage().data_ptr() for matrix in found}
    assert len(storages) == (1 if chunk > 4096 else 4)


@pytest.mark.usefixtures("needs_kernel")
def test_large_pages_are_requested_before_memory_is_written(monkeypatch):
    """Pages that were touched stay small."""
    order = []
    library = large_pages.binding.library()
    monkeypatch.setattr(library, "ask_for_large_pages", lambda address, size: order.append("asked"))
    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: order.append("written") or zero(self))
    large_pages.zeros(4, 32)
    assert order == ["asked", "written"]
