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


def filled(outputs, adapters="", prompts=None, **limits):
    """A store of requests that came one after the other, by default without prompts."""
    store = SuffixStore(**limits)
    store.attach(10)
    for output, prompt in zip(outputs, prompts or [()] * len(outputs), strict=True):
        store.extend(*store.begin(adapters, [prompt]), output)
    return store


def answers(store, prompt, adapters=""):
    return [list(tokens) for tokens in store.answers(adapters, prompt)]


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
    number = store.begin("", [[1]])[0]
    store.clear()
    store.extend(number, [1, 2])
    assert (len(store), store.num_tokens, store.num_counted, contents(store)) == (0, 0, 0, {})
    assert answers(store, [1]) == []


def test_threads_lose_nothing():
    store = filled([])

    def write(seed):
        for i in range(60):
            (number,) = store.begin("", [()])
            store.extend(number, [seed, i % 5])
            store.extend(number, [seed])

    threads = [Thread(target=write, args=(seed,)) for seed in range(5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = [[seed, i % 5, seed] for seed in range(5, 9) for i in range(60)]
    assert contents(store) == contents(filled(outputs))


class TestAnswers:
    """What a store keeps for requests with the same prompt."""

    @deterministic
    @given(OUTPUTS, st.lists(st.lists(st.integers(0, 1), max_size=1), min_size=8, max_size=8), st.integers(1, 20))
    def test_outputs_that_are_not_counted_stay_answers_to_their_prompt(self, outputs, prompts, max_tokens):
        prompts = prompts[: len(outputs)]
        store = filled(outputs, prompts=prompts, max_tokens=max_tokens)
        for prompt in ([0], [1]):
            own = [output for output, asked in zip(outputs, prompts, strict=True) if asked == prompt and output]
            assert answers(store, prompt) == own[::-1]
        num_left, sizes = store.num_counted, [len(output) for output in outputs]
        first = next(i for i in range(len(outputs) + 1) if sum(sizes[i:]) <= num_left)
        assert num_left == sum(sizes[first:]) <= max_tokens
        assert contents(store) == contents(filled(outputs[first:]))
        assert answers(store, []) == []

    def test_the_newest_sixteen_are_kept(self):
        store = filled([[i] for i in range(20)], prompts=[[1]] * 20)
        assert answers(store, [1]) == [[i] for i in range(19, 3, -1)]
        assert (len(store), store.num_tokens, store.num_counted) == (16, 16, 16)

    def test_answers_of_two_requests_are_kept_whatever_the_number_of_rows(self):
        store = SuffixStore()
        for epoch in range(3):
            for number in store.begin("", [[1]] * 10 + [[2]]):
                store.extend(number, [epoch])
        assert answers(store, [1]) == [[2]] * 10 + [[1]] * 10
        assert answers(store, [2]) == [[2], [1], [0]]
        store.extend(*store.begin("", [[1]]), [3])  # a single answer, as in an evaluation
        assert answers(store, [1]) == [[3]] + [[2]] * 10 + [[1]] * 9

    def test_answers_of_older_weights_leave_before_those_of_other_prompts(self):
        """Each prompt has room for sixteen answers, all together for 32."""
        store = filled([[0]] * 16 + [[1]] * 16 + [[2]] * 8, prompts=[[1]] * 16 + [[2]] * 16 + [[1]] * 8, max_kept=32)
        assert answers(store, [1]) == [[2]] * 8 + [[0]] * 8
        assert answers(store, [2]) == [[1]] * 16

    def test_the_oldest_requests_leave_above_the_limit(self):
        store = filled([[1, 2], [3, 4], [5]], prompts=[[1], [2], [3]], max_kept=3)
        assert [answers(store, [prompt]) for prompt in (1, 2, 3)] == [[], [[3, 4]], [[5]]]
        assert contents(store) == contents(filled([[3, 4], [5]]))

    def test_outputs_that_are_not_counted_grow_and_leave(self):
        store = filled([[1, 2, 3]], prompts=[[1]], max_tokens=2)
        store.extend(1, [4])
        assert answers(store, [1]) == [[1, 2, 3, 4]]
        assert (store.num_tokens, store.num_counted, contents(store)) == (4, 0, {})
        store.forget(1)
        assert (len(store), store.num_tokens, store.num_counted, answers(store, [1])) == (0, 0, 0, [])

    def test_adapters_do_not_see_each_others_answers(self):
        store = filled([[1, 2]], adapters="a", prompts=[[1]])
        assert answers(store, [1], "a") == [[1, 2]]
        assert answers(store, [1], "b") == []

    def test_running_requests_are_no_answers(self):
        store = SuffixStore()
        number, other = store.begin("", [[1], [1]])
        store.extend(number, [4])
        assert answers(store, [1]) == [[4]]
        store.extend(other, [5])
        assert answers(store, [1]) == [[5], [4]]


class TestFile:
    def test_store_survives_saving_and_loading(self, tmp_path):
        outputs, prompts = [[1, 2, 3, 1, 2], [3, 1, 2], [7]], [[1], [2], [1]]
        store = filled(outputs, adapters="a", prompts=prompts, max_tokens=5, max_kept=50)
        store.save(tmp_path / "store.json")
        loaded = SuffixStore.load(tmp_path / "store.json")
        loaded.attach(10)
        assert contents(loaded, "a") == contents(store, "a")
        assert repr(loaded) == repr(store)
        assert answers(loaded, [1], "a") == [[7], [1, 2, 3, 1, 2]]
        assert loaded.max_kept == 50

    def test_all_answers_to_a_prompt_survive(self, tmp_path):
        store = SuffixStore()
        for number in store.begin("", [[1]] * 20):
            store.extend(number, [number])
        store.attach(100)
        store.save(tmp_path / "store.json")
        assert answers(SuffixStore.load(tmp_path / "store.json"), [1]) == [[number] for number in range(20, 0, -1)]

    def test_files_without_prompts_are_read(self, tmp_path):
        path = tmp_path / "store.json"
        filled([[1, 2, 3]]).save(path)
        content = json.loads(path.read_text())
        del content["max_kept"], content["requests"][0]["prompt"]
        path.write_text(json.dumps(content))
        assert contents(SuffixStore.load(path)) == contents(filled([[1, 2, 3]]))

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
            ({"max_kept": 2}, "3 tokens are above its own limit"),
            ({"max_kept": 0}, "max_kept"),
            ({"requests": [{"adapters": "", "tokens": [1], "prompt": 3}]}, "not tokens below 10"),
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
