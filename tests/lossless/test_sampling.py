"""Sampling: the seed's own tokens, the RNG where stock leaves it, and the exact distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation import utils as generation_utils

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.compatibility.stock import reads_stops_late
from hf_speculate.testing import EmptyDrafter, RandomDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.models import VOCAB_SIZE
from ..support.tiers import quick


NEW_TOKENS = 32


class CountingBias(LogitsProcessor):
    """Stateful and unknown to the engine: the bias depends on how often it was called, and it checks its calls."""

    def __init__(self, prompt_length: int):
        self.num_calls = 0
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores):
        assert input_ids.shape[1] == self.prompt_length + self.num_calls, "called for a token that was not emitted"
        self.num_calls += 1
        return scores + torch.linspace(-1, 1, scores.shape[-1]).roll(7 * self.num_calls)


REQUESTS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical": {"typical_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [9, 11]]},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": list(range(3, 40))},
    "everything": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7]],
    },
    "stateful": {"logits_processor": CountingBias},
}


def request_of(name: str, prompt_length: int) -> dict:
    request = dict(REQUESTS[name])
    if "logits_processor" in request:
        request["logits_processor"] = LogitsProcessorList([CountingBias(prompt_length)])
    return {"do_sample": True, "max_new_tokens": NEW_TOKENS, **request}


def sample(model, inputs, seed, speculator=None, **request):
    torch.manual_seed(seed)
    output = model.generate(**inputs, **request, speculator=speculator)
    return output, torch.get_rng_state()


def drafters(model, script):
    return {
        "perfect": ScriptedDrafter(script, (3, 2, 1), vocab_size=VOCAB_SIZE),
        "mixed": ScriptedDrafter(script, (2, 2, 2, 1), accuracy=0.7, vocab_size=VOCAB_SIZE),
        "random": RandomDrafter(vocab_size=VOCAB_SIZE),
        "prompt_lookup": AutoSpeculator.from_name("prompt_lookup", target=model, min_ngram=1).drafter,
        "suffix": AutoSpeculator.from_name("suffix", target=model, store=True).drafter,
    }


@pytest.mark.parametrize("name", quick(REQUESTS, "plain", "top_p", "min_new_tokens", "everything", "stateful"))
@pytest.mark.parametrize("architecture", quick(["llama", "qwen2"]))
def test_the_seed_gives_the_tokens_and_the_rng_state_of_plain_generate(tiny_model, prompt, name, architecture):
    model = tiny_model(architecture)
    for length, seed in ((1, 0), (6, 1), (17, 2)):
        inputs = {"input_ids": prompt(length), "attention_mask": torch.ones(1, length, dtype=torch.long)}
        plain, rng = sample(model, inputs, seed, **request_of(name, length))
        script = plain[:, length:]
        for kind, drafter in drafters(model, script).items():
            ours, our_rng = sample(model, inputs, seed, Speculator(drafter), **request_of(name, length))
            assert torch.equal(ours, plain), kind
            assert torch.equal(our_rng, rng), f"{kind}: equal text, but the RNG is elsewhere"


class TestStopsThatStockReadsLate:
    """On MPS stock runs one step after the end of a text, and drops its token. Here it is made to do so on the CPU."""

    @pytest.fixture(autouse=True)
    def late(self, monkeypatch):
        if not hasattr(generation_utils, "DeferredStopCheck"):
            pytest.skip("this transformers reads stops at once")
        monkeypatch.setattr(generation_utils.DeferredStopCheck, "is_supported", lambda *_args, **_named: True)
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        monkeypatch.setattr(torch, "Event", lambda **_options: event)

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("ends", ["by EOS", "by length", "by both"])
    def test_the_generator_is_where_stock_leaves_it(self, tiny_model, prompt, batch_size, ends):
        model, inputs = tiny_model(), {"input_ids": prompt(6, batch_size)}
        request = {"do_sample": True, "max_new_tokens": NEW_TOKENS}
        if ends != "by length":
            request |= {"eos_token_id": list(range(3, 30)), "pad_token_id": 0}
        if ends == "by both":
            request["max_new_tokens"] = sample(model, inputs, 0, **request)[0].shape[1] - 6
        plain, rng = sample(model, inputs, 0, **request)
        assert (plain.shape[1] == 6 + request["max_new_tokens"]) == (ends != "by EOS")
        for speculator in (Speculator(RandomDrafter(vocab_size=VOCAB_SIZE)), Speculator(EmptyDrafter())):
            ours, our_rng = sample(model, inputs, 0, speculator, **request)
            assert torch.equal(ours, plain)
            assert torch.equal(our_rng, rng)


def test_stock_reads_stops_late_on_mps_alone():
    """Where this fails, transformers has changed it: `docs/equal-to-plain.md` names the devices."""
    kinds = ("cpu", "cuda", "xpu", "mps")
    late = [kind for kind in kinds if reads_stops_late(torch.device(kind), DynamicCache(), is_returned=True)]
    assert late == (["mps"] if hasattr(generation_utils, "DeferredStopCheck") else [])


@pytest.mark.parametrize("top_k", quick([3, 1]))
@pytest.mark.parametrize("name", ["plain", "everything", "stateful", "min_new_tokens"])
def test_drafting_with_the_shared_noise_changes_no_token(tiny_model, prompt, name, top_k):
    model, draft = tiny_model(), tiny_model(seed=3)
    drafter = DraftModelDrafter(draft, DraftModelOptions(top_k=top_k, depth=3))
    for length, seed in ((5, 0), (12, 1)):
        inputs = {"input_ids": prompt(length)}
        plain, rng = sample(model, inputs, seed, **request_of(name, length))
        ours, our_rng = sample(model, inputs, seed, Speculator(drafter), **request_of(name, length))
        assert torch.equal(ours, plain)
        assert torch.equal(our_rng, rng)


def test_shared_noise_makes_the_target_its_own_perfect_drafter(tiny_model, prompt):
    # Without the shared noise a drafter with the target's own distribution would be accepted only now and then.
    model = tiny_model()
    drafter = DraftModelDrafter(model, DraftModelOptions(depth=4))
    output, _ = sample(
        model,
        {"input_ids": prompt(6)},
        0,
        Speculator(drafter),
        do_sample=True,
        top_k=0,
        temperature=0.9,
        max_new_tokens=41,
        return_dict_in_generate=True,
    )
    assert output.speculation.acceptance_rate_by_depth == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}


class TestDistribution:
    """The law of the output against the exactly enumerated one: vocabulary 6, three tokens, 216 texts.

    The statistic is Pearson's chi-square over the texts with an expected count of at least 5 (the others are pooled),
    compared with the quantile of chi-square for a false-alarm probability of 1e-4 a case (Wilson-Hilferty); the seeds
    are fixed, so the outcome is too.
    """

    VOCAB, STEPS, NUM_SAMPLES, BATCH = 6, 3, 4000, 200
    FALSE_ALARM_QUANTILE = 3.719  # of the standard normal at 1 - 1e-4

    def exact_law(self, model, prompt, temperature):
        law = {}
        texts = torch.tensor(list(itertools.product(range(self.VOCAB), repeat=self.STEPS)))
        ids = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
        logits = model(ids).logits[:, prompt.shape[1] - 1 : -1].double() / temperature
        log_probs = logits.log_softmax(-1).gather(-1, texts[..., None]).sum((1, 2))
        for text, log_prob in zip(texts.tolist(), log_probs.tolist(), strict=True):
            law[tuple(text)] = math.exp(log_prob)
        return law

    def observed(self, model, prompt, temperature, speculator):
        counts = Counter()
        torch.manual_seed(1234)
        for _ in range(self.NUM_SAMPLES // self.BATCH):
            output = model.generate(
                prompt,
                do_sample=True,
                top_k=0,
                temperature=temperature,
                max_new_tokens=self.STEPS,
                num_return_sequences=self.BATCH,
                speculator=speculator,
            )
            counts.update(map(tuple, output[:, prompt.shape[1] :].tolist()))
        return counts

    def assert_same_law(self, law, counts):
        total = sum(counts.values())
        large = [text for text, p in law.items() if p * total >= 5]
        expected = [law[text] * total for text in large]
        found = [counts[text] for text in large]
        if (rest := total - sum(expected)) > 1:
            expected.append(rest)
            found.append(total - sum(found))
        statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True))
        degrees = max(len(expected) - 1, 1)
        spread = 2 / (9 * degrees)
        limit = degrees * (1 - spread + self.FALSE_ALARM_QUANTILE * spread**0.5) ** 3
        assert statistic < limit, f"chi-square {statistic:.1f} with {degrees} degrees of freedom, limit {limit:.1f}"

    @pytest.mark.parametrize("temperature", quick([1.0, 0.1]))
    @pytest.mark.parametrize("drafter", ["target", "stranger", "disjoint"])
    def test_sampled_texts_follow_the_targets_distribution(self, tiny_model, drafter, temperature):
        model = tiny_model(vocab_size=self.VOCAB)
        prompt = torch.tensor([[3, 5, 4]])
        law = self.exact_law(model, prompt, temperature)
        assert abs(sum(law.values()) - 1) < 1e-6
        if drafter == "disjoint":
            # Drafts only the token that is least likely as the first: (nearly) never accepted.
            worst = min(range(self.VOCAB), key=lambda t: sum(p for text, p in law.items() if text[0] == t))
            made = ScriptedDrafter([[worst] * self.STEPS], (1,) * 2, vocab_size=self.VOCAB)
        else:
            draft = tiny_model(vocab_size=self.VOCAB, seed=0 if drafter == "target" else 9)
            made = DraftModelDrafter(draft, DraftModelOptions(depth=2, top_k=1 if drafter == "target" else 2))
        self.assert_same_law(law, self.observed(model, prompt, temperature, Speculator(made)))

    def test_assert_same_law_notices_a_wrong_distribution(self, tiny_model):
        model = tiny_model(vocab_size=self.VOCAB)
        prompt = torch.tensor([[3, 5, 4]])
        counts = self.observed(model, prompt, 1.0, None)
        with pytest.raises(AssertionError, match="chi-square"):
            self.assert_same_law(self.exact_law(model, prompt, 1.25), counts)
