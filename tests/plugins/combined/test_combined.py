"""Several drafters in one tree: what is known of each, how trees are merged, and when a part is left out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafter import DraftRequest, DraftState
from hf_speculate.errors import DrafterNotFoundError
from hf_speculate.testing import EmptyDrafter, RandomDrafter, check_lossless
from hf_speculate.tree import DraftTree
from hf_speculate_plugins.combined import CombinedDrafter, CombinedOptions
from hf_speculate_plugins.combined import drafter as combined
from hf_speculate_plugins.combined.history import Ledger, falling, merge_row
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions, SuffixIndex


VOCAB_SIZE = 96


class Graded:
    """A session that only has a grade."""

    def __init__(self, grade=0):
        self.fixed = grade

    def grade(self, row):
        return self.fixed


def tree(tokens, parents):
    return DraftTree.from_rows([(tokens, parents)])


def paths(row):
    """Token paths of all nodes, in order."""
    found = [()]
    for token, parent in zip(row.tokens[1:], row.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def test_equal_paths_become_one_node_and_parents_come_first():
    first = tree([5, 1, 2, 3], [-1, 0, 1, 0])  # 1, 1-2, 3
    second = tree([5, 1, 4, 9], [-1, 0, 1, 2])  # 1, 1-4, 1-4-9
    merged = merge_row(0, 5, Ledger(2), [(0, Graded(), first), (1, Graded(), second)], max_nodes=99)
    assert merged.tokens[0] == 5
    assert sorted(paths(merged)) == [(1,), (1, 2), (1, 4), (1, 4, 9), (3,)]
    assert all(parent < node for node, parent in enumerate(merged.parents))


def test_what_was_accepted_more_often_comes_first_and_is_kept():
    ledger, session = Ledger(2), Graded()
    good, bad = tree([5, 1, 2], [-1, 0, 1]), tree([5, 7, 8], [-1, 0, 1])
    for _ in range(20):
        assert ledger.record(0, 0, good, 0, [1, 2, 3]) == 2
        assert ledger.record(1, 0, bad, 0, [1, 2, 3]) == 0
    drafts = [(1, session, bad), (0, session, good)]
    assert paths(merge_row(0, 5, ledger, drafts, max_nodes=4))[:2] == [(1,), (1, 2)]
    assert paths(merge_row(0, 5, ledger, drafts, max_nodes=2)) == [(1,), (1, 2)]
    best = merge_row(0, 5, ledger, [(0, session, good)], max_nodes=9).expected_length
    worst = merge_row(0, 5, ledger, [(1, session, bad)], max_nodes=9).expected_length
    assert best > 1.7
    assert worst < 0.3


def test_grades_are_kept_apart():
    ledger, chain = Ledger(1), tree([5, 1], [-1, 0])
    for _ in range(20):
        ledger.record(0, 5, chain, 0, [1])
        ledger.record(0, 2, chain, 0, [4])
    assert ledger.values(0, 5, [-1, 0])[1] > 0.9
    assert ledger.values(0, 2, [-1, 0])[1] < 0.1


def test_a_new_text_unlearns_sooner_than_the_old_one_would():
    old, chain = Ledger(1), tree([5, 1], [-1, 0])
    for _ in range(60):
        old.record(0, 0, chain, 0, [1])
    new = old.carried()
    before = new.values(0, 0, [-1, 0])[1]
    assert before > 0.9
    for ledger in (old, new):
        for _ in range(10):
            ledger.record(0, 0, chain, 0, [4])
    assert new.values(0, 0, [-1, 0])[1] < old.values(0, 0, [-1, 0])[1] - 0.1


def test_values_never_rise_towards_the_leaves():
    ledger = Ledger(1)
    for _ in range(9):  # node 2 is a hit whenever it is known; its parent is seen to miss later
        ledger.record(0, 0, tree([5, 1, 2], [-1, 0, 1]), 0, [1, 2])
    for _ in range(9):
        ledger.record(0, 0, tree([5, 1], [-1, 0]), 0, [3])
    values = ledger.values(0, 0, [-1, 0, 1])
    assert values[0] >= values[1] >= values[2]


def test_nodes_below_the_last_known_token_say_nothing_yet():
    ledger, chain = Ledger(1), tree([5, 1, 2, 3], [-1, 0, 1, 2])
    before = ledger.values(0, 0, [-1, 0, 1, 2])
    assert ledger.record(0, 0, chain, 0, [1]) == 1
    after = ledger.values(0, 0, [-1, 0, 1, 2])
    assert after[1] > before[1]
    assert after[2:] == before[2:]


def test_padding_is_no_draft():
    ledger, padded = Ledger(1), DraftTree(torch.tensor([[5, 1, 0], [5, 2, 3]]), [[-1, 0, -2], [-1, 0, 1]])
    assert ledger.record(0, 0, padded, 0, [1, 0]) == 1
    merged = merge_row(0, 5, ledger, [(0, Graded(), padded)], max_nodes=9)
    assert paths(merged) == [(1,)]


def test_a_longer_match_is_of_a_higher_grade():
    index = SuffixIndex(2, 4)
    index.extend([1, 2, 3, 4, 9, 1, 2, 3, 4])
    assert index.continuations(2)
    assert index.match_size == 4
    index.extend([7, 8])
    assert not index.continuations(2)
    assert index.match_size == 0


def state(root, active=(True,)):
    return DraftState(root_ids=torch.tensor(root), active=active, max_depth=6, chains_only=False, num_emitted=(1,))


class Clock:
    """A clock that parts move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(combined.time, "perf_counter", lambda: self.now)


class Slow(RandomDrafter):
    """Random drafts that take a second; counts them."""

    def __init__(self, clock, **options):
        super().__init__(**options)
        self.clock, self.count = clock, 0

    def start(self, request):
        session = super().start(request)

        def draft(state, inner=session.draft):
            self.clock.now += 1.0
            self.count += 1
            return inner(state)

        session.draft = draft
        return session


def test_a_part_that_does_not_pay_is_left_out_and_tried_again(monkeypatch, tiny_model, prompt):
    """A draft that costs as much as ten rounds and is never right, beside a lookup that always is."""
    clock = Clock(monkeypatch)
    slow = Slow(clock, vocab_size=VOCAB_SIZE)
    drafter = CombinedDrafter([PromptLookupDrafter(PromptLookupOptions(depth=4)), slow])
    session = drafter.start(request_of(tiny_model(), torch.tensor([[1, 2, 3, 4] * 4])))
    session.observe(torch.tensor([[2, 3, 4, 1] * 4]), {}, torch.tensor([16]))
    text = [1, 2, 3, 4]
    for _ in range(64):
        drafted = session.draft(state([text[0]]))
        assert drafted.num_nodes > 1
        clock.now += 0.1
        emitted = [text[(i + 1) % 4] for i in range(4)]
        session.observe(torch.tensor([emitted]), {}, torch.tensor([4]))
    session.close()
    assert 64 / 16 <= slow.count < 40, slow.count


class Layered(RandomDrafter):
    """Right to depth 2, wrong below; every level takes some time."""

    def __init__(self, clock, seconds, **options):
        super().__init__(**options)
        self.clock, self.seconds, self.depths = clock, seconds, []

    def start(self, request):
        session = super().start(request)

        def draft(state):
            self.clock.now += self.seconds * state.max_depth
            self.depths.append(state.max_depth)
            tokens = [int(state.root_ids[0]), 11, 12, *[90] * 6][: state.max_depth + 1]
            return tree(tokens, list(range(-1, len(tokens) - 1)))

        session.draft = draft
        return session


@pytest.mark.parametrize("is_paid", [True, False])
def test_a_part_drafts_as_deep_as_pays(monkeypatch, tiny_model, is_paid):
    """Levels that are never accepted are left out; without adapting, and on a try now and then, all of them come."""
    clock = Clock(monkeypatch)
    layered = Layered(clock, 0.02 if is_paid else 3.0, vocab_size=VOCAB_SIZE)
    session = CombinedDrafter([EmptyDrafter(), layered]).start(request_of(tiny_model(), torch.tensor([[1]])))
    session.observe(torch.tensor([[2]]), {}, torch.tensor([1]))
    for _ in range(64):
        session.draft(state([1]))
        clock.now += 0.1
        session.observe(torch.tensor([[11, 12, 13]]), {}, torch.tensor([3]))
    session.close()
    later = layered.depths[-3:]
    if is_paid:
        assert sorted(later)[1] == 2, layered.depths
        assert max(layered.depths) > 2
    else:
        assert len(layered.depths) < 12, layered.depths


def test_gains_count_what_cheaper_drafts_did_not_have():
    ledger = Ledger(2)
    before = ledger.expected_gains(1, (), 4)
    assert before[0] > 0.5  # untried parts get a try
    assert before == sorted(before)
    for _ in range(60):
        ledger.record_gain(1, (), reached=3, drafted=4, before=2)
    gains = ledger.expected_gains(1, (), 4)
    assert gains == pytest.approx([0, 0, 1, 1], abs=0.2)
    assert ledger.expected_gains(1, ((0, 2),), 4) == before


def test_a_draft_that_was_too_short_says_nothing_of_deeper_levels():
    ledger = Ledger(1)
    for _ in range(20):
        ledger.record_gain(0, (), reached=2, drafted=2, before=0)
    first, second, third = ledger.expected_gains(0, (), 3)
    assert third - second > 0.5 * first


def test_falling_pools_what_rises():
    assert falling([0.9, 0.2, 0.4, 0.3, 0.1], [1, 1, 1, 2, 1]) == pytest.approx([0.9, 0.3, 0.3, 0.3, 0.1])
    assert falling([0.1, 0.2, 0.6], [1, 1, 1]) == pytest.approx([0.3] * 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        values = torch.rand(9, generator=generator).tolist()
        weights = (torch.rand(9, generator=generator) + 0.1).tolist()
        found = falling(values, weights)
        assert all(after <= before for before, after in pairwise(found))
        # Least squares over sequences that fall: no better one has the mean of any other split (min-max formula).
        for i in range(9):
            tails = [min(weighted(values, weights, low, high) for low in range(i + 1)) for high in range(i + 1, 10)]
            assert found[i] == pytest.approx(max(tails))


def weighted(values, weights, low, high):
    return sum(v * w for v, w in zip(values[low:high], weights[low:high], strict=True)) / sum(weights[low:high])


def test_without_adapting_every_part_drafts_every_round(monkeypatch, tiny_model):
    clock = Clock(monkeypatch)
    slow = Slow(clock, vocab_size=VOCAB_SIZE)
    drafter = CombinedDrafter([PromptLookupDrafter(), slow])
    session = drafter.start(request_of(tiny_model(), torch.tensor([[1, 2, 3, 4] * 4]), adaptive=False))
    session.observe(torch.tensor([[2, 3, 4, 1] * 4]), {}, torch.tensor([16]))
    for _ in range(40):
        session.draft(state([1]))
        session.observe(torch.tensor([[2, 3, 4, 1]]), {}, torch.tensor([4]))
    session.close()
    assert slow.count == 40


def request_of(model, ids, **options):
    return DraftRequest(target=model, input_ids=ids, **options)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"])
def test_text_does_not_depend_on_it(tiny_model, prompt, sampling):
    lookup = PromptLookupDrafter(PromptLookupOptions(min_ngram=1))
    speculator = Speculator(CombinedDrafter([EmptyDrafter(), RandomDrafter(vocab_size=VOCAB_SIZE), lookup]))
    seeds = (1, 2) if sampling else (None,)
    report = check_lossless(
        tiny_model(), speculator, [prompt(9), prompt(5, seed=3)], max_new_tokens=24, seeds=seeds, **sampling
    )
    assert report.num_identical == report.num_cases


def test_names_joined_with_plus_draft_together(tiny_model, prompt, tmp_path):
    model = tiny_model()
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "draft")
    inputs = {"input_ids": prompt(9), "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs)
    together = f"{tmp_path / 'draft'}+prompt_lookup"
    assert torch.equal(model.generate(**inputs, speculator=together), plain)
    drafter = AutoSpeculator.from_pretrained(together, target=model, max_nodes=7).drafter
    assert [part.name for part in drafter.parts] == ["draft_model", "prompt_lookup"]
    assert drafter.options == CombinedOptions(max_nodes=7)
    with pytest.raises(DrafterNotFoundError, match="prompt_lokup"):
        AutoSpeculator.from_pretrained(f"{tmp_path / 'draft'}+prompt_lokup", target=model)


@pytest.mark.parametrize(("options", "found"), [({"parts": ["prompt_lookup"]}, "at least two"), ({}, "got 0")])
def test_one_drafter_is_not_several(tiny_model, options, found):
    with pytest.raises(ValueError, match=found):
        AutoSpeculator.from_name("combined", target=tiny_model(), **options)


def test_a_part_that_cannot_start_leaves_none_open(tiny_model, prompt):
    closed = []

    class Failing(EmptyDrafter):
        def start(self, request):
            raise RuntimeError("no")

    class Closing(EmptyDrafter):
        def start(self, request):
            session = super().start(request)
            session.close = lambda: closed.append(True)
            return session

    drafter = CombinedDrafter([Closing(), Failing()])
    with pytest.raises(RuntimeError, match="no"):
        drafter.start(request_of(tiny_model(), prompt(4)))
    assert closed == [True]


def test_a_conversation_goes_on_in_every_part(tiny_model, prompt):
    """Second turn on the first one's cache: the same text as without a speculator."""
    model = tiny_model()
    draft = tiny_model("llama", seed=1)
    speculator = AutoSpeculator.from_name(
        "combined", target=model, parts=["prompt_lookup", ("draft_model", {"model": draft, "depth": 3})]
    )
    ids, caches = prompt(8), []
    for chosen in (None, speculator):
        first = model.generate(ids, max_new_tokens=9, do_sample=False, speculator=chosen, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, prompt(3, seed=5)], dim=1)
        second = model.generate(
            longer, max_new_tokens=9, do_sample=False, speculator=chosen, past_key_values=first.past_key_values
        )
        caches.append(second)
    assert torch.equal(*caches)
    assert math.isfinite(speculator.stats.drafter_seconds)
