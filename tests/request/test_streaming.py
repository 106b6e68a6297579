"""Tokens as they come: stock's streamers, and `hf_speculate.stream`."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.testing import ScriptedDrafter
from hf_speculate.verification.noise import Noise
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.inputs import character_tokenizer
from ..support.models import VOCAB_SIZE


NEW_TOKENS = 40


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


def perfect(model, inputs, branching=(2, 2, 2), **request):
    width = inputs["input_ids"].shape[1]
    script = model.generate(**inputs, max_new_tokens=NEW_TOKENS + 8, speculator=None, **request)[:, width:]
    return Speculator(ScriptedDrafter(script, branching, accuracy=0.8, vocab_size=VOCAB_SIZE), adaptive=False)


@pytest.fixture
def setting(tiny_model, prompt):
    """(model, inputs, text) of one sequence, fp64."""
    model, inputs = tiny_model(dtype=torch.float64), {"input_ids": prompt(9)}
    return model, inputs, model.generate(**inputs, max_new_tokens=NEW_TOKENS)


class TestStockStreamers:
    @pytest.mark.parametrize("skip_prompt", [False, True])
    def test_text_iterator_streamer_is_read_in_another_thread(self, setting, tokenizer, skip_prompt):
        model, inputs, text = setting
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=60)
        kwargs = {**inputs, "streamer": streamer, "max_new_tokens": NEW_TOKENS, "speculator": perfect(model, inputs)}
        thread = threading.Thread(target=model.generate, kwargs=kwargs)
        thread.start()
        streamed = "".join(streamer)
        thread.join()
        assert streamed == tokenizer.decode(text[0, 9 if skip_prompt else 0 :])

    @pytest.mark.parametrize("stop", ["eos", "criterion"])
    def test_a_batch_is_put_step_by_step_as_in_stock(self, tiny_model, prompt, stop):
        model, inputs = tiny_model(), {"input_ids": torch.cat([prompt(9, seed=1), prompt(9, seed=2)])}
        text = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
        request = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [int(text[0, 20]), int(text[1, 30])]}
        if stop == "criterion":
            request = {"stopping_criteria": StoppingCriteriaList([EndsAtLength(27)]), "max_new_tokens": NEW_TOKENS}
        seen = []
        for speculator in (None, perfect(model, inputs)):
            streamer = Collector()
            model.generate(**inputs, **request, streamer=streamer, speculator=speculator)
            assert streamer.ended == 1
            seen.append(streamer.values)
        assert len(seen[0]) == len(seen[1])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


class Collector:
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.clone())

    def end(self):
        self.ended += 1


class EndsAtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class TestStream:
    def test_tokens_come_round_by_round_once_in_order(self, setting):
        model, inputs, text = setting
        speculator = perfect(model, inputs)
        rounds = list(hf_speculate.stream(model, **inputs, speculator=speculator, max_new_tokens=NEW_TOKENS))
        assert [token for (row,) in rounds for token in row] == text[0, 9:].tolist()
        assert max(len(row) for (row,) in rounds) > 2, "nothing was accepted: the test shows little"
        assert len(rounds) == 1 + speculator.stats.target_forwards
        assert speculator.stats.calls == 1

    def test_text_is_what_a_text_streamer_prints(self, setting, tokenizer):
        model, inputs, text = setting
        pieces = list(
            hf_speculate.stream(
                model, inputs["input_ids"], speculator="prompt_lookup", tokenizer=tokenizer, max_new_tokens=NEW_TOKENS
            )
        )
        assert "".join(pieces) == tokenizer.decode(text[0, 9:])
        assert all(pieces)

    def test_special_tokens_are_left_out_unless_asked_for(self, setting):
        model, inputs, text = setting
        special = character_tokenizer().convert_ids_to_tokens(text[0, 12].item())
        tokenizer = character_tokenizer(pad_token=special)
        request = {"speculator": "prompt_lookup", "tokenizer": tokenizer, "max_new_tokens": NEW_TOKENS}
        shown = "".join(hf_speculate.stream(model, **inputs, **request))
        assert shown == tokenizer.decode(text[0, 9:], skip_special_tokens=True) != tokenizer.decode(text[0, 9:])
        kept = hf_speculate.stream(model, **inputs, **request, decode_kwargs={"skip_special_tokens": False})
        assert "".join(kept) == tokenizer.decode(text[0, 9:])
        with pytest.raises(TypeError, match="give tokenizer="):
            hf_speculate.stream(model, **inputs, speculator="prompt_lookup", decode_kwargs={})

    def test_the_generators_return_value_is_what_generate_returns(self, setting, tokenizer):
        model, inputs, text = setting
        request = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": True}

        def consume(**kwargs):
            output = yield from hf_speculate.stream(
                model, **inputs, speculator=perfect(model, inputs), **request, **kwargs
            )
            outputs.append(output)

        outputs = []
        for kwargs in ({}, {"tokenizer": tokenizer}):
            assert list(consume(**kwargs))
        for output in outputs:
            assert torch.equal(output.sequences, text)
            assert len(output.scores) == NEW_TOKENS
            assert cache_of(output).get_seq_length() == text.shape[1] - 1
            assert output.speculation.accepted_tokens > 0

    def test_rows_of_a_batch_at_their_own_pace(self, tiny_model, prompt):
        model = tiny_model()
        inputs = {"input_ids": torch.cat([prompt(9, seed=1), prompt(9, seed=2), prompt(9, seed=3)])}
        text = model.generate(**inputs, max_new_tokens=NEW_TOKENS)[:, 9:]
        eos = int(text[1, 7])
        rows = [[], [], []]
        for new_tokens in hf_speculate.stream(
            model, **inputs, speculator=perfect(model, inputs), max_new_tokens=NEW_TOKENS, eos_token_id=eos
        ):
            for row, tokens in zip(rows, new_tokens, strict=True):
                row.extend(tokens)
        for row, plain in zip(rows, text.tolist(), strict=True):
            assert row == (plain[: plain.index(eos) + 1] if eos in plain else plain)

    def test_gradients_are_off_inside_and_as_they_were_outside(self, setting):
        model, inputs, _ = setting
        modes = []
        hook = model.model.layers[0].register_forward_hook(lambda *args: modes.append(torch.is_grad_enabled()))
        for _ in hf_speculate.stream(model, **inputs, speculator="prompt_lookup", max_new_tokens=6):
            assert torch.is_grad_enabled()
        hook.remove()
        assert modes
        assert not any(modes)

    def test_two_streams_of_one_model_take_turns(self, tiny_model, prompt):
        model = tiny_model()
        streams, texts = [], []
        for seed in (1, 2):
            inputs = {"input_ids": prompt(9, seed=seed)}
            texts.append(model.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, 9:].tolist())
            streams.append(
                hf_speculate.stream(model, **inputs, speculator=perfect(model, inputs), max_new_tokens=NEW_TOKENS)
            )
        found = [[], []]
        while any(len(row) < NEW_TOKENS for row in found):
            for row, rounds in zip(found, streams, strict=True):
                row.extend(next(rounds, [[]])[0])
        assert found == texts


class TestStreamEndsEarly:
    @pytest.mark.parametrize("how", ["close", "break", "exception", "forgotten", "unstarted"])
    def test_stream_that_ends_early_leaves_everything_usable(self, setting, how):
        model, inputs, text = setting
        cache, speculator = DynamicCache(config=model.config), perfect(model, inputs)
        rounds = hf_speculate.stream(
            model, **inputs, **as_cache(cache), speculator=speculator, max_new_tokens=NEW_TOKENS
        )
        yielded = []
        if how == "unstarted":
            rounds.close()
            yielded = text[0, 9:10].tolist()  # the prompt has run
        else:
            with pytest.raises(ZeroDivisionError) if how == "exception" else nullcontext():
                for (tokens,) in rounds:
                    yielded += tokens
                    if len(yielded) > 12:
                        if how == "exception":
                            rounds.throw(ZeroDivisionError())
                        break
        if how == "close":
            rounds.close()
        del rounds
        gc.collect()
        assert yielded == text[0, 9 : 9 + len(yielded)].tolist()
        assert cache.get_seq_length() == 9 + len(yielded) - 1
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        go_on = text[:, : 9 + len(yielded)]
        assert torch.equal(
            model.generate(go_on, **as_cache(cache), max_new_tokens=text.shape[1] - go_on.shape[1]), text
        )
        if how != "unstarted":
            assert speculator.stats.calls == 1

    def test_script_may_end_within_a_stream(self):
        script = (
            "import torch, hf_speculate\n"
            "from transformers import LlamaConfig, LlamaForCausalLM\n"
            "config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,"
            " num_attention_heads=2)\n"
            "kwargs = dict(speculator='prompt_lookup', max_new_tokens=9, do_sample=True)\n"
            "rounds = hf_speculate.stream(LlamaForCausalLM(config), torch.arange(3, 9)[None], **kwargs)\n"
            "next(rounds)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0
        assert "Exception ignored" not in done.stderr


class TestStreamedSampling:
    """The RNG between items is where stock has it after the tokens so far."""

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("num_taken", [1, 3, 5, 1000])
    def test_sampled_stream_has_stocks_text_and_rng_wherever_it_ends(self, tiny_model, prompt, num_taken, batch_size):
        model = tiny_model()
        inputs = {"input_ids": torch.cat([prompt(9, seed=seed) for seed in range(batch_size)])}
        torch.manual_seed(3)
        text = model.generate(**inputs, do_sample=True, max_new_tokens=NEW_TOKENS)
        # A draft model looks at the noise of the coming steps.
        script = DraftModelDrafter(tiny_model(seed=3), DraftModelOptions(depth=3, top_k=2))
        torch.manual_seed(3)
        rounds = hf_speculate.stream(
            model, **inputs, do_sample=True, max_new_tokens=NEW_TOKENS, speculator=Speculator(script, adaptive=False)
        )
        rows = [[] for _ in range(batch_size)]
        for _ in range(num_taken):
            for row, tokens in zip(rows, next(rounds, [[]] * batch_size), strict=True):
                row.extend(tokens)
            at_item = torch.get_rng_state()
        rounds.close()
        assert torch.equal(torch.get_rng_state(), at_item), "closing moved the RNG"
        for row, plain in zip(rows, text[:, 9:].tolist(), strict=True):
            assert row == plain[: len(row)]
        num_steps = max(map(len, rows))
        torch.manual_seed(3)
        model.generate(**inputs, do_sample=True, max_new_tokens=num_steps)
        assert torch.equal(torch.get_rng_state(), at_item)

    def test_noise_that_was_drawn_ahead_survives_a_pause(self):
        torch.manual_seed(0)
        noise = Noise(2, 5, torch.device("cpu"))
        ahead = noise.row(3).clone()
        torch.manual_seed(0)
        torch.empty(2, 5).exponential_()
        after_one = torch.get_rng_state()
        torch.manual_seed(1)
        noise.pause(1)
        assert torch.equal(torch.get_rng_state(), after_one)
        assert not noise.resume()
        assert torch.equal(noise.row(3), ahead)
        noise.pause(1)
        torch.rand(1)
        assert noise.resume()
        assert not torch.equal(noise.row(3), ahead), "somebody has drawn: stock would not draw this noise any more"


class TestBadInput:
    def test_stream_requires_a_speculator(self, setting):
        model, inputs, _ = setting
        with pytest.raises(UnsupportedRequestError, match=r"needs speculator="):
            hf_speculate.stream(model, **inputs)

    @pytest.mark.parametrize("kwargs", [{"streamer": Collector()}, {"adapter_names": ["a"]}])
    def test_stream_refuses_arguments_of_generate_only(self, setting, kwargs):
        model, inputs, _ = setting
        with pytest.raises(UnsupportedRequestError, match=f"does not take {next(iter(kwargs))}="):
            hf_speculate.stream(model, **inputs, speculator="prompt_lookup", **kwargs)

    def test_stream_refuses_text_of_several_rows(self, tiny_model, prompt, tokenizer):
        model = copy.deepcopy(tiny_model())
        model.register_forward_pre_hook(lambda *args: pytest.fail("the model was run"))
        with pytest.raises(UnsupportedRequestError, match="text of one sequence, the request has 2"):
            hf_speculate.stream(
                model,
                prompt(6),
                speculator="prompt_lookup",
                tokenizer=tokenizer,
                do_sample=True,
                num_return_sequences=2,
            )

    def test_beams_even_where_the_speculator_is_only_attached(self, setting):
        model, inputs, _ = setting
        model = copy.deepcopy(model)
        hf_speculate.attach(model, "prompt_lookup")
        with pytest.raises(UnsupportedRequestError, match="beam_search"):
            hf_speculate.stream(model, **inputs, num_beams=2, max_new_tokens=3)
