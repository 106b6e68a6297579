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
def test_starts_of_rows_with_padding_on_the_left_only(rows, starts, dtype):
    mask = torch.tensor(rows).to(dtype)
    assert prompt_starts(mask, len(rows)) == starts
    if starts is not None:
        assert num_left_padding(mask, mask.device)[:, 0].tolist() == starts


def test_without_a_mask_rows_begin_at_the_beginning():
    assert prompt_starts(None, 3) == [0, 0, 0]
