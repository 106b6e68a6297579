"""Models with recurrent layers: chains with a copy of the states, compared with plain `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM

from hf_speculate import Speculator
from hf_speculate.cache import CACHE_NAME, as_cache
from hf_speculate.drafting.features import RAW_LAST
from hf_speculate.forward import Scorer, recurrent
from hf_speculate.forward.recurrent import MAX_RERUN, RecurrentCache, RecurrentForward
from hf_speculate.request.trial import run_trial
from hf_speculate.testing import RandomDrafter, ScriptedDrafter, check_lossless
from hf_speculate.tree import DraftTree

from ..support.inputs import padded_batch
from ..support.models import SIZES, VOCAB_SIZE, build_tiny_lfm2, random_model
from ..support.recording import Tapping
from ..support.versions import skip_before


def qwen3_next():
    skip_before("5.14", "recurrent layers take no drafts")
    config = Qwen3NextConfig(
        **SIZES,
        num_hidden_layers=4,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return random_model(Qwen3NextForCausalLM, config)


@pytest.fixture(params=[qwen3_next, build_tiny_lfm2], ids=["qwen3_next", "lfm2"])
def model(request):
    return request.param()


def drafters(continuation):
    yield "perfect", ScriptedDrafter(continuation, (1,) * 4, vocab_size=VOCAB_SIZE)
    yield "right half of the time", ScriptedDrafter(continuation, (2, 2, 1), accuracy=0.5, vocab_size=VOCAB_SIZE)
    yield "adversarial", ScriptedDrafter(continuation, (1,) * 4, accuracy=0.0, vocab_size=VOCAB_SIZE)
    yield "random", RandomDrafter(vocab_size=VOCAB_SIZE)


def compare(model, prompts, max_new_tokens):
    for ids in prompts:
        new = model.generate(ids, max_new_tokens=max_new_tokens)[0, ids.shape[1] :]
        for kind, drafter in drafters(new):
            speculator = Speculator(drafter)
            report = check_lossless(model, speculator, [ids], max_new_tokens=max_new_tokens)
            assert report.num_identical == 1, f"{kind}: {report.ties}"
            if kind == "perfect":
                assert speculator.stats.mean_acceptance_length > 3
            elif kind == "adversarial":
                assert speculator.stats.accepted_tokens == 0 < speculator.stats.drafted_tokens


@pytest.mark.usefixtures("unchecked_shapes")
class TestText:
    def test_recurrent_models_give_plain_text(self, model, prompt):
        compare(model, [prompt(length, seed=length) for length in (2, 13)], 16)

    @pytest.mark.slow
    def test_recurrent_models_give_plain_text_for_a_hundred_prompts(self, model, prompt):
        compare(model, [prompt(3 + seed % 40, seed=seed) for seed in range(100)], 48)

    @pytest.mark.parametrize("eos", [False, True])
    def test_recurrent_batches_advance_in_lock_step(self, model, prompt, eos):
        inputs, options = padded_batch(prompt, (11, 4, 9)), {"max_new_tokens": 30}
        plain = model.generate(**inputs, **options)
        if eos:
            options["eos_token_id"] = int(plain[1, 11 + 6])
            plain = model.generate(**inputs, **options)
        drafter = ScriptedDrafter(plain[:, 11:], (1, 1, 1), accuracy=0.7, vocab_size=VOCAB_SIZE)
        speculator = Speculator(drafter)
        assert torch.equal(model.generate(**inputs, **options, speculator=speculator), plain)
        assert any("lock-step" in reason for reason in speculator.stats.fallbacks)

    def test_returned_recurrent_cache_continues_a_row_that_ended_early(self, model, prompt):
        inputs = padded_batch(prompt, (11, 4))
        plain = model.generate(**inputs, max_new_tokens=24)
        eos = int(plain[1, 11 + 5])
        plain = model.generate(**inputs, max_new_tokens=24, eos_token_id=eos)
        drafter = ScriptedDrafter(plain[:, 11:], (1, 1, 1), accuracy=0.7, vocab_size=VOCAB_SIZE)
        cache = DynamicCache(config=model.config)
        options = {"max_new_tokens": 24, "eos_token_id": eos, CACHE_NAME: cache}
        model.generate(**inputs, **options, speculator=Speculator(drafter))
        end = 11 + plain[1, 11:].tolist().index(eos)  # its entries, the end of the text not among them
        attention = next(layer for layer in cache.layers if hasattr(layer, "keys"))
        alone = DynamicCache(config=model.config)
        model(plain[1:, 7:end], **as_cache(alone))
        expected = next(layer for layer in alone.layers if hasattr(layer, "keys")).keys
        assert torch.allclose(attention.keys[1, :, 7:end], expected[0], atol=1e-4)

    def test_returned_recurrent_cache_continues_the_next_turn(self, model, prompt):
        texts = []
        for speculator in (None, Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))):
            cache = DynamicCache(config=model.config)
            text = model.generate(prompt(20), **as_cache(cache), max_new_tokens=21, speculator=speculator)
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat([text, prompt(5, seed=1)], dim=1)
            text = model.generate(text, **as_cache(cache), max_new_tokens=22, speculator=speculator)
            text = torch.cat([text, prompt(5, seed=2)], dim=1)
            texts.append(model.generate(text, **as_cache(cache), max_new_tokens=20))
        assert torch.equal(*texts)


def prefilled(model, ids):
    cache = RecurrentCache(DynamicCache(config=model.config), 1)
    model(ids, **as_cache(cache.cache), use_cache=True)
    cache.commit_appended()
    return Scorer(model, cache, shape="chain", forward=RecurrentForward())


class TestStates:
    def test_recurrent_cache_holds_one_snapshot_of_the_states(self, model, prompt):
        sizes = {prefilled(model, prompt(length)).cache.snapshot_bytes for length in (5, 50, 200)}
        assert len(sizes) == 1
        layers = DynamicCache(config=model.config)
        model(prompt(9), **as_cache(layers))
        held = [
            state.nbytes
            for layer in layers.layers
            for kind in ("conv_states", "recurrent_states")
            for state in getattr(layer, kind, {}).values()
            if state is not None
        ]
        assert sizes == {sum(held)}

    def test_recurrent_forward_limits_the_tokens_that_it_runs_again(self, model, prompt):
        scorer, position = prefilled(model, prompt(8)), 8
        widths = []
        for _ in range(40):
            scorer(DraftTree.chain(torch.tensor([[5, 6, 7]])), [position])
            widths.append(scorer.num_rerun)
            scorer.cache.keep([[0, 1]])
            position += 2
        assert max(widths) <= MAX_RERUN
        assert widths[:3] == [0, 2, 4]

    @pytest.mark.parametrize("kept", [1, 2, 4])
    def test_recurrent_cache_can_drop_undelivered_tokens(self, model, prompt, kept):
        ids = prompt(12)
        scorer = prefilled(model, ids[:, :8])
        scorer(DraftTree.chain(ids[:, 8:12]), [8])
        scorer.cache.keep([list(range(4))])
        scorer.cache.truncate([8 + kept])
        scorer.finish()
        scorer.cache.release()
        assert scorer.cache.cache.get_seq_length() == 8 + kept
        found = model(ids[:, 8 + kept : 9 + kept] if kept < 4 else prompt(1), **as_cache(scorer.cache.cache))
        text = ids[:, : 9 + kept] if kept < 4 else torch.cat([ids, prompt(1)], dim=1)
        assert torch.allclose(found.logits[0, -1], model(text).logits[0, -1], atol=1e-4)


def test_features_of_recurrent_models_are_those_of_the_text(model, prompt):
    ids = prompt(9)
    text = model.generate(ids, max_new_tokens=30)
    drafter = Tapping(text[:, 9:], (1, 1, 1), (2, RAW_LAST), accuracy=0.7)
    assert torch.equal(model.generate(ids, max_new_tokens=30, speculator=Speculator(drafter)), text)
    raw = []
    layer = model.get_decoder().layers[-1]
    hook = layer.register_forward_hook(lambda module, inputs, output: raw.append(output))
    hidden = model(text, output_hidden_states=True).hidden_states[2]
    hook.remove()
    last = raw[0][0] if isinstance(raw[0], tuple) else raw[0]
    assert drafter.assert_saw({2: hidden, RAW_LAST: last}, atol=1e-4 * float(hidden.abs().max())) > 30


def test_models_that_do_not_restore_states_get_no_drafts(model, prompt, monkeypatch):
    monkeypatch.setattr(recurrent._LayerStates, "put_back", lambda *args: None)
    shape, reason = run_trial(model, "chain")
    assert shape == "single"
    assert "does not score several tokens at once as one after another" in reason
