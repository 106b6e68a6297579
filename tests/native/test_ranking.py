"""What a head proposes, ranked natively: what torch ranks, with the warpers of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_speculate.drafting.ranking import rank_children
from hf_speculate_gguf.native import NativeRanking, Sampling
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.backends import BACKENDS
from hf_speculate_gguf.native.modules import PackedLinear


pytestmark = pytest.mark.usefixtures("needs_kernel")

HIDDEN, EPS = 64, 1e-5
WARPERS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top-k": [TopKLogitsWarper(7)],
    "top-k of ties": [TopKLogitsWarper(500)],
    "top-p": [TopPLogitsWarper(0.7)],
    "a little": [TopPLogitsWarper(0.01)],
    "min-p": [MinPLogitsWarper(0.1)],
    "all": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
}


def made(num_columns=100, dtype=torch.float32, normed=True, bias=False):
    """An output matrix, a norm, and states of three rows with five nodes."""
    generator = torch.Generator().manual_seed(num_columns)
    output = nn.Linear(HIDDEN, num_columns, bias=bias).requires_grad_(False)
    for weight in output.parameters():
        weight.normal_(generator=generator)
    norm = nn.RMSNorm(HIDDEN, eps=EPS).requires_grad_(False)
    norm.weight.normal_(1, 0.1, generator=generator)
    states = torch.randn(3, 5, HIDDEN, generator=generator) / 4
    return output.to(dtype), norm.to(dtype) if normed else None, states.to(dtype)


def reference(output, norm, states, most, noise=None, warpers=()):
    logits = output(states if norm is None else norm(states))
    scores = logits.float() if noise is None else rank_children(logits, noise, warpers)
    best, columns = scores.topk(most, dim=-1)
    return best - scores.logsumexp(-1, keepdim=True), columns


def noise_of(num_columns):
    return torch.rand(3, num_columns, generator=torch.Generator().manual_seed(7)).log().neg().log()


@pytest.mark.parametrize("num_columns", [16, 100, 333])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_best_children_and_their_shares_are_torchs(num_columns, normed, threads, set_threads):
    set_threads(threads)
    output, norm, states = made(num_columns, normed=normed, bias=normed)
    ranking = NativeRanking.of(output, norm, EPS, torch.float32, feeds_back_normed=normed)
    found = ranking.run(states, 10)
    shares, columns = reference(output, norm, states, 10)
    assert torch.equal(found.columns, columns)
    torch.testing.assert_close(found.shares, shares, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.fed_back, norm(states) if normed else states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS)
def test_a_sampled_request_is_ranked_as_its_warpers_have_it(warpers):
    output, norm, states = made()
    ranking, noise = NativeRanking.of(output, norm, EPS, torch.float32), noise_of(100)
    found = ranking.run(states, 10, noise, Sampling.of(warpers))
    shares, columns = reference(output, norm, states, 10, noise, warpers)
    is_kept = shares > -torch.inf
    assert torch.equal(found.shares > -torch.inf, is_kept)
    assert torch.equal(found.columns[is_kept], columns[is_kept])
    torch.testing.assert_close(found.shares[is_kept], shares[is_kept], rtol=1e-3, atol=1e-3)
    assert all(len(set(row)) == 10 for row in found.columns.flatten(0, 1).tolist()), "a token is proposed twice"


def test_fewer_columns_than_the_matrix_has_may_be_ranked():
    output, norm, states = made()
    found = NativeRanking.of(output, norm, EPS, torch.float32).run(states, 4, noise_of(37))
    shares, columns = reference(output, norm, states, 4, noise_of(37))
    assert torch.equal(found.columns, columns)
    torch.testing.assert_close(found.shares, shares, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "warpers",
    [
        [TypicalLogitsWarper(0.9)],
        [TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.5)],
        [TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(0.5)],
        [TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
    ],
    ids=["unknown", "another order", "twice", "at least two"],
)
def test_warpers_that_the_kernel_does_not_know_are_left_to_torch(warpers):
    assert Sampling.of(warpers) is None


def test_bfloat16_is_no_further_from_float32_than_torch_is():
    output, norm, states = made(333, torch.bfloat16)
    exact, columns = reference(output.float(), norm.float(), states.float(), 333)
    exact = exact.gather(-1, columns.argsort(-1))
    output, norm = output.bfloat16(), norm.bfloat16()
    ranked = NativeRanking.of(output, norm, EPS, torch.bfloat16).run(states, 100)
    of_torch, columns = reference(output, norm, states, 100)
    error = (ranked.shares - exact.gather(-1, ranked.columns)).norm()
    assert error <= 1.1 * (of_torch - exact.gather(-1, columns)).norm()


@pytest.mark.parametrize("backend", ["native", "native-int8"])
def test_packed_output_matrices_rank_as_their_modules(backend):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 255, (100, HIDDEN // 32, 34), dtype=torch.uint8, generator=generator)
    rows[..., :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    library = native.library()
    tiles = torch.zeros(7, library.tile_bytes("Q8_0", HIDDEN), dtype=torch.uint8)
    assert library.pack("Q8_0", rows.flatten(1), HIDDEN, tiles)
    output = PackedLinear(HIDDEN, 100, "Q8_0", BACKENDS[backend], {"packed": tiles})
    _, norm, states = made()
    found = NativeRanking.of(output, norm, EPS, torch.float32).run(states, 10)
    shares, columns = reference(output, norm, states, 10)
    assert torch.equal(found.columns, columns)
    torch.testing.assert_close(found.shares, shares, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_left_to_the_modules(value):
    output, norm, states = made()
    ranking = NativeRanking.of(output, norm, EPS, torch.float32)
    output.weight[3, 5] = value
    assert ranking.run(states, 4) is None


def test_matrices_that_the_kernel_does_not_multiply_are_left_to_torch():
    output, norm, _ = made()
    assert NativeRanking.of(output.half(), norm, EPS, torch.float16) is None
    output, norm, _ = made()
    assert NativeRanking.of(output, norm.bfloat16(), EPS, torch.float32) is None
    assert NativeRanking.of(nn.Sequential(output), None, EPS, torch.float32) is None
    assert NativeRanking.of(nn.Linear(48, 16), None, EPS, torch.float32) is None
    assert NativeRanking.of(output.to("meta"), None, EPS, torch.float32) is None
    output, _, _ = made()
    output.forward = lambda inputs: inputs  # as accelerate puts its hooks
    assert NativeRanking.of(output, None, EPS, torch.float32) is None


def test_requests_in_other_threads_do_not_disturb(monkeypatch):
    """A head is shared by them: while one ranks, another begins and ends."""
    output, norm, states = made()
    ranking, others = NativeRanking.of(output, norm, EPS, torch.float32), []
    alone, library = ranking.run(states, 10), native.library()
    rank = library.rank

    def disturbed(call):
        if not others:
            others.append(None)
            ranking.run(states[:1, :2].neg().contiguous(), 3, noise_of(100)[:1], Sampling(temperature=0.1))
        return rank(call)

    monkeypatch.setattr(library, "rank", disturbed)
    found = ranking.run(states, 10)
    assert others
    assert torch.equal(found.columns, alone.columns)
    assert torch.equal(found.shares, alone.shares)


def test_weights_that_move_or_change_are_seen():
    output, norm, _ = made()
    ranking = NativeRanking.of(output, norm, EPS, torch.float32)
    assert ranking.is_current()
    output.weight.mul_(2)
    assert ranking.is_current(), "it reads them where they lie"
    output.weight = nn.Parameter(output.weight.clone(), requires_grad=False)
    assert not ranking.is_current()
