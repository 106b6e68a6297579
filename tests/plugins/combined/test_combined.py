"""Several drafters in one tree: the text does not depend on it, and parts that add nothing are left out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.errors import DrafterNotFoundError, OptionError
from hf_speculate.testing import EmptyDrafter, RandomDrafter, check_lossless
from hf_speculate.tree import DraftTree, TreeRow
from hf_speculate_plugins import combined, parts
from hf_speculate_plugins.combined import CombinedDrafter, CombinedOptions, expected_length, merge_row
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions


VOCAB_SIZE = 96


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """Drafts take no time, however busy the machine is: no free part rests."""
    monkeypatch.setattr(parts, "perf_counter", lambda: 0.0)


def tree(tokens, parents):
    return DraftTree.from_rows([(tokens, parents)])


def state(root, active=(True,)):
    return DraftState(root_ids=torch.tensor(root), active=active, max_depth=6, chains_only=False, num_emitted=(1,))


class Counted(RandomDrafter):
    """Drafts a chain, right to depth `right`; counts its drafts."""

    def __init__(self, right, is_free=False, **options):
        super().__init__(vocab_size=VOCAB_SIZE, **options)
        self.right, self.is_free, self.count = right, is_free, 0

    def start(self, request):
        session = super().start(request)

        def draft(state):
            self.count += 1
            root = int(state.root_ids[0])
            tokens = [root, *((root + d if d <= self.right else 90) % VOCAB_SIZE for d in range(1, 5))]
            return tree(tokens, list(range(-1, len(tokens) - 1)))

        session.draft = draft
        return session


def run_rounds(drafter, model, count, **options):
    """Every round emits the next four numbers after the root."""
    session = drafter.start(request_of(model, torch.tensor([[1, 2, 3]]), **options))
    session.observe(torch.tensor([[2, 3, 4]]), {}, torch.tensor([3]))
    for number in range(count):
        root = (4 + 4 * number) % 64
        yield session.draft(state([root]))
        session.observe(torch.tensor([[(root + d) % VOCAB_SIZE for d in range(1, 5)]]), {}, torch.tensor([4]))
    session.close()


def test_a_part_does_not_run_where_the_text_drafts_as_much(tiny_model):
    """A free drafter that is always right, beside one that is right to depth 2: after a few rounds, the free one's
    calibrated drafts are worth more."""
    free, paid = Counted(4, is_free=True), Counted(2)
    trees = list(run_rounds(CombinedDrafter([paid, free]), tiny_model(), 60))
    assert free.count == 60
    assert 1 <= paid.count < 30, paid.count
    assert trees[-1].num_nodes == 5


def test_a_part_runs_where_the_text_drafts_less(tiny_model):
    free, paid = Counted(1, is_free=True), Counted(4)
    trees = list(run_rounds(CombinedDrafter([paid, free]), tiny_model(), 60))
    assert paid.count == 60
    assert trees[-1].best(4).host.token_ids[0] == [48, 49, 50, 51, 52]  # what was right comes first


class Clock:
    """A clock that a drafter moves on."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(parts, "perf_counter", lambda: self.now)

    def slowed(self, drafter, seconds):
        """`drafter`, whose drafts take `seconds`."""
        start = drafter.start

        def started(request):
            session = start(request)
            draft = session.draft

            def slow(state):
                self.now += seconds
                return draft(state)

            session.draft = slow
            return session

        drafter.start = started
        return drafter


def union(clock, free, paid, seconds=0.5):
    """A free part whose drafts take `seconds`, and one whose drafts take 2 s."""
    return CombinedDrafter([clock.slowed(paid, 2.0), clock.slowed(free, seconds)])


def test_a_free_part_that_adds_nothing_rests_and_is_tried_again(tiny_model, monkeypatch):
    clock, free, paid = Clock(monkeypatch), Counted(1, is_free=True), Counted(4)
    list(run_rounds(union(clock, free, paid), tiny_model(), 88))
    assert paid.count == 88
    assert 8 + 72 // 8 <= free.count <= 20, free.count  # the first drafts, then every eighth round


@pytest.mark.parametrize(("seconds", "rests"), [(0.5, False), (3.0, True)])
def test_a_free_part_drafts_while_its_tokens_are_worth_its_time(tiny_model, monkeypatch, seconds, rests):
    """It is right one token further than the head, in a round of 4 tokens: worth a quarter of the round."""
    clock, free, paid = Clock(monkeypatch), Counted(3, is_free=True), Counted(2)
    drafter = union(clock, free, paid, seconds)
    monkeypatch.setattr(combined.CombinedSession, "_suffices", lambda *_: False)
    list(run_rounds(drafter, tiny_model(), 60))
    assert (free.count < 30) == rests, free.count


def test_a_free_part_that_replaces_the_head_saves_the_time_of_the_head(tiny_model, monkeypatch):
    """Both are right to depth 4. Where the free part drafts, the head does not."""
    clock, free, paid = Clock(monkeypatch), Counted(4, is_free=True), Counted(4)
    list(run_rounds(union(clock, free, paid), tiny_model(), 60))
    assert free.count > 45, free.count  # it rests a little before it is known to be as good
    assert paid.count < 30


def test_free_parts_alone_never_rest(tiny_model, monkeypatch):
    clock, first, second = Clock(monkeypatch), Counted(1, is_free=True), Counted(1, is_free=True)
    list(run_rounds(CombinedDrafter([clock.slowed(first, 1.0), clock.slowed(second, 1.0)]), tiny_model(), 60))
    assert (first.count, second.count) == (60, 60)


def test_requests_start_with_what_earlier_ones_learned(tiny_model):
    model, free, paid = tiny_model(), Counted(4, is_free=True), Counted(2)
    drafter = CombinedDrafter([paid, free])
    list(run_rounds(drafter, model, 60))
    paid.count = 0
    list(run_rounds(drafter, model, 10))
    assert paid.count == 0
    list(run_rounds(drafter, model, 10, do_sample=True))
    assert paid.count > 0  # nothing is known of sampled requests


def test_without_adapting_every_part_drafts_every_round(tiny_model):
    free, paid = Counted(4, is_free=True), Counted(2)
    list(run_rounds(CombinedDrafter([paid, free]), tiny_model(), 40, adaptive=False))
    assert paid.count == 40


class Asking(EmptyDrafter):
    """Asks whether two levels pay, with values that promise everything."""

    def __init__(self):
        self.answers = []

    def start(self, request):
        session = super().start(request)

        def draft(state):
            first = state.should_continue(torch.tensor([[-0.01, -4.0]]))
            second = state.should_continue(torch.tensor([[-0.02, -5.0]]), torch.tensor([[0, 1]]))
            self.answers.append((first, second))
            return tree([int(state.root_ids[0]), 90], [-1, 0])

        session.draft = draft
        return session


def test_a_part_is_asked_about_with_what_its_values_are_worth(tiny_model):
    """What the policy is asked with are calibrated path probabilities, not the drafter's own."""
    seen = []

    def early_stopping(values, previous=None):
        seen.append((values.exp(), previous))
        return True

    asking = Asking()
    session = CombinedDrafter([EmptyDrafter(), asking]).start(request_of(tiny_model(), torch.tensor([[1]])))
    session.observe(torch.tensor([[2]]), {}, torch.tensor([1]))
    for _ in range(30):
        session.draft(replace(state([5]), early_stopping=early_stopping))
        session.observe(torch.tensor([[11]]), {}, torch.tensor([1]))
    assert asking.answers[-1] == (True, True)
    (early, _), (early_next, previous) = seen[:2]
    assert early[0, 0] > 0.9  # before anything is known, a drafter is believed
    assert early_next[0, 0] == pytest.approx(float(early[0, 0]) * 0.99, abs=0.02)
    assert previous.tolist() == [[0, 1]]
    session.close()


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
    spaced = AutoSpeculator.from_pretrained(together.replace("+", " + "), target=model).drafter
    assert [part.name for part in spaced.parts] == ["draft_model", "prompt_lookup"]
    with pytest.raises(DrafterNotFoundError, match="prompt_lokup"):
        AutoSpeculator.from_pretrained(f"{tmp_path / 'draft'}+prompt_lokup", target=model)


def test_a_text_gives_options_to_its_parts_wherever_it_is_taken(tiny_model, prompt, tmp_path):
    model, folder = tiny_model(), tmp_path / "a+b"
    tiny_model(num_layers=1).save_pretrained(folder)
    for text in (f"draft_model:model={folder}+suffix", f"draft_model:model={folder},depth=3+suffix:max_nodes=7"):
        model.generate(prompt(9), max_new_tokens=4, speculator=text)
        found = [
            hf_speculate.speculators(model)[text],
            AutoSpeculator.from_name(text, target=model),
            AutoSpeculator.from_pretrained(text, target=model),
        ]
        (described,) = {repr(speculator) for speculator in found}
        assert [part.name for part in found[0].drafter.parts] == ["draft_model", "suffix"]
        assert f"depth={3 if 'depth' in text else 5}," in described
        assert found[0].drafter.options == CombinedOptions(**{"max_nodes": 7} if "nodes" in text else {})


def test_options_of_a_part_are_refused_for_the_whole_with_the_way_to_give_them(tiny_model, tmp_path):
    with pytest.raises(OptionError, match=r"unknown option 'model'.*'draft_model:model=PATH\+suffix'.*parts=\["):
        AutoSpeculator.from_name("draft_model+suffix", target=tiny_model(), model=tmp_path)
    with pytest.raises(OptionError) as caught:
        AutoSpeculator.from_name("suffix+prompt_lookup", target=tiny_model(), max_nodes="many")
    assert "parts=" not in str(caught.value)
    with pytest.raises(TypeError, match="draft_model:model=PATH"):
        AutoSpeculator.from_name("draft_model+suffix", target=tiny_model())


@pytest.mark.parametrize(("options", "found"), [({"parts": ["prompt_lookup"]}, "at least two"), ({}, "got 0")])
def test_combined_refuses_fewer_than_two_parts(tiny_model, options, found):
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
            longer, max_new_tokens=9, do_sample=False, speculator=chosen, **as_cache(cache_of(first))
        )
        caches.append(second)
    assert torch.equal(*caches)
    assert math.isfinite(speculator.stats.drafter_seconds)


def paths(row):
    """Token paths of all nodes, in order."""
    found = [()]
    for token, parent in zip(row.token_ids[1:], row.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


FIRST = TreeRow([5, 1, 2, 3], [-1, 0, 1, 0]), [1.0, 0.5, 0.4, 0.1]  # 1, 1-2, 3
SECOND = TreeRow([5, 1, 4, 9, 0], [-1, 0, 1, 2, -2]), [1.0, 0.6, 0.3, 0.2, 0.9]  # 1, 1-4, 1-4-9, padding


def test_equal_paths_become_one_node_and_the_most_probable_come_first():
    merged = merge_row(5, [FIRST, SECOND], max_nodes=99)
    assert paths(merged) == [(1,), (1, 2), (1, 4), (1, 4, 9), (3,)]
    assert [math.exp(value) for value in merged.values] == pytest.approx([1.0, 0.6, 0.4, 0.3, 0.2, 0.1])
    assert expected_length(merged) == pytest.approx(1.6)


def test_the_most_probable_nodes_are_kept_with_their_parents():
    assert paths(merge_row(5, [SECOND, FIRST], max_nodes=3)) == [(1,), (1, 2), (1, 4)]


def test_merge_row_keeps_the_parent_of_equally_probable_nodes():
    chain = TreeRow([5, 1, 2, 3], [-1, 0, 1, 2]), [1.0, 0.5, 0.5, 0.5]
    assert paths(merge_row(5, [chain], max_nodes=2)) == [(1,), (1, 2)]


def test_no_draft_is_a_root():
    assert merge_row(5, [], max_nodes=4) == TreeRow([5], [-1], [0.0])
