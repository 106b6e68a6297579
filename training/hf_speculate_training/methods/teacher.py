"""The target's distribution over the columns that a loss needs, from its last hidden states.

`lm_head(last_hidden)` of a whole batch is the largest tensor of training (128 000 columns in fp32: half a megabyte a
token), so nothing here makes all of it where the output matrix is an ordinary one.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from hf_speculate.target import is_dense


# Elements of a block of logits; 2**24 in fp32 are 64 MiB.
_BLOCK = 1 << 24


class Teacher:
    """The target's output layer, read by columns.

    Args:
        lm_head: the target's output layer; referenced, not registered anywhere.
        target_ids: int64 [Vd], the tokens of the draft vocabulary; None for the whole vocabulary.
        vocab_size: V.
    """

    def __init__(self, lm_head: nn.Module | None, target_ids: Int[Tensor, " Vd"] | None, vocab_size: int):
        self.lm_head: Any = lm_head
        self.vocab_size = vocab_size
        self.target_ids = target_ids
        # draft column of every token, -1 outside the draft vocabulary
        self.draft_ids: Tensor | None = None
        if target_ids is not None:
            self.draft_ids = torch.full((vocab_size,), -1)
            self.draft_ids[target_ids.cpu()] = torch.arange(len(target_ids))

    @property
    def is_dense(self) -> bool:
        """Whether the output layer is a plain matrix, whose rows can be read one by one."""
        return is_dense(self.lm_head)

    @torch.no_grad()
    def read(self, hidden: Float[Tensor, "T H"]) -> TeacherRows:
        """The distributions at T positions, over the draft vocabulary."""
        return TeacherRows(self, hidden.detach())

    @torch.no_grad()
    def argmax(self, hidden: Float[Tensor, "T H"]) -> Int[Tensor, " T"]:
        """The target's best token over its whole vocabulary; streamed."""
        if not len(hidden):
            return torch.zeros(0, dtype=torch.long, device=hidden.device)
        if not self.is_dense:
            blocks = hidden.split(max(_BLOCK // self.vocab_size, 1))
            return torch.cat([self._call(block).argmax(-1) for block in blocks])
        best = best_ids = None
        for start in range(0, self.vocab_size, step := max(_BLOCK // len(hidden), 1)):
            logits = self._dense(hidden, slice(start, start + step))
            values, ids = logits.max(-1)
            if best is None or best_ids is None:
                best, best_ids = values, ids
            else:
                best_ids = torch.where(values > best, ids + start, best_ids)
                best = torch.maximum(values, best)
        assert best_ids is not None
        return best_ids

    def to_draft(self, token_ids: Int[Tensor, "*N"]) -> Int[Tensor, "*N"]:
        """Draft columns of tokens; -1 for those outside the draft vocabulary."""
        if self.draft_ids is None:
            return token_ids
        self.draft_ids = self.draft_ids.to(token_ids.device)
        return self.draft_ids[token_ids]

    def _dense(self, hidden: Tensor, rows: slice | Tensor) -> Tensor:
        weight = self.lm_head.weight[rows]
        bias = None if self.lm_head.bias is None else self.lm_head.bias[rows]
        with torch.autocast(hidden.device.type, enabled=False):  # the target decodes in its own dtype
            return functional.linear(hidden.to(weight.device, weight.dtype), weight, bias).to(hidden.device)

    def _call(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            device = self.lm_head.weight.device
            placed = hidden if device.type == "meta" else hidden.to(device)  # offloaded: its hooks place the input
            return self.lm_head(placed).to(hidden.device)


class TeacherRows:
    """A teacher at T positions: `columns(start, stop)` are logits over a part of the draft vocabulary.

    Other than dense output layers (quantised, adapted) can only be called: their needed columns are computed block by
    block at the start and kept in the target's dtype.
    """

    def __init__(self, teacher: Teacher, hidden: Float[Tensor, "T H"]):
        self.teacher, self.hidden = teacher, hidden
        self._kept: Tensor | None = None
        if not teacher.is_dense:
            ids = teacher.target_ids
            blocks = hidden.split(max(_BLOCK // teacher.vocab_size, 1))
            logits = (teacher._call(block) for block in blocks)
            self._kept = torch.cat([row if ids is None else row[:, ids.to(row.device)] for row in logits])

    def __len__(self) -> int:
        return len(self.hidden)

    def columns(self, start: int, stop: int) -> Float[Tensor, "T C"]:
        """Logits of draft columns `start` to `stop`, in the target's dtype."""
        if self._kept is not None:
            return self._kept[:, start:stop]
        ids = self.teacher.target_ids
        if ids is None:
            return self.teacher._dense(self.hidden, slice(start, stop))
        return self.teacher._dense(self.hidden, ids[start:stop].to(self.teacher.lm_head.weight.device))
