"""The kernel of our own: exact integers, every shape, one compilation, torch's threads; and doing without it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.backends import BACKENDS, choose_backend
from hf_speculate_gguf.native.formats import FORMATS

from ..support.packed import CPU, OTHER_CPUS, make_matrix, pack, quantized, reference
from ..support.paths import REPOSITORY


pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("needs_kernel")]


def check_products(library, inputs, matrix, allowed):
    """As of the dequantised matrix, whether or not activations are quantised; and no row looks at others."""
    weight, kind, weights = pack(matrix, "native", torch.float32).packed, matrix.type, reference(matrix).double()
    for quantize, exact in ((False, inputs.double()), (True, quantized(inputs))):
        expected, spread = exact @ weights.T, exact.abs() @ weights.abs().T
        for dtype, rounding in allowed.items():
            found = library.multiply(inputs.to(dtype), weight, kind, matrix.num_rows, quantize)
            error = (found.double() - expected).abs()
            assert (error <= rounding * expected.abs() + 1e-6 * spread).all(), f"{kind}, {dtype}, quantize={quantize}"
            alone = [library.multiply(row[None], weight, kind, matrix.num_rows, quantize) for row in inputs.to(dtype)]
            assert torch.equal(found, torch.cat(alone))
            if quantize:  # sums of integers are exact on every CPU
                here = native.library().multiply(inputs.to(dtype), weight, kind, matrix.num_rows, quantize)
                assert torch.equal(found, here)


# Where the float16 numbers of a block are; and its other bytes, so that products are as large as they can be.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "IQ4_NL": (0,)}
HALVES["IQ4_XS"] = (0,)
LARGEST = {"Q8_0": 0x80, "IQ4_NL": 0}


@pytest.mark.parametrize("flags", ["", *OTHER_CPUS])
def test_packed_products_are_right_on_cpus_without_some_instructions(flags, compiled, tmp_path):
    """What other CPUs compute is the same, with quantised rows bit for bit; also where 16-bit sums are full."""
    library = compiled(flags) if flags else native.library()
    for kind in FORMATS:
        inputs = torch.randn(19, 512).bfloat16()
        check_products(library, inputs, make_matrix(tmp_path, kind, 40), {torch.float32: 0, torch.bfloat16: 2**-8})

        def fill(data, kind=kind):
            blocks = data.reshape(-1, FORMATS[kind].block_bytes)
            halves = [at + byte for at in HALVES.get(kind, (0, 2)) for byte in (0, 1)]
            others = [i for i in range(blocks.shape[1]) if i not in halves]
            blocks[:, others] = LARGEST.get(kind, 0xFF)

        signs = torch.ones(3, 512)
        signs[1] = -1
        signs[2, ::3] = -1
        check_products(library, signs, make_matrix(tmp_path, kind, 16, change=fill), {torch.float32: 0})


def test_activations_are_quantized_at_every_size_and_stay_non_finite(tmp_path):
    matrix = make_matrix(tmp_path, "Q4_0", 16, 64)
    layer, weights = pack(matrix, "native-int8", torch.float32), reference(matrix).double()
    inputs = torch.randn(5, 64) * torch.tensor([1e-20, 1e-3, 1.0, 1e20, 0.0])[:, None]
    inputs[2, 32:] = 0
    torch.testing.assert_close(layer(inputs).double(), quantized(inputs) @ weights.T, rtol=1e-4, atol=1e-30)
    for value in (float("nan"), float("inf"), -float("inf")):
        spoilt = torch.randn(2, 64)
        spoilt[0, 40] = value
        found = layer(spoilt)
        assert not found[0].isfinite().any()
        assert torch.equal(found[1:], layer(spoilt[1:]))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 15, 16, 49])
def test_packed_products_are_exact_for_any_number_of_rows_and_columns(kind, rows, tmp_path):
    """Weights are exactly those of the file: in bfloat16, only the products are rounded (by 2^-8 of them at most)."""
    block_size = FORMATS[kind].block_size
    for columns in (block_size, 3 * block_size, 1024):
        matrix = make_matrix(tmp_path, kind, rows, columns)
        for num_inputs in (1, 3, 17):
            inputs = torch.randn(num_inputs, columns).bfloat16()
            check_products(native.library(), inputs, matrix, {torch.float32: 0, torch.bfloat16: 2**-8})
        assert pack(matrix, "native", torch.float32)(torch.empty(0, columns)).shape == (0, rows)


def test_packed_products_are_exact_for_every_integer_and_subnormal_scales(tmp_path):
    """All 256 bytes of Q8_0, with scales down to the smallest float16: columns come out exactly."""
    matrix = make_matrix(tmp_path, "Q8_0", 16, 256)
    blocks = matrix.read(0, 16).view(16, 8, 34)
    blocks[:, :, 2:] = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.tensor([2.0**-24, 3 * 2.0**-24, -(2.0**-15), 2.0**-14, 1.5, -65504.0, 0.1, 0.0], dtype=torch.float16)
    blocks[:, :, :2] = scales.repeat(16, 1)[..., None].view(torch.uint8)
    library, rows = native.library(), blocks.view(16, -1)
    tiles = torch.zeros(1, library.tile_bytes("Q8_0", 256), dtype=torch.uint8)
    assert library.pack("Q8_0", rows, 256, tiles)
    expected = FORMATS["Q8_0"].dequantize(rows).T
    torch.set_flush_denormal(True)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            found = library.multiply(torch.eye(256, dtype=dtype), tiles, "Q8_0", 16)
            assert torch.equal(found, expected.to(dtype)), dtype
    finally:
        torch.set_flush_denormal(False)


def test_packed_products_take_strided_inputs(tmp_path):
    layer = pack(make_matrix(tmp_path, "Q4_K", 32), "native", torch.bfloat16)
    inputs = torch.randn(512, 2, 5).bfloat16().permute(1, 2, 0)
    assert torch.equal(layer(inputs), layer(inputs.contiguous()))
    every_other = torch.randn(6, 512).bfloat16()[::2]
    assert torch.equal(layer(every_other), layer(every_other.contiguous()))


def test_packed_matrix_has_gradients_of_the_dequantised_matrix(tmp_path):
    matrix = make_matrix(tmp_path, "Q6_K", 24)
    inputs = torch.randn(3, 512, requires_grad=True)
    pack(matrix, "native", torch.float32)(inputs).sin().sum().backward()
    twin = inputs.detach().clone().requires_grad_()
    (twin @ reference(matrix).T).sin().sum().backward()
    torch.testing.assert_close(inputs.grad, twin.grad, rtol=1e-4, atol=1e-4)


def test_packed_layers_compile_without_graph_breaks(tmp_path):
    layer = pack(make_matrix(tmp_path, "Q4_0", 40), "native", torch.bfloat16)
    inputs = torch.randn(2, 3, 512).bfloat16()
    with torch.inference_mode():
        compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(inputs), layer(inputs) * 2)


def test_kernel_uses_the_number_of_threads_of_torch(tmp_path):
    """One OpenMP library in the process, and as many threads as torch was told."""
    maps = "/proc/self/maps"
    if not os.path.exists(maps):
        pytest.skip("libraries of a process are read from /proc")
    code = (
        "import os, sys, torch\n"
        "from pathlib import Path\n"
        "from tests.support.packed import pack, make_matrix\n"
        "torch.set_num_threads(3)\n"
        "layer = pack(make_matrix(Path(sys.argv[1]), 'Q4_0', 4096), 'native', torch.bfloat16)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "layer(torch.randn(1, 512).bfloat16())\n"
        "a = torch.randn(1 << 20) + 1\n"
        f"lines = open({maps!r}).read().splitlines()\n"
        "print(len({line.split()[-1] for line in lines if 'omp.so' in line or 'omp5.so' in line}))\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    libraries, new_threads = map(int, done.stdout.split() or (f"failed: {done.stderr}",))
    assert libraries == 1
    assert new_threads in (0, 2), "packing started the two that were missing; nothing else does"


def _products(numbers, threads=None):
    """Of the kernel, and of torch's own matrices."""
    if threads:
        torch.set_num_threads(threads)
    inputs, matrix = numbers
    ones = torch.ones(512, 512)
    return matrix(inputs).tolist(), float((ones @ ones).sum())


class _Products(torch.utils.data.Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return _products(self.numbers, index + 1)  # workers begin with one thread


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.parametrize("used", [1, 2, 3])
def test_forked_process_has_a_thread_pool_of_its_own(used, tmp_path, set_threads):
    set_threads(3)
    forked = multiprocessing.get_context("fork")
    numbers = torch.randn(5, 256), pack(make_matrix(tmp_path, "Q4_0", 64, 256), "native", torch.float32)
    set_threads(used)
    expected = _products(numbers)
    for threads in (None, 1, 2, 4):
        here, there = forked.Pipe()
        process = forked.Process(target=lambda end, count: end.send(_products(numbers, count)), args=(there, threads))
        process.start()
        answers = here.poll(20)
        process.kill()
        process.join()
        assert answers, f"{threads} threads: the child waits for ever"
        assert here.recv() == expected
        assert _products(numbers) == expected  # the parent's threads are new ones, too
    items = torch.utils.data.DataLoader(
        _Products(numbers), num_workers=2, timeout=20, multiprocessing_context="fork", collate_fn=lambda items: items[0]
    )
    assert list(items) == [expected] * 4


@pytest.mark.parametrize(("multiplies_bytes", "expected"), [(True, "native-int8"), (False, "native")])
def test_auto_backend_is_the_fastest_for_the_cpu(multiplies_bytes, expected, monkeypatch):
    """Activations are not quantised in float32: who asks for that wants to know."""
    monkeypatch.setattr(native.library(), "multiplies_bytes", multiplies_bytes)
    assert choose_backend("auto", CPU, torch.bfloat16) is BACKENDS[expected]
    assert choose_backend("auto", CPU, torch.float32) is BACKENDS["native"]
