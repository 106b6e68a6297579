"""Dynamic trees, each drawn in one native call, are those that the modules draw."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_speculate.drafting import DraftState
from hf_speculate.verification import Noise
from hf_speculate_gguf.native import NativeDraft
from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.eagle import EagleHead, LoadedHead
from hf_speculate_plugins.eagle.native import NativeForward, NativeSteps
from hf_speculate_plugins.eagle.spec import TreeSize
from hf_speculate_plugins.eagle.steps import PlainSteps, read_prompt
from hf_speculate_plugins.heads import HeadCache

from ..support.native_heads import SPECS, make_head


pytestmark = pytest.mark.usefixtures("needs_kernel")


SIZE = TreeSize(depth=5, width=4, max_nodes=20)
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)])


class Bench:
    """One head that has read a prompt, and states that ask it for trees."""

    def __init__(self, head, batch_size=1, padded=False, target_ids=None):
        self.loaded = LoadedHead(head, target_ids, LoadReport("made here"))
        self.forward, self.batch_size = NativeForward.of(head), batch_size
        mask = torch.arange(9) >= torch.arange(batch_size)[:, None] if padded else None
        places = torch.arange(9) if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
        self.head_cache = HeadCache(head, mask, places.expand(batch_size, -1))
        generator = torch.Generator().manual_seed(2)

        def some(count):
            ids = torch.randint(0, 96, (batch_size, count), generator=generator)
            return ids, torch.randn(batch_size, count, 64, generator=generator).to(head.dtype)

        read_prompt(head, self.head_cache, *some(9))
        hidden = PlainSteps(self.loaded, self.head_cache).entries(*some(3))
        lengths = [1 + row % 3 for row in range(batch_size)] if padded else [3] * batch_size
        self.head_cache.keep(lengths)  # holes, where rows are padded
        self.root = hidden[torch.arange(batch_size), torch.tensor(lengths) - 1]

    def state(self, do_sample=False, warpers=WARPERS, early_stopping=None) -> DraftState:
        torch.manual_seed(5)
        return DraftState(
            root_ids=torch.arange(self.batch_size) + 3,
            active=(True,) * self.batch_size,
            max_depth=9,
            chains_only=False,
            num_emitted=tuple(range(1, 1 + self.batch_size)),
            early_stopping=early_stopping,
            _noise=Noise(self.batch_size, 96, torch.device("cpu")) if do_sample else None,
            _warpers=warpers,
        )

    def trees(self, size=SIZE, **state):
        """By the native call, and by the modules."""
        found = []
        native_steps = NativeSteps(self.loaded, self.head_cache, self.forward)
        for steps in (native_steps, PlainSteps(self.loaded, self.head_cache)):
            found.append(steps.tree(self.root, self.state(**state), size))
            self.head_cache.drop()
        return found

    def check(self, calls, size=SIZE, **state):
        tree, expected = self.trees(size, **state)
        assert calls, "no native call"
        calls.clear()
        assert tree.host.parents == expected.host.parents
        assert torch.equal(tree.token_ids, expected.token_ids)
        torch.testing.assert_close(tree.values, expected.values, rtol=1e-3, atol=1e-3)
        return tree


@pytest.fixture
def calls(monkeypatch):
    """Native drafts so far."""
    found, grow = [], NativeDraft.grow
    monkeypatch.setattr(NativeDraft, "grow", lambda self, *a: found.append(1) or grow(self, *a))
    return found


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_trees_are_those_of_the_modules(changes, do_sample, calls):
    head = make_head(**changes)
    for batch_size, padded in ((1, False), (3, True)):
        Bench(head, batch_size, padded).check(calls, do_sample=do_sample)


@pytest.mark.parametrize(
    "warpers",
    [
        [],
        [TemperatureLogitsWarper(0.6)],
        [TopKLogitsWarper(7)],
        [TopPLogitsWarper(0.8)],
        [MinPLogitsWarper(0.05)],
        [TemperatureLogitsWarper(1.3), TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    ],
    ids=["none", "temperature", "top-k", "top-p", "min-p", "all"],
)
def test_a_sampled_request_is_drafted_as_its_warpers_have_it(warpers, calls):
    Bench(make_head(), 2).check(calls, TreeSize(3, 4, 12), do_sample=True, warpers=LogitsProcessorList(warpers))


def test_fewer_proposals_are_kept_than_are_wanted(calls):
    """What a request never samples fills up the level, and no token is proposed twice."""
    warpers = LogitsProcessorList([TopPLogitsWarper(0.01)])
    tree, _ = Bench(make_head()).trees(TreeSize(1, 9, 9), do_sample=True, warpers=warpers)
    assert calls
    assert tree.values[0, 1:].isfinite().sum() == 1
    assert len(set(tree.token_ids[0, 1:].tolist())) == 9


@pytest.mark.parametrize("name", ["EAGLE-3", "EAGLE-1"])
def test_quantized_heads_draw_nearly_the_same(name, calls):
    head = make_head(**SPECS[name])
    _, expected = Bench(head).trees()
    head.quantize_for_drafting()
    tree, _ = Bench(head).trees()
    assert calls == [1, 1]
    torch.testing.assert_close(tree.values, expected.values, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
def test_a_draft_reads_the_entries_before_it(changes, calls):
    head = make_head(**changes)
    found = []
    for steps_of in (NativeSteps, PlainSteps):
        bench, generator = Bench(head, 2), torch.Generator().manual_seed(4)
        tokens = torch.randint(0, 96, (2, 3), generator=generator)
        features = [torch.randn(2, 3, 64, generator=generator) for _ in range(head.spec.num_features)]
        if steps_of is NativeSteps:
            steps = NativeSteps(bench.loaded, bench.head_cache, bench.forward)
            tree, root = steps.tree_after((tokens, features, [3, 3]), bench.state(), SIZE)
        else:
            steps = PlainSteps(bench.loaded, bench.head_cache)
            root = steps.entries(tokens, head.fuse(features))[:, -1]
            bench.head_cache.keep([3, 3])
            tree = steps.tree(root, bench.state(), SIZE)
        bench.head_cache.drop()
        entries = [
            states for layer in bench.head_cache.tree_cache.cache.layers for states in (layer.keys, layer.values)
        ]
        found.append((root, tree, entries))
    (root, tree, entries), (expected_root, expected, expected_entries) = found
    assert calls == [1]
    torch.testing.assert_close(root, expected_root, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entries, expected_entries, rtol=1e-4, atol=1e-4)
    assert tree.host.parents == expected.host.parents
    assert torch.equal(tree.token_ids, expected.token_ids)


@pytest.mark.parametrize(
    "size",
    [TreeSize(1, 4, 20), TreeSize(6, 1, 6), TreeSize(3, 10, 500), TreeSize(4, 30, 7), TreeSize(2, 96, 64)],
    ids=str,
)
def test_native_trees_equal_modules_at_every_size(size, calls):
    tree = Bench(make_head()).check(calls, size)
    assert tree.token_ids.shape[1] <= size.max_nodes + 1


@pytest.mark.parametrize(
    "spec", [{"norm_logits": True, "feed_back_normed": True}, {"feed_back_normed": False}], ids=str
)
def test_native_trees_equal_modules_for_every_fed_back_state(spec, calls):
    Bench(make_head(**spec)).check(calls, do_sample=True)


def test_native_trees_equal_modules_with_a_draft_vocabulary(calls):
    head = make_head(draft_vocab_size=50)
    tree = Bench(head, target_ids=torch.arange(50) * 2 - torch.arange(50) // 10).check(calls, do_sample=True)
    assert tree.token_ids.max() > 50


@pytest.mark.parametrize("spec", ["EAGLE-3", "EAGLE-1"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_native_trees_ignore_output_rows_of_added_tokens(spec, do_sample, calls):
    head = make_head(**SPECS[spec])
    plain = Bench(head).check(calls, do_sample=do_sample)
    head.shared["lm_head"] = torch.nn.Linear(64, 101, bias=False).requires_grad_(False)
    head.shared["lm_head"].weight[:96], head.shared["lm_head"].weight[96:] = head.lm_head.weight, 50.0
    tree = Bench(head).check(calls, do_sample=do_sample)
    assert torch.equal(tree.token_ids, plain.token_ids)


def test_levels_that_do_not_pay_are_left_out(calls):
    asked = []

    def early_stopping(values, previous=None):
        asked.append((values.tolist(), previous.tolist()))
        return len(asked) % 3 != 0

    bench = Bench(make_head(), 2)
    tree = bench.check(calls, early_stopping=early_stopping)
    assert len(asked) == 6
    assert max(map(max, tree.host.parents)) > 0
    for (values, previous), (expected, others) in zip(asked[:3], asked[3:], strict=True):
        assert previous == others
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_nothing_stays_in_the_cache(calls):
    bench = Bench(make_head(num_layers=2, windows=(None, None)))
    before = [
        states.clone() for layer in bench.head_cache.tree_cache.cache.layers for states in (layer.keys, layer.values)
    ]
    NativeSteps(bench.loaded, bench.head_cache, bench.forward).tree(bench.root, bench.state(), SIZE)
    after = [states for layer in bench.head_cache.tree_cache.cache.layers for states in (layer.keys, layer.values)]
    assert calls
    assert all(map(torch.equal, after, before))


def test_native_trees_are_near_modules_in_bfloat16(calls):
    """Nothing to compare: near ties fall otherwise. Best nodes of the modules are near the best."""
    tree, expected = Bench(make_head(torch.bfloat16)).trees()
    assert calls
    torch.testing.assert_close(tree.values, expected.values, rtol=0.05, atol=0.1)


def test_what_the_kernel_does_not_compute_is_drawn_by_the_modules(calls):
    bench = Bench(make_head())
    for tree in bench.trees(do_sample=True, warpers=LogitsProcessorList([TypicalLogitsWarper(0.8)])):
        assert tree.token_ids.shape == (1, 21)
    assert not calls


def test_scores_that_are_not_finite_are_the_modules_business(calls):
    head = make_head()
    bench = Bench(head)
    head.lm_head.weight[7, 0] = torch.nan
    for tree in bench.trees():
        assert tree.token_ids.shape == (1, 21)
    assert len(calls) == 1


def test_exchanged_weights_are_seen(calls):
    bench = Bench(make_head())
    before = bench.check(calls)
    output = bench.loaded.head.lm_head
    output.weight = torch.nn.Parameter(-output.weight, requires_grad=False)
    assert not torch.equal(bench.check(calls).token_ids, before.token_ids)


class TestPrompts:
    @staticmethod
    def read(head, count, native, padded=False):
        """States of the last entry, and how many entries there are; whether the kernel was asked and answered."""
        generator, answers = torch.Generator().manual_seed(2), []
        mask = torch.arange(count) >= torch.arange(2)[:, None] if padded else None
        head_cache = HeadCache(head, mask, torch.arange(count).expand(2, -1))
        tokens = torch.randint(0, 96, (2, count), generator=generator)
        states = torch.randn(2, count, 64, generator=generator).to(head.dtype)

        def asked(*arguments):
            answers.append(native(*arguments))
            return answers[-1]

        hidden = read_prompt(head, head_cache, tokens, states, asked if native else None)
        return hidden, head_cache.tree_cache.append_index, [answer is not None for answer in answers]

    @pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
    @pytest.mark.parametrize("count", [1, 2, 64])
    def test_short_ones_are_read_by_the_kernel(self, changes, count):
        head = make_head(**changes)
        found, length, answers = self.read(head, count, NativeForward.of(head))
        expected = self.read(head, count, None)
        assert answers == [True]
        assert length == expected[1] == count
        torch.testing.assert_close(found, expected[0], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize(("count", "padded", "answers"), [(9, True, []), (200, False, [False])])
    def test_other_prompts_are_read_by_the_modules(self, count, padded, answers):
        head = make_head()
        found, _, given = self.read(head, count, NativeForward.of(head), padded)
        assert given == answers
        assert torch.equal(found, self.read(head, count, None, padded)[0])


class TestPending:
    """Entries that were committed before a draft."""

    @pytest.mark.parametrize(("batch_size", "count"), [(1, 1), (3, 4)])
    @pytest.mark.parametrize("is_quantized", [False, True], ids=["", "quantized"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_pending_tokens_are_read_before_the_draft(self, batch_size, count, is_quantized, dtype, calls, monkeypatch):
        """The target's states are projected there, too, where that is done in 8 bits."""
        fused, fuse = [], EagleHead.fuse

        def make():
            head = make_head(dtype, target_hidden_size=704)  # of so many, the projection is quantised
            if is_quantized:
                head.quantize_for_drafting()
            return Bench(head, batch_size)

        one, other = make(), make()
        tokens = torch.arange(batch_size * count).view(batch_size, count) + 7
        generator = torch.Generator().manual_seed(4)
        features = [torch.randn(batch_size, count, 704, generator=generator).to(dtype) for _ in range(3)]
        lengths = [count] * batch_size
        monkeypatch.setattr(EagleHead, "fuse", lambda *a: fused.append(1) or fuse(*a))
        drawn = NativeSteps(one.loaded, one.head_cache, one.forward).tree_after(
            (tokens, features, lengths), one.state(), SIZE
        )
        assert bool(fused) is not is_quantized
        assert drawn is not None
        assert calls == [1]
        steps = NativeSteps(other.loaded, other.head_cache, other.forward)
        with torch.no_grad():
            hidden = steps.entries(tokens, other.loaded.head.fuse(features))[:, -1]
        other.head_cache.keep(lengths)
        assert torch.equal(drawn[1], hidden)
        assert_same_bits(drawn[0], steps.tree(hidden, other.state(), SIZE))
        assert one.head_cache.tree_cache.lengths == other.head_cache.tree_cache.lengths

    def test_tokens_that_the_head_does_not_know_are_read_on_their_own(self, calls):
        bench = Bench(make_head())
        steps, tokens = NativeSteps(bench.loaded, bench.head_cache, bench.forward), torch.tensor([[7, 96]])
        pending, length = (tokens, [torch.ones(1, 2, 64)] * 3, [2]), bench.head_cache.tree_cache.lengths
        assert steps.tree_after(pending, bench.state(), SIZE) is None
        assert bench.head_cache.tree_cache.lengths == length
        native = steps.entries(tokens, bench.loaded.head.fuse(pending[1]))
        bench.head_cache.drop()
        modules = PlainSteps(bench.loaded, bench.head_cache).entries(tokens, bench.loaded.head.fuse(pending[1]))
        torch.testing.assert_close(native, modules, rtol=1e-3, atol=1e-3)

    def test_entries_with_holes_are_read_on_their_own(self):
        bench = Bench(make_head(), 3, padded=True)
        pending = torch.zeros(3, 2, dtype=torch.long), [torch.zeros(3, 2, 64)] * 3, [2, 1, 2]
        steps = NativeSteps(bench.loaded, bench.head_cache, bench.forward)
        assert steps.tree_after(pending, bench.state(), SIZE) is None

    def test_an_error_of_whoever_is_asked_comes_out(self):
        bench = Bench(make_head())

        def broken(*_):
            raise ZeroDivisionError("asked")

        with pytest.raises(ZeroDivisionError, match="asked"):
            NativeSteps(bench.loaded, bench.head_cache, bench.forward).tree(
                bench.root, bench.state(early_stopping=broken), SIZE
            )

    def test_a_signal_that_comes_as_the_callback_begins(self, capsys):
        """The handler's exception is raised before the callback's first line. A tracer raises there."""
        bench, hook = Bench(make_head()), sys.unraisablehook

        def alarm(frame, event, arg):
            if frame.f_code.co_name == "ask":
                raise TimeoutError("alarm")

        tracer = sys.gettrace()
        sys.settrace(alarm)
        try:
            with pytest.raises(TimeoutError, match="alarm"):
                NativeSteps(bench.loaded, bench.head_cache, bench.forward).tree(bench.root, bench.state(), SIZE)
        finally:
            sys.settrace(tracer)
        assert sys.unraisablehook is hook
        assert not capsys.readouterr().err


def assert_same_bits(tree, expected) -> None:
    assert tree.host.parents == expected.host.parents
    assert torch.equal(tree.token_ids, expected.token_ids)
    assert torch.equal(tree.values, expected.values)
