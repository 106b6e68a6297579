"""Float16 targets whose states are larger than float16 can add up: heads stay usable, and text is the target's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafting import DraftState
from hf_speculate.drafting.features import FeatureTaps, finite
from hf_speculate.testing import check_lossless
from hf_speculate_plugins.eagle import EagleSession
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads

from ..support.tiny_heads import write_eagle_head


VOCAB_SIZE = 96
START = 7  # the token whose states are huge, as those of the first token are in many models


@pytest.fixture
def target(tiny_model):
    """Norms take the size of a state away, so that the target itself has no trouble with 5e4."""
    model = copy.deepcopy(tiny_model(dtype=torch.float16))
    with torch.no_grad():
        row = torch.randn(32, generator=torch.Generator().manual_seed(3))
        model.model.embed_tokens.weight[START] = 5e4 * row / row.abs().max()
    return model


@pytest.fixture
def eagle(target, tmp_path):
    def load(model=target):
        folder = write_eagle_head(tmp_path / "head", 32, VOCAB_SIZE)
        speculator = AutoSpeculator.from_pretrained(folder, target=model, feature_layers=(0, 1, 2))
        drafter: Any = speculator.drafter
        drafter.head.fc.weight.mul_(20)
        return speculator

    return load


def started(prompt, seed=0):
    ids = prompt(9, seed=seed)
    ids[:, 0] = START
    return ids


def test_a_head_whose_projection_overflows_at_the_first_token_drafts_on(target, eagle, prompt, monkeypatch):
    """Without care its attention mixes that token into every later state, and no draft is ever more than noise."""
    seen, draft = [], EagleSession.draft
    monkeypatch.setattr(EagleSession, "draft", lambda self, state: seen.append(self) or draft(self, state))
    drafted = []
    score = DraftState.child_scores
    monkeypatch.setattr(
        DraftState, "child_scores", lambda self, logits, *rest: drafted.append(logits) or score(self, logits, *rest)
    )
    speculator = eagle()
    prompts = [started(prompt, seed) for seed in range(2)]
    with torch.no_grad():
        features = target(prompts[0], output_hidden_states=True).hidden_states
        joined = torch.cat([state[:, :1] for state in features[:3]], dim=-1)
        assert joined.isfinite().all()
        assert not speculator.drafter.head.fc(joined).isfinite().all()
    report = check_lossless(target, speculator, prompts, max_new_tokens=24)
    assert report.num_cases == 2
    assert seen
    assert drafted
    assert all(logits.isfinite().all() for logits in drafted)


def test_a_target_that_overflows_itself_is_as_broken_as_ever(target, eagle, prompt):
    """Infinite states make no logits: plain and speculative text say so alike, and nothing raises."""
    with torch.no_grad():
        target.model.embed_tokens.weight[START] = float("inf")
    medusa = Speculator(
        MedusaDrafter.for_target(target, heads=MedusaHeads(torch.randn(3, 1, 32, 32).half(), None, None))
    )
    ids = started(prompt)
    plain = target.generate(ids, max_new_tokens=12)
    for speculator in (eagle(target), medusa):
        assert torch.equal(target.generate(ids, max_new_tokens=12, speculator=speculator), plain)
        assert speculator.stats.rounds > 0


def test_taps_show_finite_states(target, prompt):
    with torch.no_grad():
        target.model.embed_tokens.weight[START, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
        taps = FeatureTaps(target, (0,))
        output = target(started(prompt), **taps.forward_kwargs)
    top = torch.finfo(torch.float16).max
    assert taps.last(output.hidden_states, 9)[0][0, 0, :4].tolist() == [top, -top, 0.0, 1.0]
    assert taps.at(output.hidden_states, [[0, 1]], [0])[0][0, 0, :4].tolist() == [top, -top, 0.0, 1.0]


def test_finite_changes_only_float16_without_gradients():
    states = torch.tensor([float("inf"), 1.0])
    assert finite(states) is states
    assert finite(states.bfloat16()).isinf().any()
    trained = states.half().requires_grad_(True)
    assert finite(trained) is trained
