"""Heads follow their target to another dtype or device, or say that they cannot, before the request starts."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.errors import TargetMismatchError
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.heads import placed_copy

from ..support.block_heads import random_block
from ..support.heads import MEDUSA_LAYOUTS, PLAIN, target, write_head, write_medusa_heads
from ..support.mtp import load_target, write_target
from ..support.pretended_device import PretendedDevice
from ..support.tiers import quick


pytestmark = pytest.mark.usefixtures("unchecked_shapes")

KINDS = ("mtp", "mtp rows", "eagle1", "safeailab", "speculators", "dspark", "reduced", "domino", "medusa1", "v2")
DTYPES = (torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function that writes the head of a kind, or for `mtp` the target with its draft layers; the folder."""

    @cache
    def write(kind):
        folder = tmp_path_factory.mktemp("head")
        if kind.startswith("mtp"):
            return str(write_target(folder, "qwen2"))
        return str(write_medusa_heads(folder, kind) if kind in MEDUSA_LAYOUTS else write_head(folder, kind))

    return write


@pytest.fixture
def made(folder_of):
    """Function that makes a target of its own for a kind of head, and one that makes its speculator."""

    def make(kind):
        if kind.startswith("mtp"):
            options = {"draft_vocab": 40} if kind == "mtp rows" else {}
            model = load_target(folder_of("mtp"))
            return model, lambda: AutoSpeculator.from_name("mtp", model, adaptive=False, **options)
        model = copy.deepcopy(target())
        if kind in ("dspark", "reduced", "domino"):
            return model, lambda: Speculator(random_block(kind, model), adaptive=False)
        return model, lambda: AutoSpeculator.from_pretrained(folder_of(kind), model, adaptive=False)

    return make


def counts(speculator):
    return speculator.stats.drafted_tokens, speculator.stats.accepted_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float64))
def test_a_head_follows_its_target_to_another_dtype_and_back(made, prompt, kind, dtype):
    model, speculator_of = made(kind)
    speculator, ids = speculator_of(), prompt(9)
    for now in (dtype, torch.float32):
        model.to(now)
        speculator.stats.reset()
        text = model.generate(ids, **PLAIN, speculator=speculator)
        new = speculator_of() if now is dtype else None  # weights of the head have lost digits on the way back
        if new is not None and kind not in ("dspark", "reduced", "domino"):
            assert torch.equal(text, model.generate(ids, **PLAIN, speculator=new))
            assert counts(speculator) == counts(new)
        assert counts(speculator)[0]
        if now is not torch.float16 and now is not torch.bfloat16:
            assert torch.equal(text, model.generate(ids, **PLAIN))


def test_an_attached_speculator_follows(made, prompt):
    model, speculator_of = made("mtp")
    speculator = hf_speculate.attach(model, speculator_of())
    model.to(torch.float64)
    text = model.generate(prompt(9), **PLAIN)
    assert counts(speculator)[0]
    hf_speculate.detach(model)
    assert torch.equal(text, model.generate(prompt(9), **PLAIN))


@pytest.mark.parametrize(
    "kind",
    quick(["mtp", "eagle1", "safeailab", "dspark", "reduced", "medusa1", "v2"], "mtp", "safeailab", "dspark", "v2"),
)
def test_a_head_follows_its_target_to_a_device_and_back(made, prompt, kind):
    model, speculator_of = made(kind)
    speculator, ids = speculator_of(), prompt(9)
    plain = model.generate(ids, **PLAIN)
    with PretendedDevice() as device:
        model.to(device.name)
        text = model.generate(ids.to(device.name), **PLAIN, speculator=speculator)
        assert text.tolist() == plain.tolist()
        assert counts(speculator)[0]
        model.to("cpu")
        speculator.stats.reset()
        assert torch.equal(model.generate(ids, **PLAIN, speculator=speculator), plain)
        assert counts(speculator)[0]


def test_nothing_is_copied_while_the_target_stays(made, prompt):
    for kind in ("safeailab", "medusa1"):
        model, speculator_of = made(kind)
        drafter = speculator_of().drafter
        before = drafter.head if kind == "safeailab" else drafter.heads
        model.generate(prompt(9), **PLAIN, speculator=Speculator(drafter))
        assert (drafter.head if kind == "safeailab" else drafter.heads) is before


def test_a_request_that_runs_keeps_the_head_that_it_began_with(made, prompt):
    """Two targets share a drafter; one of them begins while the other one's request runs."""
    model, speculator_of = made("speculators")  # with embeddings of its own
    drafter = speculator_of().drafter
    running = hf_speculate.rounds(model, prompt(9), **PLAIN, speculator=Speculator(drafter, adaptive=False))
    first = next(running)
    drafter.follow(copy.deepcopy(model).to(torch.float64))
    tokens = [token for each in (first, *running) for token in each.tokens[0]]
    assert tokens == model.generate(prompt(9), **PLAIN)[0, 9:].tolist()


def test_a_copy_keeps_frequencies_and_the_targets_own_modules(made):
    model, speculator_of = made("mtp")
    head = speculator_of().drafter.head
    copied = placed_copy(head, torch.bfloat16, torch.device("cpu"), {id(model.lm_head): model.lm_head})
    assert copied.rotary.inv_freq.dtype == torch.float32
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    assert copied.shared["lm_head"] is model.lm_head
    assert head.dtype == torch.float32


class TestProblems:
    def test_head_using_modules_of_another_model_is_refused(self, made, prompt):
        model, speculator_of = made("eagle1")
        speculator, other = speculator_of(), copy.deepcopy(model).to(torch.float64)
        with pytest.raises(TargetMismatchError, match=r"the target is now in torch.float64 on cpu, and it uses"):
            other.generate(prompt(5), **PLAIN, speculator=speculator)

    def test_head_with_packed_matrices_cannot_change_its_dtype(self, made, prompt):
        model, speculator_of = made("safeailab")
        speculator = speculator_of()
        assert isinstance(speculator.drafter, EagleDrafter)
        speculator.drafter.head.fc.register_parameter(
            "packed", torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
        )
        model.to(torch.float64)
        with pytest.raises(TargetMismatchError, match="its matrices are packed: load the head again"):
            model.generate(prompt(5), **PLAIN, speculator=speculator)
