"""Every installed drafter keeps the contract, and the suite that says so notices drafters that do not."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate import AutoSpeculator, Drafter, DraftSession, DraftTree, installed_drafters
from hf_speculate.errors import DrafterError, SpeculateError
from hf_speculate.testing import EmptyDrafter, RandomDrafter, check_drafter, check_lossless

from ..support.inputs import character_tokenizer
from ..support.models import VOCAB_SIZE
from ..support.tiers import quick


# Options of `AutoSpeculator.from_name`; a draft model is given by its architecture.
VARIANTS = [
    ("prompt_lookup", {}),
    ("prompt_lookup", {"min_ngram": 1, "depth": 3}),
    ("grammar", {}),
    ("suffix", {"store": True}),
    ("draft_model", {"model": "llama"}),
    ("draft_model", {"model": "qwen2", "top_k": 3, "depth": 3}),
    ("combined", {"parts": [("prompt_lookup", {"min_ngram": 1}), ("draft_model", {"model": "llama"})]}),
]
# Drafters that need trained heads: their own tests run `check_drafter` on heads made for the purpose.
TESTED_WITH_THEIR_HEADS = {"block", "eagle", "medusa", "mtp"}


def with_models(options, tiny_model):
    """A copy of the options with models in the place of their architectures."""
    options = dict(options)
    if "model" in options:
        options["model"] = tiny_model(options["model"], seed=1)
    if "parts" in options:
        options["parts"] = [(name, with_models(part, tiny_model)) for name, part in options["parts"]]
    return options


def test_no_installed_drafter_is_forgotten():
    unknown = set(installed_drafters()) - dict(VARIANTS).keys() - TESTED_WITH_THEIR_HEADS
    assert not unknown, f"add {sorted(unknown)} to VARIANTS, so that the conformance suite runs for them"


@pytest.mark.parametrize("architecture", quick(["llama", "qwen2"]))
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_installed_drafters_keep_the_contract(tiny_model, prompt, architecture, name, options):
    target = tiny_model(architecture)
    drafter = AutoSpeculator.from_name(name, target=target, **with_models(options, tiny_model)).drafter
    check_drafter(drafter, target, [prompt(10)[0], prompt(4, seed=1)[0]], max_new_tokens=6)


@pytest.mark.parametrize("drafter", [EmptyDrafter(), RandomDrafter(vocab_size=VOCAB_SIZE)], ids=["empty", "random"])
def test_scripted_drafters_keep_the_contract(tiny_model, prompt, drafter):
    check_drafter(drafter, tiny_model(), [prompt(10)[0], prompt(4, seed=1)[0]], max_new_tokens=6)


class Broken(Drafter):
    """Drafts two siblings below the root, one of them with a child, after `spoil` has had its way with each row."""

    name = "broken"

    def __init__(self, spoil=None, *, observe=None, close=None, shared=False, num_rows=None):
        self.spoil = spoil or (lambda root, state, tokens, parents: (tokens, parents))
        self.on_observe = observe or (lambda: None)
        self.on_close = close or (lambda: None)
        self.num_rows = num_rows
        self.session = Session(self) if shared else None

    @classmethod
    def for_target(cls, target, **options):
        raise NotImplementedError

    def start(self, request):
        return self.session or Session(self)


class Session(DraftSession):
    def __init__(self, drafter):
        self.drafter = drafter
        self.is_closed = False

    def draft(self, state):
        if self.is_closed:
            raise RuntimeError("this session was closed")
        rows = []
        for root in state.root_ids.tolist()[: self.drafter.num_rows]:
            tokens, parents = [root, 5, 6, 7], [-1, 0, 0, 1]
            keep = {0: 1, 1: 3}.get(state.max_depth, 4)
            rows.append(self.drafter.spoil(root, state, tokens[:keep], parents[:keep]))
        width = max(len(tokens) for tokens, _ in rows)
        padded = [(t + t[:1] * (width - len(t)), p + [-2] * (width - len(p))) for t, p in rows]
        # Trees on the device: the host form would refuse some of these at once.
        return DraftTree(torch.tensor([t for t, _ in padded]), torch.tensor([p for _, p in padded]), max_depth=width)

    def observe(self, tokens, features, lengths):
        self.drafter.on_observe()

    def close(self):
        self.is_closed = True
        self.drafter.on_close()


class DraftsChoices(Broken):
    """Drafts only after a round whose most probable tokens it got."""

    def start(self, request):
        session = Session(self)
        session.num_choices = 2
        session.observe_choices = lambda choices: self.seen.append(choices.token_ids.shape[-1])
        return session

    def __init__(self):
        super().__init__(lambda root, state, tokens, parents: (tokens, parents) if self.seen else ([root], [-1]))
        self.seen = []


def fail():
    raise RuntimeError("on purpose")


class LooksAhead(Broken):
    """Keeps a word of every look ahead, and drafts it."""

    drafts_ahead = True

    def start(self, request):
        return _LooksAhead(self)


class _LooksAhead(Session):
    num_looks = 0

    def ahead(self, state, path):
        self.num_looks += 1
        return super().draft(state)

    def draft(self, state):
        tree = super().draft(state)
        if self.num_looks and tree.num_nodes > 1:
            tree.token_ids[:, 1] = 8
        return tree


BROKEN = {
    "a look ahead leaves something": (LooksAhead(), "drafting ahead changed the session"),
    "another root": (Broken(lambda root, s, t, p: ([(root + 1) % VOCAB_SIZE, *t[1:]], p)), "the root is"),
    "too deep": (Broken(lambda root, s, t, p: ([root, 5, 6, 7, 8], [-1, 0, 1, 2, 3])), "deep, the budget is"),
    "siblings alike": (Broken(lambda root, s, t, p: ([*t, 5], [*p, 0])), "drafted token 5 twice below node 0"),
    "beyond the vocabulary": (Broken(lambda root, s, t, p: ([*t[:-1], VOCAB_SIZE], p)), "the target has 0 to"),
    "negative token": (Broken(lambda root, s, t, p: ([*t[:-1], -1], p)), "drafted token -1"),
    "child before parent": (Broken(lambda root, s, t, p: ([root, 5, 6], [-1, 2, 0])), "parents come first"),
    "no root": (Broken(lambda root, s, t, p: (t, [0, *p[1:]])), "it is the root"),
    "a row missing": (Broken(num_rows=1), "drafted 1 rows for 2"),
    "observe raises": (Broken(observe=fail), "raised RuntimeError: on purpose"),
    "sessions share their state": (Broken(shared=True), "this session was closed"),
}


class TestTheSuiteItself:
    def run(self, tiny_model, prompt, drafter):
        check_drafter(drafter, tiny_model(), [prompt(6)[0], prompt(3, seed=1)[0]], max_new_tokens=6)

    def test_check_drafter_passes_the_unbroken_drafter(self, tiny_model, prompt):
        self.run(tiny_model, prompt, Broken())

    def test_check_drafter_passes_the_targets_choices_on(self, tiny_model, prompt):
        report = check_drafter(DraftsChoices(), tiny_model(), [prompt(6)[0], prompt(3, seed=1)[0]], max_new_tokens=6)
        assert report.num_drafts > 0

    @pytest.mark.parametrize("name", BROKEN)
    def test_check_drafter_fails_for_broken_drafters(self, tiny_model, prompt, name):
        drafter, message = BROKEN[name]
        with pytest.raises(DrafterError, match=message):
            self.run(tiny_model, prompt, drafter)

    def test_check_drafter_fails_for_a_session_that_cannot_be_closed(self, tiny_model, prompt):
        with pytest.raises((SpeculateError, RuntimeError), match="on purpose"):
            self.run(tiny_model, prompt, Broken(close=fail))

    def test_check_drafter_fails_for_a_drafter_that_breaks_on_ragged_ends(self, tiny_model, prompt):
        def spoil(root, state, tokens, parents):
            if not all(state.active):
                fail()
            return tokens, parents

        with pytest.raises(DrafterError, match="on purpose"):
            self.run(tiny_model, prompt, Broken(spoil))

    def test_check_drafter_fails_for_a_drafter_that_writes_to_the_target(self, prompt, tiny_model):
        target = copy.deepcopy(tiny_model())

        def sabotage():
            target.lm_head.weight.data.neg_()

        with pytest.raises(SpeculateError):
            check_drafter(Broken(observe=sabotage), target, [prompt(6)[0], prompt(3)[0]], max_new_tokens=6)


TEXTS = ["abcabcabc", "def f(x):"]


@pytest.fixture
def tokenizer():
    return character_tokenizer(pad_token="<pad>", bos_token="<s>")


@pytest.fixture
def target(tiny_model, tokenizer):
    return tiny_model(vocab_size=len(tokenizer))


def test_check_lossless_takes_texts_and_token_ids(target, tokenizer):
    speculator = AutoSpeculator.from_name("prompt_lookup", target=target, min_ngram=1)
    report = check_lossless(target, speculator, TEXTS, tokenizer=tokenizer, max_new_tokens=8)
    ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    assert check_lossless(target, speculator, ids, max_new_tokens=8) == report
    assert report.num_cases == 2


def test_check_drafter_takes_a_speculator(target, tokenizer):
    speculator = AutoSpeculator.from_name("prompt_lookup", target=target, min_ngram=1)
    check_drafter(speculator, target, TEXTS, max_new_tokens=8, tokenizer=tokenizer)


def test_a_drafter_that_never_drafts_is_warned_of(target, monkeypatch):
    warned = []
    monkeypatch.setattr("hf_speculate.testing.conformance.logger.warning", warned.append)
    report = check_drafter(EmptyDrafter(), target, [torch.tensor([3, 4, 5]), torch.tensor([6, 7])], max_new_tokens=8)
    assert (report.num_drafts, report.tokens_per_round) == (0, None)
    assert report.num_asked > 0
    assert "made none. Does it find its place in the text?" in warned[0]


def test_checks_refuse_arguments_that_they_cannot_use(target, tokenizer):
    speculator = AutoSpeculator.from_name("prompt_lookup", target=target)
    with pytest.raises(TypeError, match="no tokenizer was given"):
        check_lossless(target, speculator, TEXTS)
    with pytest.raises(TypeError, match="prompts must be a list of texts or token ids, got one str"):
        check_lossless(target, speculator, TEXTS[0], tokenizer=tokenizer)
    with pytest.raises(TypeError, match=r"takes a Speculator, got EmptyDrafter: Speculator\(drafter\)"):
        check_lossless(target, EmptyDrafter(), TEXTS, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="takes a Drafter or a Speculator, got str"):
        check_drafter("prompt_lookup", target, TEXTS, tokenizer=tokenizer)
