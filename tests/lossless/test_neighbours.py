"""What stands beside `generate`: pipelines, adapters, offloading, compilation, threads, evaluation harnesses."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.testing import ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.inputs import character_tokenizer
from ..support.models import VOCAB_SIZE
from ..support.recording import Tapping
from ..support.tiers import quick
from ..support.tiny_heads import write_eagle_head


NEW_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(pad_token="~", eos_token="|", bos_token="^")


def scripted(text, width, branching=(2, 2, 1)):
    drafter = ScriptedDrafter(text[:, width:], branching, accuracy=0.8, vocab_size=VOCAB_SIZE)
    return Speculator(drafter)


class TestPipeline:
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_pipeline_gives_plain_text_attached_and_by_argument(self, tiny_model, tokenizer, batch_size, do_sample):
        model = copy.deepcopy(tiny_model())
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        texts = ["Once upon", "A", "To be or not to be"]
        request = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "batch_size": batch_size}

        def run(**kwargs):
            torch.manual_seed(1)
            return pipe(texts, **request, **kwargs)

        plain = run()
        speculator = Speculator(DraftModelDrafter(model, DraftModelOptions(depth=3)))
        assert run(speculator=speculator) == plain
        assert speculator.stats.calls == (3 if batch_size == 1 else 1)
        hf_speculate.attach(model, speculator)
        assert run() == plain
        assert speculator.stats.calls == (6 if batch_size == 1 else 2)
        assert speculator.stats.accepted_tokens > 0
        assert run(speculator=None) == plain
        assert speculator.stats.calls == (6 if batch_size == 1 else 2)
        hf_speculate.detach(model)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", speculator=speculator)
        assert run() == plain
        assert speculator.stats.calls == (9 if batch_size == 1 else 3)


class TestPlacement:
    @pytest.mark.parametrize("embeddings", ["cpu", "disk"])
    def test_offloaded_models_give_plain_text(self, tiny_model, prompt, tmp_path, embeddings):
        accelerate = pytest.importorskip("accelerate")
        model, ids = tiny_model(), prompt(9)
        plain = model.generate(ids, max_new_tokens=NEW_TOKENS)
        model.save_pretrained(tmp_path / "model")
        places = {
            "model.embed_tokens": embeddings,
            "model.layers.0": "cpu",
            "model.layers.1": "disk",
            "model.norm": "disk",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
        offloaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload", dtype=torch.float32
        )
        assert "disk" in offloaded.hf_device_map.values()
        assert isinstance(offloaded.model.layers[1].mlp._hf_hook, accelerate.hooks.AlignDevicesHook)

        class Tapping(ScriptedDrafter):
            feature_layers = (0, 1, 2, -1)

        for speculator in (
            scripted(plain, 9),
            Speculator(Tapping(plain[:, 9:], (2, 2), vocab_size=VOCAB_SIZE)),
            Speculator(DraftModelDrafter(tiny_model(), DraftModelOptions(depth=3))),
        ):
            assert torch.equal(offloaded.generate(ids, max_new_tokens=NEW_TOKENS, speculator=speculator), plain)
            assert speculator.stats.accepted_tokens > 0

    def test_device_map_auto_gives_plain_text(self, tiny_model, prompt, tmp_path):
        """accelerate puts what does not fit on disk; a head that has no matrices of its own is where the last layer
        computes, and what it is shown comes from wherever a layer was."""
        pytest.importorskip("accelerate")
        config, ids = copy.deepcopy(tiny_model().config), prompt(9)
        config.num_hidden_layers = 4
        model = LlamaForCausalLM(config).eval()
        plain = model.generate(ids, max_new_tokens=NEW_TOKENS)
        model.save_pretrained(tmp_path / "model")
        spread = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            device_map="auto",
            max_memory={"cpu": "60KB"},
            offload_folder=tmp_path / "offload",
            dtype=torch.float32,
        )
        places = spread.hf_device_map
        assert {"cpu", "disk"} <= set(places.values()), places
        head = write_eagle_head(tmp_path / "head", 32, VOCAB_SIZE)
        speculator = AutoSpeculator.from_pretrained(head, target=spread, feature_layers=(1, 2, 4))
        drafter: Any = speculator.drafter
        assert drafter.head.device.type == "cpu"
        for each in (speculator, scripted(plain, 9)):
            assert torch.equal(spread.generate(ids, max_new_tokens=NEW_TOKENS, speculator=each), plain)
            assert each.stats.rounds > 0

    @pytest.mark.parametrize("way", quick([("eager", "model"), ("aot_eager", "model"), ("eager", "forward")]))
    def test_compiled_models_give_plain_text(self, tiny_model, prompt, way):
        backend, how = way
        model, ids = copy.deepcopy(tiny_model(num_layers=1)), prompt(9)
        plain = model.generate(ids, max_new_tokens=12)
        if how == "model":
            compiled = torch.compile(model, backend=backend, dynamic=True)
        else:
            compiled, model.forward = model, torch.compile(model.forward, backend=backend, dynamic=True)
        speculator = scripted(plain, 9, (1, 1, 1))
        assert torch.equal(compiled.generate(ids, max_new_tokens=12, speculator=speculator), plain)
        assert speculator.stats.accepted_tokens > 0
        assert hf_speculate.attach(compiled, "prompt_lookup") is hf_speculate.detach(model)
        torch.compiler.reset()

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
    def test_gradient_modes_give_plain_text(self, tiny_model, prompt, mode):
        model = copy.deepcopy(tiny_model()).requires_grad_(True)
        plain = model.generate(prompt(9), max_new_tokens=NEW_TOKENS)
        with mode():
            ours = model.generate(prompt(9), max_new_tokens=NEW_TOKENS, speculator=scripted(plain, 9))
        assert torch.equal(ours, plain)


def test_two_threads_with_two_speculators_on_one_model(tiny_model, prompt):
    model = tiny_model()
    prompts = [prompt(9, seed=1), prompt(6, seed=2)]
    texts = [model.generate(ids, max_new_tokens=60) for ids in prompts]
    tapping = Tapping(texts[0][:, 9:], (2, 2), (1,), accuracy=0.8)
    scripted = ScriptedDrafter(texts[1][:, 6:], (3, 1, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
    found: list[list[bool]] = [[], []]

    def work(index, drafter):
        for _ in range(6):
            ours = model.generate(prompts[index], max_new_tokens=60, speculator=Speculator(drafter))
            found[index].append(torch.equal(ours, texts[index]))

    threads = [threading.Thread(target=work, args=each) for each in enumerate((tapping, scripted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 6] * 2
    hidden = model(texts[0][:, :-1], output_hidden_states=True).hidden_states[1]
    begins = [i for i, (tokens, _, _) in enumerate(tapping.seen) if tokens.shape[1] >= 9]
    assert len(begins) == 6, "the prompt of each call"
    for begin, end in zip(begins, [*begins[1:], None], strict=True):
        one_call = Tapping([0], (1,), (1,))
        one_call.seen = tapping.seen[begin:end]
        assert one_call.assert_saw({1: hidden}, atol=1e-4) > 50
