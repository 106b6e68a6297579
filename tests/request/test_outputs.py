"""`return_dict_in_generate`: every part as plain `generate` returns it, whatever was drafted."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.target.hooks import SaveableHook, keep_saveable
from hf_speculate.testing import RandomDrafter, ScriptedDrafter
from hf_speculate.verification.records import LayerRecord
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.inputs import padded_batch
from ..support.models import VOCAB_SIZE
from ..support.recording import Tapping


NEW_TOKENS = 16
ALL_PARTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def drafters(model, script):
    return {
        "scripted": ScriptedDrafter(script, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        "random": RandomDrafter(vocab_size=VOCAB_SIZE),
        "draft_model": DraftModelDrafter(model, DraftModelOptions(depth=3, top_k=2)),
    }


def assert_same_parts(ours, plain, width):
    """All of them, also what rows that have ended show for padding."""
    assert type(ours) is type(plain) is GenerateDecoderOnlyOutput
    assert torch.equal(ours.sequences, plain.sequences)
    assert set(ours) - {"speculation"} == set(plain)
    for step in range(plain.sequences.shape[1] - width):
        for name in ("scores", "logits"):
            if name in plain:
                torch.testing.assert_close(ours[name][step], plain[name][step], atol=2e-4, rtol=1e-4)
        for name in ("hidden_states", "attentions"):
            if name in plain:
                assert len(ours[name]) == len(plain[name])
                assert len(ours[name][step]) == len(plain[name][step])
                for a, b in zip(ours[name][step], plain[name][step], strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name} of step {step}"
                    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 1)], ids=["one", "batch"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_outputs_equal_plain(tiny_model, prompt, attention, lengths, do_sample):
    model, inputs = tiny_model("qwen2", attention=attention), padded_batch(prompt, lengths)
    for eos in ([], list(range(3, 12))):
        request = {**ALL_PARTS, "max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "eos_token_id": eos or None}
        torch.manual_seed(0)
        plain = model.generate(**inputs, **request)
        assert bool(plain.attentions[0]) == (attention == "eager")
        for drafter in drafters(model, plain.sequences[:, max(lengths) :]).values():
            torch.manual_seed(0)
            ours = model.generate(**inputs, **request, speculator=Speculator(drafter))
            assert_same_parts(ours, plain, max(lengths))


@pytest.mark.parametrize("part", [name for name in ALL_PARTS if name != "return_dict_in_generate"])
def test_outputs_hold_the_requested_parts_only(tiny_model, prompt, part):
    model, ids = tiny_model(attention="eager"), prompt(9)
    for asked in ({part: True}, {part: False}, {}):
        request = {"max_new_tokens": 6, "return_dict_in_generate": True, **asked}
        plain = model.generate(ids, **request)
        ours = model.generate(ids, **request, speculator=Speculator(RandomDrafter(vocab_size=VOCAB_SIZE)))
        assert_same_parts(ours, plain, 9)
    asked = {part: True, "max_new_tokens": 6}
    assert isinstance(model.generate(ids, **asked, speculator="prompt_lookup"), torch.Tensor), "no dict was asked for"


def test_outputs_equal_plain_while_a_drafter_reads_layers(tiny_model, prompt):
    model, ids = tiny_model(attention="eager"), prompt(9)
    plain = model.generate(ids, max_new_tokens=NEW_TOKENS, **ALL_PARTS)
    drafter = Tapping(plain.sequences[:, 9:], (2, 2), (1,))
    ours = model.generate(ids, max_new_tokens=NEW_TOKENS, **ALL_PARTS, speculator=Speculator(drafter))
    assert_same_parts(ours, plain, 9)
    torch.testing.assert_close(drafter.seen[0][1][1], plain.hidden_states[0][1])


def test_outputs_equal_plain_after_chunked_prefill_and_with_a_continued_cache(tiny_model, prompt):
    model, ids = tiny_model(attention="eager"), prompt(11)
    script = model.generate(ids, max_new_tokens=60)[:, 11:]
    speculator = Speculator(ScriptedDrafter(script, (2, 2), vocab_size=VOCAB_SIZE))
    results = []
    for chosen in (None, speculator):
        request = {**ALL_PARTS, "max_new_tokens": NEW_TOKENS, "speculator": chosen}
        chunked = model.generate(ids, prefill_chunk_size=4, **request)
        first = model.generate(ids, **request)
        second = model.generate(first.sequences, **as_cache(cache_of(first)), **request)
        results.append((chunked, first, second))
    for (ours, plain), width in zip(zip(*reversed(results), strict=True), (11, 11, 11 + NEW_TOKENS), strict=True):
        assert_same_parts(ours, plain, width)


def pickled(cache):
    data = pickle.dumps(cache)
    return pickle.loads(data), len(data)


def deep_copied(cache):
    twin = copy.deepcopy(cache)
    return twin, sum(s.untyped_storage().nbytes() for layer in twin.layers for s in (layer.keys, layer.values))


@pytest.mark.parametrize("copied", [pickled, deep_copied])
@pytest.mark.parametrize("lengths", [(150,), (40, 9)], ids=["one", "batch"])
def test_a_copy_of_the_cache_is_as_large_as_stocks_and_continues(tiny_model, prompt, copied, lengths):
    model, inputs = tiny_model("qwen2"), padded_batch(prompt, lengths)
    request = {**inputs, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    plain = model.generate(**request)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))
    twin, size = copied(cache_of(model.generate(**request, speculator=speculator)))
    assert size < 1.05 * copied(cache_of(plain))[1] + 1500, "spare room of the buffers went along"
    text = torch.cat([plain.sequences, padded_batch(prompt, [5] * len(lengths))["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), NEW_TOKENS + 5).long()], dim=1)
    expected = model.generate(text, attention_mask=mask, max_new_tokens=NEW_TOKENS)
    for continuing in (None, speculator):
        request = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, **as_cache(copy.deepcopy(twin))}
        continued = model.generate(text, **request, speculator=continuing)
        assert torch.equal(continued, expected)


def test_records_hold_no_view_of_a_trees_states(tiny_model, prompt, monkeypatch):
    added = []
    add = LayerRecord.add
    monkeypatch.setattr(
        LayerRecord, "add", lambda self, step, row, layers: (added.append(layers), add(self, step, row, layers))
    )
    model, ids = tiny_model(attention="eager"), prompt(9)
    request = {"max_new_tokens": 8, "speculator": Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=20))}
    model.generate(ids, **ALL_PARTS, **request)
    assert added
    for value in (value for layers in added for value in layers):
        assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_a_model_is_saved_after_a_call_that_recorded_outputs(tiny_model, prompt, asked):
    model = copy.deepcopy(tiny_model())
    model.set_attn_implementation("eager")
    call = {"max_new_tokens": 4, "return_dict_in_generate": True, asked: True}
    output = model.generate(prompt(8), speculator="prompt_lookup", **call)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    for found in (model, again, copy.deepcopy(model)):
        plain = found.generate(prompt(8), **call)
        assert torch.equal(plain.sequences, output.sequences)
        name = asked.removeprefix("output_")
        torch.testing.assert_close(getattr(plain, name)[0], getattr(output, name)[0])


def test_hooks_are_exchanged_once_and_nobody_elses(tiny_model, prompt):
    model = copy.deepcopy(tiny_model())
    layer = model.model.layers[0]
    other = layer.register_forward_hook(lambda *_: None)
    model(prompt(4), output_hidden_states=True)
    before = dict(layer._forward_hooks)
    keep_saveable(model)
    assert list(layer._forward_hooks) == list(before)
    assert layer._forward_hooks[other.id] is before[other.id]
    exchanged = [hook for hook in layer._forward_hooks.values() if isinstance(hook, SaveableHook)]
    assert len(exchanged) == len(before) - 1
    keep_saveable(model)
    assert [hook for hook in layer._forward_hooks.values() if isinstance(hook, SaveableHook)] == exchanged
