"""Top-p from the most probable tokens: bit for bit what transformers' sort of the whole vocabulary leaves."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from hf_speculate.verification import nucleus


VOCAB_SIZE = 8192


@pytest.fixture
def sorted_rows(monkeypatch):
    """Numbers of rows that transformers' own warper has sorted."""
    counts, sort = [], TopPLogitsWarper.__call__

    def counted(self, input_ids, scores):
        counts.append(len(scores))
        return sort(self, input_ids, scores)

    monkeypatch.setattr(TopPLogitsWarper, "__call__", counted)
    return counts


def peaked(rows: int, spread: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB_SIZE, generator=generator) * spread


def assert_same(scores: torch.Tensor, limit: float) -> None:
    warper = TopPLogitsWarper(limit)
    expected = TopPLogitsWarper.__call__(warper, None, scores.clone())
    assert torch.equal(nucleus.top_p(warper, scores.clone()), expected)


@pytest.mark.parametrize("limit", [0.0, 0.1, 0.5, 0.8, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize("spread", [0.3, 2.0, 4.0, 9.0])
def test_top_p_equals_transformers_sorting(limit, spread):
    assert_same(peaked(24, spread), limit)


def test_rows_that_a_tail_decides_are_sorted_and_no_others(sorted_rows):
    scores = torch.cat([peaked(2, 4.0), peaked(1, 0.1), peaked(2, 4.0, seed=1)])
    nucleus.top_p(TopPLogitsWarper(0.95), scores)
    assert sorted_rows == [1]


def test_equal_scores_at_the_border_are_left_to_transformers(sorted_rows):
    scores = torch.full((1, VOCAB_SIZE), -30.0)
    scores[0, [5, 17, 300, 4000]] = 2.0  # a quarter each: two of them stay, whichever the sort takes
    assert_same(scores, 0.4)
    assert sorted_rows == [1, 1]


def test_a_decision_within_rounding_is_left_to_transformers(sorted_rows):
    scores = torch.full((1, VOCAB_SIZE), -torch.inf)
    scores[0, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert_same(scores, 0.8)
    assert sorted_rows == [1, 1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_top_p_equals_transformers_for_scores_that_are_not_finite(value):
    scores = peaked(3, 4.0)
    scores[1, 7] = value
    scores[2] = value
    warper = TopPLogitsWarper(0.9)
    expected = warper(None, scores.clone())
    assert torch.equal(nucleus.top_p(warper, scores.clone()).nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))
