"""The log-probabilities of the best children of a node: two kernels compute them on a GPU."""

from __future__ import annotations

import pytest
import torch

from hf_speculate_plugins import top_log_probs, trees
from hf_speculate_plugins.trees import best_log_probs

from ...support.triton_kernels import compile_for_hopper


pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:TRITON_DEFAULT_FP_FUSION")


def scores_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


def reference(scores, count):
    log_probs = torch.log_softmax(scores.double(), dim=-1)
    order = torch.sort(log_probs, dim=-1, descending=True, stable=True)
    return order.values[..., :count].float(), order.indices[..., :count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "count"), [((2, 3, 5000), 4), ((1, 1024), 16), ((3, 7), 7), ((2, 1025), 1)], ids=str)
def test_kernels_find_what_pytorch_finds(interpreted, monkeypatch, shape, count, dtype):
    """Equal scores come in the order of their columns; in 16 bit many are equal."""
    scores = scores_of(*shape).to(dtype)
    monkeypatch.setattr(torch, "log_softmax", None)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    values, columns = best_log_probs(scores, count)
    monkeypatch.undo()
    expected, where = reference(scores, count)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(columns, where)


def test_log_shares_of_unusable_scores_name_existing_columns(interpreted):
    scores = scores_of(4, 1100)
    scores[0], scores[1], scores[2, :1098], scores[3, 5] = -torch.inf, torch.nan, -torch.inf, torch.nan
    values, columns = best_log_probs(scores, 4)
    assert ((columns >= 0) & (columns < 1100)).all()
    assert values[2, :2].isfinite().all()
    assert columns[2, :2].sort().values.tolist() == [1098, 1099]
    assert values[[1, 3]].isnan().all()


def test_log_shares_use_the_kernel_where_it_fits(monkeypatch, interpreted):
    scores = scores_of(1, 40)
    assert top_log_probs.takes(scores, 16)
    assert not top_log_probs.takes(scores, 17)
    assert not top_log_probs.takes(scores[:, :3], 4)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not top_log_probs.takes(scores, 4), "on a CPU"
    monkeypatch.setattr(trees, "top_log_probs", lambda *_: pytest.fail("the kernel ran"))
    best_log_probs(scores, 4)


def test_kernels_compile_for_a_gpu(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    top_log_probs._kernels.cache_clear()
    score_part, merge = top_log_probs._kernels()
    parts = {"best": "*fp32", "columns": "*i32", "sums": "*fp32"}
    compile_for_hopper(score_part, {"scores": "*bf16", **parts}, {"COUNT": 10, "BLOCK": 1024})
    outputs = {"log_probs": "*fp32", "best_columns": "*i64"}
    compile_for_hopper(merge, {**parts, **outputs}, {"COUNT": 10, "PARTS": 256, "CELLS": 2048})
    top_log_probs._kernels.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [5, 4096, 32000, 151936])
def test_kernels_on_a_gpu_equal_those_of_a_cpu(width):
    scores = scores_of(2, 3, width)
    for found, expected in zip(best_log_probs(scores.cuda(), 5), reference(scores, 5), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
