"""Stopping criteria and hooks as users write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import StoppingCriteria


class EndsWithToken(StoppingCriteria):
    """Not known: rows go in lock-step."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class EndsRow(EndsWithToken):
    """Says that it judges every row alone."""

    row_wise = True


class EndsRows(StoppingCriteria):
    """Ends every row, known by its prompt, after so many tokens; as stock has it with EOS, padding follows."""

    row_wise = True
    eos_token_id = None

    def __init__(self, prompts, ends):
        self.width = prompts.shape[1]
        self.ends = {tuple(row): end for row, end in zip(prompts.tolist(), ends, strict=True)}

    def __call__(self, input_ids, scores, **kwargs):
        num_new = input_ids.shape[1] - self.width
        done = [num_new >= self.ends[tuple(row)] for row in input_ids[:, : self.width].tolist()]
        return torch.tensor(done)


@contextmanager
def all_rows_stay(model: nn.Module) -> Iterator[None]:
    """A hook of a user that may hold a value for each row: no row that has ended leaves the forwards of `model`."""
    handle = model.register_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()
