"""Rows leave the cache and come back, beside plain lists of entries."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from transformers import DynamicCache, MistralConfig

from hf_speculate.cache import TreeCache

from ..support.layers import HEAD_DIM, HEADS, states


WINDOW = 8


class TestCache:
    @pytest.mark.parametrize("windowed", [False, True], ids=["full", "sliding"])
    @pytest.mark.parametrize("seed", range(12))
    def test_tree_cache_sets_rows_aside_and_restores_them(self, seed, windowed):
        """Beside plain lists of entries; some rows go at once, some one after the other, at random times."""
        choose, batch_size = random.Random(seed), 5
        cache = DynamicCache()
        if windowed:
            cache = DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=WINDOW))
        tree_cache, texts = TreeCache(cache, batch_size), [[[] for _ in range(batch_size)] for _ in range(2)]

        def append(count, paths):
            for index, text in enumerate(texts):
                new = states(len(tree_cache.rows), count)
                cache.update(*new, index)
                for slot, row in enumerate(tree_cache.rows):
                    text[row] += [(new[0][slot, :, node], new[1][slot, :, node]) for node in paths[row]]

        num_prompt = choose.choice([3, 20, 126])
        append(num_prompt, [range(num_prompt)] * batch_size)
        tree_cache.commit_appended()
        ended: set[int] = set()
        for _ in range(choose.choice([10, 80])):
            running = [row for row in range(batch_size) if row not in ended]
            paths = [
                sorted(choose.sample(range(5), choose.randint(1, 5))) if row in running else []
                for row in range(batch_size)
            ]
            append(5, paths)
            if len(running) > 1 and choose.random() < 0.2:
                ended.update(choose.sample(running, choose.randint(1, len(running) - 1)))
            tree_cache.keep(paths, ended)
            if choose.random() < 0.5 and ended.intersection(tree_cache.rows):
                tree_cache.set_aside(ended)
                assert not ended.intersection(tree_cache.rows)
            self.assert_holds(tree_cache, tree_cache.rows, texts)
        first = [getattr(layer, "first", 0) for layer in cache.layers]
        append(3, [[]] * batch_size)  # a round that is broken off
        tree_cache.bring_back()
        assert list(tree_cache.rows) == list(range(batch_size))
        self.assert_holds(tree_cache, range(batch_size), texts, first)
        lengths = tree_cache.lengths
        tree_cache.truncate([n if row in ended else n - 2 for row, n in enumerate(lengths)])
        tree_cache.release()
        append(4, [[]] * batch_size)  # by stock
        assert all(layer.keys.isfinite().all() for layer in cache.layers)

    def assert_holds(self, tree_cache, rows, texts, first=None):
        lengths = tree_cache.lengths
        for index, (layer, text) in enumerate(zip(tree_cache.cache.layers, texts, strict=True)):
            shown_from = tree_cache.visible_from(index)
            assert layer.keys.shape[0] == len(rows)
            assert layer.get_seq_length() == max(lengths[row] for row in rows)
            for slot, row in enumerate(rows):
                assert lengths[row] == len(text[row])
                begin = shown_from if first is None else max(shown_from, first[index])
                for kind, held in enumerate((layer.keys, layer.values)):
                    expected = [entry[kind] for entry in text[row]][begin:]
                    if expected:
                        found = held[slot, :, begin - shown_from : len(text[row]) - shown_from]
                        assert torch.equal(found, torch.stack(expected, dim=1))

    def test_tree_cache_frees_buffers_of_rows_set_aside(self):
        cache = DynamicCache()
        for index in range(2):
            cache.update(*states(8, 100), index)
        tree_cache = TreeCache(cache, 8)
        cache.update(*states(8, 1), 0), cache.update(*states(8, 1), 1)
        tree_cache.keep([[0]] * 8)
        old = weakref.ref(cache.layers[0]._buffers["keys"])
        tree_cache.set_aside([0, 1, 2])
        assert old() is None
        aside = [left for of_layer in tree_cache._aside._left.values() for left in of_layer]
        assert [left.states[0].shape for left in aside] == [(3, HEADS, 101, HEAD_DIM)] * 2
        assert all(s.untyped_storage().nbytes() == s.nbytes for left in aside for s in left.states)
