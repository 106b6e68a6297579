"""Rows that the kernel looks up are those of `dequantize`, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.native import binding as native
from hf_speculate.native.formats import FORMATS
from hf_speculate.native.modules import PackedEmbedding, look_up

from ..support.gguf import OTHER_CPUS, make_matrix


ROWS, COLUMNS = 12, 512


def needs_kernel():
    if not native.has_kernel():
        pytest.skip("no native kernel here")


def blocks_of(folder, kind: str) -> torch.Tensor:
    return make_matrix(folder, kind, ROWS, COLUMNS).read(0, ROWS)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type(tmp_path, kind, dtype):
    needs_kernel()
    blocks, ids = blocks_of(tmp_path, kind), torch.tensor([[3, 0, ROWS - 1], [3, 7, 1]])
    plain, fast = (PackedEmbedding(blocks, kind, dtype, is_native) for is_native in (False, True))
    assert torch.equal(plain(ids), fast(ids))
    assert fast(ids).dtype is dtype
    assert torch.equal(plain(ids[0].int()), fast(ids[0].int()))
    assert fast(ids[:, :0]).shape == (2, 0, COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("flags", OTHER_CPUS)
def test_compiled_for_other_cpus(tmp_path, monkeypatch, flags):
    needs_kernel()
    library = native.Library(native.compile_source([*native.find_compiler(), *flags.split()]))
    monkeypatch.setattr(native, "library", lambda: library)
    for kind in FORMATS:
        blocks, ids = blocks_of(tmp_path, kind), torch.arange(ROWS)
        found = look_up(blocks, kind, COLUMNS, ids)
        assert torch.equal(found, FORMATS[kind].dequantize(blocks)), kind


@pytest.mark.parametrize("token", [ROWS, -ROWS - 1])
def test_a_token_that_is_none_raises_as_it_does_without(tmp_path, token):
    needs_kernel()
    embedding = PackedEmbedding(blocks_of(tmp_path, "Q8_0"), "Q8_0", torch.float32, is_native=True)
    with pytest.raises(IndexError, match="out of bounds"):
        embedding(torch.tensor([1, token]))
    assert torch.equal(embedding(torch.tensor([-1])), embedding(torch.tensor([ROWS - 1]))), "as torch counts"
