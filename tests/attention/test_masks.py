"""The beginnings of rows in a padded prompt."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.attention import prompt_starts
from hf_speculate.attention.prefix import num_left_padding


@pytest.mark.parametrize(
    ("rows", "starts"),
    [
        ([[0, 0, 1, 1], [1, 1, 1, 1]], [2, 0]),
        ([[1, 0, 1, 1]], None),  # a hole
        ([[0, 1, 1, 0]], None),  # padding on the right
        ([[0, 0, 0, 1]], [3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.long], ids=str)
def test_row_starts_need_padding_on_the_left_only(rows, starts, dtype):
    mask = torch.tensor(rows).to(dtype)
    assert prompt_starts(mask, len(rows)) == starts
    if starts is not None:
        assert num_left_padding(mask, mask.device)[:, 0].tolist() == starts


def test_row_starts_are_zero_without_a_mask():
    assert prompt_starts(None, 3) == [0, 0, 0]
