"""Ctrl-C and exceptions in the middle of requests of every drafter: afterwards all is as if nothing had been."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_speculate.cache import as_cache

from ..support.every_drafter import CASES, Targets
from ..support.models import state_of
from ..support.tiers import quick


class Boom(Exception):
    pass


class CountDown:
    """Raises `Boom` at one of its calls."""

    row_wise = True

    def __init__(self, at: int):
        self.left = at

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Boom


class Processor(CountDown, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.count()
        return scores


class Criterion(CountDown, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(CountDown):
    def put(self, value) -> None:
        self.count()

    def end(self) -> None:
        raise AssertionError("the stream was broken off")


BREAKING = {
    "processor": lambda at: {"logits_processor": LogitsProcessorList([Processor(at)])},
    "criterion": lambda at: {"stopping_criteria": StoppingCriteriaList([Criterion(at)])},
    "streamer": lambda at: {"streamer": Streamer(at)},
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"))


def facts_of(model: Any) -> tuple[Any, ...]:
    """Everything that a request might leave changed, without the random numbers."""
    return state_of(model)[:-1]


def assert_untouched(targets: Targets, case: tuple[str, str], speculator: Any, before: Any, known: Any) -> None:
    """Model, default generator and the next texts are those of a process in which nothing was broken off."""
    name, _ = case
    assert facts_of(targets.load(name)) == before, case
    for sample in (False, True):
        assert torch.equal(targets.text(name, sample, speculator), known[sample][0]), (case, sample)
        assert torch.equal(torch.get_rng_state(), known[sample][1]), (case, sample)


def text_and_state(targets: Targets, name: str, sample: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return targets.text(name, sample), torch.get_rng_state()


@pytest.mark.parametrize("kind", BREAKING)
@pytest.mark.parametrize("case", quick(CASES, CASES[0], CASES[9]), ids=lambda case: case[0])
def test_exceptions_of_the_request_leave_everything_as_it_was(targets, case, kind):
    name, drafter = case
    known = {sample: text_and_state(targets, name, sample) for sample in (False, True)}
    speculator = targets.speculator(name, drafter)
    targets.text(name, False, speculator)  # a head's hooks on the target stay
    before = facts_of(targets.load(name))
    for at in (0, 1, 2, 5, 11):
        with pytest.raises(Boom):
            targets.text(name, at % 2 == 0, speculator, is_alone=kind == "streamer", **BREAKING[kind](at))
        assert_untouched(targets, case, speculator, before, known)


@pytest.mark.slow
def test_ctrl_c_at_random_points_leaves_everything_as_it_was(targets):
    choose, num_interrupted = random.Random(0), 0

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        facts: dict[Any, Any] = {}
        while num_interrupted < 300:
            case = name, drafter = choose.choice(CASES)
            if case not in facts:
                known = {sample: text_and_state(targets, name, sample) for sample in (False, True)}
                speculator = targets.speculator(name, drafter)
                began = time.perf_counter()
                targets.text(name, False, speculator)
                facts[case] = speculator, facts_of(targets.load(name)), known, time.perf_counter() - began
            speculator, before, known, seconds = facts[case]
            cache, sample = DynamicCache(config=targets.load(name).config), choose.random() < 0.5
            signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-4, seconds))
            try:
                targets.text(name, sample, speculator, **as_cache(cache))
            except KeyboardInterrupt:
                num_interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert_untouched(targets, case, speculator, before, known)
            assert_continues(targets, name, speculator, cache, known[sample][0], sample)
    finally:
        signal.signal(signal.SIGALRM, handler)


def assert_continues(
    targets: Targets, name: str, speculator: Any, cache: Any, text: torch.Tensor, sample: bool
) -> None:
    """A greedy text goes on from the cache of a broken request."""
    length, prompt = cache.get_seq_length(), targets.inputs(name)
    if sample or length < prompt["input_ids"].shape[1] or length >= text.shape[1]:
        return
    written = text[:, : length + 1]
    mask = torch.cat([prompt["attention_mask"], torch.ones_like(written[:, prompt["input_ids"].shape[1] :])], dim=1)
    more = {"max_new_tokens": text.shape[1] - written.shape[1], **as_cache(cache)}
    if more["max_new_tokens"] and len(text) == 1:
        model = targets.load(name)
        found = model.generate(written, attention_mask=mask, do_sample=False, speculator=speculator, **more)
        assert torch.equal(found, text), name
