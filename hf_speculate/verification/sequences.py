"""The text of a batch while it grows, each row at its own pace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from ..transfers import to_device


class Sequences:
    """Prompt and new tokens of B rows. Rows may have different numbers of new tokens until the end.

    Args:
        input_ids: prompt as `generate` gives it to its decoding method, [B, S] (left padded; S may be 0), of any
            integer dtype. As in stock, the text is int64 from the first new token on.
        pad_token_id: token id that fills finished rows in the result; None means 0.
    """

    def __init__(self, input_ids: Int[Tensor, "B S"], pad_token_id: int | None):
        self.prompt = input_ids
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self.new_tokens: list[list[int]] = [[] for _ in range(input_ids.shape[0])]
        self.finished = [False] * input_ids.shape[0]
        self._ids = input_ids.long()
        self._num_written = [0] * input_ids.shape[0]

    @property
    def batch_size(self) -> int:
        return len(self.new_tokens)

    @property
    def num_emitted(self) -> list[int]:
        """Number of new tokens of each row."""
        return [len(tokens) for tokens in self.new_tokens]

    @property
    def last_tokens(self) -> Int[Tensor, " B"]:
        """The last token of each row, on the CPU; 0 for an empty text."""
        if all(self.new_tokens):
            return torch.tensor([tokens[-1] for tokens in self.new_tokens], dtype=torch.long, device="cpu")
        return (self.prompt[:, -1] if self.prompt.shape[1] else self.prompt.new_zeros(self.batch_size)).cpu()

    @property
    def finished_rows(self) -> list[int]:
        return [row for row, is_finished in enumerate(self.finished) if is_finished]

    @property
    def new_shape(self) -> tuple[int, int]:
        """Shape of the new tokens in the result, (B, steps)."""
        return self.batch_size, max(self.num_emitted)

    def length(self, row: int) -> int:
        """Number of prompt and new tokens of a row, left padding included (stock's `input_ids.shape[1]`)."""
        return self.prompt.shape[1] + len(self.new_tokens[row])

    def append(self, row: int, token: int) -> None:
        self.new_tokens[row].append(token)

    def view(self, rows: Sequence[int]) -> Int[Tensor, "R T"]:
        """The text of some rows of equal length, in the form of stock's `input_ids`: contiguous, on the prompt's
        device, read only."""
        length = self.length(rows[0])
        if len(rows) == self.batch_size and length == self.prompt.shape[1]:
            return self.prompt
        self._write(length)
        if len(rows) == self.batch_size:
            return self._ids[:, :length].contiguous()
        if len(rows) == 1:
            return self._ids[rows[0] : rows[0] + 1, :length]
        return self._ids[list(rows), :length]

    def result(self) -> Int[Tensor, "B T"]:
        """All rows as plain `generate` returns them, finished ones filled with the padding token."""
        num_new = self.new_shape[1]
        rows = [tokens + [self.pad_token_id] * (num_new - len(tokens)) for tokens in self.new_tokens]
        new_ids = torch.tensor(rows, dtype=torch.long, device=self.prompt.device)
        return torch.cat([self.prompt, new_ids.view(self.batch_size, num_new)], dim=1)

    def columns(self, start: int) -> list[Tensor]:
        """The tokens of steps `start`, `start + 1`, …, each [B], for streamers. Rows must be of equal length."""
        return [
            torch.tensor(column, dtype=torch.long, device="cpu")
            for column in zip(*(tokens[start:] for tokens in self.new_tokens), strict=True)
        ]

    def _write(self, length: int) -> None:
        """Updates the copy on the device. It grows geometrically, so each token is written once."""
        num_prompt = self.prompt.shape[1]
        if self._ids.shape[1] < length:
            grown = self._ids.new_zeros(self.batch_size, max(length, 2 * self._ids.shape[1], num_prompt + 64))
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown
        for row, tokens in enumerate(self.new_tokens):
            written = self._num_written[row]
            if written < len(tokens) and num_prompt + len(tokens) <= self._ids.shape[1]:
                new = to_device(tokens[written:], self._ids.device, self._ids.dtype)
                self._ids[row, num_prompt + written : num_prompt + len(tokens)] = new
                self._num_written[row] = len(tokens)
