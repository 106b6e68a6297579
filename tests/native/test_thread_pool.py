"""PyTorch's threads between the forwards of a request, on a machine that other processes use."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_speculate_gguf.native import binding

from ..support.packed import ids


pytestmark = pytest.mark.usefixtures("needs_kernel")


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Watcher(BaseStreamer):
    """Notes the number of threads whenever a token arrives."""

    def __init__(self):
        self.seen: list[int] = []

    def put(self, value):
        self.seen.append(torch.get_num_threads())

    def end(self):
        self.seen.append(torch.get_num_threads())


Watcher.__module__ = "transformers.watcher"  # code that leaves a model unchanged


class Interrupting(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 7:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


Interrupting.__module__ = "transformers.interrupting"


@pytest.fixture
def busy(monkeypatch):
    """A machine on which thread pools have one thread; notes with how many threads forwards begin."""
    library, forwards = binding.library(), []
    step = library.step
    monkeypatch.setattr(library, "thread_pool_size", lambda most: 1)
    monkeypatch.setattr(library, "step", lambda address: forwards.append(torch.get_num_threads()) or step(address))
    return forwards


def write(model, watcher, **options):
    return model.generate(ids(1, 5), max_new_tokens=4, streamer=watcher, pad_token_id=0, **options)


@pytest.mark.parametrize("speculator", [{}, {"speculator": "prompt_lookup"}])
def test_thread_limit_applies_between_forwards_only(load, busy, speculator):
    model, watcher = load(dtype=torch.float32), Watcher()
    write(model, watcher, do_sample=False, **speculator)
    assert set(watcher.seen[1:-1]) == {1}
    assert set(busy) == {2}
    assert torch.get_num_threads() == 2


def test_thread_limit_spares_processors_whose_sums_depend_on_it(load, busy):
    model, watcher = load(dtype=torch.float32), Watcher()
    write(model, watcher, do_sample=True, typical_p=0.9)
    assert set(watcher.seen) == {2}


def test_interrupted_request_restores_the_number_of_threads(load, busy):
    with pytest.raises(KeyboardInterrupt):
        write(load(dtype=torch.float32), Watcher(), do_sample=False, stopping_criteria=[Interrupting()])
    assert torch.get_num_threads() == 2


def test_nested_request_begins_with_all_threads(load, busy):
    model = load(dtype=torch.float32)
    with torch.no_grad(), model.forward.native.assume_unchanged(is_threaded=False):
        model(ids(1, 5), use_cache=True)
        assert torch.get_num_threads() == 1
        with model.forward.native.assume_unchanged(is_threaded=False):
            assert torch.get_num_threads() == 2


def test_thread_limit_does_not_apply_on_a_quiet_machine(load, busy, monkeypatch):
    monkeypatch.setattr(binding.library(), "thread_pool_size", lambda most: most)
    watcher = Watcher()
    write(load(dtype=torch.float32), watcher, do_sample=False)
    assert set(watcher.seen) == {2}
