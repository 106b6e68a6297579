"""What stands beside `generate`: pipelines, adapters, offloading, compilation, threads, evaluation harnesses."""

from __future__ import annotations

import copy
import json
import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.testing import RandomDrafter, ScriptedDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions

from ..support.inputs import character_tokenizer
from ..support.models import VOCAB_SIZE
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
    def test_attached_and_as_an_argument(self, tiny_model, tokenizer, batch_size, do_sample):
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


class TestPeft:
    @pytest.fixture
    def adapted(self, tiny_model):
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            copy.deepcopy(tiny_model("qwen2")), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "first"
        )
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up_proj"]))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3, generator=generator)
        return model.eval()

    def test_adapters_switched_between_calls(self, adapted, prompt):
        ids, texts = prompt(9), {}
        speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=20))
        for attached in (False, True):
            for name in ("first", "second", "none", "first"):
                adapted.set_adapter("first" if name == "none" else name)
                with adapted.disable_adapter() if name == "none" else torch.no_grad():
                    texts[name] = adapted.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, speculator=None)
                    if attached:
                        hf_speculate.attach(adapted, scripted(texts[name], 9))
                        ours = adapted.generate(input_ids=ids, max_new_tokens=NEW_TOKENS)
                        assert hf_speculate.detach(adapted).stats.accepted_tokens > 0
                    else:
                        ours = adapted.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, speculator=speculator)
                assert torch.equal(ours, texts[name]), name
        assert len({tuple(text[0].tolist()) for text in texts.values()}) == 3, "the adapters do nothing"

    def test_an_adapter_for_each_row_of_a_batch(self, adapted, prompt):
        inputs = {"input_ids": torch.cat([prompt(9, seed=1), prompt(9, seed=2), prompt(9, seed=3)])}
        request = {**inputs, "adapter_names": ["first", "second", "__base__"], "max_new_tokens": NEW_TOKENS}
        plain = adapted.generate(**request)
        assert not torch.equal(plain, adapted.generate(**inputs, max_new_tokens=NEW_TOKENS))
        eos = int(plain[0, 14])
        for stops in (None, eos):
            expected = adapted.generate(**request, eos_token_id=stops)
            speculator = scripted(plain, 9)
            assert torch.equal(adapted.generate(**request, eos_token_id=stops, speculator=speculator), expected)
            assert speculator.stats.accepted_tokens > 0

    def test_streaming(self, adapted, prompt):
        text = adapted.generate(input_ids=prompt(9), max_new_tokens=NEW_TOKENS)
        rounds = hf_speculate.stream(
            adapted, input_ids=prompt(9), max_new_tokens=NEW_TOKENS, speculator=scripted(text, 9)
        )
        assert [token for (row,) in rounds for token in row] == text[0, 9:].tolist()


class TestPlacement:
    @pytest.mark.parametrize("embeddings", ["cpu", "disk"])
    def test_cpu_and_disk_offload(self, tiny_model, prompt, tmp_path, embeddings):
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

    def test_device_map_auto_with_little_memory(self, tiny_model, prompt, tmp_path):
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
    def test_compiled(self, tiny_model, prompt, way):
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
        torch.compiler.reset()

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
    def test_gradient_modes(self, tiny_model, prompt, mode):
        model = copy.deepcopy(tiny_model()).requires_grad_(True)
        plain = model.generate(prompt(9), max_new_tokens=NEW_TOKENS)
        with mode():
            ours = model.generate(prompt(9), max_new_tokens=NEW_TOKENS, speculator=scripted(plain, 9))
        assert torch.equal(ours, plain)


def test_two_threads_with_two_speculators_on_one_model(tiny_model, prompt):
    model = tiny_model()
    prompts = [prompt(9, seed=1), prompt(6, seed=2)]
    texts = [model.generate(ids, max_new_tokens=60) for ids in prompts]

    class Tapping(ScriptedDrafter):
        feature_layers = (1, -1)

        def start(self, request):
            session = super().start(request)
            session.observe = lambda tokens, features, lengths: seen.append(
                {layer: states[:, : int(lengths)].clone() for layer, states in features.items()}
            )
            return session

    seen: list = []
    speculators = [
        Speculator(Tapping(texts[0][:, 9:], (2, 2), accuracy=0.8, vocab_size=VOCAB_SIZE)),
        Speculator(ScriptedDrafter(texts[1][:, 6:], (3, 1, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)),
    ]
    found: list[list[bool]] = [[], []]

    def work(index):
        for _ in range(6):
            ours = model.generate(prompts[index], max_new_tokens=60, speculator=speculators[index])
            found[index].append(torch.equal(ours, texts[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 6] * 2
    hidden = model(texts[0][:, :-1], output_hidden_states=True).hidden_states[1]
    position = 0
    for features in seen:
        length = features[1].shape[1]
        position = 0 if length >= 9 else position  # the prompt of the next call
        torch.testing.assert_close(features[1], hidden[:, position : position + length], atol=1e-4, rtol=1e-4)
        position += length


class TestLmEval:
    @pytest.fixture
    def harness(self, shared_root):
        pytest.importorskip("lm_eval")
        from lm_eval.models.huggingface import HFLM
        from transformers import AutoTokenizer

        folder = shared_root / "models" / "stories260k"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        loaded = AutoTokenizer.from_pretrained(folder)
        loaded.pad_token = loaded.pad_token or loaded.eos_token
        return HFLM(pretrained=model, tokenizer=loaded, batch_size=4)

    def test_a_task_scores_as_plain(self, harness, tmp_path, monkeypatch):
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager

        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
        names = ("Lily", "Tom", "The big dog", "Anna", "A bird", "Sam and Mia")
        rows = [{"q": f"Once upon a time, {name}", "a": " was"} for name in names]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        task = {
            "task": "tiny",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{a}}",
            "generation_kwargs": {"until": [".", "He "], "max_gen_toks": 40},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
        (tmp_path / "tiny.yaml").write_text(json.dumps(task))  # JSON is YAML

        def run():
            found = simple_evaluate(
                model=harness,
                tasks=["tiny"],
                task_manager=TaskManager(include_path=str(tmp_path)),
                log_samples=True,
                bootstrap_iters=0,
            )
            return [sample["resps"] for sample in found["samples"]["tiny"]], found["results"]["tiny"][
                "exact_match,none"
            ]

        plain = run()
        model = harness.model
        for drafter in (
            RandomDrafter(vocab_size=512),
            DraftModelDrafter(model, DraftModelOptions(depth=4)),
        ):
            speculator = hf_speculate.attach(model, Speculator(drafter))
            assert run() == plain
            hf_speculate.detach(model)
            assert speculator.stats.calls >= 2
        assert speculator.stats.mean_acceptance_length > 2
