"""The bridge: stock `generate` with one more argument, and nothing else changed."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import weakref

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationMixin,
)
from transformers.cache_utils import DynamicLayer

import hf_speculate
from hf_speculate import SpeculationStats, Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.errors import CheckpointError, UnsupportedRequestError
from hf_speculate.request import bridge
from hf_speculate.testing import RandomDrafter, ScriptedDrafter

from ..support.heads import DRAFTERS
from ..support.inputs import character_tokenizer
from ..support.models import VOCAB_SIZE, state_of
from ..support.recording import Tapping


def perfect(model, ids, branching=(2, 2, 2)):
    script = model.generate(ids, max_new_tokens=48, speculator=None)[:, ids.shape[1] :]
    return Speculator(ScriptedDrafter(script, branching, vocab_size=VOCAB_SIZE))


class TestSignature:
    def test_generate_keeps_its_signature_and_documentation(self):
        hf_speculate.uninstall()
        stock = GenerationMixin.generate
        stock_parameters, stock_doc = inspect.signature(stock).parameters, stock.__doc__
        hf_speculate.install()
        ours = inspect.signature(GenerationMixin.generate).parameters
        assert [name for name in ours if name != "speculator"] == list(stock_parameters)
        assert all(ours[name] == stock_parameters[name] for name in stock_parameters)
        assert ours["speculator"].default is None
        assert GenerationMixin.generate.__doc__ == stock_doc

    def test_install_twice_wraps_once_and_uninstall_restores_the_original(self, tiny_model, prompt):
        ours = GenerationMixin.generate
        hf_speculate.install()
        assert GenerationMixin.generate is ours
        hf_speculate.uninstall()
        try:
            assert GenerationMixin.generate is not ours
            with pytest.raises(ValueError, match="speculator"):
                tiny_model().generate(prompt(4), max_new_tokens=2, speculator="prompt_lookup")
        finally:
            hf_speculate.install()
        tiny_model().generate(prompt(4), max_new_tokens=2, speculator="prompt_lookup")

    def test_uninstall_leaves_a_method_that_somebody_wrapped_after_us(self, monkeypatch):
        def outer(*args, **kwargs):
            raise AssertionError

        hf_speculate.uninstall()
        stock = GenerationMixin.generate
        hf_speculate.install()
        monkeypatch.setattr(GenerationMixin, "generate", outer)
        hf_speculate.uninstall()
        assert GenerationMixin.generate is outer
        monkeypatch.undo()  # brings our wrapper back, of an installation that no longer exists
        GenerationMixin.generate = stock
        hf_speculate.install()


def test_without_a_speculator_the_original_runs_untouched(tiny_model, prompt, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("our loop ran")

    monkeypatch.setattr(bridge, "prepare", forbidden)
    model, ids = tiny_model(), prompt(6)
    model.generate(ids, max_new_tokens=3)
    model.generate(ids, max_new_tokens=3, speculator=None)
    model.generate(ids, max_new_tokens=3, num_beams=2)
    with pytest.raises(AssertionError, match="our loop ran"):
        model.generate(ids, max_new_tokens=3, speculator="prompt_lookup")


def test_the_model_is_left_as_it_was(tiny_model, prompt):
    model = copy.deepcopy(tiny_model())
    model.generate(prompt(6), max_new_tokens=3)
    before = state_of(model)
    hf_speculate.attach(model, "prompt_lookup")
    model.generate(prompt(6), max_new_tokens=9)
    hf_speculate.detach(model)
    assert state_of(model) == before
    assert not any("specul" in key for key in model.state_dict())


class TestWrappedModels:
    def test_cache_from_inference_mode_continues_outside(self, tiny_model, prompt):
        model, ids = tiny_model(), prompt(8)
        text, cache = model.generate(ids, max_new_tokens=30), DynamicCache(config=model.config)
        with torch.inference_mode():
            first = model.generate(ids, max_new_tokens=10, **as_cache(cache), speculator=perfect(model, ids))
        assert torch.equal(first, text[:, :18])
        ours = model.generate(first, max_new_tokens=20, **as_cache(cache), speculator=perfect(model, first))
        assert torch.equal(ours, text)


class TestSpeculatorArgument:
    def test_a_name_is_resolved_once_per_model(self, tiny_model, prompt):
        for model in (copy.deepcopy(tiny_model()), copy.deepcopy(tiny_model("qwen2"))):
            for calls in (1, 2):
                output = model.generate(
                    prompt(8), max_new_tokens=5, speculator="prompt_lookup", return_dict_in_generate=True
                )
                resolved = hf_speculate.attach(model, "prompt_lookup")
                hf_speculate.detach(model)
                assert resolved.stats.calls == calls
                assert output.speculation.calls == 1

    def test_an_installed_name_wins_over_a_folder_of_that_name(self, tiny_model, prompt, tmp_path, monkeypatch):
        (tmp_path / "prompt_lookup").mkdir()
        monkeypatch.chdir(tmp_path)
        model = copy.deepcopy(tiny_model())
        model.generate(prompt(8), max_new_tokens=5, speculator="prompt_lookup")

    @pytest.mark.parametrize("text", ["{}", "medusa:heads={},max_nodes=4", "prompt_lookup+{}"])
    def test_a_folder_is_read_again_when_its_files_change(self, tiny_model, prompt, tmp_path, text):
        model, folder = copy.deepcopy(tiny_model()), tmp_path / "head"
        DRAFTERS["medusa"](model, None).save_pretrained(folder)
        text = text.format(folder)

        def resolved():
            model.generate(prompt(8), max_new_tokens=4, speculator=text)
            return hf_speculate.speculators(model)[text]

        first = resolved()
        assert resolved() is first
        weights = next(path for path in folder.iterdir() if path.suffix != ".json")
        written = weights.stat()
        other = tmp_path / "other"  # of the same size and time, as `cp -p` and `rsync -t` write it
        other.write_bytes(weights.read_bytes())
        os.utime(other, ns=(written.st_atime_ns, written.st_mtime_ns))
        os.replace(other, weights)
        second = resolved()
        assert second is not first
        os.utime(weights, ns=(0, 0))
        third = resolved()
        assert third is not second
        assert resolved() is third
        config = folder / "config.json"
        content = config.read_bytes()
        config.write_text("{")
        with pytest.raises(CheckpointError):
            resolved()
        config.write_bytes(content)
        third = resolved()
        folder.rename(tmp_path / "gone")
        assert resolved() is third

    def test_attach_serves_code_that_calls_generate_itself(self, tiny_model, prompt):
        model, ids = copy.deepcopy(tiny_model()), prompt(8)
        plain = model.generate(ids, max_new_tokens=20)
        speculator = perfect(model, ids)
        assert hf_speculate.attach(model, speculator) is speculator
        assert torch.equal(model.generate(ids, max_new_tokens=20), plain)
        assert speculator.stats.calls == 1
        model.generate(ids, max_new_tokens=20, speculator=None)
        assert speculator.stats.calls == 1, "speculator=None must run plain"
        hf_speculate.detach(model)
        model.generate(ids, max_new_tokens=20)
        assert speculator.stats.calls == 1

    def test_attach_takes_an_object_that_holds_a_model(self, tiny_model, prompt):
        class Harness:
            model = copy.deepcopy(tiny_model())

        harness = Harness()
        speculator = hf_speculate.attach(harness, "prompt_lookup:max_ngram=3")
        assert speculator.drafter.options.max_ngram == 3
        assert hf_speculate.attached(harness) is hf_speculate.attached(harness.model) is speculator
        assert hf_speculate.speculators(harness) == {"prompt_lookup:max_ngram=3": speculator}
        harness.model.generate(prompt(9), max_new_tokens=8)
        assert speculator.stats.calls == 1
        assert hf_speculate.detach(harness) is speculator
        assert hf_speculate.attached(harness) is None
        with pytest.raises(TypeError, match="expected a transformers model"):
            hf_speculate.attach(object(), "prompt_lookup")

    def test_attached_model_is_freed_with_its_last_reference(self, tiny_model, prompt):
        model = copy.deepcopy(tiny_model())
        hf_speculate.attach(model, "prompt_lookup")
        model.generate(prompt(8), max_new_tokens=5)
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None


class TestOutput:
    def test_statistics_come_per_call_and_add_up(self, tiny_model, prompt):
        model, ids = tiny_model(), prompt(8)
        speculator = perfect(model, ids)
        outputs = [
            model.generate(ids, max_new_tokens=n, speculator=speculator, return_dict_in_generate=True) for n in (10, 20)
        ]
        for output, n in zip(outputs, (10, 20), strict=True):
            assert isinstance(output.speculation, SpeculationStats)
            assert output.speculation.emitted_tokens + output.speculation.prefill_tokens == n
        assert speculator.stats.emitted_tokens == 28
        assert speculator.stats.calls == 2
        speculator.stats.reset()
        assert speculator.stats == SpeculationStats()

    def test_the_users_cache_object_is_the_one_that_is_used_and_returned(self, tiny_model, prompt):
        model, ids = tiny_model(), prompt(8)
        text = model.generate(ids, max_new_tokens=30)
        for make in (lambda: DynamicCache(config=model.config), DynamicCache):
            cache = make()
            model.generate(ids, max_new_tokens=10, **as_cache(cache))
            output = model.generate(
                text[:, :18],
                max_new_tokens=6,
                **as_cache(cache),
                speculator=perfect(model, text[:, :18]),
                return_dict_in_generate=True,
            )
            assert cache_of(output) is cache
            assert torch.equal(output.sequences, text[:, :24])
            assert torch.equal(model.generate(text[:, :24], max_new_tokens=14, **as_cache(cache)), text)


class StrangeLayer(DynamicLayer):
    """Of somebody else: what it does with its entries is not known."""


class TestFallbacks:
    @pytest.mark.rest
    @pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() == "AVX2",
        reason="torch's flex attention is wrong there at some lengths",
    )
    def test_flex_attention_gets_chains(self, tiny_model, prompt):
        model, ids = copy.deepcopy(tiny_model(num_layers=1)), prompt(8)
        model.config._attn_implementation = "flex_attention"
        plain = model.generate(ids, max_new_tokens=24)
        ours = model.generate(ids, max_new_tokens=24, speculator=perfect(model, ids), return_dict_in_generate=True)
        assert torch.equal(ours.sequences, plain)
        assert ours.speculation.mean_acceptance_length > 3
        assert "flex_attention" in next(iter(ours.speculation.fallbacks))

    def test_layers_that_cannot_be_indexed_run_plain_and_say_so(self, tiny_model, prompt):
        def strange_cache():
            cache = DynamicCache(config=model.config)
            cache.layers = [StrangeLayer() for _ in cache.layers]
            return as_cache(cache)

        model, request = tiny_model(), {"inputs": prompt(12), "max_new_tokens": 20, "pad_token_id": 0}
        speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))
        plain = model.generate(**request)
        with pytest.raises(UnsupportedRequestError, match="StrangeLayer"):
            model.generate(**request, speculator=speculator, **strange_cache())
        hf_speculate.attach(model, speculator)
        try:
            assert torch.equal(model.generate(**request, **strange_cache()), plain)
        finally:
            hf_speculate.detach(model)
        assert "StrangeLayer" in next(iter(speculator.stats.fallbacks))


def test_features_are_the_targets_hidden_states_at_the_path(tiny_model, prompt):
    model, ids = tiny_model(dtype=torch.float64), prompt(9)
    script = model.generate(ids, max_new_tokens=48)[:, 9:]
    drafter = Tapping(script, (2, 2, 2), (0, 1, 2), accuracy=0.8)
    text = model.generate(ids, max_new_tokens=30, speculator=Speculator(drafter))
    untold = text.shape[1] - 1 - drafter.assert_saw(model(text[:, :-1], output_hidden_states=True).hidden_states)
    assert 1 <= untold <= 4  # the last round only: no draft came after it


def test_stop_strings_work_without_any_file(tiny_model, prompt):
    model, ids, tokenizer = tiny_model(), prompt(8), character_tokenizer()
    text = model.generate(ids, max_new_tokens=30)
    speculator = perfect(model, ids)
    for place in range(8, 20):
        stop = tokenizer.decode(text[0, place : place + 2])
        request = {"stop_strings": [stop], "tokenizer": tokenizer, "max_new_tokens": 30}
        plain = model.generate(ids, **request)
        assert torch.equal(model.generate(ids, **request, speculator=speculator), plain)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_inputs_by_position_and_by_name_however_many_logits_the_prefill_keeps(tiny_model, prompt, do_sample):
    model, ids = tiny_model(), prompt(8)
    request = {"max_new_tokens": 12, "do_sample": do_sample}
    for args, kwargs in (((ids,), {}), ((), {"inputs": ids}), ((), {"input_ids": ids, "logits_to_keep": 3})):
        texts = []
        for speculator in (None, perfect(model, ids), Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))):
            torch.manual_seed(0)
            texts.append(model.generate(*args, **kwargs, **request, speculator=speculator))
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(texts[0], texts[2])


def test_stocks_warnings_about_lengths_are_still_there(tiny_model, prompt):
    with pytest.warns(UserWarning, match="default `max_length`"):
        tiny_model().generate(prompt(7), speculator="prompt_lookup")
    with pytest.raises(ValueError, match=r"`max_length`"):
        tiny_model().generate(prompt(7), max_length=4, max_new_tokens=None, speculator="prompt_lookup")
