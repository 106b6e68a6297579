"""Triton's kernels on a CPU: interpreted, or compiled for a GPU that is not there."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.attention import tree_kernel
from hf_speculate.graphs import layer_kernels
from hf_speculate_plugins import top_log_probs


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's interpreter runs all kernels."""
    tl = pytest.importorskip("triton.language")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Triton was imported without the interpreter, so its library is there to be compiled.
    monkeypatch.setattr(tl, "max", lambda block, axis: tl.reduce(block, axis, tl.standard._elementwise_max))
    monkeypatch.setattr(tl, "sum", lambda block, axis: tl.reduce(block, axis, tl.standard._sum_combine))
    _forget()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)
    _forget()


def _forget() -> None:
    for module in (tree_kernel, layer_kernels, top_log_probs):
        module._kernels.cache_clear()


def compile_for_hopper(kernel, pointers, constants, **options):
    """The kernel's PTX for an H100, which needs no GPU; arguments without a type are 32-bit integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(kernel.arg_names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if name in pointers or name.startswith(("key_", "value_", "query_"))
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options).asm["ptx"]
