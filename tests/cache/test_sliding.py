"""Sliding windows: the layer beside stock's, kept paths beside plain lists, requests beside plain `generate`."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from transformers import DynamicCache, MistralConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_speculate import Speculator
from hf_speculate.cache import as_cache
from hf_speculate.cache.sliding import SlidingLayer
from hf_speculate.cache.tree_cache import TreeCache
from hf_speculate.errors import CacheStateError
from hf_speculate.target.layers import LayerType, layer_types, layer_types_of
from hf_speculate.testing import ScriptedDrafter

from ..support.layers import assert_updates_equal, change_rows, reset_both, states
from ..support.models import build_tiny_model
from ..support.versions import needs_transformers


WINDOW, VOCAB_SIZE = 8, 96


def assert_layers_equal(ours, stock):
    assert ours.get_seq_length() == stock.get_seq_length()
    assert ours.cumulative_length == stock.cumulative_length
    assert ours.get_mask_sizes(3) == stock.get_mask_sizes(3)
    if stock.get_seq_length():
        num_seen = min(stock.get_seq_length(), WINDOW - 1)  # with past recording, stock holds more
        assert torch.equal(ours.keys, stock.keys[:, :, -num_seen:])
        assert torch.equal(ours.values, stock.values[:, :, -num_seen:])


class TestLayer:
    OPERATIONS = ("append", "append", "append many", "reorder", "select", "repeat", "reset", "copy", "pickle")

    @pytest.mark.parametrize("seed", range(12))
    def test_sliding_layer_equals_stocks_layer_after_any_operations(self, seed):
        choose = random.Random(seed)
        ours, stock, batch_size = SlidingLayer(WINDOW), DynamicSlidingWindowLayer(sliding_window=WINDOW), 2
        for _ in range(60):
            operation = choose.choice(self.OPERATIONS)
            if operation.startswith("append"):
                # 150 is beyond the first capacity of 128: the buffer is made anew.
                length = 150 if operation == "append many" else choose.randint(1, 12)
                assert_updates_equal(ours, stock, batch_size, length)
            elif operation == "reset" and choose.random() < 0.3:
                stock = reset_both(ours, stock)
                batch_size = 2
            elif operation == "copy":
                ours, stock = copy.deepcopy(ours), copy.deepcopy(stock)
            elif operation == "pickle":
                ours, stock = (pickle.loads(pickle.dumps(layer)) for layer in (ours, stock))
            elif stock.get_seq_length():
                batch_size = change_rows(operation, ours, stock, batch_size, choose)
            assert_layers_equal(ours, stock)

    @needs_transformers("5.14", "layers do not record the past")
    @pytest.mark.parametrize("seed", range(6))
    def test_sliding_layer_records_and_crops_as_stocks_layer(self, seed):
        choose = random.Random(seed)
        ours, stock = SlidingLayer(WINDOW), DynamicSlidingWindowLayer(sliding_window=WINDOW)
        for layer in (ours, stock):
            layer.activate_past_recording()
        for _ in range(40):
            count = choose.randint(1, 9)
            new = states(1, count)
            returned, expected = ours.update(*new), stock.update(*new)
            assert all(torch.equal(a, b) for a, b in zip(returned, expected, strict=True))
            removed = choose.randint(0, count)
            ours.crop(-removed), stock.crop(-removed)
            assert_layers_equal(ours, stock)

    def test_copy_of_a_sliding_layer_crops_independently(self):
        layer = SlidingLayer(WINDOW)
        for _ in range(100):
            layer.update(*states(1, 1))
        before, twins = layer.keys.clone(), [pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)]
        layer.crop(-30)
        cropped = layer.keys.clone()
        for twin in twins:
            assert torch.equal(twin.keys, before)
            twin.crop(-30)
            assert torch.equal(twin.keys, cropped)
            twin.update(*states(1, 5))
        assert torch.equal(layer.keys, cropped)

    def test_crop_refuses_entries_that_left_the_window(self):
        layer = SlidingLayer(WINDOW)
        for _ in range(300):
            layer.update(*states(1, 1))
        layer.crop(-1)  # still there
        with pytest.raises(RuntimeError, match="cannot crop a sliding window of 8"):
            layer.crop(-280)
        assert layer.get_seq_length() == 299

    def test_sliding_layer_has_constant_memory(self):
        layer = SlidingLayer(WINDOW)
        for _ in range(1000):
            layer.update(*states(1, 3))
            layer.pinned_from = layer.window_start(layer.length)
        assert layer._buffers["keys"].shape[-2] <= 128


def sliding_cache(num_layers=2):
    config = MistralConfig(num_hidden_layers=num_layers, sliding_window=WINDOW)
    return DynamicCache(config=config)


def append(tree_cache, num_nodes):
    blocks = [states(len(tree_cache.lengths), num_nodes) for _ in range(2)]
    for index, block in enumerate(blocks):
        tree_cache.cache.update(*block, index)
    return blocks


class TestTreeCache:
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("seed", range(4))
    def test_tree_cache_keeps_the_window_of_each_row(self, batch_size, seed):
        choose = random.Random(seed)
        cache = TreeCache(sliding_cache(), batch_size)
        texts = [[] for _ in range(batch_size)]  # of layer 0: one key a token
        prompt = append(cache, 20)
        cache.commit_appended()
        for row, text in enumerate(texts):
            text.extend(prompt[0][0][row].unbind(1))
        for _ in range(120):
            block = append(cache, 5)[0][0]
            paths = [sorted(choose.sample(range(5), choose.randint(1, 5))) for _ in range(batch_size)]
            cache.keep(paths)
            for row, path in enumerate(paths):
                texts[row] += [block[row, :, node] for node in path]
            layer = cache.cache.layers[0]
            for row, text in enumerate(texts):
                assert cache.lengths[row] == len(text)
                first = layer.visible_from
                assert first <= max(len(text) - WINDOW + 1, 0)
                held = layer.keys[row, :, : len(text) - first]
                assert torch.equal(held, torch.stack(text[first:], dim=1))

    def test_ended_rows_do_not_stop_sliding(self):
        cache = TreeCache(sliding_cache(), 2)
        append(cache, 4)
        cache.commit_appended()
        for _ in range(200):
            append(cache, 2)
            cache.keep([[0, 1], []], ended=[1])
        assert cache.cache.layers[0]._buffers["keys"].shape[-2] <= 256
        cache.truncate([cache.lengths[0] - 3, 4])  # the ended row stays as it is

    def test_interrupted_prompt_leaves_the_sliding_cache_unchanged(self):
        stock = sliding_cache()
        for index in range(2):
            stock.update(*states(1, 30), index)
        before = [layer.keys.clone() for layer in stock.layers]
        cache = TreeCache(stock, 1)
        append(cache, 200)
        append(cache, 200)
        cache.restore()
        cache.release()
        assert stock.get_seq_length() == 30
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(stock.layers, before, strict=True))

    def test_truncate_refuses_lengths_before_the_window(self):
        cache = TreeCache(sliding_cache(), 1)
        append(cache, 4)
        cache.commit_appended()
        for _ in range(100):
            append(cache, 3)
            cache.keep([[0, 1, 2]])
        with pytest.raises(CacheStateError, match="a sliding window has moved on"):
            cache.truncate([20])
        cache.truncate([cache.lengths[0] - 30])  # some are kept behind the window


class TestLayerTypes:
    def test_layer_types_refuse_different_windows_of_one_type(self, monkeypatch):
        config = MistralConfig(num_hidden_layers=2)
        layers = [MistralConfig(sliding_window=window) for window in (8, 16)]
        monkeypatch.setattr(MistralConfig, "per_layer_config", layers, raising=False)
        with pytest.raises(CacheStateError, match="windows of 8 and 16"):
            layer_types(config)

    def test_layer_types_follow_a_changed_config(self, tiny_model):
        model = copy.copy(tiny_model("mistral"))
        model.config = copy.deepcopy(model.config)
        for window in (8, 16, None):
            model.config.sliding_window = window
            assert layer_types_of(model) == layer_types(model.config)
            assert layer_types_of(model)[0].window == window

    def test_chunked_layers_begin_after_the_padding(self):
        chunks = LayerType("chunked_attention", 0, 4, is_chunked=True)
        too_far = chunks.too_far(torch.arange(8)[None], torch.tensor([[6]]), torch.tensor([[3]]))
        assert too_far[0, 0].tolist() == [True, True, True, False, False, False, False, True]


@pytest.fixture(params=["eager", "sdpa"])
def model(request):
    return build_tiny_model("mistral", attention=request.param, sliding_window=WINDOW)


class TestRequests:
    def test_models_with_windows_draft_on_a_cache_without_sliding_layers(self, model, prompt):
        """`DynamicCache()` without a config has no sliding layers; the model masks the window all the same."""
        plain = model.generate(prompt(20), **as_cache(DynamicCache()), max_new_tokens=30)
        drafter = ScriptedDrafter(plain[:, 20:], (2, 2, 1), accuracy=0.7, vocab_size=VOCAB_SIZE)
        text = model.generate(prompt(20), **as_cache(DynamicCache()), max_new_tokens=30, speculator=Speculator(drafter))
        assert torch.equal(text, plain)
