"""Whole models in one native call: what `model(...)` answers is what the modules answer, whoever asks for what."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from hf_speculate.cache import CACHE_NAME, as_cache, cache_of
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.layers import MOST_ROWS

from ..support.packed import ids, modules_only, padded


pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("needs_kernel")]


@pytest.fixture(name="load")
def _load(load):
    """In float32, and tied unless it is said otherwise."""
    return partial(load, **{"dtype": torch.float32, "is_tied": True})


@pytest.fixture
def steps(monkeypatch):
    """Which calls of the whole model there were."""
    found, library = [], native.library()
    step = library.step
    monkeypatch.setattr(library, "step", lambda address: found.append(step(address)) or found[-1])
    return found


@torch.no_grad()
def answer(model, input_ids, cache=None, **options):
    return model(input_ids, **as_cache(cache), use_cache=True, **options)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("recipe", ["Q4_0", "Q6_K"])
def test_logits_are_those_of_the_modules(recipe, is_tied, load, steps):
    model = load(recipe=recipe, is_tied=is_tied)
    twin = modules_only(model)
    caches = None, None
    for text, options in ((ids(1, 19), {}), (ids(1, 1), {"logits_to_keep": 1}), (ids(1, 5), {"logits_to_keep": 2})):
        found, expected = (
            answer(each, text, cache, **options) for each, cache in zip((model, twin), caches, strict=True)
        )
        assert found.logits.shape == expected.logits.shape
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=2e-5)
        assert type(found) is type(expected)
        assert found.keys() == expected.keys()
        caches = cache_of(found), cache_of(expected)
    assert steps == [1, 1, 1]


@pytest.mark.parametrize("backend", ["native", "native-int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_logits_do_not_depend_on_the_rows_beside_them(backend, dtype, load, steps):
    model, text = load(recipe="Q4_K", dtype=dtype, backend=backend), ids(1, 30)
    whole = answer(model, text).logits
    for sizes in ([1] * 30, [20, 1, 9], [29, 1]):
        cache, parts = DynamicCache(config=model.config), []
        for piece in text.split(sizes, dim=1):
            parts.append(answer(model, piece, cache).logits)
        assert torch.equal(torch.cat(parts, dim=1), whole), sizes
    many = text.expand(MOST_ROWS // 30 + 2, -1)  # in parts
    assert torch.equal(answer(model, many).logits, whole.expand(len(many), -1, -1))
    assert set(steps) == {1}


@pytest.mark.parametrize("wanted", [True, 1, [0, 3], [-1], [-2, 1], False])
def test_hidden_states_are_handed_out_as_transformers_does(wanted, load, steps):
    model = load()
    twin = modules_only(model)
    found, expected = (answer(each, ids(1, 6), output_hidden_states=wanted) for each in (model, twin))
    assert (found.hidden_states is None) == (expected.hidden_states is None)
    for state, other in zip(found.hidden_states or (), expected.hidden_states or (), strict=True):
        assert (state is None) == (other is None)
        if state is not None:
            torch.testing.assert_close(state, other, rtol=1e-4, atol=2e-5)
    assert steps == [1]


def test_rows_of_a_padded_batch_get_the_bits_that_they_get_alone(load, steps):
    """As plain `generate` pads a batch: rows get the bits that they get alone."""
    model, lengths = load(recipe="Q4_K"), (11, 24, 3)
    batch = padded(lengths)
    together = answer(model, **batch)
    one_more, mask = ids(3, 1, seed=9), torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
    place = mask.sum(1, keepdim=True) - 1
    later = answer(model, one_more, cache_of(together), attention_mask=mask, position_ids=place)
    for row, length in enumerate(lengths):
        alone = answer(model, ids(1, length, seed=length))
        assert torch.equal(together.logits[row, 24 - length :], alone.logits[0])
        assert torch.equal(later.logits[row], answer(model, one_more[row : row + 1], cache_of(alone)).logits[0])
    assert set(steps) == {1}


def test_positions_behind_the_table_are_served(load, steps):
    model = load()
    twin = modules_only(model)
    positions = torch.tensor([[0, 1, 0, 1]])  # two texts in one row: transformers finds that out
    found, expected = (answer(each, ids(1, 4), position_ids=positions).logits for each in (model, twin))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert not steps
    cache = cache_of(answer(model, ids(1, 2)))
    twin_cache = cache_of(answer(twin, ids(1, 2)))
    positions = torch.tensor([[5000, 5001]])
    found = answer(model, ids(1, 2), cache, position_ids=positions).logits
    expected = answer(twin, ids(1, 2), twin_cache, position_ids=positions).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert steps == [1, 0, 1], "the table was too short once"


def test_a_token_without_an_embedding_is_an_error_as_before(load):
    model = load()
    cache = cache_of(answer(model, ids(1, 4)))
    with pytest.raises(IndexError):
        answer(model, torch.tensor([[5, 97]]), cache)
    assert cache.get_seq_length() == 4


def test_one_cache_may_be_cut_reordered_and_exchanged(load, steps):
    model, text = load(), ids(2, 12)
    expected = answer(model, text.flip(0)).logits[:, 5:]
    cache = DynamicCache(config=model.config)
    answer(model, text, cache)
    cache.crop(-7)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(answer(model, text.flip(0)[:, 5:], cache).logits, expected)
    cache.crop(-7)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    assert torch.equal(answer(model, text.flip(0)[:, 5:], cache).logits, expected)
    assert set(steps) == {1}


def test_who_changes_the_class_is_called(load, steps, monkeypatch):
    model, calls = load(), []
    stock = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, *a, **k: calls.append(1) or stock(self, *a, **k))
    answer(model, ids(1, 4))
    assert calls == [1]
    assert not steps


@pytest.mark.parametrize(
    "options",
    [{"return_dict": False}, {"labels": ids(1, 5)}, {"output_attentions": True}, {"logits_to_keep": torch.tensor([2])}],
)
def test_what_only_the_modules_can_answer_is_left_to_them(options, load, steps):
    model = load(attn_implementation="eager")
    twin = modules_only(model)
    found, expected = (answer(each, ids(1, 5), **options) for each in (model, twin))
    logits = (each[0] if isinstance(each, tuple) else each.logits for each in (found, expected))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)
    assert len(steps) <= 1, "the decoder alone at most"


def test_what_is_no_cache_is_left_to_transformers(load, steps):
    model = load()
    with pytest.raises(AttributeError):
        answer(model, ids(1, 3), ((torch.zeros(1), torch.zeros(1)),))
    assert not steps


def test_a_weight_that_is_trained_gets_its_gradient(load, steps):
    model = load()
    model.model.norm.weight.requires_grad_()
    model(ids(1, 5)).logits.sum().backward()
    assert model.model.norm.weight.grad is not None
    assert not steps
    answer(model, ids(1, 5))
    assert steps == [1]


def test_the_signature_is_that_of_the_class(load):
    model = load()
    of_class = list(inspect.signature(LlamaForCausalLM.forward).parameters.values())
    assert list(inspect.signature(model.forward).parameters.values()) == of_class[1:]
    assert CACHE_NAME in inspect.signature(model.model.forward).parameters


def test_plain_generate_takes_one_call_a_token(load, steps):
    model = load()
    model.generate(ids(1, 5), max_new_tokens=7, do_sample=False, pad_token_id=0)
    assert steps == [1] * 7


# ---- what is looked at once, while nobody disturbs a request ----


def looks(model, monkeypatch):
    """How often the model is looked at."""
    whole, found = model.forward._whole, []
    is_untouched = whole._is_untouched
    monkeypatch.setattr(whole, "_is_untouched", lambda config: found.append(1) or is_untouched(config))
    return found


def test_a_request_is_looked_at_once(load, monkeypatch):
    model = load()
    found = looks(model, monkeypatch)
    model.generate(ids(1, 5), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert len(found) == 1
    model.generate(ids(1, 5), max_new_tokens=6, do_sample=False, pad_token_id=0, logits_processor=[lambda _, s: s])
    assert len(found) == 7
    answer(model, ids(1, 2))
    answer(model, ids(1, 2))
    assert len(found) == 9


def test_a_hook_that_is_registered_meanwhile_has_its_effect(load, steps):
    model = load()
    with model.forward.undisturbed(is_threaded=False):
        before = answer(model, ids(1, 6)).logits
        handle = model.model.norm.register_forward_hook(lambda module, inputs, output: output * 1.5)
        assert not torch.allclose(answer(model, ids(1, 6)).logits, before)
        assert steps == [1]
        handle.remove()
        assert torch.equal(answer(model, ids(1, 6)).logits, before)
    assert steps == [1, 1]


def test_what_is_changed_behind_a_request_is_seen(load):
    model = load()
    with model.forward.undisturbed(is_threaded=False):
        before = answer(model, ids(1, 6)).logits
        with model.forward.undisturbed(is_threaded=False):  # a request within a request
            answer(model, ids(1, 6))
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2, requires_grad=False)
    torch.testing.assert_close(answer(model, ids(1, 6)).logits, before * 2, rtol=1e-4, atol=1e-4)


def test_a_cache_may_change_within_a_request(load):
    """Rows that have ended leave it, text is cut: all layers alike."""
    model, text = load(), ids(2, 12)
    with model.forward.undisturbed(is_threaded=False):
        expected = answer(model, text[1:]).logits[:, 5:]
        cache = cache_of(answer(model, text))
        cache.crop(-7)
        cache.batch_select_indices(torch.tensor([1]))
        assert torch.equal(answer(model, text[1:, 5:], cache).logits, expected)
        cache.crop(-7)
        assert torch.equal(answer(model, text[1:, 5:], cache).logits, expected)
        long = ids(1, 100, seed=3)
        assert torch.equal(
            answer(model, long, cache).logits, answer(model, torch.cat([text[1:], long], dim=1)).logits[:, 12:]
        )
