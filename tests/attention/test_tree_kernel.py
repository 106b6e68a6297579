"""The kernel for tree attention: interpreted, against plain PyTorch in fp64, and compiled for an H100 without one."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch.nn import functional

from hf_speculate import triton_support
from hf_speculate.attention import tree_kernel
from hf_speculate.attention.tree_kernel import DeviceTree, has_kernel
from hf_speculate.tree import PADDING_PARENT, ROOT_PARENT, TreePlan

from ..support.triton_kernels import compile_for_hopper


triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:TRITON_DEFAULT_FP_FUSION")

# Shapes are checked.
tree_attention = jaxtyped(typechecker=beartype)(tree_kernel.tree_attention)
plain_tree_attention = jaxtyped(typechecker=beartype)(tree_kernel.plain_tree_attention)

# Of outputs that are means of standard normal values. In 16 bit, weights and outputs are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

# batch, query heads, KV heads, nodes, head dim, capacity
SHAPES = [
    (1, 14, 2, 16, 64, 300),
    (3, 14, 2, 2, 64, 200),
    (1, 32, 8, 1, 128, 140),
    (3, 8, 8, 7, 16, 64),
    (1, 32, 8, 8, 128, 260),
    (1, 4, 1, 33, 80, 600),
    (1, 4, 1, 64, 16, 200),
]
LARGE_SHAPES = [
    (1, 14, 2, 64, 64, 8192),
    (1, 32, 8, 16, 128, 2048),
    (2, 32, 8, 64, 128, 1000),
    (4, 8, 8, 150, 96, 700),
    (3, 8, 2, 17, 256, 500),
]


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The kernels are compiled, in this process at most once for all tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def random_parents(choose, num_nodes, num_padding):
    parents = [ROOT_PARENT, *(choose.choice([node - 1, choose.randrange(node)]) for node in range(1, num_nodes))]
    return parents[: num_nodes - num_padding] + [PADDING_PARENT] * num_padding


def random_inputs(shape, dtype, device="cpu", seed=0, shared=False):
    """Queries, buffers and place of random trees; whatever no node may see is NaN.

    Args:
        shape: one of SHAPES.
        shared: whether all rows have the same tree, without padding.
    """
    batch_size, num_heads, num_kv_heads, num_nodes, head_dim, capacity = shape
    choose = random.Random(seed)
    base = choose.randrange((capacity - num_nodes) // 2, capacity - num_nodes + 1)
    padding = [0 if shared else choose.randrange((num_nodes + 1) // 2) for _ in range(batch_size)]
    plan = TreePlan.from_parents([random_parents(choose, num_nodes, row) for row in padding[: 1 if shared else None]])
    starts = [choose.randrange(base // 2 + 1) for _ in range(batch_size)]
    ends = [choose.randrange(start, base + 1) for start in starts]
    ends[0] = base

    # Layouts of a model: heads within a token, and layers in one tensor.
    query = torch.randn(batch_size, num_nodes, num_heads, head_dim, dtype=dtype).transpose(1, 2)
    pair = torch.full((2, 3, batch_size, capacity, num_kv_heads, head_dim), torch.nan, dtype=dtype)[:, 1]
    for row in range(batch_size):
        num_real = num_nodes - padding[row]
        query[row, :, num_real:] = torch.nan
        for low, high in ((starts[row], ends[row]), (base, base + num_real)):
            pair[:, row, low:high] = torch.randn(2, high - low, num_kv_heads, head_dim, dtype=dtype)
    keys, values = pair.to(device).transpose(2, 3)
    place = DeviceTree(
        torch.tensor(starts, device=device),
        torch.tensor(ends, device=device),
        torch.tensor(base, device=device),
        plan.ancestors.to(device),
    )
    return query.to(device), keys, values, place


def tensors_of(query, keys, values, place):
    return query, keys, values, place.starts, place.ends, place.base, place.ancestors


def reference(query, keys, values, place, scale=None):
    return plain_tree_attention(query.double(), keys.double(), values.double(), place, scale)


def assert_near(outputs, expected, dtype):
    assert outputs.shape == expected.shape
    assert outputs.dtype == dtype
    assert outputs.is_contiguous()
    torch.testing.assert_close(outputs.double(), expected, atol=TOLERANCE[dtype], rtol=0, equal_nan=True)
    assert expected.isfinite().any()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES)]
    + [(shape, dtype) for shape in SHAPES[:3] for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_tree_kernel_equals_plain_attention_in_fp64(interpreted, shape, dtype):
    inputs = random_inputs(shape, dtype)
    assert_near(tree_attention(*inputs), reference(*inputs), dtype)


@pytest.mark.parametrize("shared", [False, True])
def test_tree_kernel_computes_the_last_nodes_alone(interpreted, shared):
    """As in a level of a draft: fewer queries than nodes."""
    query, keys, values, place = random_inputs((2, 4, 2, 9, 16, 120), torch.float32, shared=shared)
    whole = tree_attention(query, keys, values, place)
    last = query[:, :, 5:], keys, values, replace(place, ancestors=place.ancestors[:, 5:])
    torch.testing.assert_close(tree_attention(*last), whole[:, 5:], equal_nan=True)
    whole = plain_tree_attention(query, keys, values, place)
    torch.testing.assert_close(plain_tree_attention(*last), whole[:, 5:], equal_nan=True)


@pytest.mark.parametrize("seed", range(8))
def test_tree_kernel_is_right_for_random_lengths_paddings_and_splits(interpreted, monkeypatch, seed):
    monkeypatch.setattr(tree_kernel, "_LEAST_KEYS", [16, 32, 100][seed % 3])
    inputs = random_inputs((2, 2, 1, 5, 16, 150 + 70 * seed), torch.float32, seed=seed, shared=seed % 2)
    assert_near(tree_attention(*inputs, scale=0.5), reference(*inputs, scale=0.5), torch.float32)


@pytest.mark.parametrize("lengths", [(0, 0), (7, 7), (9, 4), (3, 4), (0, 64), (0, 65), (1, 200)], ids=str)
def test_tree_kernel_takes_empty_splits_of_short_prefixes(interpreted, monkeypatch, lengths):
    monkeypatch.setattr(tree_kernel, "_LEAST_KEYS", 16)
    query, keys, values, place = random_inputs((1, 2, 1, 4, 16, 600), torch.float32, shared=True)
    starts, ends = (torch.tensor([length], dtype=torch.int32) for length in lengths)
    keys, values = keys.nan_to_num(0.5), values.nan_to_num(2.0)
    place = replace(place, starts=starts, ends=ends, base=place.base[None])
    assert_near(tree_attention(query, keys, values, place), reference(query, keys, values, place), torch.float32)


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_tree_kernel_keeps_non_finite_nodes_from_other_branches(interpreted, what):
    query, keys, values, place = random_inputs((1, 4, 2, 9, 16, 80), torch.float32, shared=True)
    node = 4
    values[:, 1, place.base + node, 3] = what
    outputs = tree_attention(query, keys, values, place)
    assert_near(outputs, reference(query, keys, values, place), torch.float32)
    heads = torch.tensor([False, False, True, True])  # those of the second KV head
    assert torch.equal(outputs[0].isnan().all(-1), place.ancestors[0, :, node, None] & heads)
    assert place.ancestors[0, :, node].sum() < 9


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_plain_attention_is_sdpa_with_an_additive_mask(shape):
    batch_size, num_heads, num_kv_heads, num_nodes, _, capacity = shape
    query, keys, values, place = random_inputs(shape, torch.float64, shared=True)
    base = int(place.base)
    mask = torch.full((batch_size, 1, num_nodes, capacity), -torch.inf, dtype=torch.float64)
    for row in range(batch_size):
        mask[row, :, :, place.starts[row] : place.ends[row]] = 0
        mask[row, :, :, base : base + num_nodes].masked_fill_(place.ancestors[0], 0)
    keys, values = keys.nan_to_num(0), values.nan_to_num(0)
    repeated = [buffer.repeat_interleave(num_heads // num_kv_heads, dim=1) for buffer in (keys, values)]
    expected = functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask).transpose(1, 2)
    found = plain_tree_attention(query, keys, values, place)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_plain_attention_computes_in_fp32_at_least(dtype):
    inputs = random_inputs(SHAPES[1], dtype)
    assert_near(plain_tree_attention(*inputs), reference(*inputs), dtype)


def test_last_dimensions_must_be_contiguous():
    query, keys, values, place = random_inputs(SHAPES[1], torch.float32)
    with pytest.raises(ValueError, match="last dimension"):
        tree_attention(query, keys.mT.contiguous().mT, values, place)


class Launches:
    """A kernel that notes its grid and arguments."""

    def __init__(self):
        self.grids, self.arguments = [], []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, **constants: self.arguments.append((*arguments, *constants.values()))


@pytest.fixture
def launches(monkeypatch):
    """Stand-ins for both kernels."""
    both = Launches(), Launches()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(tree_kernel, "_kernels", lambda: both)
    monkeypatch.setattr(tree_kernel, "tl", tl)
    return both


@pytest.mark.parametrize("shared", [False, True])
def test_tree_kernel_launch_reads_shapes_only(launches, shared):
    """Tensors on the device `meta` have no values: whoever reads one raises."""
    query, keys, values, place = random_inputs(SHAPES[1], torch.bfloat16, shared=shared)
    query, keys, values, *others = (tensor.to("meta") for tensor in tensors_of(query, keys, values, place))
    outputs = tree_attention(query, keys, values, DeviceTree(*others))
    assert outputs.shape == (3, 2, 14, 64)
    with pytest.raises(RuntimeError, match="meta"):
        others[2].item()


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((1, 32, 8, 16, 64, 4096), 16),
        ((1, 32, 8, 17, 64, 4096), 64),
        ((1, 14, 2, 16, 64, 512), 16),
        ((1, 14, 2, 64, 64, 512), 64),
        ((8, 32, 8, 8, 64, 512), 32),
        ((1, 32, 8, 8, 64, 8192), 32),
    ],
    ids=str,
)
def test_tree_kernel_takes_small_blocks_if_splits_suffice(monkeypatch, shape, rows):
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **constants: launches.append((grid, constants))

    monkeypatch.setattr(tree_kernel, "_kernels", lambda: (Kernel(), Kernel()))
    monkeypatch.setattr(tree_kernel, "tl", tl)
    inputs = [each.to("meta") for each in tensors_of(*random_inputs(shape, torch.bfloat16))]
    tree_kernel.tree_attention(*inputs[:3], DeviceTree(*inputs[3:]))
    (num_blocks, num_parts, _), constants = launches[0]
    assert constants["BLOCK_ROWS"] == rows
    assert num_blocks == -(-shape[1] // shape[2] * shape[3] // rows)
    assert num_parts - 1 >= min(7, shape[-1] // 128) or rows > 16


@pytest.mark.parametrize(
    ("dtype", "num_rows", "head_dim", "instructions"),
    [
        (torch.bfloat16, 112, 128, ("wgmma.mma_async", "cp.async.cg")),
        (torch.float16, 7, 80, ("mma.sync", "cp.async.cg")),
        pytest.param(torch.float32, 16, 64, ("fma.rn.f32", "cp.async.cg"), marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_tree_kernel_compiles_to_tensor_cores_and_prefetches(compiled, dtype, num_rows, head_dim, instructions):
    """The compiler refuses what the interpreter lets pass."""
    name = str(dtype).removeprefix("torch.")
    element = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[name]
    attend, merge = tree_kernel._kernels()
    block_rows, block_keys, block_dim = tree_kernel._blocks(num_rows, head_dim, dtype, False)
    results = dict.fromkeys(("maxima", "sums", "partials"), "*fp32")
    inputs = dict.fromkeys(("query", "keys", "values"), f"*{element}")
    lengths = dict.fromkeys(("starts", "ends", "base"), "*i64")
    sizes = {"HEAD_DIM": head_dim, "BLOCK_DIM": block_dim}
    constants = {**sizes, "BLOCK_ROWS": block_rows, "BLOCK_KEYS": block_keys, "FACTOR": getattr(tl, name)}
    code = compile_for_hopper(attend, {**inputs, **lengths, **results, "ancestors": "*u8", "scale": "fp32"}, constants)
    assert [instruction for instruction in instructions if instruction not in code] == []
    compile_for_hopper(merge, {**results, "outputs": f"*{element}"}, {**sizes, "BLOCK_PARTS": 16})


def test_tree_kernel_module_imports_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    name = "hf_speculate.attention.without_triton"
    spec: Any = importlib.util.spec_from_file_location(name, tree_kernel.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert not module.has_kernel()


def test_tree_kernel_needs_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for capability, is_enough in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        cuda = SimpleNamespace(
            is_available=lambda: True, get_device_capability=lambda found=capability: found, current_device=lambda: 0
        )
        monkeypatch.setattr(torch, "cuda", cuda)
        monkeypatch.setattr(triton_support, "_builds", lambda index: True)
        assert has_kernel() == is_enough
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    assert not has_kernel()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert has_kernel()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.bfloat16) for shape in (*SHAPES, *LARGE_SHAPES)]
    + [(shape, dtype) for shape in (*SHAPES[:2], LARGE_SHAPES[1]) for dtype in (torch.float16, torch.float32)],
    ids=str,
)
def test_tree_kernel_equals_plain_attention_on_a_gpu(compiled, shape, dtype):
    inputs = random_inputs(shape, dtype, "cuda")
    assert_near(tree_attention(*inputs), reference(*inputs), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[1], *LARGE_SHAPES[:2]], ids=str)
def test_captured_tree_kernel_reads_new_lengths_and_trees(compiled, shape):
    buffers = random_inputs(shape, torch.bfloat16, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tree_attention(*buffers)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = tree_attention(*buffers)
    for seed in range(1, 6):
        inputs = random_inputs(shape, torch.bfloat16, "cuda", seed=seed)
        for buffer, value in zip(tensors_of(*buffers), tensors_of(*inputs), strict=True):
            buffer.copy_(value)
        graph.replay()
        assert_near(outputs, reference(*inputs), torch.bfloat16)
