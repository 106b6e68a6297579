"""Training of draft layers (MTP): the model's own, or new ones; agreement with drafting, learning, files."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate import AutoSpeculator
from hf_speculate.drafting import DraftRequest
from hf_speculate.tree import TreePlan
from hf_speculate_plugins.mtp import MtpDrafter, new_head
from hf_speculate_training.methods import load_method
from hf_speculate_training.methods.contract import NoOptions
from hf_speculate_training.methods.mtp import MtpMethod, MtpTrainingOptions
from hf_speculate_training.states import TargetReader
from tests.support.mtp import build, load_target, write_target
from tests.support.training import assert_every_draft_is_accepted, learn_by_heart, own_text, packed


def method_for(target, **options) -> MtpMethod:
    return MtpMethod.for_target(target, NoOptions(), MtpTrainingOptions(**options), lambda: None).train()


@pytest.fixture
def native(tmp_path):
    """A target whose checkpoint has draft layers."""
    return load_target(write_target(tmp_path / "base", "glm4_moe"))


def test_method_starts_with_the_targets_layer_or_a_new_one(native):
    own = MtpDrafter.for_target(native).head
    assert torch.equal(method_for(native).head.fc.weight, own.fc.weight)
    for family in ("llama", "qwen2"):
        target = build(family)
        head = method_for(target).head
        assert head.spec.dialect == "speculators"
        assert torch.equal(head.layers[0].mlp.up_proj.weight, target.model.layers[-1].mlp.up_proj.weight)
        assert torch.equal(head.enorm.weight, torch.ones(32))
        assert all(p.requires_grad and p.dtype == torch.float32 for p in head.parameters())
    assert load_method("mtp") is MtpMethod


@pytest.mark.parametrize("family", ["llama", "glm4_moe", "qwen3_5_text"])
@torch.no_grad()
def test_unrolled_steps_are_those_of_drafting(family):
    """At every entry, the states of step k are those of a chain of k tokens of the text."""
    target, batch = build(family), packed([12])
    torch.manual_seed(0)
    method = method_for(target, steps=3).eval()
    states = TargetReader(target, method.feature_layers)(batch)
    outputs = method.unroll(batch, states)
    drafter, tokens = method.drafter(target), batch["input_ids"]
    (layer,) = drafter.feature_layers
    for last in (3, 6, 7):
        session = drafter.start(DraftRequest(target=target, input_ids=tokens[:, : last + 1]))
        features = {layer: states.features[layer][:, : last + 1]}
        session.observe(tokens[:, 1 : last + 2], features, torch.tensor([last + 1]))
        hidden = session._root()
        for step in range(3):
            inputs, fed_back = drafter.head.finish(hidden)
            torch.testing.assert_close(inputs[0], outputs[step][0, last], rtol=1e-4, atol=1e-4)
            plan = TreePlan.from_parents([range(-1, step)])
            entry = tokens[:, last + 2 + step, None]
            positions, masks = session._head_cache.node_place(plan, 1)
            hidden = session._steps._run(entry, fed_back[:, None], positions, masks)[:, 0]


def test_overfitting_one_batch_accepts_every_draft():
    target = copy.deepcopy(build("llama"))
    target.lm_head.weight *= 20  # a random target has no clear preferences
    prompts, batch = own_text(target, 29)
    torch.manual_seed(0)
    method = method_for(target, steps=3)
    states = TargetReader(target, method.feature_layers)(batch)
    learn_by_heart(method, batch, states, 3, num_steps=300, lr=3e-3)
    drafter = method.drafter(target, depth=3, top_k=1)
    assert_every_draft_is_accepted(target, drafter, prompts, batch["input_ids"])


def test_what_is_saved_is_read_again_and_its_training_continues(tmp_path, native, prompt):
    for target in (build("qwen2"), native):
        method = method_for(target)
        with torch.no_grad():
            method.head.fc.weight += 0.01
        saved = method.save(tmp_path / type(target).__name__, target)
        assert saved.layout == "speculators"
        speculator = AutoSpeculator.from_pretrained(tmp_path / type(target).__name__, target)
        assert torch.equal(speculator.drafter.head.fc.weight, method.head.fc.weight)
        plain = target.generate(prompt(7), max_new_tokens=9)
        assert torch.equal(target.generate(prompt(7), max_new_tokens=9, speculator=speculator), plain)
        again = MtpMethod.from_folder(str(tmp_path / type(target).__name__), target, MtpTrainingOptions())
        assert torch.equal(again.head.fc.weight, method.head.fc.weight)
        assert again.head.fc.weight.requires_grad


def test_a_new_layer_needs_weights_that_are_not_quantised():
    target = copy.deepcopy(build("llama"))
    packed_weight = torch.zeros(48, 32, dtype=torch.int8)
    target.model.layers[-1].mlp.up_proj.weight = torch.nn.Parameter(packed_weight, requires_grad=False)
    with pytest.raises(Exception, match="whose weights are quantised"):
        new_head(target)
