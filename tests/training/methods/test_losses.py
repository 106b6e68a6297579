"""Losses and their gradients against position-by-position loops, in fp64; the lean form against the plain one."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_speculate_training.methods import (
    HardTargets,
    SoftTargets,
    Teacher,
    lean_cross_entropy,
    losses,
    plain_cross_entropy,
)

from ...benchmarks.train import LossShape, loss_inputs


ENTRIES, POSITIONS, HIDDEN, WIDTH, VOCAB = 13, 7, 6, 5, 37
FORMS = {
    "plain": plain_cross_entropy,
    "lean-default": lean_cross_entropy,  # one chunk, at sizes like these
    # 37 = 3 * 10 + 7: the last chunk is not a whole one
    "lean-chunks": lambda *args: lean_cross_entropy(*args, chunk=10),
    "lean-columns": lambda *args: lean_cross_entropy(*args, chunk=1),
}


class Problem:
    """Random entries; `columns` are the tokens of the draft vocabulary."""

    def __init__(self, dtype=torch.float64, entries: int = ENTRIES, truncated: bool = True, scale: float = 1.0):
        torch.manual_seed(0)
        size = VOCAB if truncated else VOCAB + 12
        self.target_ids = torch.randperm(VOCAB + 12)[:size].sort().values if truncated else None
        self.lm_head = nn.Linear(HIDDEN, VOCAB + 12, bias=False, dtype=dtype).requires_grad_(False)
        torch.manual_seed(1)  # the same numbers in every dtype
        self.lm_head.weight.copy_(torch.randn(VOCAB + 12, HIDDEN, dtype=torch.float64) * scale / 2)
        self.teacher = Teacher(self.lm_head, self.target_ids, VOCAB + 12)
        self.hidden = (torch.randn(POSITIONS, HIDDEN, dtype=torch.float64) * scale).to(dtype)
        self.states = (torch.randn(entries, WIDTH, dtype=torch.float64) * scale).to(dtype).requires_grad_()
        self.output = torch.randn(size, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
        self.index = torch.randint(0, POSITIONS, (entries,))
        self.labels = torch.randint(0, size, (entries,))
        self.weights = torch.rand(entries)
        self.weights[::4] = 0

    def targets(self, kind: str):
        if kind == "soft":
            return SoftTargets(self.teacher.read(self.hidden), self.index)
        return HardTargets(self.labels)

    def run(self, form, kind: str, factor: float = 1.0):
        """loss, its gradients, losses of the entries, best columns."""
        result = FORMS[form](self.states, self.output, self.targets(kind), self.weights)
        grads = torch.autograd.grad(result.loss * factor, (self.states, self.output))
        return result, grads

    def by_hand(self, kind: str):
        """The same in Python loops over numbers: the loss, its gradients and the entries' losses."""
        logits = (self.states @ self.output.T).tolist()
        columns = range(len(self.output)) if self.target_ids is None else self.target_ids.tolist()
        teacher = (self.hidden @ self.lm_head.weight.T).tolist()
        loss, each = 0.0, []
        grad_logits = torch.zeros(len(self.states), len(self.output), dtype=torch.float64)
        for e, row in enumerate(logits):
            draft = [math.exp(z) for z in row]
            draft = [d / sum(draft) for d in draft]
            if kind == "soft":
                wanted = [math.exp(teacher[self.index[e]][c]) for c in columns]
                wanted = [w / sum(wanted) for w in wanted]
            else:
                wanted = [float(v == self.labels[e]) for v in range(len(row))]
            each.append(-sum(w * math.log(d) for w, d in zip(wanted, draft, strict=True)))
            loss += float(self.weights[e]) * each[-1]
            for v, (w, d) in enumerate(zip(wanted, draft, strict=True)):
                grad_logits[e, v] = float(self.weights[e]) * (d - w)
        grads = grad_logits @ self.output, grad_logits.T @ self.states
        return loss, grads, each, [row.index(max(row)) for row in logits]


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("truncated", [True, False])
def test_loss_and_gradients_equal_loops(form, kind, truncated):
    problem = Problem(truncated=truncated)
    result, grads = problem.run(form, kind)
    loss, expected_grads, each, best = problem.by_hand(kind)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    assert result.each.tolist() == pytest.approx(each, rel=1e-10)
    assert result.best.tolist() == best
    for name, ours, theirs in zip(("states", "output matrix"), grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("form", FORMS)
def test_loss_without_entries_is_zero(form, kind):
    result, grads = Problem(entries=0).run(form, kind)
    assert result.loss.item() == 0
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("form", ["lean-default", "lean-chunks"])
def test_huge_logits_stay_finite(form, kind):
    """exp of these logits overflows, and most probabilities are 0."""
    problem = Problem(dtype=torch.float32, scale=300)
    (result, grads), (plain, plain_grads) = problem.run(form, kind), problem.run("plain", kind)
    torch.testing.assert_close(result.loss, plain.loss, rtol=1e-5, atol=0)
    for ours, theirs in zip(grads, plain_grads, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_sums_are_float32_under_bfloat16_autocast(kind):
    """Products are bfloat16 in both forms, so they agree as far as those round; sums over the vocabulary are not."""
    problem = Problem(dtype=torch.float32)
    exact, exact_grads = problem.run("plain", kind)
    results = {}
    for form in FORMS:
        with torch.autocast("cpu", torch.bfloat16):
            results[form] = FORMS[form](problem.states, problem.output, problem.targets(kind), problem.weights)
        grads = torch.autograd.grad(results[form].loss, (problem.states, problem.output))
        assert results[form].loss.dtype == torch.float32
        assert [grad.dtype for grad in grads] == [torch.float32] * 2
        for ours, theirs in zip(grads, exact_grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))
        torch.testing.assert_close(results[form].loss, exact.loss, rtol=1e-2, atol=0)
    for form in ("lean-default", "lean-chunks", "lean-columns"):
        torch.testing.assert_close(results[form].each, results["plain"].each, rtol=2e-5, atol=1e-5)


def test_a_gradient_scaler_scales_before_the_rounding_to_16_bits():
    problem = Problem(dtype=torch.float16)
    problem.weights *= 1e-7  # the gradient of a logit is below float16's smallest number
    _, exact = Problem().run("plain", "hard")
    for form in ("lean-default", "lean-chunks"):
        _, grads = problem.run(form, "hard", factor=1e7)
        for ours, theirs in zip(grads, exact, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))


def test_gradients_are_made_only_where_they_are_wanted():
    problem = Problem()
    frozen = problem.output.detach()
    loss = lean_cross_entropy(problem.states, frozen, problem.targets("soft"), problem.weights, chunk=10).loss
    (grad,) = torch.autograd.grad(loss, problem.states)
    torch.testing.assert_close(grad, problem.run("plain", "soft")[1][0])


class Called(nn.Module):
    """An output layer that is not a plain matrix, as quantised ones are."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear, self.widest = linear, 0

    @property
    def weight(self):
        return torch.zeros(3, 3, dtype=torch.uint8)

    def forward(self, hidden):
        self.widest = max(self.widest, len(hidden))
        return self.linear(hidden)


class TestTeacher:
    @pytest.mark.parametrize("truncated", [True, False])
    def test_teacher_computes_columns_and_argmax(self, truncated, monkeypatch):
        monkeypatch.setattr("hf_speculate_training.methods.losses._BLOCK", POSITIONS * 10)
        problem = Problem(truncated=truncated)
        logits = problem.hidden @ problem.lm_head.weight.T
        assert torch.equal(problem.teacher.argmax(problem.hidden), logits.argmax(-1))
        expected = logits if problem.target_ids is None else logits[:, problem.target_ids]
        torch.testing.assert_close(problem.teacher.read(problem.hidden).columns(3, 21), expected[:, 3:21])

    @pytest.mark.parametrize("truncated", [True, False])
    def test_teacher_calls_output_layers_without_a_weight_in_blocks(self, truncated, monkeypatch):
        monkeypatch.setattr("hf_speculate_training.methods.losses._BLOCK", 3 * (VOCAB + 12))
        problem = Problem(truncated=truncated)
        called = Called(problem.lm_head)
        teacher = Teacher(called, problem.target_ids, VOCAB + 12)
        assert torch.equal(teacher.argmax(problem.hidden), problem.teacher.argmax(problem.hidden))
        ours, theirs = teacher.read(problem.hidden), problem.teacher.read(problem.hidden)
        torch.testing.assert_close(ours.columns(3, 21), theirs.columns(3, 21))
        assert called.widest == 3, "blocks of rows, never all at once"

    def test_to_draft_maps_tokens_to_draft_columns(self):
        problem = Problem()
        for token, column in enumerate(problem.teacher.to_draft(torch.arange(VOCAB + 12)).tolist()):
            known = problem.target_ids.tolist()
            assert column == (known.index(token) if token in known else -1)


class AllocatedBytes(TorchDispatchMode):
    """Counts the memory of tensors that come to life inside it; `peak` is the most at one time.

    Exact, other than the resident size of a process, which hangs on what the allocator kept.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.counted = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in inputs:
                self.add(leaf.untyped_storage())
        return result

    def add(self, storage):
        if storage not in self.counted:
            self.counted.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, storage.nbytes())

    def remove(self, size):
        self.now -= size


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_at_a_vocabulary_of_128k_the_lean_loss_takes_less_than_half_the_memory(kind, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", losses.CHUNK_BYTES // 8)  # as 128 entries are an eighth of 1024
    shape = LossShape(num_entries=128, num_positions=32, hidden_size=8, vocab_size=131072)
    matrix, grad = 128 * 131072 * 4, 131072 * 8 * 4
    peaks = {}
    for form in ("plain", "lean-default"):
        with AllocatedBytes() as allocated:
            states, output, targets, weights = loss_inputs(shape, kind, "cpu")
            held, allocated.peak = allocated.now, 0
            FORMS[form](states, output, targets, weights).loss.backward()
        peaks[form] = allocated.peak - held
    assert peaks["plain"] > 2 * matrix + grad, "logits and their log-softmax at the least"
    assert peaks["lean-default"] < peaks["plain"] / 2
    assert peaks["lean-default"] < losses.CHUNK_BYTES + 1.2 * grad, "a chunk, and the gradient of the output matrix"
