"""The text of a batch while it grows."""

from __future__ import annotations

import random

import pytest
import torch

from hf_speculate.verification.sequences import Sequences


PROMPT = torch.tensor([[0, 4, 5], [6, 7, 8], [9, 1, 2]])


@pytest.mark.parametrize("num_prompt", [3, 1, 0])
@pytest.mark.parametrize("seed", range(4))
def test_views_show_prompt_and_new_tokens_whenever_they_are_looked_at(num_prompt, seed):
    choose, sequences = random.Random(seed), Sequences(PROMPT[:, :num_prompt], 0)
    rows = [PROMPT[row, :num_prompt].tolist() for row in range(3)]
    for _ in range(300):  # beyond every first capacity
        row = choose.randrange(3)
        token = choose.randrange(10)
        sequences.append(row, token)
        rows[row].append(token)
        if choose.random() < 0.3:
            look = choose.randrange(3)
            assert sequences.length(look) == len(rows[look])
            if rows[look]:
                assert sequences.view([look]).tolist() == [rows[look]]
    assert sequences.num_emitted == [len(row) - num_prompt for row in rows]


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2], [1]])
def test_rows_of_equal_length_are_seen_together(rows):
    sequences = Sequences(PROMPT, 0)
    for step in range(70):
        for row in range(3):
            sequences.append(row, 10 * row + step % 7)
        view = sequences.view(rows)
        assert view.shape == (len(rows), 4 + step)
        assert view[:, -1].tolist() == [10 * row + step % 7 for row in rows]
        assert torch.equal(view[:, :3], PROMPT[rows])


@pytest.mark.parametrize(("pad", "filled"), [(7, 7), (0, 0), (None, 0)])
def test_the_result_fills_rows_that_ended_early(pad, filled):
    sequences = Sequences(PROMPT, pad)
    for row, tokens in enumerate(([1, 2, 3], [4], [])):
        for token in tokens:
            sequences.append(row, token)
    expected = torch.tensor([[1, 2, 3], [4, filled, filled], [filled] * 3])
    assert torch.equal(sequences.result(), torch.cat([PROMPT, expected], dim=1))


def test_columns_are_the_steps_of_all_rows():
    sequences = Sequences(PROMPT, 0)
    for step in range(3):
        for row in range(3):
            sequences.append(row, 10 * row + step)
    assert [column.tolist() for column in sequences.columns(1)] == [[1, 11, 21], [2, 12, 22]]
    assert sequences.columns(3) == []


def test_columns_of_ragged_rows_are_an_error_not_a_truncation():
    sequences = Sequences(PROMPT, 0)
    sequences.append(0, 1)
    with pytest.raises(ValueError, match="zip"):
        sequences.columns(0)
