"""Noise that something else than torch draws: the same, or not used."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.gguf import native
from hf_speculate.verification import drawing


@pytest.fixture
def drawn_by(monkeypatch):
    """What draws now."""
    others: list = []
    monkeypatch.setattr(drawing, "_others", others)
    return others


def by_torch(state, values):
    generator = torch.Generator()
    generator.set_state(state)
    values.exponential_(generator=generator)
    state.copy_(generator.get_state())


def another_value(state, values):
    by_torch(state, values)
    values[-1] += 1e-6


def another_state(state, values):
    before = state.clone()
    by_torch(state, values)
    state.copy_(before)


def test_what_draws_the_same_is_used(drawn_by):
    assert drawing.draw_by(by_torch)
    assert drawn_by == [by_torch]
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for shape in ((2, 7), (1, 1000)):
        assert torch.equal(
            drawing.exponential(torch.empty(shape), one), torch.empty(shape).exponential_(generator=other)
        )
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize("draw", [another_value, another_state])
def test_what_draws_otherwise_is_not(draw, drawn_by):
    assert not drawing.draw_by(draw)
    assert not drawn_by


@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.parametrize("num_before", [0, 1, 5, 623, 624])
@pytest.mark.parametrize("count", [1, 7, 8, 511, 513, 40_000])
def test_the_kernel_draws_what_torch_does(num_before, count):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        torch.empty(num_before, dtype=torch.long).random_(100, generator=generator)
        state, found = generator.get_state(), torch.empty(count)
        native.library().draw_exponential(state, found)
        assert torch.equal(found, torch.empty(count).exponential_(generator=generator))
        assert torch.equal(state, generator.get_state())


@pytest.mark.usefixtures("needs_kernel")
def test_values_that_round_either_way_are_the_library_s():
    """A value in two million lies so near the middle of two floats that the fast logarithm does not decide."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        state, found = generator.get_state(), torch.empty(1 << 20)
        native.library().draw_exponential(state, found)
        assert torch.equal(found, torch.empty(1 << 20).exponential_(generator=generator))


@pytest.mark.usefixtures("needs_kernel")
def test_the_kernel_is_used_here():
    assert drawing.draw_by(native.library().draw_exponential)
