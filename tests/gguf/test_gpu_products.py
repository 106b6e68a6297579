"""Triton kernels for packed matrices: interpreted, compiled for GPUs that are not there, and on one."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_gguf import load_model
from hf_speculate_gguf.gpu import LAYOUTS, MAX_ROWS, TILE_ROWS, multiply, pack, problem, products
from hf_speculate_gguf.native import FORMATS, PackedLinear
from hf_speculate_gguf.native.backends import BACKENDS

from ..support.packed import CPU, SMALLEST, ids, make_matrix, reference
from ..support.tiers import quick
from ..support.triton_kernels import compile_for, resources_of


triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:TRITON_DEFAULT_FP_FUSION")

# Relative errors: sums in float32, products in the inputs' dtype. The interpreter cuts bfloat16 off.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 6e-3}
KINDS = quick(LAYOUTS, "Q4_K", "Q6_K", "Q8_0", "Q5_0")
CAPABILITIES = [80, 89, 90, 120]


def product_of(matrix, inputs):
    tiles = pack(matrix.read(0, matrix.num_rows), matrix.type)
    return multiply(inputs, tiles.to(inputs.device), matrix.type, matrix.num_rows)


def check_product(matrix, inputs):
    expected = inputs.cpu().double() @ reference(matrix).double().T
    found = product_of(matrix, inputs)
    assert (found.dtype, found.shape) == (inputs.dtype, expected.shape)
    error = ((found.cpu().double() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE[inputs.dtype], f"{matrix.type}, {matrix.num_columns} columns, {inputs.dtype}: {error:.1e}"


def odd_shape(kind):
    """Rows and columns that fill neither tiles nor slabs nor splits."""
    return (70, 544) if FORMATS[kind].block_size == 32 else (70, 768)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_gguf_package(kind, tmp_path):
    rows, columns = odd_shape(kind)
    assert products.num_splits(kind, rows, columns)[0] > 1
    check_product(make_matrix(tmp_path, kind, rows, columns), torch.randn(3, columns))


@pytest.mark.rest
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_products_in_16_bits_round_inputs_and_results_only(kind, dtype, tmp_path):
    columns = 2 * FORMATS[kind].block_size
    check_product(make_matrix(tmp_path, kind, 5, columns), torch.randn(2, columns).to(dtype))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", quick(LAYOUTS, "Q5_0"))
def test_the_bits_of_a_row_depend_on_nothing_but_the_row(kind, tmp_path):
    matrix, inputs = make_matrix(tmp_path, kind, rows=3), torch.randn(MAX_ROWS, 512)
    every = product_of(matrix, inputs)
    for count in (1, 5, 16, 17):
        assert torch.equal(product_of(matrix, inputs[:count]), every[:count]), f"{count} rows"
    order = torch.randperm(MAX_ROWS)
    assert torch.equal(product_of(matrix, inputs[order]), every[order])


def test_num_splits_gives_large_matrices_fewer_splits_and_covers_all_columns():
    for kind in LAYOUTS:
        for out_features, in_features in [(4096, 4096), (1024, 4096), (14336, 4096), (151936, 1024), (1, 256)]:
            splits, slabs = products.num_splits(kind, out_features, in_features)
            num_slabs = LAYOUTS[kind].num_slabs(in_features)
            assert (splits - 1) * slabs < num_slabs <= splits * slabs
    assert products.num_splits("Q4_K", 4096, 4096) == (8, 4)
    assert products.num_splits("Q6_K", 151936, 4096) == (1, 32)


@pytest.mark.usefixtures("interpreted")
def test_multiply_refuses_tiles_of_another_matrix(tmp_path):
    tiles = pack(make_matrix(tmp_path, "Q8_0", rows=TILE_ROWS).read(0, TILE_ROWS), "Q8_0")
    for columns, out_features in ((256, TILE_ROWS), (512, TILE_ROWS + 1)):
        with pytest.raises(ValueError, match="A Triton kernel takes"):
            multiply(torch.randn(2, columns), tiles, "Q8_0", out_features)
    assert multiply(torch.randn(0, 512), tiles, "Q8_0", TILE_ROWS).shape == (0, TILE_ROWS)


@pytest.mark.usefixtures("interpreted")
def test_many_rows_are_multiplied_by_the_library(tmp_path, monkeypatch):
    matrix, backend = make_matrix(tmp_path, "Q4_K", rows=150), BACKENDS["triton"]
    layer = PackedLinear(512, 150, "Q4_K", backend, backend.pack(matrix, CPU))
    monkeypatch.setattr("hf_speculate_gguf.native.backends.BUFFER_WEIGHTS", TILE_ROWS * 512)
    monkeypatch.setattr("hf_speculate_gguf.gpu.multiply", lambda *_: pytest.fail("the kernel was called"))
    inputs = torch.randn(MAX_ROWS + 1, 512)
    torch.testing.assert_close(layer(inputs), inputs @ reference(matrix).T, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("interpreted")
def test_layers_of_the_first_rows_share_the_tiles(tmp_path):
    matrix, backend = make_matrix(tmp_path, "Q8_0", rows=130, columns=256), BACKENDS["triton"]
    layer = PackedLinear(256, 130, "Q8_0", backend, backend.pack(matrix, CPU), torch.randn(130))
    first, inputs = layer.first_rows(70), torch.randn(2, 256)
    assert first.packed.data_ptr() == layer.packed.data_ptr()
    torch.testing.assert_close(first(inputs), layer(inputs)[:, :70])


@pytest.mark.usefixtures("interpreted")
def test_products_are_one_operation_for_torch_compile(tmp_path):
    matrix, backend = make_matrix(tmp_path, "Q8_0", rows=70, columns=64), BACKENDS["triton"]
    layer, inputs = PackedLinear(64, 70, "Q8_0", backend, backend.pack(matrix, CPU)), torch.randn(2, 64)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs), layer(inputs))


def test_problem_names_what_is_missing(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert problem(CPU, torch.bfloat16) == "it computes on NVIDIA GPUs, not on 'cpu'"
    assert problem(cuda, torch.float64) == "it computes in bfloat16, float16 or float32, not torch.float64"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problem(cuda, torch.bfloat16) == "this PyTorch sees no NVIDIA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert problem(cuda, torch.bfloat16) == "it needs compute capability 8.0, and Tesla T4 has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(products, "has_triton", lambda: False)
    assert "Triton's kernels do not run here" in problem(cuda, torch.bfloat16)
    monkeypatch.setattr(products, "has_triton", lambda: True)
    assert problem(cuda, torch.bfloat16) == ""
    monkeypatch.setattr(products.importlib.util, "find_spec", lambda name: None)
    assert problem(cuda, torch.bfloat16) == "Triton is not installed (`pip install triton`)"


def test_a_model_for_a_gpu_is_refused_on_a_cpu(write, no_weights, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedRequestError, match="'triton' cannot be used here: it computes on NVIDIA GPUs"):
        load_model(write(), backend="triton")


def test_packed_weights_are_not_multiplied_on_another_device(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    matrix, backend = make_matrix(tmp_path, "Q8_0", rows=4), BACKENDS["triton"]
    layer = PackedLinear(512, 4, "Q8_0", backend, backend.pack(matrix, CPU))
    with pytest.raises(UnsupportedRequestError, match=r"packed for Triton on 'cpu'.*load_gguf\(..., device='cpu'\)"):
        layer(torch.randn(1, 512))


@pytest.mark.usefixtures("interpreted")
def test_a_packed_model_writes_the_same_text_with_and_without_a_speculator(write):
    """In the interpreter, as on a GPU: decoding and verification run the same products."""
    path, prompt = write(SMALLEST, "Q5_0"), ids(1, 4) % SMALLEST.vocab_size
    model = load_model(path, dtype=torch.float32, backend="triton")
    expected = load_model(path, dtype=torch.float32, backend="dequantize")(prompt).logits
    torch.testing.assert_close(model(prompt).logits, expected, rtol=1e-4, atol=1e-4)
    request = {"max_new_tokens": 5, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(3)
    plain = model.generate(prompt, **request)
    drafter = ScriptedDrafter(plain[:, prompt.shape[1] :], (2, 1), accuracy=0.8, vocab_size=SMALLEST.vocab_size)
    speculator = Speculator(drafter)
    torch.manual_seed(3)
    assert torch.equal(model.generate(prompt, **request, speculator=speculator), plain)
    assert speculator.stats.accepted_tokens > 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The kernels are compiled."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    products._kernels.cache_clear()
    yield products._kernels()
    products._kernels.cache_clear()


def compile_product(kernel, kind, dtype, columns, capability, results="*fp32"):
    constants = products.constants(kind, dtype, columns, interpreted=False)
    aligned = [name for name in kernel.arg_names if name not in (*products._VARYING, *constants)]
    pointers = {"inputs": ELEMENTS[dtype], "tiles": "*u8", "results": results}
    return compile_for(capability, kernel, pointers, constants, aligned, **products.OPTIONS)


ELEMENTS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@pytest.mark.rest
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q2_K", "IQ4_XS"])
def test_compiled_products_spill_no_registers(compiled, kind, capability, tmp_path):
    """Tensor cores multiply, loads of low bits run ahead, and nothing goes through memory."""
    code = compile_product(compiled[0], kind, torch.bfloat16, 1024, capability)
    found = resources_of(code, tmp_path)
    assert found.spilled == 0
    assert found.registers <= 128
    assert found.shared <= 32 * 1024
    assert "mma.sync" in code.asm["ptx"]
    assert "cp.async" in code.asm["ptx"]


@pytest.mark.rest
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_products_of_other_dtypes_and_padded_columns_compile(compiled, dtype, tmp_path):
    code = compile_product(compiled[0], "Q5_1", dtype, 96, 90, results=ELEMENTS[dtype])
    assert resources_of(code, tmp_path).spilled == 0


@pytest.mark.rest
def test_the_sum_of_splits_compiles(compiled, tmp_path):
    pointers = {"results": "*fp32", "outputs": "*bf16"}
    code = compile_for(90, compiled[1], pointers, {"BLOCK": products._ADD_COLUMNS}, **products.OPTIONS)
    assert resources_of(code, tmp_path).spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYOUTS)
def test_products_on_a_gpu_keep_the_bits_of_every_row(kind, tmp_path):
    matrix = make_matrix(tmp_path, kind, rows=4096, columns=4096)
    inputs = torch.randn(MAX_ROWS, 4096, device="cuda", dtype=torch.bfloat16)
    every = product_of(matrix, inputs)
    check_product(matrix, inputs[:16])
    for count in (1, 5, 16, 33):
        assert torch.equal(product_of(matrix, inputs[:count]), every[:count]), f"{count} rows"
    order = torch.randperm(MAX_ROWS, device="cuda")
    assert torch.equal(product_of(matrix, inputs[order]), every[order])
    assert all(torch.equal(product_of(matrix, inputs), every) for _ in range(20))
