"""Targets with PEFT adapters: the text of each, what is learnt of each, and what one must not tell of another."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import CACHE_NAME
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.target import unwrap
from hf_speculate.target.adapters import active_adapters, adapter_fingerprints
from hf_speculate.testing import RandomDrafter, ScriptedDrafter, check_lossless
from hf_speculate.tree import TreeRow
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.origin.targets import adapter_mismatch

from ..support.adapters import perturbed
from ..support.decoding import ForwardClock
from ..support.models import VOCAB_SIZE
from ..support.tiny_heads import write_eagle_head


peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("unchecked_shapes")

NEW_TOKENS = 14
ALL = ("eagle", "scripted", "random", "prompt lookup", "itself")


@pytest.fixture
def adapted(tiny_model):
    """Adapters "first" (attention and output matrix) and "second" (MLP)."""
    first = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "lm_head"])
    model = peft.get_peft_model(copy.deepcopy(tiny_model("qwen2")), first, "first")
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["up_proj", "down_proj"]))
    return perturbed(model)


def speculators(model, text, width, folder):
    """One of every kind of drafter, with its name in `ALL`."""
    yield (
        "eagle",
        AutoSpeculator.from_pretrained(
            write_eagle_head(folder, 32, VOCAB_SIZE), target=model, feature_layers=(0, 1, 2)
        ),
    )
    drafter = ScriptedDrafter(text[:, width:], (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
    yield "scripted", Speculator(drafter)
    yield "random", Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=20))
    yield "prompt lookup", AutoSpeculator.from_name("prompt_lookup", target=model, min_ngram=1)
    yield "itself", Speculator(DraftModelDrafter(unwrap(model), DraftModelOptions(depth=3, top_k=2)))


def check(model, prompt, folder, kinds=("eagle", "scripted")):
    """Greedy and sampled text with drafters of these kinds is the target's own, as it computes now."""
    ids = prompt(9)
    text = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS)
    for name, speculator in speculators(model, text, 9, folder):
        if name not in kinds:
            continue
        report = check_lossless(model, speculator, [ids], max_new_tokens=NEW_TOKENS)
        sampled = check_lossless(model, speculator, [ids], max_new_tokens=NEW_TOKENS, seeds=(3,), do_sample=True)
        assert report.num_identical + sampled.num_identical == 2, f"{name}: {report.ties + sampled.ties}"
        assert speculator.stats.rounds, name
    return text


class TestText:
    def test_text_is_plain_with_adapters_switched_merged_and_unloaded(self, adapted, prompt, tmp_path):
        texts = {}
        for turn, name in enumerate(("first", "second", "first")):
            adapted.set_adapter(name)
            texts[name] = check(adapted, prompt, tmp_path / f"{turn}", ALL if turn == 1 else ("eagle", "scripted"))
        with adapted.disable_adapter():
            texts["none"] = check(adapted, prompt, tmp_path / "none")
        adapted.merge_adapter()
        assert torch.equal(check(adapted, prompt, tmp_path / "merged"), texts["first"])
        adapted.unmerge_adapter()
        alone = adapted.merge_and_unload()
        assert torch.equal(check(alone, prompt, tmp_path / "unloaded"), texts["first"])
        assert len({tuple(text[0].tolist()) for text in texts.values()}) == 3, "the adapters do nothing"

    @pytest.mark.parametrize(
        "config",
        [
            {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
            {"target_modules": ["embed_tokens", "lm_head"]},
            {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
            {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]},
        ],
        ids=["dora", "embeddings", "modules_to_save", "tokens"],
    )
    def test_text_is_plain_with_every_kind_of_lora(self, tiny_model, prompt, config, tmp_path):
        """Where embeddings or output matrix are adapted, a head that shares them follows."""
        model = peft.get_peft_model(copy.deepcopy(tiny_model()), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **config))
        check(perturbed(model), prompt, tmp_path / "head")

    def test_text_is_plain_with_an_adapter_per_row(self, adapted, prompt, tmp_path):
        inputs = {"input_ids": torch.cat([prompt(9, seed=seed) for seed in (1, 2, 3)])}
        request = {**inputs, "adapter_names": ["first", "second", "__base__"], "max_new_tokens": NEW_TOKENS}
        plain = adapted.generate(**request)
        for name, speculator in speculators(adapted, plain, 9, tmp_path / "head"):
            assert torch.equal(adapted.generate(**request, speculator=speculator), plain), name
            assert list(speculator.adapter_stats) == ["first|second|__base__"]

    def test_activated_lora_is_refused(self, tiny_model, prompt):
        """PEFT counts its tokens from the end of a forward: nodes of a tree would be computed without the adapter."""
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], alora_invocation_tokens=[5, 6]
        )
        model = perturbed(peft.get_peft_model(copy.deepcopy(tiny_model("qwen2")), config))
        ids = torch.cat([prompt(9), torch.tensor([[5, 6]])], dim=1)
        plain = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS)
        speculator = Speculator(ScriptedDrafter(plain[:, 11:], (2, 2, 1), vocab_size=VOCAB_SIZE))
        with pytest.raises(UnsupportedRequestError, match="activated LoRA"):
            model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, speculator=speculator)
        hf_speculate.attach(model, speculator)
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS), plain)
        assert speculator.stats.rounds == 0
        # Without its invocation the adapter is not in effect.
        plain = model.generate(input_ids=ids[:, :9], max_new_tokens=NEW_TOKENS, speculator=None)
        assert torch.equal(model.generate(input_ids=ids[:, :9], max_new_tokens=NEW_TOKENS), plain)
        assert speculator.stats.rounds > 0


class TestConversations:
    def turns(self, model, prompt, speculator, names):
        """Turns on one cache, each written by another adapter; returns the text and the last turn's statistics."""
        cache, text = DynamicCache(config=unwrap(model).config), prompt(11)
        stats: Any = None
        for turn, name in enumerate(names):
            model.set_adapter(name)
            request = {"input_ids": text, CACHE_NAME: cache, "max_new_tokens": 20, "speculator": speculator}
            output = model.generate(**request, return_dict_in_generate=True)
            stats = getattr(output, "speculation", None)
            text = torch.cat([output.sequences, prompt(4, seed=turn + 5)], dim=1)
        return text, stats

    def test_drafter_state_follows_the_cache_when_the_adapter_changes(self, adapted, prompt, tmp_path):
        """The cache holds what the last adapter read, so a drafter's states of that text must be the last ones too: a
        model that drafts for itself is right to the end only if it goes on from these."""
        names = ("first", "second", "first")
        plain, _ = self.turns(adapted, prompt, None, names)
        for name, speculator in speculators(adapted, plain, 11, tmp_path / "head"):
            text, stats = self.turns(adapted, prompt, speculator, names)
            assert torch.equal(text, plain), name
            if name == "itself":
                assert stats.acceptance_rate_by_depth[1] == 1.0


class TestLearntAcceptance:
    def run(self, model, speculator, ids, name, count=2):
        model.set_adapter(name)
        for _ in range(count):
            model.generate(input_ids=ids, max_new_tokens=64, speculator=speculator)

    def test_policy_learns_acceptance_per_adapter(self, adapted, prompt, monkeypatch):
        """A drafter that knows the text of "first": what "second" rejects must not change what is known of "first"."""
        ids = prompt(9)
        ForwardClock(monkeypatch, unwrap(adapted))
        adapted.set_adapter("first")
        text = adapted.generate(input_ids=ids, max_new_tokens=64)
        drafter = ScriptedDrafter(text[:, 9:], (1, 1, 1, 1), vocab_size=VOCAB_SIZE)
        speculator = Speculator(drafter, adaptive=True)
        self.run(adapted, speculator, ids, "first")
        known, costs = speculator.policy._known[unwrap(adapted)], speculator.policy._costs[unwrap(adapted)]

        def shares(name):
            """That a node is right of which the drafter is sure."""
            return known[name, False].acceptance.probabilities(TreeRow([5, 1], [-1, 0], [0.0, 0.0]))[1]

        before = shares("first")
        self.run(adapted, speculator, ids, "second")
        assert shares("first") == before > 0.9
        assert shares("second") < 0.85  # rounds without a draft have it half forgotten
        assert costs["first", 1, False, ()] is not costs["second", 1, False, ()]
        stats = speculator.adapter_stats
        assert (stats["first"].mean_acceptance_length or 0) > 4
        assert 1 <= (stats["second"].mean_acceptance_length or 0) < 1.5
        assert stats["first"].calls + stats["second"].calls == speculator.stats.calls == 4


class TestActiveAdapters:
    def test_active_adapters_names_enabled_and_merged_adapters(self, adapted):
        model = unwrap(adapted)
        assert active_adapters(model) == "first"
        adapted.set_adapter("second")
        assert active_adapters(model) == "second"
        adapted.base_model.set_adapter(["second", "first"])
        assert active_adapters(model) == "first+second"
        with adapted.disable_adapter():
            assert active_adapters(model) == ""
        adapted.set_adapter("second")
        adapted.merge_adapter(["first"])
        assert active_adapters(model) == "first+second"
        adapted.unmerge_adapter()
        assert active_adapters(adapted.merge_and_unload()) == ""


class TestHeadsForAnAdapter:
    """A head's provenance against the adapter in effect when it is loaded; text and loading never depend on it."""

    @pytest.fixture
    def head(self, tmp_path, adapted):
        def write(adapters):
            folder = write_eagle_head(tmp_path / "head", 32, VOCAB_SIZE)
            if adapters is not None:
                (tmp_path / "head" / "provenance.json").write_text(json.dumps({"adapters": dict(adapters)}))
            return folder

        return write

    def test_adapter_fingerprints_depend_on_weights_only(self, adapted, tmp_path):
        model = unwrap(adapted)
        first = adapter_fingerprints(model)
        adapted.set_adapter("second")
        second = adapter_fingerprints(model)
        assert (list(first), list(second)) == (["first"], ["second"])
        adapted.save_pretrained(str(tmp_path), selected_adapters=["first"])
        adapted.load_adapter(str(tmp_path / "first"), "another name")
        adapted.set_adapter("another name")
        assert list(adapter_fingerprints(model).values()) == list(first.values()) != list(second.values())

    def test_head_of_the_same_adapter_loads_without_a_warning(self, adapted, head, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        monkeypatch.setattr(logging.getLogger("hf_speculate"), "propagate", True)
        folder = head(adapter_fingerprints(unwrap(adapted)))
        AutoSpeculator.from_pretrained(folder, target=adapted, feature_layers=(0, 1, 2))
        assert not caplog.records
        with adapted.disable_adapter():
            AutoSpeculator.from_pretrained(folder, target=adapted, feature_layers=(0, 1, 2))
        (record,) = caplog.records
        assert "was trained for a target with the PEFT adapter 'first', and none is in effect" in record.getMessage()
        assert "fewer drafts will be accepted" in record.getMessage()

    def test_head_of_another_adapter_loads_with_a_warning(self, adapted, head, tmp_path):
        model = unwrap(adapted)
        folder = head(adapter_fingerprints(model))
        adapted.set_adapter("second")
        assert "'first', but another one is: 'second' in effect" in adapter_mismatch(folder, model)
        (tmp_path / "head" / "provenance.json").write_text(json.dumps({"adapters": {}}))
        assert "trained for the target without adapters, but there is 'second'" in adapter_mismatch(folder, model)
        (tmp_path / "head" / "provenance.json").unlink()
        assert "has no record of training for the PEFT adapter 'second'" in adapter_mismatch(folder, model)
        with adapted.disable_adapter():
            assert adapter_mismatch(folder, model) == ""
