"""Every logits processor that stock `generate` builds, and those that users bring: equal to plain, row by row."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process as lp

from hf_speculate import Speculator
from hf_speculate.drafting import RAW_LAST
from hf_speculate.testing import EmptyDrafter, RandomDrafter, ScriptedDrafter
from hf_speculate.verification.processors import without_inspection
from hf_speculate.verification.sampler import Sampler

from ..support.inputs import padded_batch
from ..support.models import VOCAB_SIZE
from ..support.recording import Tapping
from ..support.tiers import quick


NEW_TOKENS = 14
LENGTHS = (9, 4, 1)
SOME_EOS = list(range(3, 20))


def one_in_three_is_forbidden(batch_id: int, text: torch.Tensor) -> list[int]:
    return [token for token in range(3, VOCAB_SIZE) if (token + int(text[-1]) + batch_id) % 3]


pytestmark = pytest.mark.usefixtures("unchecked_shapes")

REQUESTS = {
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor: {"guidance_scale": 1.7},
    lp.SequenceBiasLogitsProcessor: {"sequence_bias": [[[5], -3.0], [[7, 9], 4.0]]},
    lp.EncoderRepetitionPenaltyLogitsProcessor: {"encoder_repetition_penalty": 1.4},
    lp.RepetitionPenaltyLogitsProcessor: {"repetition_penalty": 1.4},
    lp.NoRepeatNGramLogitsProcessor: {"no_repeat_ngram_size": 2},
    lp.EncoderNoRepeatNGramLogitsProcessor: {"encoder_no_repeat_ngram_size": 2},
    lp.NoBadWordsLogitsProcessor: {"bad_words_ids": [[5], [9, 11]]},
    lp.MinLengthLogitsProcessor: {"min_length": 18, "eos_token_id": SOME_EOS},
    lp.MinNewTokensLengthLogitsProcessor: {"min_new_tokens": 10, "eos_token_id": SOME_EOS},
    lp.PrefixConstrainedLogitsProcessor: {"prefix_allowed_tokens_fn": one_in_three_is_forbidden},
    lp.ForcedBOSTokenLogitsProcessor: {"forced_bos_token_id": 5},
    lp.ForcedEOSTokenLogitsProcessor: {"forced_eos_token_id": [90, 91], "eos_token_id": [90, 91]},
    lp.InfNanRemoveLogitsProcessor: {"remove_invalid_values": True},
    lp.ExponentialDecayLengthPenalty: {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": [3, 4, 5]},
    lp.SuppressTokensLogitsProcessor: {"suppress_tokens": list(range(3, 50))},
    lp.SuppressTokensAtBeginLogitsProcessor: {"begin_suppress_tokens": list(range(3, 60))},
    lp.TemperatureLogitsWarper: {"temperature": 0.7},
    lp.TopHLogitsWarper: {"top_h": 0.5},
    lp.TopKLogitsWarper: {"top_k": 5},
    lp.TopPLogitsWarper: {"top_p": 0.8, "top_k": 0},
    lp.MinPLogitsWarper: {"min_p": 0.1, "top_k": 0},
    lp.TypicalLogitsWarper: {"typical_p": 0.7},
    lp.EpsilonLogitsWarper: {"epsilon_cutoff": 0.02},
    lp.EtaLogitsWarper: {"eta_cutoff": 0.02},
    lp.WatermarkLogitsProcessor: {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
    lp.SynthIDTextWatermarkLogitsProcessor: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3)
    },
    lp.LogitNormalization: {"renormalize_logits": True},
}
NAMED = {kind.__name__: request for kind, request in REQUESTS.items()}
NAMED["WatermarkSelfHash"] = {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")}
ONLY_SAMPLING = {kind.__name__ for kind in REQUESTS if kind.__name__.endswith("Warper")}


def generate(model, inputs, speculator, **request):
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(
            **inputs, **request, speculator=speculator, return_dict_in_generate=True, output_scores=True
        )
    return output, torch.get_rng_state()


def assert_equals_plain(model, inputs, **request):
    """Tokens, scores of all steps before a row's end, and the RNG. Returns our last output."""
    width = inputs["input_ids"].shape[1]
    plain, rng = generate(model, inputs, None, **request)
    script = plain.sequences[:, width:]
    for drafter in (
        ScriptedDrafter(script, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE),
        RandomDrafter(vocab_size=VOCAB_SIZE),
    ):
        ours, our_rng = generate(model, inputs, Speculator(drafter), **request)
        assert torch.equal(ours.sequences, plain.sequences), drafter.name
        assert torch.equal(our_rng, rng), f"{drafter.name}: equal text, but the RNG is elsewhere"
        eos = request.get("eos_token_id") or []
        running = torch.ones(len(script), dtype=torch.bool)
        for step, (a, b) in enumerate(zip(ours.scores, plain.scores, strict=True)):
            torch.testing.assert_close(a[running], b[running], atol=2e-4, rtol=1e-4)
            running &= torch.tensor([int(token) not in eos for token in script[:, step]])
    return ours


def test_the_list_is_that_of_transformers():
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    built = set(re.findall(r"\b([A-Z]\w+)\(", source)) & set(vars(lp))
    watermarks = {"WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}  # made by their configs
    assert built | watermarks == {kind.__name__ for kind in REQUESTS} | {"LogitsProcessorList"}


CASES = [(name, do_sample) for name in NAMED for do_sample in (False, True) if do_sample or name not in ONLY_SAMPLING]


@pytest.mark.parametrize("lengths", quick([LENGTHS[:1], LENGTHS], LENGTHS), ids=["one", "batch"])
@pytest.mark.parametrize(("name", "do_sample"), CASES, ids=[f"{n}-{'sample' if s else 'greedy'}" for n, s in CASES])
def test_processors_give_plain_text(tiny_model, prompt, name, lengths, do_sample):
    if name == "ForcedBOSTokenLogitsProcessor":
        lengths = [1] * len(lengths)  # it forces the second token of the text
    model, inputs = tiny_model("qwen2"), padded_batch(prompt, lengths)
    request = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, **NAMED[name]}
    if name == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
        request["negative_prompt_ids"] = inputs["input_ids"].flip(1)
    ours = assert_equals_plain(model, inputs, **request)
    if name != "InfNanRemoveLogitsProcessor":
        bare = {key: request[key] for key in ("max_new_tokens", "do_sample", "eos_token_id") if key in request}
        without, _ = generate(model, inputs, None, **bare, top_k=0)
        pairs = zip(ours.scores, without.scores, strict=False)
        assert any(not torch.allclose(a, b, atol=1e-3) for a, b in pairs), "the processor does nothing here"


OF_PROMPTS = ("PrefixConstrained", "EncoderNoRepeatNGram", "EncoderRepetitionPenalty")


@pytest.mark.parametrize("name", [f"{name}LogitsProcessor" for name in OF_PROMPTS])
def test_processors_give_plain_text_for_several_texts_of_a_prompt(tiny_model, prompt, name):
    """Some processors count rows by prompt."""
    inputs = padded_batch(prompt, LENGTHS[:2])
    request = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "num_return_sequences": 3, **NAMED[name]}
    assert_equals_plain(tiny_model("qwen2"), inputs, **request)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_many_processors_together_give_plain_text(tiny_model, prompt, do_sample):
    model, inputs = tiny_model(), padded_batch(prompt, LENGTHS)
    request = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "eos_token_id": SOME_EOS}
    for name in (
        "SequenceBiasLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "WatermarkLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "LogitNormalization",
    ):
        request |= NAMED[name]
    ours = assert_equals_plain(model, inputs, **request)
    assert not any("lock-step" in reason for reason in ours.speculation.fallbacks), "each of these sees one row only"


class DrawsFromTheGlobalRng(LogitsProcessor):
    """Its draws come between those of the sampler: noise must not be drawn ahead of them."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand(scores.shape)


class CountsCalls(LogitsProcessor):
    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.clone())
        return scores.roll(len(self.calls), dims=-1)


class WritesInPlace(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, input_ids[:, -1] % VOCAB_SIZE] = -torch.inf
        return scores


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["one", "batch"])
@pytest.mark.parametrize("kind", [DrawsFromTheGlobalRng, CountsCalls, WritesInPlace])
def test_users_processors_give_plain_text(tiny_model, prompt, kind, lengths, do_sample):
    model, inputs = tiny_model(), padded_batch(prompt, lengths)
    outcomes = []
    for drafter in (None, RandomDrafter(vocab_size=VOCAB_SIZE), "scripted"):
        processor = kind()
        if drafter == "scripted":
            script = outcomes[0][0][:, max(lengths) :]
            drafter = ScriptedDrafter(script, (2, 1, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
        torch.manual_seed(2)
        text = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=do_sample,
            logits_processor=LogitsProcessorList([processor]),
            speculator=None if drafter is None else Speculator(drafter),
        )
        outcomes.append((text, torch.get_rng_state(), getattr(processor, "calls", [])))
    for text, rng, calls in outcomes[1:]:
        assert torch.equal(text, outcomes[0][0])
        assert torch.equal(rng, outcomes[0][1])
        assert [call.tolist() for call in calls] == [call.tolist() for call in outcomes[0][2]]


def test_a_processor_that_runs_the_target_disturbs_no_feature(tiny_model, prompt):
    # Classifier-free guidance runs the target between a round's forward and the drafter's observation.
    model, ids = tiny_model(dtype=torch.float64), prompt(9)
    request = {"max_new_tokens": 30, "guidance_scale": 1.5}
    plain = model.generate(ids, **request)
    drafter = Tapping(plain[:, 9:], (2, 2, 2), (1, RAW_LAST), accuracy=0.8)
    assert torch.equal(model.generate(ids, **request, speculator=Speculator(drafter)), plain)
    raw = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, inputs, output: raw.append(output))
    hidden = model(plain[:, :-1], output_hidden_states=True).hidden_states
    hook.remove()
    assert drafter.assert_saw({1: hidden[1], RAW_LAST: raw[0]}) > 20


class ForbidsEverything(LogitsProcessor):
    def __init__(self, length, value, row=0):
        self.length, self.value, self.row = length, value, row

    def __call__(self, input_ids, scores):
        if self.length in (None, input_ids.shape[1]):
            scores[self.row] = self.value
        return scores


@pytest.mark.parametrize("tier", ["walk", "scores", "prefix"])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_scores_that_cannot_be_sampled_from_are_stocks_error(tiny_model, prompt, monkeypatch, value, tier):
    model, inputs = tiny_model(), padded_batch(prompt, LENGTHS)
    script = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=True)[:, 9:]
    if tier != "walk":  # on accelerators all nodes are sampled at once
        monkeypatch.setattr(Sampler, "tier", lambda self, device: tier)
    for speculator in (None, Speculator(ScriptedDrafter(script, (2, 2), vocab_size=VOCAB_SIZE))):
        processor = ForbidsEverything(None if tier == "scores" else 14, value, row=0)
        processor.row_wise = tier != "walk"
        with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan` or element < 0"):
            model.generate(
                **inputs,
                max_new_tokens=NEW_TOKENS,
                do_sample=True,
                logits_processor=LogitsProcessorList([processor]),
                speculator=speculator,
            )


def test_known_processors_are_called_without_a_look_at_their_signatures(monkeypatch):
    """The same scores as stock's list; a processor that may want more arguments keeps stock's call."""
    ids: Any = torch.tensor([[5, 6, 5]])
    scores: Any = torch.randn(1, 96, generator=torch.Generator().manual_seed(0))
    known = LogitsProcessorList([lp.RepetitionPenaltyLogitsProcessor(1.3), lp.TopKLogitsWarper(7)])
    expected = known(ids, scores.clone())
    fast = without_inspection(known)
    monkeypatch.setattr(lp.inspect, "signature", None)
    assert torch.equal(fast(ids, scores.clone()), expected)

    class Custom(lp.LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    for unknown in (LogitsProcessorList([Custom()]), type("Mine", (LogitsProcessorList,), {})(known)):
        assert without_inspection(unknown) is unknown


@pytest.mark.parametrize(
    "processor",
    [
        lp.MinLengthLogitsProcessor(4, [3, 95]),
        lp.MinLengthLogitsProcessor(3, [3, 200]),
        lp.MinNewTokensLengthLogitsProcessor(1, 3, [5, 200]),
        lp.MinNewTokensLengthLogitsProcessor(1, 2, 5),
        lp.SuppressTokensLogitsProcessor([0, 5, 95, 300]),
        lp.SuppressTokensAtBeginLogitsProcessor([1, 2], 3),
        lp.SuppressTokensAtBeginLogitsProcessor([1, 2], 2),
        lp.TopPLogitsWarper(0.7),
    ],
)
def test_quick_forms_give_stocks_scores(processor):
    ids: Any = torch.tensor([[5, 6, 5], [1, 2, 3]])
    scores: Any = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    before = scores.clone()
    assert torch.equal(
        without_inspection(LogitsProcessorList([processor]))(ids, scores), processor(ids, scores.clone())
    )
    assert torch.equal(scores, before), "the scores of others stay"


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_batch_without_a_draft_is_chosen_in_one_call_a_step(tiny_model, prompt, do_sample, monkeypatch):
    batch, calls = padded_batch(prompt, LENGTHS), []
    request = {"max_new_tokens": 6, "min_new_tokens": 6, "repetition_penalty": 1.2, "do_sample": do_sample}
    torch.manual_seed(1)
    expected = tiny_model().generate(**batch, **request)
    original = lp.RepetitionPenaltyLogitsProcessor.__call__
    monkeypatch.setattr(
        lp.RepetitionPenaltyLogitsProcessor,
        "__call__",
        lambda self, ids, scores: calls.append(len(ids)) or original(self, ids, scores),
    )
    torch.manual_seed(1)
    found = tiny_model().generate(**batch, **request, speculator=Speculator(EmptyDrafter()))
    assert torch.equal(found, expected)
    assert calls == [len(LENGTHS)] * 6
