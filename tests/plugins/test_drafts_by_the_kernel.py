"""Captured drafts whose attention is the kernel for trees, interpreted on a CPU: those of the plain path."""

from __future__ import annotations

import copy

import pytest

from hf_speculate.attention import grouped as attention
from hf_speculate.attention import tree_kernel
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.draft_model.session import DraftModelSession
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.eagle.drafter import EagleSession
from hf_speculate_plugins.heads import captured
from hf_speculate_plugins.heads import head as heads_head
from hf_speculate_plugins.mtp import MtpDrafter

from ..support.captured_drafts import assert_alike, assert_same_nodes, drafts_of
from ..support.heads import PLAIN, SHAPES, target, write_head
from ..support.inputs import padded_batch
from ..support.mtp import load_target, write_target
from ..support.replays import stand_in
from ..support.tiers import quick


pytestmark = [
    pytest.mark.usefixtures("unchecked_shapes"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.fixture
def replays(monkeypatch, interpreted):
    """CudaGraphs on the CPU. The kernel is interpreted, so it computes in float32 and splits nothing."""
    monkeypatch.setattr(tree_kernel, "_LEAST_KEYS", 4096)
    monkeypatch.setattr(EagleDrafter, "_native", None)
    return stand_in(monkeypatch)


@pytest.fixture
def calls(monkeypatch):
    """(queries, nodes seen after the text) of every call of the kernel by a head."""
    found = []

    def counted(queries, keys, values, place, original=heads_head.tree_attention):
        found.append((queries.shape[2], place.ancestors.shape[2]))
        return original(queries, keys, values, place)

    monkeypatch.setattr(heads_head, "tree_attention", counted)
    return found


@pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)]), ids=["1 row", "3 rows left padded"])
@pytest.mark.parametrize("layout", quick(["safeailab", "eagle1"], "safeailab"))
def test_eagle_drafts_by_the_tree_kernel_are_plain(replays, calls, monkeypatch, prompt, tmp_path, layout, lengths):
    monkeypatch.setattr(captured, "kernel_fits", lambda *_: True)

    def run(compile):
        model = copy.deepcopy(target())
        drafter = EagleDrafter.from_folder(write_head(tmp_path, layout), model, **SHAPES["dynamic"])
        return drafts_of(EagleSession, model, drafter, padded_batch(prompt, lengths), request, compile)

    request = {**PLAIN, "max_new_tokens": 6, "do_sample": False}
    expected = run(False)
    assert not calls
    found = run(None)
    assert found.text == expected.text
    assert_same_nodes(found.rounds, expected.rounds, tolerance=1e-3)
    assert any(count < seen for count, seen in calls), "a level sees earlier ones"
    assert "eagle_draft" in replays.names


@pytest.mark.parametrize("family", quick(["glm4_moe", "deepseek_v3"]))
def test_mtp_drafts_by_the_tree_kernel_are_plain(replays, calls, monkeypatch, prompt, tmp_path, family):
    """Latent attention has keys and values of different sizes, which the kernel does not take."""
    monkeypatch.setattr(captured, "kernel_fits", lambda *_: True)
    folder = write_target(tmp_path / family, family)

    def run(compile):
        model = load_target(folder)
        drafter = MtpDrafter.for_target(model, **SHAPES["dynamic"])
        return drafts_of(EagleSession, model, drafter, padded_batch(prompt, (9, 4)), request, compile)

    request = {**PLAIN, "max_new_tokens": 5, "do_sample": False}
    expected, found = run(False), run(None)
    assert found.text == expected.text
    assert_same_nodes(found.rounds, expected.rounds, tolerance=1e-3)
    assert bool(calls) == (family != "deepseek_v3")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("lengths", "options"),
    [((9, 4, 13), {"depth": 2}), ((12,), {"depth": 2, "top_k": 3, "max_nodes": 6})],
    ids=["chains, 3 rows left padded", "trees, 1 row"],
)
def test_draft_model_drafts_by_the_tree_kernel_are_plain(replays, monkeypatch, prompt, options, lengths):
    monkeypatch.setattr(attention, "kernel_fits", lambda *_: True)

    def run(compile):
        drafter = DraftModelDrafter(copy.deepcopy(target()), DraftModelOptions(**options))
        batch = padded_batch(prompt, lengths)
        return drafts_of(DraftModelSession, copy.deepcopy(target()), drafter, batch, request, compile)

    request = {**PLAIN, "max_new_tokens": 10, "do_sample": False}
    assert_alike(run(None), run(False))
    assert "model_draft" in replays.names
