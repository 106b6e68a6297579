"""Batches whose rows end at different steps: what stock goes on to compute for them is there where it can be seen."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_speculate import Speculator, stream
from hf_speculate.testing import EmptyDrafter, ScriptedDrafter

from ..support.inputs import padded_batch, random_prompt
from ..support.models import build_tiny_model


VOCAB_SIZE, WIDTH, NEW_TOKENS = 96, 9, 25
EOS = list(range(3, 12))
ALL_STATES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ALL_STATES |= {"output_hidden_states": True, "output_attentions": True}


def drafters(model, script):
    yield "perfect", ScriptedDrafter(script, (1,) * 5, vocab_size=VOCAB_SIZE)
    yield "scripted", ScriptedDrafter(script, (2, 2, 1, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
    yield "empty", EmptyDrafter()


class TestEveryRowItsPace:
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

    def test_ended_rows_cost_no_forward_without_a_returned_cache(self):
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


class TestLockStep:
    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
    def test_processors_across_rows_see_stocks_scores_of_ended_rows(self, do_sample):
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

    def test_attentions_of_windows_that_slide(self):
        model = build_tiny_model("mistral", attention="eager", sliding_window=6)
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
