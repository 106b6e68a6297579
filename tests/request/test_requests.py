"""Requests and models beside the usual: refused with a clear error, or the text of plain `generate`."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from transformers import DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig, LogitsProcessor

import hf_speculate
from hf_speculate import DraftTree, Speculator
from hf_speculate.cache import CACHE_NAME, as_cache, cache_of
from hf_speculate.drafting import RAW_LAST
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.request.bridge import _originals
from hf_speculate.testing import EmptyDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter

from ..support.inputs import random_prompt
from ..support.models import SIZES, VOCAB_SIZE, build_tiny_gpt2, build_tiny_model, random_model
from ..support.requests import BATCH, assert_as_plain, assert_same, assert_steps_aside, run


@pytest.fixture
def model():
    """One that tests may change."""
    return copy.deepcopy(build_tiny_model())


@pytest.fixture
def gpt2():
    return copy.deepcopy(build_tiny_gpt2(num_positions=128, num_layers=3))


@pytest.mark.filterwarnings("error::FutureWarning")
class TestTraining:
    def test_gradient_checkpointing_leaves_the_cache_out(self, model):
        # its name before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        model.train()
        assert_steps_aside(model, "gradient checkpointing", lambda: {"input_ids": random_prompt(9)})
        assert assert_as_plain(model.eval(), input_ids=random_prompt(9)).accepted_tokens > 0
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()
        assert assert_as_plain(model.train(), input_ids=random_prompt(9)).accepted_tokens > 0

    def test_unwrapping_generate_leads_past_no_grad_as_in_transformers(self, model):
        assert type(model).generate.__wrapped__.__code__ is _originals["generate"].__wrapped__.__code__
        wrapped = inspect.unwrap(type(model).generate)
        model.requires_grad_(True)
        request = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_scores": True}
        assert wrapped(model, random_prompt(5), **request).scores[0].requires_grad
        assert not model.generate(random_prompt(5), **request).scores[0].requires_grad


class Evicting(DynamicCache):
    """Sees the first and the last tokens only."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys[:, :, -200:], values[:, :, -200:]

    crop = DynamicCache.crop


class Labelled(DynamicCache):
    def __init__(self, label):
        super().__init__()
        self.label = label

    def describe(self):
        return self.label


class TestCaches:
    def test_caches_that_evict_entries_run_plain(self, model):
        reason = "Evicting, which has its own crop, update: what it keeps of the text is not known"
        assert_steps_aside(model, reason, lambda: {"input_ids": random_prompt(9), CACHE_NAME: Evicting()})

    def test_subclasses_of_caches_with_other_methods_speculate(self, model):
        plain, cache = run(model, input_ids=random_prompt(9))[0], Labelled("mine")
        speculator = Speculator(ScriptedDrafter(plain[:, 9:], vocab_size=VOCAB_SIZE))
        assert torch.equal(run(model, speculator, input_ids=random_prompt(9), **as_cache(cache))[0], plain)
        assert speculator.stats.accepted_tokens > 10
        assert (cache.describe(), cache.get_seq_length()) == ("mine", 9 + 23)


class Masking(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, VOCAB_SIZE:] = -float("inf")
        return scores


class Cutting(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores[:, :50]


class CuttingSometimes(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores[:, : VOCAB_SIZE - 40 * (input_ids.shape[1] % 2)]


class WithTheLastIds(EmptyDrafter):
    """Ranks children by the noise of the highest ids of the vocabulary."""

    def start(self, request):
        session = super().start(request)

        def draft(state):
            ids = torch.arange(60, VOCAB_SIZE)
            state.child_scores(torch.zeros(len(state.root_ids), 1, len(ids)), 0, ids)
            return DraftTree.root_only(state.root_ids)

        session.draft = draft
        return session


@pytest.mark.parametrize(
    ("inputs", "row_wise", "do_sample"),
    [({"input_ids": random_prompt(9)}, False, True), (BATCH, False, False), (BATCH, True, True)],
    ids=["one row", "lock-step", "batch"],
)
class TestWidthOfScores:
    def run(self, model, do_sample, inputs, row_wise, *processors):
        for processor in processors:
            processor.row_wise = row_wise
        request = {**inputs, "do_sample": do_sample, "logits_processor": list(processors), "max_new_tokens": 10}
        assert assert_as_plain(model, 0.7, **request).accepted_tokens > 0
        for drafter in (DraftModelDrafter(build_tiny_model(seed=1)), WithTheLastIds()):
            assert_same(run(model, Speculator(drafter), **request), run(model, **request))

    @pytest.mark.parametrize("width", [90, 128])
    def test_text_is_plain_with_a_head_of_another_width(self, model, do_sample, inputs, row_wise, width):
        head, count = torch.nn.Linear(32, width, bias=False).requires_grad_(False), min(width, VOCAB_SIZE)
        head.weight.data.zero_()[:count] = model.lm_head.weight[:count]
        model.lm_head = head
        self.run(model, do_sample, inputs, row_wise, *[Masking()] * (width > VOCAB_SIZE))

    def test_text_is_plain_with_a_processor_that_cuts_scores(self, model, do_sample, inputs, row_wise):
        self.run(model, do_sample, inputs, row_wise, Cutting())

    def test_text_is_plain_with_a_processor_that_cuts_at_some_steps(self, model, do_sample, inputs, row_wise):
        self.run(model, do_sample, inputs, False, CuttingSometimes())


@pytest.mark.parametrize("make", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_of_a_speculator_that_was_used(make):
    target, request = build_tiny_model(), {"input_ids": random_prompt(9), "return_dict_in_generate": True}
    speculator = Speculator(DraftModelDrafter(build_tiny_model(seed=1), None), adaptive=True)
    first = run(target, speculator, **request)[0]
    other = make(speculator)
    assert other.stats.calls == speculator.stats.calls == 1
    text = torch.cat([first.sequences, random_prompt(4)], dim=1)
    for each in (other, speculator):  # the original goes on where it was, the copy begins anew
        cache = copy.deepcopy(cache_of(first))
        ours = run(target, each, input_ids=text, **as_cache(cache))[0]
        assert torch.equal(ours, run(target, input_ids=text)[0])
    assert [s.stats.calls for s in (speculator, other)] == [2, 2]


class Watching(EmptyDrafter):
    feature_layers = (RAW_LAST,)

    def __init__(self):
        self.shown = []

    def start(self, request):
        session = super().start(request)
        session.observe = lambda tokens, features, lengths: self.shown.append(features[RAW_LAST])
        return session


class TestRawLast:
    def test_raw_last_is_found_under_other_layer_names(self, gpt2):
        drafter, states = Watching(), []
        plain = run(gpt2, input_ids=random_prompt(9))[0]
        assert torch.equal(run(gpt2, Speculator(drafter), input_ids=random_prompt(9))[0], plain)
        handle = gpt2.transformer.h[-1].register_forward_hook(lambda module, inputs, output: states.append(output))
        gpt2(plain)
        handle.remove()
        expected = states[0][0] if isinstance(states[0], tuple) else states[0]
        shown = torch.cat(drafter.shown, dim=1)
        expected = expected.reshape(1, *expected.shape[-2:])[:, : shown.shape[1]]
        torch.testing.assert_close(shown, expected, atol=3e-5, rtol=1e-5)
        assert shown.shape[1] >= plain.shape[1] - 3  # nothing is drafted behind the end

    def test_raw_last_that_cannot_be_found_is_an_error(self, gpt2):
        gpt2.transformer.extra = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
        plain = run(gpt2, input_ids=random_prompt(9))[0]
        with pytest.raises(UnsupportedRequestError, match="output of the last decoder layer, which is not to be found"):
            run(gpt2, Speculator(Watching()), input_ids=random_prompt(9))
        hf_speculate.attach(gpt2, Speculator(Watching()))
        assert torch.equal(gpt2.generate(random_prompt(9), max_new_tokens=24), plain)
        hf_speculate.detach(gpt2)


@pytest.mark.parametrize("inputs", [{"input_ids": random_prompt(9)}, BATCH], ids=["one row", "batch"])
def test_hidden_states_with_an_axis_in_front_of_the_batch(inputs):
    """Gemma 3n: one for each of its predictions."""
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64}
    layers |= {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4, "head_dim": 8}
    own = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16, "altup_num_inputs": 2}
    model = random_model(Gemma3nForCausalLM, Gemma3nTextConfig(**SIZES, **layers, **own))
    request = {**inputs, "max_new_tokens": 9, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = run(model, **request)[0]
    for drafter in (EmptyDrafter(), ScriptedDrafter(plain.sequences[:, 9:], (1, 1, 1), vocab_size=VOCAB_SIZE)):
        ours = run(model, Speculator(drafter), **request)[0]
        assert torch.equal(ours.sequences, plain.sequences)
        assert len(ours.hidden_states) == len(plain.hidden_states) == 9
        for mine, theirs in zip(ours.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
