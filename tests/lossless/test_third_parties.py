"""Code of others that draws random numbers, or takes what it gets apart, while a request runs."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_speculate import Speculator
from hf_speculate.testing import RandomDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads, StaticTree

from ..support.replays import stand_in
from ..support.tiny_heads import write_eagle_head


VOCAB_SIZE, WIDTH, NEW_TOKENS = 96, 9, 18


class DrawingStreamer:
    def __init__(self):
        self.num_puts = 0

    def put(self, value):
        self.num_puts += 1
        if self.num_puts % 3 == 0:
            torch.rand(3)

    def end(self):
        pass


class DrawingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        torch.rand(3)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class DrawingProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


OTHERS = {
    "a streamer": lambda: {"streamer": DrawingStreamer()},
    "a criterion": lambda: {"stopping_criteria": StoppingCriteriaList([DrawingCriterion()])},
    "a processor": lambda: {"logits_processor": LogitsProcessorList([DrawingProcessor()])},
    "all of them": lambda: {
        "streamer": DrawingStreamer(),
        "stopping_criteria": StoppingCriteriaList([DrawingCriterion()]),
        "logits_processor": LogitsProcessorList([DrawingProcessor()]),
    },
}


class DrawingDrafter(ScriptedDrafter):
    """Draws wherever it is called."""

    def start(self, request):
        torch.rand(2)
        session = super().start(request)
        session.draft = self._drawing(session.draft)
        session.observe = self._drawing(session.observe)
        session.close = self._drawing(session.close)
        return session

    @staticmethod
    def _drawing(method):
        def call(*args):
            torch.rand(3)
            return method(*args)

        return call


def generate(model, ids, seed, speculator, **request):
    torch.manual_seed(seed)
    text = model.generate(ids, max_new_tokens=NEW_TOKENS, **request, speculator=speculator)
    return text, torch.get_rng_state()


def drafters(model, script, tiny_model):
    yield ScriptedDrafter(script, (2, 2, 1), accuracy=0.9, vocab_size=VOCAB_SIZE)
    yield DraftModelDrafter(tiny_model(), DraftModelOptions(depth=4, top_k=2))  # drafts along the noise


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_random_numbers_drawn_by_others_keep_text_and_rng_plain(tiny_model, prompt, name, num_rows):
    model = tiny_model()
    ids = torch.cat([prompt(WIDTH, seed=row) for row in range(num_rows)])
    if num_rows > 1 and "streamer" in OTHERS[name]():
        ids = ids[:1]  # stock streams one row
    for do_sample in (False, True):
        plain, rng = generate(model, ids, 3, None, do_sample=do_sample, **OTHERS[name]())
        for drafter in drafters(model, plain[:, WIDTH:], tiny_model):
            ours, our_rng = generate(model, ids, 3, Speculator(drafter), do_sample=do_sample, **OTHERS[name]())
            assert torch.equal(ours, plain), type(drafter).__name__
            assert torch.equal(our_rng, rng), type(drafter).__name__


@pytest.mark.usefixtures("unchecked_shapes")
def test_tokens_chosen_by_the_forward_are_dropped_after_others_draw(tiny_model, prompt, monkeypatch):
    """As on a GPU: all tokens of a round are chosen at once, with noise that a criterion then makes outdated."""
    model, ids, others = tiny_model(), prompt(WIDTH), OTHERS["a criterion"]
    plain, rng = generate(model, ids, 3, None, do_sample=True, **others())
    stand_in(monkeypatch)
    speculator = Speculator(ScriptedDrafter(plain[:, WIDTH:], (1,) * 5, vocab_size=VOCAB_SIZE))
    ours, our_rng = generate(model, ids, 3, speculator, do_sample=True, **others())
    assert torch.equal(ours, plain)
    assert torch.equal(our_rng, rng)


def test_round_continues_after_a_streamer_that_draws_nothing(tiny_model, prompt):
    class Silent(DrawingStreamer):
        def put(self, value):
            self.num_puts += 1

    model, ids = tiny_model(), prompt(WIDTH)
    plain, _ = generate(model, ids, 3, None, do_sample=True)
    speculator = Speculator(ScriptedDrafter(plain[:, WIDTH:], (1,) * 5, vocab_size=VOCAB_SIZE))
    ours, _ = generate(model, ids, 3, speculator, do_sample=True, streamer=Silent())
    assert torch.equal(ours, plain)
    assert speculator.stats.mean_acceptance_length > 4


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_drafter_that_draws_keeps_text_and_rng_plain(tiny_model, prompt, do_sample):
    model, ids = tiny_model(), torch.cat([prompt(WIDTH), prompt(WIDTH, seed=1)])
    plain, rng = generate(model, ids, 3, None, do_sample=do_sample)
    drafter = DrawingDrafter(plain[:, WIDTH:], (2, 2), accuracy=0.8, vocab_size=VOCAB_SIZE)
    ours, our_rng = generate(model, ids, 3, Speculator(drafter), do_sample=do_sample)
    assert torch.equal(ours, plain)
    assert torch.equal(our_rng, rng)


class TakesTextApart(LogitsProcessor):
    def __call__(self, input_ids, scores):
        assert input_ids.dtype == torch.long or input_ids.shape[1] == WIDTH
        input_ids.view(-1)
        return scores


class TakesTextApartToo(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.dtype == torch.long
        input_ids.view(-1)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_texts_are_contiguous_and_int64(tiny_model, prompt, num_rows, dtype):
    model = tiny_model()
    ids = torch.cat([prompt(WIDTH, seed=row) for row in range(num_rows)]).to(dtype)
    for speculator in (None, Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))):
        text = model.generate(
            ids,
            max_new_tokens=6,
            logits_processor=LogitsProcessorList([TakesTextApart()]),
            stopping_criteria=StoppingCriteriaList([TakesTextApartToo()]),
            speculator=speculator,
        )
        assert text.dtype == torch.long
    assert torch.equal(text, model.generate(ids.long(), max_new_tokens=6))


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_that_uses_the_targets_matrices_calls_no_hook_on_them(tiny_model, prompt, tmp_path, kind):
    """A hook counts, or adds something for each row: it is about the target's own forwards."""
    model = copy.deepcopy(tiny_model())
    ids, calls = torch.cat([prompt(WIDTH), prompt(WIDTH, seed=1)]), []
    bias = torch.randn(2, 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))

    def add_for_each_row(module, args, output):
        calls.append(output.shape)
        return output + bias

    model.lm_head.register_forward_hook(add_for_each_row)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    request = {"max_new_tokens": 20, "eos_token_id": list(range(3, 12))}
    plain = model.generate(ids, **request)
    if kind == "eagle":
        folder = write_eagle_head(tmp_path / "head", 32, VOCAB_SIZE)
        drafter = EagleDrafter.from_folder(folder, model, depth=3, feature_layers=(0, 1, 2))
    else:
        heads = MedusaHeads(torch.randn(2, 1, 32, 32) * 0.3, torch.randn(2, 1, 32), None)
        drafter = MedusaDrafter(heads, model, tree=StaticTree.of(((0,), (1,), (0, 0))))
    calls.clear()
    speculator = Speculator(drafter)
    assert torch.equal(model.generate(ids, **request, speculator=speculator), plain)
    assert len(calls) == 2 * (speculator.stats.target_forwards + 1)
