"""A drafter can only cost time: whatever it returns, text and cache are plain's or the error names it."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate import DraftTree, Speculator
from hf_speculate.cache import as_cache
from hf_speculate.drafting import checks as draft_checks
from hf_speculate.drafting.checks import MAX_NODES
from hf_speculate.errors import DrafterError
from hf_speculate.testing import EmptyDrafter
from hf_speculate.tree import TreePlan

from ..support.models import VOCAB_SIZE


NEW_TOKENS = 24
CHAIN = (-1, 0, 1, 2)


class Drafts(EmptyDrafter):
    """What `make(roots, right)` returns; `right` are the three tokens that plain `generate` writes next."""

    name = "sloppy"

    def __init__(self, script, make):
        self.script, self.make = script, make

    def start(self, request):
        session = super().start(request)
        session.draft = self._draft
        return session

    def _draft(self, state):
        rows = [[*row[n : n + 3].tolist(), 7, 8, 9][:3] for row, n in zip(self.script, state.num_emitted, strict=True)]
        return self.make(state.root_ids, torch.tensor(rows))


def tree(tokens, parents, **options):
    return DraftTree(torch.as_tensor(tokens), parents, **options)


def with_root(roots, right):
    return torch.cat([roots[:, None], right], dim=1)


def on_device(parents):
    """Parents as a tensor, for every row."""
    return torch.tensor([parents])


BREACHES = {
    "nothing": lambda roots, right: None,
    "a list": lambda roots, right: [1, 2],
    "token beyond the vocabulary": lambda r, t: tree(with_root(r, t.fill_(VOCAB_SIZE)), CHAIN),
    "negative token": lambda r, t: tree(with_root(r, -t - 1), CHAIN),
    "floats": lambda r, t: tree(with_root(r, t).float(), CHAIN),
    "int32": lambda r, t: tree(with_root(r, t).int(), CHAIN),
    "no data": lambda r, t: tree(torch.empty(len(r), 4, dtype=torch.long, device="meta"), CHAIN),
    "no nodes": lambda r, t: tree(torch.empty(len(r), 0, dtype=torch.long), ()),
    "a row too many": lambda r, t: tree(with_root(r, t).repeat(2, 1), CHAIN),
    "too few parents": lambda r, t: tree(with_root(r, t), (-1, 0)),
    "too many parents": lambda r, t: tree(with_root(r, t), (*CHAIN, 3)),
    "no root": lambda r, t: tree(with_root(r, t), (-2, 0, 1, 2)),
    "two roots": lambda r, t: tree(with_root(r, t), (-1, -1, 1, 2)),
    "a cycle": lambda r, t: tree(with_root(r, t), (-1, 3, 1, 2)),
    "its own parent": lambda r, t: tree(with_root(r, t), (-1, 0, 2, 2)),
    "a parent that is padding": lambda r, t: tree(with_root(r, t), (-1, -2, 1, 2)),
    "a parent out of range": lambda r, t: tree(with_root(r, t), (-1, 99, 1, 2)),
    "fractions of parents": lambda r, t: tree(with_root(r, t), (-1.0, 0.0, 1.0, 2.0)),
    "a token twice": lambda r, t: tree(with_root(r, t[:, :1].expand(-1, 3)), (-1, 0, 0, 0)),
    "a cycle in a tensor": lambda r, t: tree(with_root(r, t), on_device([-1, 3, 1, 2]), max_depth=3),
    "a tensor out of range": lambda r, t: tree(with_root(r, t), on_device([-1, 9, 1, 2]), max_depth=3),
    "a tensor of floats": lambda r, t: tree(with_root(r, t), on_device(CHAIN).float(), max_depth=3),
    "a tensor of another width": lambda r, t: tree(with_root(r, t), on_device([-1, 0]), max_depth=3),
    "values of another width": lambda r, t: tree(with_root(r, t), CHAIN, values=torch.zeros(len(r), 2)),
    "values that are integers": lambda r, t: tree(with_root(r, t), CHAIN, values=torch.zeros(len(r), 4).long()),
    "values in a list": lambda r, t: tree(with_root(r, t), CHAIN, values=[[0.0] * 4] * len(r)),
    "values without data": lambda r, t: tree(with_root(r, t), CHAIN, values=torch.zeros(len(r), 4, device="meta")),
}
HARMLESS = {
    "right": lambda r, t: tree(with_root(r, t), CHAIN),
    "another root": lambda r, t: tree(with_root((r + 1) % VOCAB_SIZE, t), CHAIN),
    "roots changed in place": lambda r, t: tree(with_root(r.zero_(), t), CHAIN),
    "a plan that is not the parents'": lambda r, t: tree(
        with_root(r, t), CHAIN, plan=TreePlan.from_parents([[-1, 0, 0, 0]])
    ),
    "a depth that is too small": lambda r, t: tree(with_root(r, t), on_device(CHAIN), max_depth=1),
    "a depth that is negative": lambda r, t: tree(with_root(r, t), on_device(CHAIN), max_depth=-5),
    "a depth that is huge": lambda r, t: tree(with_root(r, t), on_device(CHAIN), max_depth=10**9),
    "values that mean nothing": lambda r, t: tree(with_root(r, t), CHAIN, values=torch.full((len(r), 4), torch.nan)),
    "values above those of parents": lambda r, t: tree(
        with_root(r, t), CHAIN, values=torch.arange(4.0).repeat(len(r), 1)
    ),
    "values with gradients": lambda r, t: tree(
        with_root(r, t), CHAIN, values=torch.zeros(len(r), 4, requires_grad=True)
    ),
    "values in 64 bit": lambda r, t: tree(with_root(r, t), CHAIN, values=-torch.arange(4.0).double().repeat(len(r), 1)),
    "gradients left on": lambda r, t: (torch.set_grad_enabled(True), tree(with_root(r, t), CHAIN))[1],
    "the random numbers of everybody": lambda r, t: (torch.rand(5), tree(with_root(r, t), CHAIN))[1],
}


@pytest.fixture(params=[False, True], ids=["greedy", "sampling"])
def setting(request, tiny_model, prompt):
    model, ids = tiny_model(), torch.cat([prompt(9), prompt(9, seed=1)])
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": request.param}
    torch.manual_seed(3)
    return model, ids, asked, model.generate(ids, **asked), torch.get_rng_state()


def generate(setting, make, **more):
    model, ids, asked, text, _ = setting
    torch.manual_seed(3)
    return model.generate(ids, **asked, **more, speculator=Speculator(Drafts(text[:, 9:], make)))


@pytest.mark.parametrize("setting", [False], ids=["greedy"], indirect=True)
@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_an_error_that_names_the_drafter_and_leaves_everything_usable(setting, name):
    model, _, _, text, _ = setting
    cache = DynamicCache(config=model.config)
    with pytest.raises(DrafterError, match="drafter 'sloppy'"):
        generate(setting, BREACHES[name], **as_cache(cache))
    going_on = text[:, : cache.get_seq_length() + 1]
    assert going_on.shape[1] == 10, "the token of the prompt was emitted"
    greedy = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(going_on, **as_cache(cache), **greedy), model.generate(going_on, **greedy))


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_breaches_do_not_change_the_text(setting, name):
    *_, text, rng = setting
    ours = generate(setting, HARMLESS[name])
    assert torch.equal(ours, text)
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()


class TestTreesOnADevice:
    """They are read after they were scored: what the target sees of them is clamped."""

    @pytest.fixture(autouse=True)
    def _on_a_device(self, monkeypatch):
        monkeypatch.setattr(draft_checks, "_is_on_host", lambda tree: False)

    @pytest.mark.parametrize("setting", [False], ids=["greedy"], indirect=True)
    @pytest.mark.parametrize("name", [name for name in BREACHES if "nothing" not in name and "list" not in name])
    def test_a_breach_is_an_error(self, setting, name):
        test_a_breach_is_an_error_that_names_the_drafter_and_leaves_everything_usable(setting, name)

    @pytest.mark.parametrize("name", [name for name in HARMLESS if "too small" not in name and "negative" not in name])
    def test_harmless_breaches_do_not_change_the_text(self, setting, name):
        test_harmless_breaches_do_not_change_the_text(setting, name)

    @pytest.mark.parametrize("name", ["a depth that is too small", "a depth that is negative"])
    def test_a_wrong_depth_is_an_error(self, setting, name):
        """The plan of such a tree, and with it the positions, has been made from it."""
        with pytest.raises(DrafterError, match=r"of depth 3 with max_depth=(1|-5)"):
            generate(setting, HARMLESS[name])


@pytest.mark.parametrize("shape", ["wide", "deep"])
def test_there_is_a_cap_on_nodes_without_the_adaptive_policy_too(tiny_model, prompt, shape):
    model, ids = tiny_model(vocab_size=3000, max_positions=4000), prompt(9)
    nodes = torch.arange(2000)
    parents = [-1, *([0] * 2000 if shape == "wide" else range(2000))]
    make = lambda roots, right: tree(torch.cat([roots[:, None], nodes[None]], dim=1), parents)  # noqa: E731
    text = model.generate(ids, max_new_tokens=4)[:, 9:]
    speculator = Speculator(Drafts(text, make), adaptive=False)
    rounds = list(hf_speculate.rounds(model, input_ids=ids, max_new_tokens=4, speculator=speculator))
    assert [token for round in rounds for token in round.tokens[0]] == text[0].tolist()
    widest = max(round.tree.num_nodes for round in rounds)
    assert widest == (MAX_NODES if shape == "wide" else 3), "what is too deep to be emitted is cut as always"
