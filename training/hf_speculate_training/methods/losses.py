"""Cross-entropy of draft logits against the target's distribution or against tokens: readable, and lean in memory.

    loss = sum_e w_e * -sum_v p_ev log q_ev,    q_e = softmax(states_e @ output.T)

over E entries with weights w. Both forms give the same value and the same gradients. `plain_cross_entropy` is the
reference: it makes the whole [E, Vd] several times over. `lean_cross_entropy` streams the log-sum-exp over chunks of
the vocabulary and makes each chunk anew in the backward, so that what it holds is a chunk, whatever the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from .teacher import TeacherRows


# Bytes that a chunk of the vocabulary may take, all temporaries together.
CHUNK_BYTES = 1 << 27
# Columns of a chunk at least: thinner matrix products are slow.
_MIN_COLUMNS = 128


@dataclass(frozen=True)
class EntryLosses:
    """What a loss gives: `loss` is the weighted sum, with a graph; `each` the E unweighted losses and `best` the best
    column of each, without."""

    loss: Float[Tensor, ""]
    each: Float[Tensor, " E"]
    best: Int[Tensor, " E"]


class Targets(ABC):
    """What E entries are compared with: a distribution p over the columns for each.

    `add` is called for one chunk after the other, each column once, before `expected` and `subtract_from`.
    """

    temporaries: int

    @abstractmethod
    def reset(self) -> None:
        """Forgets what was added."""

    @abstractmethod
    def add(self, logits: Float[Tensor, "E C"], start: int) -> None:
        """Takes the draft logits of columns from `start` on into the sum of `expected`."""

    @abstractmethod
    def expected(self) -> Float[Tensor, " E"]:
        """sum_v p_ev z_ev over all logits z that were added."""

    @abstractmethod
    def subtract_from(self, values: Float[Tensor, "E C"], start: int) -> None:
        """`values -= p` in place, for columns from `start` on."""

    @abstractmethod
    def cross_entropy(self, logits: Float[Tensor, "E Vd"]) -> Float[Tensor, " E"]:
        """-sum_v p_ev log softmax(logits)_ev of whole rows of logits, for the reference."""


class SoftTargets(Targets):
    """The target's own distributions, renormalised over the draft vocabulary.

    Args:
        rows: the teacher at T positions.
        index: int64 [E], the position of each entry.
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
        """Which labels are among the columns of `like`, and where."""
        local = self.labels - start
        return (local >= 0) & (local < like.shape[1]), local.clamp(0, like.shape[1] - 1)[:, None]


def plain_cross_entropy(
    states: Float[Tensor, "E Hd"],
    output: Float[Tensor, "Vd Hd"] | Callable[[Tensor], Tensor],
    targets: Targets,
    weights: Float[Tensor, " E"],
) -> EntryLosses:
    """The reference; `output` may be any module, also one that is no plain matrix.

    Logits are taken to at least float32 before anything is summed.
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
    """`plain_cross_entropy` by chunks of `chunk` columns (default: as many as fit `CHUNK_BYTES`).

    Where one chunk holds the whole vocabulary, q - p is kept for the backward and nothing is computed twice.
    """
    if chunk is None:
        column_bytes = 4 * max(len(states), 1) * targets.temporaries
        chunk = max(CHUNK_BYTES // column_bytes, _MIN_COLUMNS)
    return EntryLosses(*_LeanCrossEntropy.apply(states, output, targets, weights, chunk))  # type: ignore[misc]


class _LeanCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, output, targets: Targets, weights, chunk: int):
        """Gives loss, losses of the entries, best columns."""
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
    """q - p of a chunk, the gradient of an entry's loss by its logits; made in their place."""
    draft_probs = logits.sub_(normalizer[:, None]).exp_()
    targets.subtract_from(draft_probs, start)
    return draft_probs


def _product_dtype(states: Tensor, output: Tensor) -> torch.dtype:
    """In which matrix products are taken: that of autocast where it is on, as for any linear layer."""
    device = states.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(states.dtype, output.dtype) if states.dtype != output.dtype else states.dtype


def _summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over a vocabulary are never taken in 16 bits."""
    return torch.promote_types(dtype, torch.float32)
