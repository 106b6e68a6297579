"""Drafting ahead: neither text, RNG nor counts depend on what the drafter's thread does or how long it takes; and it is
gone when the request is."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import CACHE_NAME, as_cache
from hf_speculate.errors import DrafterError, OptionError
from hf_speculate.testing import ScriptedDrafter
from hf_speculate.testing.scripted import _ScriptedSession
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.inputs import padded_batch, random_prompt
from ..support.interruptions import RaisingCriterion, assert_usable
from ..support.models import VOCAB_SIZE
from ..support.tiers import quick


NEW_TOKENS = 32


class Timed(ScriptedDrafter):
    """A script whose drafts ahead do something else, too: sleep, look around, die."""

    def __init__(self, *args, does=lambda: None, **kwargs):
        super().__init__(*args, vocab_size=VOCAB_SIZE, **kwargs)
        self.does = does

    def start(self, request):
        return _TimedSession(self, self.rows, None)


class _TimedSession(_ScriptedSession):
    def ahead(self, state, path):
        tree = super().ahead(state, path)
        self.script.does()
        return tree


def script(model, ids, does=lambda: None, branching=(1, 1, 1), accuracy=0.8, **request):
    torch.manual_seed(3)
    text = model.generate(ids, max_new_tokens=NEW_TOKENS + 8, **request)[:, ids.shape[1] :]
    return Timed(text, branching, accuracy=accuracy, does=does)


def run(model, ids, speculator, **request):
    torch.manual_seed(3)
    return model.generate(ids, max_new_tokens=NEW_TOKENS, speculator=speculator, **request), torch.get_rng_state()


def looking_ahead(drafter, ahead=True):
    return Speculator(drafter, adaptive=False, ahead=ahead)


def counts(stats):
    return {name: value for name, value in stats.to_dict().items() if isinstance(value, int)} | {
        "accepted": stats.accepted_histogram
    }


@contextmanager
def no_thread_is_left():
    before = set(threading.enumerate())
    num_threads = torch.get_num_threads()
    yield
    assert set(threading.enumerate()) == before
    assert torch.get_num_threads() == num_threads


REQUESTS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "with the prefix": {"do_sample": True, "repetition_penalty": 1.2},
    "stopped": {"eos_token_id": list(range(0, VOCAB_SIZE, 9))},
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2, 1)], ids=["chain", "tree"])
def test_text_rng_and_counts_do_not_depend_on_the_time_that_drafts_take(tiny_model, branching, request_):
    model, ids, found = tiny_model(), random_prompt(9), []
    plain = run(model, ids, None, **request_)
    numbers = random.Random(0)
    for does in (lambda: None, lambda: time.sleep(0.01), lambda: time.sleep(numbers.choice([0, 0.003]))):
        speculator = looking_ahead(script(model, ids, does, branching, **request_))
        with no_thread_is_left():
            ours = run(model, ids, speculator, **request_)
        assert torch.equal(ours[0], plain[0])
        assert torch.equal(ours[1], plain[1])
        found.append(counts(speculator.stats))
    assert found[0] == found[1] == found[2]
    if not request_:
        assert 0 < found[0]["drafts_ahead_taken"] < found[0]["drafts_ahead"], "right guesses and wrong ones are needed"


def test_a_chain_made_ahead_is_the_chain_that_would_have_been_drafted(tiny_model):
    """So the rounds are the same: as many, as long."""
    model, ids = tiny_model(), random_prompt(9)
    rounds = {}
    for ahead in (False, True):
        draft_model = DraftModelDrafter(tiny_model(seed=1), DraftModelOptions(depth=3))
        request = {"max_new_tokens": NEW_TOKENS, "speculator": looking_ahead(draft_model, ahead)}
        rounds[ahead] = list(hf_speculate.rounds(model, ids, **request))
    assert [round.tree.host for round in rounds[True]] == [round.tree.host for round in rounds[False]]
    assert not any(round.is_ahead for round in rounds[False])


@pytest.mark.parametrize("kind", quick(["llama", "qwen2", "windows"], "llama", "windows"))
@pytest.mark.parametrize("top_k", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_draft_model_that_is_always_right_is_always_ahead(tiny_model, kind, top_k, do_sample):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} if kind == "windows" else {}
    model, ids = tiny_model("qwen2" if windows else kind, **windows), random_prompt(12)
    plain = run(model, ids, None, do_sample=do_sample)
    drafter = DraftModelDrafter(model, DraftModelOptions(depth=3, top_k=top_k, max_nodes=24))
    speculator = looking_ahead(drafter)
    ours = run(model, ids, speculator, do_sample=do_sample)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    stats = speculator.stats
    assert stats.drafts_ahead > 4
    assert stats.drafts_ahead_taken == stats.drafts_ahead
    assert "100% of" in stats.summary()


class Dies(Exception):
    pass


def die():
    raise Dies("on purpose")


def test_an_error_counts_where_the_draft_would_have_been_used(tiny_model):
    model, ids = tiny_model(dtype=torch.float64), random_prompt(9)
    cache = DynamicCache(config=model.config)
    with no_thread_is_left(), pytest.raises(DrafterError, match="raised Dies: on purpose"):
        run(model, ids, looking_ahead(script(model, ids, die, accuracy=1.0)), **as_cache(cache))
    assert_usable(model, ids, model.generate(ids, max_new_tokens=48), cache)
    with no_thread_is_left():
        ours = run(model, ids, looking_ahead(script(model, ids, die, accuracy=0.0)))
    assert torch.equal(ours[0], run(model, ids, None)[0])


class TestItIsGone:
    """However a request ends while a draft is being made: no thread is left, cache and model are usable."""

    @pytest.fixture
    def setting(self, tiny_model):
        model, ids = tiny_model(dtype=torch.float64), random_prompt(9)
        return model, ids, script(model, ids, lambda: time.sleep(0.02), accuracy=0.9), DynamicCache(config=model.config)

    def test_thread_ends_with_an_abandoned_stream(self, setting):
        model, ids, drafter, cache = setting
        with no_thread_is_left():
            request = {"max_new_tokens": NEW_TOKENS, CACHE_NAME: cache, "speculator": looking_ahead(drafter)}
            for number, _ in enumerate(hf_speculate.rounds(model, ids, **request)):
                if number == 3:
                    break
            del _
        assert_usable(model, ids, model.generate(ids, max_new_tokens=48), cache)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, Dies])
    def test_thread_ends_after_an_error_in_verification(self, setting, error):
        model, ids, drafter, cache = setting
        criteria = StoppingCriteriaList([RaisingCriterion(20, error())])
        with no_thread_is_left(), pytest.raises(error):
            run(model, ids, looking_ahead(drafter), **as_cache(cache), stopping_criteria=criteria)
        assert_usable(model, ids, model.generate(ids, max_new_tokens=48), cache)

    def test_thread_ends_after_an_interrupted_forward(self, setting):
        model, ids, drafter, cache = setting
        calls = iter([None] * 5)

        def interrupt(*_):
            if next(calls, 0) == 0:
                raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_hook(interrupt)
        with no_thread_is_left(), pytest.raises(KeyboardInterrupt):
            run(model, ids, looking_ahead(drafter), **as_cache(cache))
        hook.remove()
        assert_usable(model, ids, model.generate(ids, max_new_tokens=48), cache)


def test_a_streamer_that_draws_does_not_change_what_is_drafted_by_chance(tiny_model):
    """What it draws changes the noise of what comes: a draft with the old noise is not taken, however fast it was."""

    class Draws:
        def put(self, value):
            torch.rand(1)

        def end(self):
            pass

    model, ids, found = tiny_model(), random_prompt(9), []
    request = {"do_sample": True, "streamer": Draws()}
    plain = run(model, ids, None, **request)
    for does in (lambda: None, lambda: time.sleep(0.005)):
        speculator = looking_ahead(script(model, ids, does, do_sample=True))
        ours = run(model, ids, speculator, **request)
        assert torch.equal(ours[0], plain[0])
        assert torch.equal(ours[1], plain[1])
        found.append(counts(speculator.stats))
    assert found[0] == found[1]


def test_the_thread_computes_as_its_caller_would(tiny_model):
    """PyTorch keeps these for every thread."""
    seen, model, ids = set(), tiny_model(), random_prompt(9)

    def look():
        kinds = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        seen.add((*kinds, torch.get_autocast_dtype("cpu")))

    run(model, ids, looking_ahead(script(model, ids, look)))
    assert seen == {(False, False, False, torch.bfloat16)}
    seen.clear()
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        run(model, ids, looking_ahead(script(model, ids, look)))
    assert seen == {(True, False, True, torch.float16)}


def test_threads_of_pytorch_are_divided_while_both_compute(tiny_model, set_threads):
    set_threads(4)
    model, ids, of_drafter, of_target = tiny_model(), random_prompt(9), set(), []
    hook = model.lm_head.register_forward_hook(lambda *_: of_target.append(torch.get_num_threads()))
    speculator = looking_ahead(script(model, ids, lambda: of_drafter.add(torch.get_num_threads()), accuracy=1.0))
    with no_thread_is_left():
        of_target.clear()
        run(model, ids, speculator)
    hook.remove()
    assert of_drafter == {1}
    assert of_target[0] == 4, "the prompt runs alone"
    assert set(of_target[1:-1]) == {3}
    new: list[int] = []
    thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert new == [4], "threads that others begin later"


class TestWhatCannotBeAhead:
    def test_ahead_refuses_drafters_that_cannot_draft_ahead(self, tiny_model):
        with pytest.raises(OptionError, match="'prompt_lookup' drafts nothing ahead; of the built-in ones draft_model"):
            AutoSpeculator.from_name("prompt_lookup", target=tiny_model(), ahead=True)

    def test_ahead_falls_back_for_batches_with_a_reason(self, tiny_model):
        model, batch = tiny_model(), padded_batch(random_prompt, (9, 5))
        drafter = DraftModelDrafter(tiny_model(seed=1), DraftModelOptions(depth=3))
        speculator = looking_ahead(drafter)
        ours = model.generate(**batch, max_new_tokens=12, speculator=speculator)
        assert torch.equal(ours, model.generate(**batch, max_new_tokens=12, speculator=None))
        assert speculator.stats.drafts_ahead == 0
        assert any("nothing is drafted ahead" in reason for reason in speculator.stats.fallbacks)
