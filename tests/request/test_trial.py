"""The trial of a model: it finds what is wrong, runs once, and leaves nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_speculate import Speculator
from hf_speculate.attention import AttentionMetadata
from hf_speculate.cache import as_cache
from hf_speculate.cache.tree_cache import TreeCache
from hf_speculate.forward.scorer import Scorer
from hf_speculate.request import trial
from hf_speculate.request.trial import needs_trial, request_shape, run_trial
from hf_speculate.testing import ScriptedDrafter
from hf_speculate.tree import TreePlan, additive

from ..support.models import VOCAB_SIZE, build_tiny_model, state_of


class Custom(LlamaForCausalLM):
    """A user's class, whose forward draws if `draws`; after `num_good` of them it raises `failure`."""

    draws = False
    failure: BaseException | None = None
    num_good = 0
    num_forwards = 0

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        Custom.num_forwards += 1
        if self.draws:
            torch.rand(1)
        if self.failure is not None and Custom.num_forwards > self.num_good:
            raise self.failure
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


@pytest.fixture
def model():
    """A fresh one, untried."""
    tiny = build_tiny_model()
    model = Custom(copy.deepcopy(tiny.config)).eval().requires_grad_(False)
    model.load_state_dict(tiny.state_dict())
    model.generation_config.pad_token_id = 0
    Custom.num_forwards = 0
    return model


def cache_of(model):
    return DynamicCache(config=model.config)


class TestFindsFaults:
    """Each of these is an engine that is broken in one place."""

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_trial_passes_a_sound_model(self, attention, dtype):
        assert run_trial(build_tiny_model(attention=attention, dtype=dtype), "tree") == ("tree", "")

    def test_a_tree_mask_that_hides_nothing_among_nodes(self, monkeypatch):
        def bias(plan, dtype, device):
            return torch.zeros(plan.ancestors.shape, dtype=dtype, device=device)

        monkeypatch.setattr(TreePlan, "bias", bias)
        assert run_trial(build_tiny_model(), "tree")[0] != "tree"

    def test_siblings_that_see_one_another(self, monkeypatch):
        """Chains have none."""

        def bias(plan, dtype, device):
            return additive(torch.ones_like(plan.ancestors).tril(), dtype)

        monkeypatch.setattr(TreePlan, "bias", bias)
        assert run_trial(build_tiny_model(), "tree")[0] == "chain"

    @pytest.mark.parametrize("by", [-1, 1])
    def test_positions_of_nodes_that_are_off_by_one(self, monkeypatch, by):
        original = AttentionMetadata.positions

        def positions(metadata):
            return original(metadata) + by * (metadata.plan.depths[:, metadata.num_cached :] > 0)

        monkeypatch.setattr(AttentionMetadata, "positions", positions)
        assert run_trial(build_tiny_model(), "tree")[0] == "single"

    def test_left_padding_that_is_not_masked(self, monkeypatch):
        monkeypatch.setattr(Scorer, "prompt_mask", None)
        assert run_trial(build_tiny_model(), "tree")[0] == "single"

    def test_holes_behind_short_rows_that_are_not_masked(self, monkeypatch):
        original = AttentionMetadata.visible_prefix.func

        def visible(metadata):
            found = original(metadata)
            end = 0 if metadata.prompt_mask is None else metadata.prompt_mask.shape[1]
            return found if found is None else found | (torch.arange(metadata.num_prefix) >= end)

        monkeypatch.setattr(AttentionMetadata, "visible_prefix", property(visible))
        assert run_trial(build_tiny_model(), "tree")[0] == "single"

    def test_entries_of_the_wrong_nodes_are_kept(self, monkeypatch):
        monkeypatch.setattr(TreeCache, "_move", lambda *args: None)
        assert run_trial(build_tiny_model(), "tree")[0] != "tree"

    def test_rows_that_use_the_lengths_of_the_first(self, monkeypatch):
        monkeypatch.setattr(TreeCache, "present_lengths", property(lambda cache: cache.lengths[:1] * len(cache.rows)))
        assert run_trial(build_tiny_model(), "tree")[0] == "single"


class TestRunsOnce:
    def test_a_second_request_runs_no_trial(self, model, prompt):
        counts = []
        for _ in range(3):
            before = Custom.num_forwards
            model.generate(prompt(9), max_new_tokens=4, speculator="prompt_lookup")
            counts.append(Custom.num_forwards - before)
        assert counts[0] > counts[1] == counts[2]
        assert counts[1] <= 4

    def test_another_object_is_another_trial(self, model):
        request_shape(model, cache_of(model))
        before = Custom.num_forwards
        request_shape(copy.deepcopy(model), cache_of(model))
        assert Custom.num_forwards > before

    def test_another_attention_is_another_trial(self, model):
        for attention, runs in (("eager", True), ("sdpa", True), ("eager", False), ("sdpa", False)):
            model.set_attn_implementation(attention)
            before = Custom.num_forwards
            assert request_shape(model, cache_of(model)) == ("tree", "")
            assert (Custom.num_forwards > before) == runs

    def test_a_model_that_was_changed_is_tried_again(self, model):
        for change in (lambda: None, lambda: model.resize_token_embeddings(VOCAB_SIZE + 8)):
            change()
            before = Custom.num_forwards
            assert request_shape(model, cache_of(model)) == ("tree", "")
            assert Custom.num_forwards > before

    def test_an_attention_of_somebodys_is_tried(self, chain_only):
        known = build_tiny_model(attention=chain_only)
        assert needs_trial(known, cache_of(known))
        assert request_shape(known, cache_of(known))[0] == "chain"

    def test_known_models_run_no_trial(self, model, monkeypatch, prompt):
        known = build_tiny_model()
        monkeypatch.setattr(trial, "run_trial", lambda *args: pytest.fail("was tried"))
        known.generate(prompt(5), max_new_tokens=3, speculator="prompt_lookup")
        assert not needs_trial(known, cache_of(known))
        assert needs_trial(model, cache_of(model))

    @pytest.mark.parametrize(("version", "is_tried"), [("5.23.9", False), ("5.2.3", True), ("6.23.0", True)])
    def test_another_version_of_transformers_is_another_model(self, monkeypatch, version, is_tried):
        known = build_tiny_model()
        # Not this module's `transformers`: its `processing_utils` makes a second object of the package.
        monkeypatch.setattr(trial.transformers, "__version__", version)
        assert needs_trial(known, cache_of(known)) == is_tried

    def test_a_class_that_borrows_a_known_name(self):
        borrowed = type("LlamaForCausalLM", (LlamaForCausalLM,), {})(build_tiny_model().config)
        assert needs_trial(borrowed, cache_of(borrowed))

    @pytest.mark.parametrize("name", trial.INPUT_PREPARATION)
    def test_a_known_class_that_was_given_a_method_of_its_own(self, monkeypatch, name):
        known = build_tiny_model()
        with monkeypatch.context() as patch:
            patch.setattr(known, name, getattr(known, name))
            assert needs_trial(known, cache_of(known))
        monkeypatch.setattr(LlamaForCausalLM, name, lambda *args, **kwargs: {})
        assert needs_trial(known, cache_of(known))


class TestLeavesNothing:
    FAILURES = (None, ZeroDivisionError(), torch.OutOfMemoryError())

    def hooked(self, model):
        """Registers hooks of each kind in front of and behind one that is ours; returns what they were called with."""
        called = []

        def hook(*args, **kwargs):
            called.append(args)

        def ours(*args):
            pass

        ours.__module__ = "hf_speculate.somewhere"
        for module in (model, model.model.layers[0], model.lm_head):
            module.register_forward_hook(hook)
            module.register_forward_hook(ours)
            module.register_forward_hook(hook, with_kwargs=True, always_call=True)
            module.register_forward_pre_hook(hook, prepend=True)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        return called

    @pytest.mark.parametrize("num_good", [0, 3, 11])
    @pytest.mark.parametrize("failure", FAILURES, ids=["fine", "error", "memory"])
    @pytest.mark.parametrize("gradients", [True, False])
    def test_trial_leaves_model_and_random_numbers_unchanged(self, model, failure, num_good, gradients):
        called, model.draws, model.failure, model.num_good = self.hooked(model), True, failure, num_good
        model.generation_config.eos_token_id, model.generation_config.temperature = [5, 6], 0.3
        with torch.set_grad_enabled(gradients):
            before = state_of(model)
            shape, reason = request_shape(model, cache_of(model))
            assert state_of(model) == before
        assert (shape == "tree", reason == "") == (failure is None, failure is None)
        assert not called
        assert Custom.num_forwards > num_good

    @pytest.mark.parametrize("num_good", [0, 3, 11])
    def test_ctrl_c_in_a_trial_restores_hooks_and_records_nothing(self, model, num_good):
        called, model.draws, model.num_good = self.hooked(model), True, num_good
        model.failure = KeyboardInterrupt()
        before = state_of(model)
        with pytest.raises(KeyboardInterrupt):
            request_shape(model, cache_of(model))
        assert state_of(model) == before
        assert not called
        assert trial._shape_on_trial.get() is None, "a request within the trial does not go on as one"
        model.failure = None
        assert request_shape(model, cache_of(model)) == ("tree", "")

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_trial_leaves_a_filled_cache_unchanged(self, model, do_sample, prompt):
        ids, results = prompt(20), []
        for speculator in (None, Speculator(ScriptedDrafter([5] * 30, (2, 1), vocab_size=VOCAB_SIZE))):
            cache = cache_of(model)
            model(ids[:, :12], **as_cache(cache))
            torch.manual_seed(1)
            text = model.generate(ids, **as_cache(cache), max_new_tokens=9, do_sample=do_sample, speculator=speculator)
            results.append((text, torch.get_rng_state(), cache.layers[1].keys))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        torch.testing.assert_close(results[0][2], results[1][2], atol=1e-5, rtol=1e-4)
