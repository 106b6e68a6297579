"""The preallocated cache layer beside stock's, and append / keep / truncate beside a plain gather."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_speculate.cache import as_cache, cache_of
from hf_speculate.cache.layers import PreallocatedLayer
from hf_speculate.cache.sliding import SlidingLayer
from hf_speculate.cache.tree_cache import TreeCache, is_indexable
from hf_speculate.compatibility.stock import CROPS_TO_ZERO
from hf_speculate.errors import CacheStateError

from ..support.layers import HEAD_DIM, HEADS, assert_updates_equal, change_rows, reset_both, states
from ..support.versions import skip_before


def assert_layers_equal(ours, stock):
    assert ours.get_seq_length() == stock.get_seq_length()
    assert ours.get_mask_sizes(3) == stock.get_mask_sizes(3)
    assert ours.is_initialized == stock.is_initialized
    if stock.get_seq_length():
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)


def fill(cache, length, batch_size=1, num_layers=2):
    for index in range(num_layers):
        cache.update(*states(batch_size, length), index)
    return cache


class TestLayer:
    OPERATIONS = ("append", "append", "append many", "crop", "reorder", "select", "repeat", "reset", "copy", "pickle")

    @pytest.mark.parametrize("seed", range(25))
    def test_preallocated_layer_equals_stocks_layer_after_any_operations(self, seed):
        choose = random.Random(seed)
        ours, stock, batch_size = PreallocatedLayer(), DynamicLayer(), 2
        for _ in range(30):
            operation = choose.choice(self.OPERATIONS)
            if operation.startswith("append"):
                # 150 is beyond the first capacity of 128: the buffer grows.
                length = 150 if operation == "append many" else choose.randint(1, 4)
                assert_updates_equal(ours, stock, batch_size, length)
            elif operation == "crop":
                count = choose.choice([0, 1, 2, 5, 10_000])
                if CROPS_TO_ZERO:  # then stock keeps some if more are dropped than there are
                    count = min(count, stock.get_seq_length())
                ours.crop(-count)
                if stock.is_initialized:  # older versions cannot crop before
                    stock.crop(-count)
            elif operation == "reset":
                stock = reset_both(ours, stock)
            elif operation == "copy":
                ours, stock = copy.deepcopy(ours), copy.deepcopy(stock)
            elif operation == "pickle":
                ours, stock = (pickle.loads(pickle.dumps(layer)) for layer in (ours, stock))
            elif stock.get_seq_length():
                batch_size = change_rows(operation, ours, stock, batch_size, choose)
            if stock.get_seq_length() == 0:
                batch_size = 2
                stock = reset_both(ours, stock)  # stock cannot change the batch size of an emptied layer
            assert_layers_equal(ours, stock)

    def test_preallocated_layer_never_writes_inference_tensors_outside_inference_mode(self):
        ours, stock = PreallocatedLayer(), DynamicLayer()
        first, second, third = (states(1, 3) for _ in range(3))
        for layer in (ours, stock):
            with torch.inference_mode():
                layer.update(*first)
            layer.update(*second)
            with torch.inference_mode():
                layer.update(*third)
        assert_layers_equal(ours, stock)

    @pytest.mark.parametrize(
        ("ours", "stock"),
        [(PreallocatedLayer(), DynamicLayer()), (SlidingLayer(16), DynamicSlidingWindowLayer(sliding_window=16))],
        ids=["full", "sliding"],
    )
    def test_update_keeps_gradients_as_stock_does(self, ours, stock):
        prefix, new, later = states(1, 5), states(1, 3, requires_grad=True), states(1, 2)
        gradients = []
        for layer in (ours, stock):
            layer.update(*prefix)
            keys, values = layer.update(*new)
            assert keys.shape == values.shape == (1, HEADS, 8, HEAD_DIM)
            loss = (keys * values).square().sum()
            layer.update(*later)  # must not disturb what autograd has saved
            gradients.append(torch.autograd.grad(loss, new))
        assert_layers_equal(ours, stock)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    def test_preallocated_layer_never_writes_tensors_that_it_took_over(self):
        stock = DynamicLayer()
        stock.update(*states(1, 5))
        keys, values = stock.keys, stock.values
        before = keys.clone(), values.clone()
        ours = PreallocatedLayer.from_layer(stock)
        assert ours.keys.data_ptr() == keys.data_ptr(), "nothing need be copied before the first append"
        ours.crop(-2)
        ours.update(*states(1, 2))  # as many as were cropped: they would fit into the user's tensors
        ours.move(torch.tensor([3, 4]), torch.tensor([0, 1]))
        assert torch.equal(keys, before[0])
        assert torch.equal(values, before[1])


class Reference:
    """What every row must hold, by plain lists of entries: (keys, values) of each layer."""

    def __init__(self, batch_size, num_layers):
        self.rows = [[[] for _ in range(batch_size)] for _ in range(num_layers)]

    def add(self, blocks, paths):
        for layer, block in zip(self.rows, blocks, strict=True):
            for row, path in enumerate(paths):
                layer[row] += [(block[0][row, :, node], block[1][row, :, node]) for node in path]

    def assert_equal(self, tree_cache):
        for layer, rows in zip(tree_cache.cache.layers, self.rows, strict=True):
            assert layer.get_seq_length() == tree_cache.append_index
            for row, entries in enumerate(rows):
                assert tree_cache.lengths[row] == len(entries)
                for kind, found in enumerate((layer.keys, layer.values)):
                    expected = torch.stack([entry[kind] for entry in entries], dim=1)
                    assert torch.equal(found[row, :, : len(entries)], expected)


def append(tree_cache, num_nodes):
    blocks = [states(len(tree_cache.lengths), num_nodes) for _ in range(2)]
    for index, block in enumerate(blocks):
        tree_cache.cache.update(*block, index)
    return blocks


def random_path(choose, num_nodes):
    return sorted(choose.sample(range(num_nodes), choose.randint(0, num_nodes)))


class TestKeep:
    @pytest.mark.parametrize("batch_size", [1, 2, 4])
    @pytest.mark.parametrize("shared", [True, False], ids=["one path for all", "a path each"])
    @pytest.mark.parametrize("seed", range(6))
    def test_keep_equals_a_plain_gather_round_after_round(self, batch_size, shared, seed):
        choose = random.Random(seed)
        cache, reference = TreeCache(DynamicCache(), batch_size), Reference(batch_size, 2)
        num_prompt = choose.choice([1, 7, 126])
        reference.add(append(cache, num_prompt), [range(num_prompt)] * batch_size)
        cache.commit_appended()
        for _ in range(8):
            num_nodes = choose.randint(1, 9)
            paths = [random_path(choose, num_nodes) for _ in range(batch_size)]
            paths = [paths[0]] * batch_size if shared else paths
            reference.add(append(cache, num_nodes), paths)
            cache.keep(paths)
            reference.assert_equal(cache)

    def test_interrupted_keep_leaves_the_old_state(self, monkeypatch):
        cache, reference = TreeCache(DynamicCache(), 2), Reference(2, 2)
        reference.add(append(cache, 6), [range(6)] * 2)
        cache.commit_appended()
        reference.add(append(cache, 4), [[0, 2], [1]])
        cache.keep([[0, 2], [1]])  # ragged from here on
        append(cache, 4)
        move, calls = PreallocatedLayer.move, []

        def interrupted(layer, *args):
            move(layer, *args)
            calls.append(layer)
            raise KeyboardInterrupt

        monkeypatch.setattr(PreallocatedLayer, "move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.keep([[1, 3], [0, 2, 3]])
        assert len(calls) == 1, "the interruption must fall between two layers"
        cache.restore()
        reference.assert_equal(cache)


class TestTruncate:
    def test_truncate_cuts_each_row_to_its_own_length(self):
        cache, reference = TreeCache(DynamicCache(), 2), Reference(2, 2)
        blocks = append(cache, 6)
        cache.commit_appended()
        cache.truncate([4, 2])
        reference.add(blocks, [range(4), range(2)])
        reference.assert_equal(cache)
        assert cache.is_ragged
        assert cache.append_index == 4

    @pytest.mark.parametrize("lengths", [(7, 6), (6, 7), (-1, 6)])
    def test_truncate_refuses_lengths_beyond_the_text(self, lengths):
        cache = TreeCache(fill(DynamicCache(), 6, batch_size=2), 2)
        with pytest.raises(CacheStateError, match=r"cannot truncate row .* it has 6"):
            cache.truncate(lengths)
        assert cache.lengths == (6, 6)

    def test_restore_drops_entries_of_an_interrupted_forward(self):
        cache, reference = TreeCache(DynamicCache(), 1), Reference(1, 2)
        reference.add(append(cache, 6), [range(6)])
        cache.commit_appended()
        cache.cache.update(*states(1, 3), 0)  # the forward broke after the first layer
        cache.restore()
        reference.assert_equal(cache)


class TestTakeOver:
    def test_tree_cache_keeps_the_users_object_and_tensors(self, tiny_model, prompt):
        model, cache, ids = tiny_model(), DynamicCache(), prompt(9)
        model(ids, **as_cache(cache))
        held = [(layer.keys, layer.values) for layer in cache.layers]
        copies = [(keys.clone(), values.clone()) for keys, values in held]
        tree_cache = TreeCache(cache, 1)
        assert tree_cache.cache is cache
        assert tree_cache.lengths == (9,)
        assert all(type(layer) is PreallocatedLayer for layer in cache.layers)
        model(ids[:, :3], **as_cache(cache))
        tree_cache.keep([[2]])
        for (keys, values), (old_keys, old_values) in zip(held, copies, strict=True):
            assert torch.equal(keys, old_keys)
            assert torch.equal(values, old_values)

    @pytest.mark.parametrize("kind", ["static", "offloaded"])
    def test_tree_cache_refuses_caches_that_cannot_be_indexed(self, kind):
        config = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        cache = StaticCache(config=config, max_cache_len=16) if kind == "static" else DynamicCache(config=config)
        cache.offloading = kind == "offloaded"
        before = list(cache.layers)
        assert not is_indexable(cache)
        with pytest.raises(CacheStateError, match=f"{type(cache).__name__} with layers"):
            TreeCache(cache, 1)
        assert cache.layers == before


def ours_and_stock():
    return TreeCache(DynamicCache(), 1).cache, DynamicCache()


REQUESTS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "stock prompt lookup": {"prompt_lookup_num_tokens": 3},
    "left padded": {"attention_mask": torch.tensor([[0] * 4 + [1] * 12])},
    "chunked prefill": {"prefill_chunk_size": 5},
}


class TestStockGenerate:
    """Plain `generate` on a cache with our layers is plain `generate`."""

    @pytest.mark.parametrize("request_name", REQUESTS)
    def test_stock_generate_gives_the_same_text_and_cache(self, tiny_model, prompt, request_name):
        if request_name == "stock prompt lookup":
            skip_before("5.15", "stock's prompt lookup fails without an EOS")
        model, ids, outputs = tiny_model("qwen2"), prompt(16), []
        for cache in ours_and_stock():
            torch.manual_seed(0)
            request = {"max_new_tokens": 24, "return_dict_in_generate": True} | REQUESTS[request_name]
            outputs.append(model.generate(ids, **as_cache(cache), **request))
        ours, stock = outputs
        assert torch.equal(ours.sequences, stock.sequences)
        assert [type(layer) for layer in cache_of(ours).layers] == [PreallocatedLayer] * 2
        for our_layer, stock_layer in zip(cache_of(ours).layers, cache_of(stock).layers, strict=True):
            assert_layers_equal(our_layer, stock_layer)
