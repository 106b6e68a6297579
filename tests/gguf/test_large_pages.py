"""Memory of packed weights: matrices that lie together do not overlap, and are zero."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.native import large_pages


pytestmark = pytest.mark.usefixtures("needs_kernel")


@pytest.mark.parametrize("chunk", [1 << 25, 4096])
def test_matrices_that_lie_together_do_not_overlap(chunk, monkeypatch):
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
    assert all((matrix.data_ptr() - found[0].data_ptr()) % 64 == 0 for matrix in found[:2])
    storages = {matrix.untyped_storage().data_ptr() for matrix in found}
    assert len(storages) == (1 if chunk > 4096 else 4)


def test_other_matrices_have_memory_of_their_own():
    with large_pages.together():
        first = large_pages.zeros(4, 32)
    second = large_pages.zeros(4, 32)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert second.untyped_storage().nbytes() == second.nbytes


def test_large_pages_are_asked_for_before_memory_is_touched(monkeypatch):
    """Pages that were touched stay small."""
    order = []
    library = large_pages.binding.library()
    monkeypatch.setattr(library, "ask_for_large_pages", lambda address, size: order.append("asked"))
    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: order.append("written") or zero(self))
    large_pages.zeros(4, 32)
    assert order == ["asked", "written"]
