"""Cross-entropy of draft logits against the target's distribution (the teacher) or against tokens.

    loss = sum_e w_e * -sum_v p_ev log q_ev,    q_e = softmax(states_e @ output.T)

over E entries with weights w. Both forms give the same value and the same gradients. `plain_cross_entropy` is the
reference: it makes the whole [E, Vd] several times over. `lean_cross_entropy` streams the log-sum-exp over chunks of
the vocabulary and makes each chunk again in the backward, so it holds one chunk, whatever the vocabulary.

`lm_head(last_hidden)` of a whole batch is the largest tensor of training (128 000 columns in fp32: half a megabyte a
token). The `Teacher` therefore makes only the columns that are needed, if the output layer is an ordinary matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from hf_speculate.target import is_dense


# Elements of a block of logits; 2**24 in fp32 are 64 MiB.
_BLOCK = 1 << 24
# Bytes that a chunk of the vocabulary may take, all temporaries together. On an accelerator calls cost more than caches
# save: a step of 8192 tokens took 116 ms on an H200 with the first, 82 with the second.
CHUNK_BYTES = 1 << 27
_ACCELERATOR_CHUNK_BYTES = 1 << 30
# Columns of a chunk at least: thinner matrix products are slow.
_MIN_COLUMNS = 128


class Teacher:
    """The target's output layer, read by columns, referenced and registered nowhere.

    `target_ids` are the tokens of the draft vocabulary; None for the whole vocabulary.
    """

    def __init__(self, lm_head: nn.Module | None, target_ids: Int[Tensor, " Vd"] | None, vocab_size: int):
        self.lm_head: Any = lm_head
        self.vocab_size = vocab_size
        self.target_ids = target_ids
        self.draft_ids: Tensor | None = None  # draft column of every token, -1 outside the draft vocabulary
        if target_ids is not None:
            self.draft_ids = torch.full((vocab_size,), -1, dtype=torch.long, device="cpu")
            self.draft_ids[target_ids.cpu()] = torch.arange(len(target_ids), dtype=torch.long, device="cpu")

    @property
    def is_dense(self) -> bool:
        """True if the output layer is a plain matrix, whose rows can be read one by one."""
        return is_dense(self.lm_head)

    @torch.no_grad()
    def read(self, hidden: Float[Tensor, "T H"]) -> TeacherRows:
        """The distributions at T positions, over the draft vocabulary."""
        return TeacherRows(self, hidden.detach())

    @torch.no_grad()
    def argmax(self, hidden: Float[Tensor, "T H"]) -> Int[Tensor, " T"]:
        """The target's best tokens over its whole vocabulary, computed block by block."""
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

    Output layers that are not dense (quantised, adapted) can only be called. Their columns are computed block by block
    at the start and kept in the target's dtype.
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


@dataclass(frozen=True)
class EntryLosses:
    """The result of a loss.

    Attributes:
        loss: weighted sum, with a graph.
        each: unweighted loss of each entry, without a graph.
        best: best draft column of each entry.
    """

    loss: Float[Tensor, ""]
    each: Float[Tensor, " E"]
    best: Int[Tensor, " E"]


class Targets(ABC):
    """The distributions p over the columns with which E entries are compared.

    `add` is called for one chunk after the other, each column once, before `expected` and `subtract_from`.

    Class attributes:
        temporaries: number of tensors as large as a chunk that live at once.
    """

    temporaries: int

    @abstractmethod
    def reset(self) -> None:
        """Forgets all chunks."""

    @abstractmethod
    def add(self, logits: Float[Tensor, "E C"], start: int) -> None:
        """Adds the draft logits of columns from `start` on to the sum of `expected`."""

    @abstractmethod
    def expected(self) -> Float[Tensor, " E"]:
        """`sum_v p_ev z_ev` over all logits z that were added."""

    @abstractmethod
    def subtract_from(self, values: Float[Tensor, "E C"], start: int) -> None:
        """`values -= p` in place, for columns from `start` on."""

    @abstractmethod
    def cross_entropy(self, logits: Float[Tensor, "E Vd"]) -> Float[Tensor, " E"]:
        """`-sum_v p_ev log softmax(logits)_ev` of whole rows of logits, for the reference."""


class SoftTargets(Targets):
    """The target's own distributions at T positions, renormalised over the draft vocabulary.

    `index` is the position of each entry.
    """

    temporaries = 4

    def __init__(self, rows: TeacherRows, index: Int[Tensor, " E"]):
        self.rows, self.index = rows, index
        self.reset()

    def reset(self) -> None:
        self._normalizer: Tensor | None = None  # log-sum-exp of the columns so far, [T]
        self._expected: Tensor | None = None

    def add(self, logits: Tensor, start: int) -> None:
        columns = self._columns(start, logits)
        normalizer = torch.logsumexp(columns, dim=-1)
        expected: Any = 0
        if self._normalizer is not None and self._expected is not None:
            earlier, normalizer = self._normalizer, torch.logaddexp(self._normalizer, normalizer)
            expected = self._expected * (earlier - normalizer).exp()[self.index]
        chosen = columns.sub_(normalizer[:, None]).exp_()[self.index]
        self._expected = expected + chosen.mul_(logits).sum(-1)
        self._normalizer = normalizer

    def expected(self) -> Tensor:
        assert self._expected is not None
        return self._expected

    def subtract_from(self, values: Tensor, start: int) -> None:
        assert self._normalizer is not None
        columns = self._columns(start, values)
        values -= columns.sub_(self._normalizer[:, None]).exp_()[self.index]

    def cross_entropy(self, logits: Tensor) -> Tensor:
        target_probs = torch.softmax(self._columns(0, logits), dim=-1)[self.index]
        return -(target_probs * torch.log_softmax(logits, dim=-1)).sum(-1)

    def _columns(self, start: int, like: Tensor) -> Tensor:
        """A copy of the teacher's logits at the columns of `like`, in its dtype."""
        columns = self.rows.columns(start, start + like.shape[1])
        return columns.to(like, copy=columns.dtype == like.dtype)


class HardTargets(Targets):
    """One column for each entry, int64 [E]."""

    temporaries = 2

    def __init__(self, labels: Int[Tensor, " E"]):
        self.labels = labels
        self.reset()

    def reset(self) -> None:
        self._expected: Any = 0

    def add(self, logits: Tensor, start: int) -> None:
        inside, columns = self._inside(start, logits)
        self._expected = self._expected + logits.gather(1, columns)[:, 0] * inside

    def expected(self) -> Tensor:
        return self._expected

    def subtract_from(self, values: Tensor, start: int) -> None:
        inside, columns = self._inside(start, values)
        values.scatter_add_(1, columns, -inside[:, None].to(values))

    def cross_entropy(self, logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits, self.labels, reduction="none")

    def _inside(self, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """For each label: True if it is among the columns of `like`, and its place there."""
        local = self.labels - start
        return (local >= 0) & (local < like.shape[1]), local.clamp(0, like.shape[1] - 1)[:, None]


def plain_cross_entropy(
    states: Float[Tensor, "E Hd"],
    output: Float[Tensor, "Vd Hd"] | Callable[[Tensor], Tensor],
    targets: Targets,
    weights: Float[Tensor, " E"],
) -> EntryLosses:
    """The reference. `output` is a matrix or any module that makes logits.

    Logits become at least float32 before anything is summed.
    """
    if isinstance(output, Tensor):
        logits = functional.linear(states, output.to(states.dtype) if states.dtype != output.dtype else output)
    else:
        logits = output(states)
    logits = logits.to(_summing_dtype(logits.dtype))
    each = targets.cross_entropy(logits)
    return EntryLosses((weights.to(each) * each).sum(), each.detach(), logits.detach().argmax(-1))


def lean_cross_entropy(
    states: Float[Tensor, "E Hd"],
    output: Float[Tensor, "Vd Hd"],
    targets: Targets,
    weights: Float[Tensor, " E"],
    chunk: int | None = None,
) -> EntryLosses:
    """`plain_cross_entropy` by chunks of `chunk` columns (default: as many as fit `CHUNK_BYTES`, or 1 GiB on
    an accelerator).

    Where one chunk holds the whole vocabulary, q - p is kept for the backward and nothing is computed twice.
    """
    if chunk is None:
        column_bytes = 4 * max(len(states), 1) * targets.temporaries
        most = CHUNK_BYTES if states.device.type == "cpu" else _ACCELERATOR_CHUNK_BYTES
        chunk = max(most // column_bytes, _MIN_COLUMNS)
    return EntryLosses(*_LeanCrossEntropy.apply(states, output, targets, weights, chunk))  # type: ignore[misc]


def cross_entropy(
    states: Float[Tensor, "E Hd"],
    output: Float[Tensor, "Vd Hd"] | nn.Module,
    targets: Targets,
    weights: Float[Tensor, " E"],
) -> EntryLosses:
    """`lean_cross_entropy` where it is possible, else `plain_cross_entropy`.

    Output layers that are not a plain matrix (quantised, adapted) can only be called.
    """
    if isinstance(output, nn.Linear) and is_dense(output):
        output = output.weight.to(states.device)
    if isinstance(output, Tensor):
        return lean_cross_entropy(states, output, targets, weights)
    return plain_cross_entropy(states, output, targets, weights)


class _LeanCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, output, targets: Targets, weights, chunk: int):
        """Returns the loss, the losses of the entries and their best columns."""
        ctx.targets, ctx.chunk, ctx.dtype = targets, chunk, _product_dtype(states, output)
        with torch.autocast(states.device.type, enabled=False):
            rows = states.to(ctx.dtype)
            targets.reset()
            best_logits = normalizer = rows.new_full((len(rows),), -torch.inf, dtype=_summing_dtype(ctx.dtype))
            best = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
            logits = None
            for start in range(0, len(output), chunk):
                logits = _logits(rows, output, start, chunk)
                normalizer = torch.logaddexp(normalizer, torch.logsumexp(logits, dim=-1))
                values, columns = logits.max(dim=-1)
                best = torch.where(values > best_logits, columns + start, best)
                best_logits = torch.maximum(values, best_logits)
                targets.add(logits, start)
            each = normalizer - targets.expected()
            weights = weights.to(each)
            difference = None
            if len(output) <= chunk and logits is not None:
                difference = _difference(logits, normalizer, targets, 0).to(ctx.dtype)
        ctx.save_for_backward(states, output, weights, normalizer, difference)
        ctx.mark_non_differentiable(each, best)
        return (weights * each).sum(), each, best

    @staticmethod
    def backward(ctx, *grads):
        grad = grads[0]
        states, output, weights, normalizer, kept = ctx.saved_tensors
        needs_states, needs_output = ctx.needs_input_grad[:2]
        rows = states.to(ctx.dtype)
        # Before anything is rounded to 16 bits: a gradient scaler's factor comes with `grad`.
        factors = (weights * grad)[:, None]
        grad_states = torch.zeros_like(rows, dtype=_summing_dtype(ctx.dtype)) if needs_states else None
        grad_output = torch.empty_like(output) if needs_output else None
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(output), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                if kept is None:
                    logits = _logits(rows, output, start, ctx.chunk)
                    difference = _difference(logits, normalizer, ctx.targets, start).mul_(factors).to(ctx.dtype)
                else:
                    difference = (kept * factors).to(ctx.dtype)
                if grad_states is not None:
                    grad_states += difference @ output[part].to(ctx.dtype)
                if grad_output is not None:
                    grad_output[part] = difference.mT @ rows
        return None if grad_states is None else grad_states.to(states.dtype), grad_output, None, None, None


def _logits(rows: Tensor, output: Tensor, start: int, chunk: int) -> Tensor:
    logits = functional.linear(rows, output[start : start + chunk].to(rows.dtype))
    return logits.to(_summing_dtype(rows.dtype))


def _difference(logits: Tensor, normalizer: Tensor, targets: Targets, start: int) -> Tensor:
    """`q - p` of a chunk, the gradient of an entry's loss by its logits, computed in place."""
    draft_probs = logits.sub_(normalizer[:, None]).exp_()
    targets.subtract_from(draft_probs, start)
    return draft_probs


def _product_dtype(states: Tensor, output: Tensor) -> torch.dtype:
    """The dtype of matrix products: that of autocast if it is on, as for any linear layer."""
    device = states.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(states.dtype, output.dtype) if states.dtype != output.dtype else states.dtype


def _summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over a vocabulary, never of 16 bits."""
    return torch.promote_types(dtype, torch.float32)
