"""Triton's kernels on a CPU: interpreted, or compiled for a GPU that is not there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hf_speculate.attention import tree_kernel
from hf_speculate.graphs import layer_kernels
from hf_speculate_gguf.gpu import products
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
    for module in (tree_kernel, layer_kernels, top_log_probs, products):
        module._kernels.cache_clear()


class Resources(NamedTuple):
    """Resources of a compiled kernel: registers and bytes of spilled registers per thread, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compile_for_hopper(kernel, pointers, constants, **options):
    """The kernel's PTX for an H100, which needs no GPU; arguments without a type are 32-bit integers."""
    strides = [name for name in kernel.arg_names if name.startswith(("key_", "value_", "query_"))]
    return compile_for(90, kernel, pointers, constants, strides, **options).asm["ptx"]


def compile_for(capability: int, kernel, pointers, constants, aligned=(), **options):
    """A kernel, compiled for GPUs of a compute capability (90 is an H100's); integers in `aligned` are multiples of 16.

    Triton brings NVIDIA's assembler. The test is skipped where that is missing.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not _tool("ptxas").exists():
        pytest.skip("this Triton comes without ptxas, which compiles for GPUs that are not there")
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if name in pointers or name in aligned
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4} | options)


def resources_of(compiled, folder: Path) -> Resources:
    """The resources of a compiled kernel."""
    program = folder / "kernel.cubin"
    program.write_bytes(compiled.asm["cubin"])
    command = [_tool("cuobjdump"), "--dump-resource-usage", program]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], compiled.metadata.shared)


def _tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
