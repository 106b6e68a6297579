"""A kernel that stands in for torch where noise is drawn, and tokens are chosen and ranked: the same, or not used."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.verification import natively
from hf_speculate_gguf.native import binding as native


class ByTorch:
    """Does it as torch does."""

    def draw_exponential(self, state, values):
        generator = torch.Generator()
        generator.set_state(state)
        values.exponential_(generator=generator)
        state.copy_(generator.get_state())

    def argmax(self, row):
        return int(row.float().argmax())

    def most_probable(self, scores, count):
        values, token_ids = scores.float().topk(count)
        return values.softmax(-1).nan_to_num(), token_ids


class AnotherValue(ByTorch):
    def draw_exponential(self, state, values):
        super().draw_exponential(state, values)
        values[-1] += 1e-6


class AnotherState(ByTorch):
    def draw_exponential(self, state, values):
        before = state.clone()
        super().draw_exponential(state, values)
        state.copy_(before)


class LastOfTies(ByTorch):
    def argmax(self, row):
        return len(row) - 1 - int(row.float().flip(0).argmax())


class NoNaN(ByTorch):
    def argmax(self, row):
        return int(row.float().nan_to_num(-9.0).argmax())


class SmallerOnesToo(ByTorch):
    def most_probable(self, scores, count):
        return tuple(values[..., 1:] for values in super().most_probable(scores, count + 1))


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    """Nobody stands in."""
    for name in ("_draw", "_argmax", "_probable"):
        monkeypatch.setattr(natively, name, [])


@pytest.fixture
def kernel(needs_kernel):
    return native.library()


def test_stand_in_uses_functions_that_agree_with_torch():
    kernel = ByTorch()
    assert natively.stand_in(kernel) == (True, True, True)
    assert natively._draw == [kernel.draw_exponential]
    assert natively._argmax == [kernel.argmax]
    assert natively._probable == [kernel.most_probable]
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for shape in ((2, 7), (1, 1000)):
        wanted = torch.empty(shape).exponential_(generator=other)
        assert torch.equal(natively.exponential(torch.empty(shape), one), wanted)
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [(AnotherValue(), 0), (AnotherState(), 0), (LastOfTies(), 1), (NoNaN(), 1), (SmallerOnesToo(), 2)],
    ids=lambda value: type(value).__name__,
)
def test_stand_in_rejects_functions_that_differ_from_torch(kernel, wrong):
    wanted = tuple(place != wrong for place in range(3))
    assert natively.stand_in(kernel) == wanted
    assert tuple(map(bool, (natively._draw, natively._argmax, natively._probable))) == wanted


@pytest.mark.parametrize("num_before", [0, 1, 5, 623, 624])
@pytest.mark.parametrize("count", [1, 7, 8, 511, 513, 40_000])
def test_the_kernel_draws_what_torch_does(num_before, count, kernel):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        torch.empty(num_before, dtype=torch.long).random_(100, generator=generator)
        state, found = generator.get_state(), torch.empty(count)
        kernel.draw_exponential(state, found)
        assert torch.equal(found, torch.empty(count).exponential_(generator=generator))
        assert torch.equal(state, generator.get_state())


def test_values_that_round_either_way_are_the_library_s(kernel):
    """A value in two million lies so near the middle of two floats that the fast logarithm does not decide."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        state, found = generator.get_state(), torch.empty(1 << 20)
        kernel.draw_exponential(state, found)
        assert torch.equal(found, torch.empty(1 << 20).exponential_(generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 5, 16, 511, 512, 513, 4099])
def test_the_kernel_chooses_what_torch_does(count, dtype, kernel):
    generator = torch.Generator().manual_seed(count)
    for case in range(60):
        row = torch.randint(-9, 9, (count,), generator=generator).to(dtype)  # with ties
        if case % 3 == 1:
            row = -row.abs() * 0.0  # both zeros
            row[count // 2 :] = 0.0
        if case % 5 == 1:
            row[count // 3 :: 2] = torch.nan
        if case % 7 == 1:
            row[torch.randint(count, (1,), generator=generator)] = torch.inf
        if case % 11 == 1:
            row[:] = -torch.inf
        assert kernel.argmax(row) == int(row.float().argmax()), row


@pytest.mark.parametrize("shape", [(1, 9), (2, 9), (1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_argmax_takes_any_dtype_and_layout(shape, dtype, kernel):
    assert natively.stand_in(kernel) == (True, True, True), "not used here"
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for each in (scores, scores.expand(2, -1)[::2], scores.repeat_interleave(2, dim=1)[:, ::2]):
        if shape[1]:
            assert natively.argmax(each) == each.float().argmax(-1).tolist()
        else:
            with pytest.raises(IndexError):
                natively.argmax(each)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 33, 64, 4099])
@pytest.mark.parametrize("with_kernel", [False, True], ids=["torch", "kernel"])
def test_most_probable_equals_topk(with_kernel, width, dtype, kernel):
    if with_kernel:
        natively.stand_in(kernel)
    generator = torch.Generator().manual_seed(width)
    whole = torch.randint(-99, 99, (2, 3, width + 7), generator=generator).to(dtype)  # with ties
    whole[0, 1, width // 2] = -torch.inf
    for scores in (whole, whole[..., :width], whole[:, :, 7:], whole.transpose(0, 1)[..., :width], whole[:1, 1:]):
        for count in {1, min(32, width), width}:
            probs, token_ids = natively.most_probable(scores, count)
            values = scores.float().topk(count).values
            assert torch.equal(scores.float().gather(-1, token_ids), values)
            assert torch.allclose(probs, values.softmax(-1).nan_to_num(), atol=1e-6)
            assert all(len(set(row)) == count for row in token_ids.flatten(0, 1).tolist())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("with_kernel", [False, True], ids=["torch", "kernel"])
def test_most_probable_gives_nothing_where_scores_are_not_finite(with_kernel, value, kernel):
    if with_kernel:
        natively.stand_in(kernel)
    scores = torch.zeros(1, 2, 200)
    scores[0, 0, 3:] = value
    if value == -torch.inf:
        scores[0, 0] = value
    probs, token_ids = natively.most_probable(scores, 5)
    assert probs[0].sum(-1).tolist() == pytest.approx([0.0, 1.0])
    assert ((token_ids >= 0) & (token_ids < 200)).all()
