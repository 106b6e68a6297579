"""The store: capped, exact, apart by adapters, shared by threads, on disk and back."""

from __future__ import annotations

import json
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speculate.errors import CheckpointError
from hf_speculate_plugins.suffix import SuffixStore
from hf_speculate_plugins.suffix import store as store_module


deterministic = settings(derandomize=True, deadline=None, max_examples=60, database=None)
OUTPUTS = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=8)


def filled(outputs, adapters="", **limits):
    store = SuffixStore(**limits)
    store.attach(10)
    for output in outputs:
        store.extend(store.begin(adapters), output)
    return store


def contents(store, adapters=""):
    """All counts, as plain dictionaries."""
    return {context: found.counts for context, found in store.counts(adapters).followers.items()}


@deterministic
@given(OUTPUTS, st.integers(1, 20))
def test_store_drops_the_oldest_texts_above_its_cap(outputs, max_tokens):
    store = filled(outputs, max_tokens=max_tokens)
    kept = len(store)
    assert store.num_tokens == sum(map(len, outputs[len(outputs) - kept :])) <= max_tokens
    assert contents(store) == contents(filled(outputs[len(outputs) - kept :]))


def test_adapters_do_not_see_each_others_text():
    store = filled([[1, 2, 3]], adapters="a")
    assert contents(store, "a")
    assert contents(store, "b") == {}


def test_clear_leaves_nothing_and_running_requests_stay_out():
    store = filled([[1, 2, 3], [1, 2, 4]])
    number = store.begin("")
    store.clear()
    store.extend(number, [1, 2])
    assert (len(store), store.num_tokens, contents(store)) == (0, 0, {})


def test_threads_lose_nothing():
    store = filled([])

    def write(seed):
        for i in range(60):
            number = store.begin("")
            store.extend(number, [seed, i % 5])
            store.extend(number, [seed])

    threads = [Thread(target=write, args=(seed,)) for seed in range(5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = [[seed, i % 5, seed] for seed in range(5, 9) for i in range(60)]
    assert contents(store) == contents(filled(outputs))


class TestFile:
    def test_store_survives_saving_and_loading(self, tmp_path):
        store = filled([[1, 2, 3, 1, 2], [3, 1, 2]], adapters="a", max_tokens=50)
        store.save(tmp_path / "store.json")
        loaded = SuffixStore.load(tmp_path / "store.json")
        loaded.attach(10)
        assert contents(loaded, "a") == contents(store, "a")
        assert repr(loaded) == repr(store)

    def test_attach_refuses_another_vocabulary_and_keeps_the_store(self, tmp_path):
        store = filled([[1, 2, 3]])
        before = contents(store)
        with pytest.raises(CheckpointError, match="a vocabulary of 10, the target's has 11"):
            store.attach(11)
        assert contents(store) == before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "x"}, "expected 'hf_speculate"),
            ({"requests": {}}, "requests is {}, expected a list"),
            ({"requests": None}, "requests.* is null"),
            ({"requests": [{"adapters": "", "tokens": [10]}]}, "not tokens below 10"),
            ({"requests": [{"adapters": "", "tokens": [True]}]}, "not tokens below 10"),
            ({"requests": [3]}, "not tokens below 10"),
            ({"vocab_size": "many"}, "vocab_size"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 2}, "3 tokens are above its own limit"),
        ],
    )
    def test_load_refuses_broken_files(self, tmp_path, change, message):
        path = tmp_path / "store.json"
        filled([[1, 2, 3]]).save(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(CheckpointError, match=message):
            SuffixStore.load(path)

    def test_save_refuses_stores_that_load_would_refuse(self, tmp_path, monkeypatch):
        """A store may be larger than any other JSON file."""
        path, store = tmp_path / "store.json", filled([[1, 2, 3]], adapters="x" * (65 << 20))
        store.save(path)
        assert repr(SuffixStore.load(path)) == repr(store)
        monkeypatch.setattr(store_module, "_MAX_BYTES", 64 << 20)
        before = path.stat()
        with pytest.raises(CheckpointError, match=r"more than the 64 MB that are read; lower max_tokens.*is lost"):
            store.save(path)
        assert path.stat() == before

    def test_cut_files_are_refused_and_a_failed_save_leaves_the_old_one(self, tmp_path):
        path = tmp_path / "store.json"
        store = filled([[1, 2, 3]])
        store.save(path)
        whole = path.read_bytes()
        (tmp_path / "cut.json").write_bytes(whole[:-20])
        with pytest.raises(CheckpointError, match=r"cut\.json"):
            SuffixStore.load(tmp_path / "cut.json")
        with pytest.raises(CheckpointError, match="cannot write"):
            store.save(path / "below a file")
        assert path.read_bytes() == whole


def test_the_limit_is_positive():
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        SuffixStore(max_tokens=0)
