"""Layers of EAGLE heads in one native call: states and entries of the modules, and modules where it is not its own."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.tree import TreePlan
from hf_speculate_gguf.native import binding as native
from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.eagle import EagleDrafter, EagleOptions, LoadedHead
from hf_speculate_plugins.eagle.native import NativeForward
from hf_speculate_plugins.eagle.steps import PlainSteps, read_prompt
from hf_speculate_plugins.heads import HeadCache

from ..support.heads import target
from ..support.native_heads import SPECS, make_head


pytestmark = pytest.mark.usefixtures("needs_kernel")


# A tree whose later nodes see earlier ones here and there.
PARENTS = [[-1, -1, 0, 1, 2, 2, 4, 3, 6, 6]]
LEVELS = (2, 4, 6, 8, 10)


def states_and_entries(head, forward, batch_size=1, padded=False):
    """Of a prompt, a round's entries and a tree, level by level."""
    loaded = LoadedHead(head, None, LoadReport("made here"))
    mask = None
    if padded:
        mask = torch.arange(9) >= torch.arange(batch_size)[:, None]
    positions = (torch.arange(9) if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)).expand(batch_size, -1)
    head_cache = HeadCache(head, mask, positions)
    steps = PlainSteps(loaded, head_cache, forward)
    generator = torch.Generator().manual_seed(1)

    def some(count):
        ids = torch.randint(0, 96, (batch_size, count), generator=generator)
        return ids, torch.randn(batch_size, count, 64, generator=generator).to(head.dtype)

    found = [read_prompt(head, head_cache, *some(9))]
    for _ in range(2):
        found.append(steps.entries(*some(4)))
        head_cache.keep([3] * batch_size if not padded else [3, 1, 4][:batch_size])
    found.append(steps.entries(*some(1)))
    head_cache.keep([1] * batch_size)
    for first, last in zip((0, *LEVELS), LEVELS, strict=False):
        parents = [row[:last] for row in PARENTS * batch_size]
        found += steps.level(*some(last - first), TreePlan.from_parents(parents))
    layers = head_cache.tree_cache.cache.layers
    found += [states for layer in layers for states in (layer.keys, layer.values)]
    return [states.clone() for states in found]


@pytest.fixture
def calls(monkeypatch):
    counts, library = [0], native.library()
    run = library.run_layers
    monkeypatch.setattr(library, "run_layers", lambda *a: counts.__setitem__(0, counts[0] + 1) or run(*a))
    return counts


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
def test_states_and_entries_are_those_of_the_modules(changes, calls):
    head = make_head(**changes)
    forward = NativeForward.of(head)
    assert forward is not None
    for batch_size, padded in ((1, False), (3, True)):
        found = states_and_entries(head, forward, batch_size, padded)
        assert calls == [3 + len(LEVELS)]
        calls[0] = 0
        for each, other in zip(found, states_and_entries(head, None, batch_size, padded), strict=True):
            torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)
        assert calls == [0]


@pytest.mark.parametrize("name", ["EAGLE-3", "EAGLE-1"])
def test_bfloat16_is_no_further_from_float32_than_the_modules_are(name):
    exact = states_and_entries(make_head(**SPECS[name]).to(torch.bfloat16).float(), None)
    head = make_head(torch.bfloat16, **SPECS[name])
    found, modules = states_and_entries(head, NativeForward.of(head)), states_and_entries(head, None)
    error, allowed = (
        sum((each.float() - other).norm() for each, other in zip(states, exact, strict=True))
        for states in (found, modules)
    )
    assert error <= 1.1 * allowed


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
def test_quantized_heads_are_near_the_modules(changes, calls):
    """Matrices in 8 bits, those that are too small for `quantize_for_drafting` too; written to, they are others."""
    head = make_head(**changes)
    exact = states_and_entries(head, None)
    head.quantize_for_drafting()
    forward = NativeForward.of(head)
    found = states_and_entries(head, forward)
    assert calls == [3 + len(LEVELS)]
    for each, other in zip(found, exact, strict=True):
        assert (each - other).norm() < 0.06 * other.norm()
    assert not torch.equal(found[1], exact[1])
    head.layers[0].mlp.down_proj.weight.mul_(-2)
    changed, exact = states_and_entries(head, forward), states_and_entries(make_exact(head), None)
    for each, other in zip(changed, exact, strict=True):
        assert (each - other).norm() < 0.06 * other.norm()


def make_exact(head):
    """The same weights, multiplied as they are."""
    twin = type(head)(head.spec).requires_grad_(False)
    twin.load_state_dict(head.state_dict())
    return twin


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 8},
        {"hidden_act": "gelu"},
        {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {"intermediate_size": 80},
    ],
    ids=str,
)
def test_native_forward_is_absent_for_unsupported_heads(changes):
    assert NativeForward.of(make_head(**changes)) is None


def test_native_forward_is_absent_in_float16_and_without_a_kernel(monkeypatch):
    assert NativeForward.of(make_head(torch.float16)) is None
    monkeypatch.setattr("hf_speculate_plugins.eagle.native.has_kernel", lambda: False)
    assert NativeForward.of(make_head()) is None


def test_weights_of_two_types_are_modules(calls):
    head = make_head()
    assert NativeForward.of(head) is not None
    head.layers[0].hidden_norm.bfloat16()
    assert NativeForward.of(head) is None


def test_nothing_is_compiled_for_a_head_that_is_only_read(tmp_path, monkeypatch):
    head = make_head()
    monkeypatch.setattr(NativeForward, "of", lambda head: pytest.fail("a kernel was asked for"))
    drafter = EagleDrafter(LoadedHead(head, None, LoadReport("made here")), target())
    drafter.save_pretrained(tmp_path / "saved")


def test_layers_that_see_different_entries_are_modules(calls):
    head = make_head(num_layers=2, windows=(None, 4))
    forward = NativeForward.of(head)
    found, expected = states_and_entries(head, forward), states_and_entries(head, None)
    assert all(map(torch.equal, found, expected))
    assert calls == [0]


def test_native_forward_of_a_copy_has_its_own_weights(calls):
    head = make_head()
    forward = NativeForward.of(head)
    before = states_and_entries(head, forward)
    twin, twin_forward = copy.deepcopy((head, forward))
    twin.layers[0].mlp.down_proj.weight.zero_()
    for each, other in zip(states_and_entries(head, forward), before, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)
    changed = states_and_entries(twin, twin_forward)
    for each, other in zip(changed, states_and_entries(twin, None), strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)
    assert not torch.equal(changed[1], before[1])
    head.layers[0].mlp.down_proj.weight = torch.nn.Parameter(twin.layers[0].mlp.down_proj.weight, requires_grad=False)
    for each, other in zip(states_and_entries(head, forward), changed, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4, msg="another tensor in the same place")


@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_of_one_level_after_a_prompt_shorter_than_its_width(tiny_model, prompt, do_sample):
    """No level is run then: only the root is ranked."""
    model, loaded = tiny_model(num_layers=7, hidden_size=64), LoadedHead(make_head(), None, LoadReport("made here"))
    speculator = Speculator(EagleDrafter(loaded, model, EagleOptions(depth=1, top_k=8)), adaptive=False)
    request = {"max_new_tokens": 8, "do_sample": do_sample, "pad_token_id": 0}
    torch.manual_seed(0)
    plain = model.generate(prompt(3), **request)
    torch.manual_seed(0)
    assert torch.equal(model.generate(prompt(3), **request, speculator=speculator), plain)
    assert set(speculator.stats.draft_runners) == {"native"}
    assert speculator.stats.drafted_tokens > 8


class TestRecords:
    """What statistics say about the runner of a draft."""

    @staticmethod
    def statistics_of(head, tiny_model, prompt):
        model = tiny_model(num_layers=7, hidden_size=64)
        loaded = LoadedHead(head, None, LoadReport("made here"))
        drafter = EagleDrafter(loaded, model, EagleOptions(depth=3, top_k=2))
        speculator = Speculator(drafter, adaptive=False)
        model.generate(prompt(9), max_new_tokens=8, do_sample=False, pad_token_id=0, speculator=speculator)
        return speculator.stats

    def test_draft_by_the_kernel_is_native(self, tiny_model, prompt):
        stats = self.statistics_of(make_head(), tiny_model, prompt)
        assert set(stats.draft_runners) == {"native"}
        assert not stats.fallbacks

    def test_draft_under_autocast_names_it(self, tiny_model, prompt):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stats = self.statistics_of(make_head(), tiny_model, prompt)
        assert set(stats.draft_runners) == {"eager"}
        assert dict(stats.fallbacks) == {"draft not native: autocast": 1}
        assert stats.dearest_fallback.endswith("forwards of the draft were eager, not native: autocast.")

    def test_head_that_cannot_be_ranked_natively_names_it(self, tiny_model, prompt):
        head = make_head()
        head.norm.double()
        stats = self.statistics_of(head, tiny_model, prompt)
        (reason,) = stats.fallbacks
        assert reason.startswith("draft not native: weights that were moved")

    def test_missing_kernel_is_named(self, tiny_model, prompt, monkeypatch):
        monkeypatch.setattr("hf_speculate_plugins.eagle.native.has_kernel", lambda: False)
        stats = self.statistics_of(make_head(), tiny_model, prompt)
        assert set(stats.draft_runners) == {"eager"}
        (reason,) = stats.fallbacks
        assert reason.startswith("draft not native: no kernel on this machine")
