"""Several drafters in one tree: the text does not depend on it, and parts that do not pay are left out."""

from __future__ import annotations

import math

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.errors import DrafterNotFoundError
from hf_speculate.testing import EmptyDrafter, RandomDrafter, check_lossless
from hf_speculate.tree import DraftTree
from hf_speculate_plugins.combined import CombinedDrafter, CombinedOptions, parts, session
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions


VOCAB_SIZE = 96


def tree(tokens, parents):
    return DraftTree.from_rows([(tokens, parents)])


def state(root, active=(True,)):
    return DraftState(root_ids=torch.tensor(root), active=active, max_depth=6, chains_only=False, num_emitted=(1,))


class Clock:
    """A clock that parts move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (parts, session):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


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
