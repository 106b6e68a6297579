"""Between which forwards of a request nobody else's code runs."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TextStreamer

from hf_speculate import Speculator, attach, detach
from hf_speculate.drafting import Drafter
from hf_speculate.request import unchanged as module
from hf_speculate.speculator import attached_to
from hf_speculate.testing import EmptyDrafter
from hf_speculate_tools.cli.session import print_piece
from hf_speculate_tools.commands.typing import Typist
from hf_speculate_tools.serving.requests import MeasuredModel, ServedRequest


class Watched:
    """A forward that says when it is left alone."""

    last_problem = ""

    def __init__(self, forward):
        self.forward, self.spans, self.native = forward, [], self
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *arguments, **named):
        return self.forward(*arguments, **named)

    def problem(self):
        return ""

    def move_entries(self, *_arguments):
        return False

    @contextmanager
    def assume_unchanged(self, is_threaded):
        self.spans.append("open")
        yield
        self.spans.append("closed")


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.fixture
def watched(tiny_model, monkeypatch):
    model = tiny_model()
    forward = Watched(model.forward)
    monkeypatch.setitem(vars(model), "forward", forward)
    yield model
    if attached_to(model) is not None:
        detach(model)  # other tests share it


REQUESTS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
    "shortest": {"min_new_tokens": 3},
}


@pytest.mark.parametrize("speculator", [None, EmptyDrafter()], ids=["plain", "speculative"])
@pytest.mark.parametrize("request_kind", REQUESTS)
def test_requests_of_known_code_are_left_alone(request_kind, speculator, watched, prompt):
    chosen = None if speculator is None else Speculator(speculator)
    watched.generate(prompt(5), max_new_tokens=4, pad_token_id=0, speculator=chosen, **REQUESTS[request_kind])
    assert watched.forward.spans == ["open", "closed"]


def test_requests_of_the_server_are_left_alone(watched, prompt):
    speculator = Speculator(EmptyDrafter())
    attach(watched, speculator)
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    served = MeasuredModel(watched, speculator, ServedRequest("/v1/completions"))
    served.generate(input_ids=prompt(5), generation_config=config)
    assert watched.forward.spans == ["open", "closed"]


OTHERS = {
    "a function": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
    "a class": {"logits_processor": LogitsProcessorList([Own()])},
    "a given function": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(20))},
    "a criterion": {"stopping_criteria": [lambda ids, scores, **named: torch.zeros(len(ids), dtype=torch.bool)]},
}


@pytest.mark.parametrize("speculator", [None, EmptyDrafter()], ids=["plain", "speculative"])
@pytest.mark.parametrize("other", OTHERS)
def test_requests_with_code_of_others_open_no_span(other, speculator, watched, prompt):
    chosen = None if speculator is None else Speculator(speculator)
    watched.generate(prompt(5), max_new_tokens=4, pad_token_id=0, speculator=chosen, **OTHERS[other])
    assert not watched.forward.spans


def test_drafters_and_streamers_of_others_are_not_known():
    class Ours(EmptyDrafter):
        pass

    class Printing(TextStreamer):
        pass

    Ours.__module__ = "hf_speculate_plugins.somewhere"
    assert isinstance(Ours(), Drafter)
    assert module._is_known(Ours())
    assert module._is_known(TextStreamer(None))
    assert not module._is_known(Printing(None))
    Ours.__module__ = "somebody_elses"
    assert not module._is_known(Ours())


def test_functions_inside_a_streamer_are_known_if_they_are_ours_and_hold_nothing():
    held = []

    def closure(text):
        held.append(text)

    closure.__module__ = print_piece.__module__
    assert module._is_known(Typist(None, print_piece)), "the one of `hf-speculate chat` and `generate`"
    assert not module._is_known(Typist(None, closure))
    assert not module._is_known(Typist(None, lambda text: None))
    made: dict[str, Any] = {}
    exec("def write(text): pass", made)
    assert made["write"].__module__ is None
    assert not module._is_known(Typist(None, made["write"]))
