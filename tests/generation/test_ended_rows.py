"""Batches whose rows end at different steps: what stock goes on to compute for them is there where it can be seen."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_speculate import Speculator, stream
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.testing import EmptyDrafter, ScriptedDrafter

from ..support.criteria import EndsWithToken
from ..support.inputs import character_tokenizer, padded_batch, random_prompt
from ..support.models import build_tiny_model
from ..support.tiers import quick


VOCAB_SIZE, WIDTH, NEW_TOKENS = 96, 9, 25
EOS = list(range(3, 12))
ALL_STATES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ALL_STATES |= {"output_hidden_states": True, "output_attentions": True}


def drafters(model, script):
    yield "perfect", ScriptedDrafter(script, (1,) * 5, vocab_size=VOCAB_SIZE)
    yield "scripted", ScriptedDrafter(script, (2, 2, 1, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
    yield "empty", EmptyDrafter()


REQUESTS = {
    "a list of EOS": lambda: {"eos_token_id": EOS},
    "one EOS": lambda: {"eos_token_id": 61},
    "stop strings": lambda: {"eos_token_id": EOS, "stop_strings": ["a", "Z"], "tokenizer": character_tokenizer()},
    "a criterion that is not known": lambda: {
        "eos_token_id": EOS,
        "stopping_criteria": StoppingCriteriaList([EndsWithToken(40)]),
    },
    "several sequences": lambda: {"eos_token_id": EOS, "do_sample": True, "num_return_sequences": 2},
    "sampling": lambda: {"eos_token_id": EOS, "do_sample": True},
}


def two_turns(model, inputs, request, speculator, second):
    """Texts of both turns; the second one goes on from the returned cache, and masks padding alone."""
    torch.manual_seed(7)
    cache = DynamicCache(config=model.config)
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    first = model.generate(**inputs, **as_cache(cache), **options, **request(), speculator=speculator)
    assert cache_of(first) is cache
    repeats = len(first.sequences) // len(inputs["input_ids"])
    mask = torch.cat(
        [inputs["attention_mask"].repeat_interleave(repeats, 0), (first.sequences[:, WIDTH:] != 0).long()], dim=1
    )
    later = torch.cat([random_prompt(4, seed=20 + row) for row in range(len(mask))])
    text, mask = torch.cat([first.sequences, later], dim=1), torch.cat([mask, torch.ones_like(later)], dim=1)
    follow = model.generate(
        text, attention_mask=mask, **as_cache(cache), max_new_tokens=12, speculator=speculator if second else None
    )
    return first.sequences, follow


class TestSecondTurns:
    @pytest.mark.parametrize(
        "is_speculative", quick([True, False]), ids=["speculative second turn", "plain second turn"]
    )
    @pytest.mark.parametrize("name", REQUESTS)
    def test_masking_padding_alone_gives_stocks_second_turn(self, name, is_speculative):
        model, inputs = build_tiny_model(), padded_batch(random_prompt, (9, 4, 7, 9))
        plain = two_turns(model, inputs, REQUESTS[name], None, False)
        ends = {int((row != 0).sum()) for row in plain[0][:, WIDTH:]}
        assert len(ends) > 1, "rows that end at different steps are what this is about"
        for kind, drafter in drafters(model, plain[0][:, WIDTH:]):
            ours = two_turns(model, inputs, REQUESTS[name], Speculator(drafter), is_speculative)
            assert torch.equal(ours[0], plain[0]), f"{kind}: first turn"
            assert torch.equal(ours[1], plain[1]), f"{kind}: second turn"

    def test_windows_that_slide(self):
        model, inputs = build_tiny_model("mistral", sliding_window=6), padded_batch(random_prompt, (9, 4, 7, 9))
        plain = two_turns(model, inputs, REQUESTS["a list of EOS"], None, False)
        for kind, drafter in drafters(model, plain[0][:, WIDTH:]):
            ours = two_turns(model, inputs, REQUESTS["a list of EOS"], Speculator(drafter), False)
            assert torch.equal(ours[0], plain[0]), kind
            assert torch.equal(ours[1], plain[1]), kind

    def test_windows_go_on_sliding_below_rows_that_are_padded(self):
        """Records of every step have rows go on with padding behind their end, in their own windows."""
        model = build_tiny_model("mistral", sliding_window=8, dtype=torch.float64)
        ids = padded_batch(random_prompt, (9, 9, 9))["input_ids"]
        for seed in range(4):
            torch.manual_seed(seed)
            request = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": EOS, "output_scores": True}
            request |= {"output_logits": True, "return_dict_in_generate": True}
            plain = model.generate(ids, **request)
            torch.manual_seed(seed)
            drafter = ScriptedDrafter(plain.sequences[:, 9:], (1,) * 4, accuracy=0.9, vocab_size=VOCAB_SIZE)
            ours = model.generate(ids, **request, speculator=Speculator(drafter))
            assert torch.equal(ours.sequences, plain.sequences)
            for step, (mine, theirs) in enumerate(zip(ours.logits, plain.logits, strict=True)):
                torch.testing.assert_close(mine, theirs, msg=f"seed {seed}, step {step}")

    def test_the_entries_of_every_real_token_are_stocks(self):
        model, inputs = build_tiny_model(dtype=torch.float64), padded_batch(random_prompt, (9, 4, 7, 9))
        caches = []
        request = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS, "return_dict_in_generate": True}
        plain = model.generate(**inputs, **request)
        for drafter in (EmptyDrafter(), ScriptedDrafter(plain.sequences[:, WIDTH:], (2, 2), vocab_size=VOCAB_SIZE)):
            caches.append(cache_of(model.generate(**inputs, **request, speculator=Speculator(drafter))))
        for cache in caches:
            for mine, theirs in zip(cache.layers, cache_of(plain).layers, strict=True):
                assert mine.get_seq_length() == theirs.get_seq_length()
                for row, text in enumerate(plain.sequences):
                    real = range(min(int((text[WIDTH:] != 0).sum()) + WIDTH, mine.get_seq_length()))
                    torch.testing.assert_close(mine.keys[row, :, real], theirs.keys[row, :, real], atol=1e-10, rtol=0)

    def test_a_cache_that_nobody_sees_costs_no_forward(self):
        model, inputs = build_tiny_model(), padded_batch(random_prompt, (9, 4, 7, 9))
        counts = {}
        for dict_output in (False, True):
            speculator = Speculator(EmptyDrafter())
            options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS, "return_dict_in_generate": dict_output}
            output = model.generate(**inputs, **options, speculator=speculator)
            text = output.sequences if dict_output else output
            counts[dict_output] = speculator.stats.target_forwards, text.shape[1] - WIDTH - 1
        assert counts[False] == (counts[False][1],) * 2, "a forward for each token but the first"
        assert counts[True][0] == counts[False][0], "the EOS goes along with the others"


class AcrossRows(LogitsProcessor):
    """Looks at the scores of other rows."""

    def __call__(self, input_ids, scores):
        return scores + 0.7 * scores.flip(0)


class SeesScores(StoppingCriteria):
    """Stops nothing; notes the scores of the whole batch."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(scores[-1].clone())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class TestLockStep:
    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
    def test_what_looks_across_rows_sees_stocks_scores_of_rows_that_have_ended(self, do_sample):
        model = build_tiny_model()
        for seed in range(2):
            ids = torch.cat([random_prompt(WIDTH, seed=3 * seed + row) for row in range(3)])
            request = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS, "do_sample": do_sample}
            request["logits_processor"] = LogitsProcessorList([AcrossRows()])
            torch.manual_seed(seed)
            plain = model.generate(ids, **request)
            rng = torch.get_rng_state()
            for kind, drafter in drafters(model, plain[:, WIDTH:]):
                torch.manual_seed(seed)
                assert torch.equal(model.generate(ids, **request, speculator=Speculator(drafter)), plain), kind
                assert torch.equal(torch.get_rng_state(), rng), kind

    def test_criteria_see_stocks_scores(self):
        model, inputs = build_tiny_model(), padded_batch(random_prompt, (9, 4, 7))
        request = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS, "output_scores": True}
        request["return_dict_in_generate"] = True
        views = []
        script = model.generate(**inputs, **request).sequences[:, WIDTH:]
        for speculator in (None, Speculator(ScriptedDrafter(script, (2, 1), vocab_size=VOCAB_SIZE))):
            criterion = SeesScores()
            criteria = StoppingCriteriaList([criterion])
            model.generate(**inputs, **request, stopping_criteria=criteria, speculator=speculator)
            views.append(torch.stack(criterion.seen))
        torch.testing.assert_close(views[1], views[0], atol=2e-4, rtol=1e-4)

    @pytest.mark.parametrize("lockstep", [False, True], ids=["each row its pace", "lock-step"])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_records_are_stocks_at_every_step_of_every_row(self, attention, lockstep):
        model = build_tiny_model(attention=attention)
        for seed in range(1):
            ids = torch.cat([random_prompt(WIDTH, seed=5 * seed + row) for row in range(3)])
            request = {**ALL_STATES, "max_new_tokens": NEW_TOKENS, "eos_token_id": EOS}
            request |= {"max_time": 1000.0} if lockstep else {}
            plain = model.generate(ids, **request)
            for kind, drafter in drafters(model, plain.sequences[:, WIDTH:]):
                ours = model.generate(ids, **request, speculator=Speculator(drafter))
                assert torch.equal(ours.sequences, plain.sequences), kind
                for name in ("scores", "logits", "hidden_states", "attentions"):
                    assert len(ours[name]) == len(plain[name]), name
                    for mine, theirs in zip(ours[name], plain[name], strict=True):
                        pairs = [(mine, theirs)] if torch.is_tensor(mine) else zip(mine, theirs, strict=True)
                        for a, b in pairs:
                            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3, msg=f"{kind} {name}")

    def test_attentions_of_windows_that_slide(self):
        model = build_tiny_model("mistral", sliding_window=6)
        model.set_attn_implementation("eager")
        ids = torch.cat([random_prompt(WIDTH, seed=row) for row in range(2)])
        request = {**ALL_STATES, "max_new_tokens": 12, "eos_token_id": EOS}
        plain = model.generate(ids, **request)
        for kind, drafter in drafters(model, plain.sequences[:, WIDTH:]):
            ours = model.generate(ids, **request, speculator=Speculator(drafter))
            for mine, theirs in zip(ours.attentions[1:], plain.attentions[1:], strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3, msg=kind)

    def test_statistics_and_streams_count_no_padding(self):
        model, inputs = build_tiny_model(), padded_batch(random_prompt, (9, 4, 7))
        request = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS, **ALL_STATES}
        plain = model.generate(**inputs, **request).sequences
        real = int((plain[:, WIDTH:] != 0).sum())
        for more in ({}, {"max_time": 1000.0}):
            speculator = Speculator(ScriptedDrafter(plain[:, WIDTH:], (2, 1), accuracy=0.7, vocab_size=VOCAB_SIZE))
            tokens = [sum(map(len, new)) for new in stream(model, **inputs, **request, **more, speculator=speculator)]
            assert sum(tokens) == real
            assert all(tokens), "a round that only catches up with padding is nobody's business"
            assert speculator.stats.emitted_tokens + speculator.stats.prefill_tokens == real
