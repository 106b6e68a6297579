"""Published layouts of EAGLE heads: read, written, refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.drafting import RAW_LAST
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.speculator.repositories import drafter_class_for
from hf_speculate_plugins.checkpoints import ConfigValues
from hf_speculate_plugins.eagle import EagleDrafter, EagleOptions
from hf_speculate_plugins.eagle.loading import _rope
from hf_speculate_tools.heads.convert import convert_checkpoint

from ...support.heads import DEPTH, EAGLE_LAYOUTS, HIDDEN, PLAIN, VOCAB, make_tensors, target
from ...support.paths import REPOSITORY


PYCODER = str(REPOSITORY / "examples" / "pycoder")


class TestLayouts:
    @pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
    def test_from_pretrained_finds_the_drafter(self, head, layout):
        folder = head(layout)
        assert drafter_class_for(folder) is EagleDrafter
        drafter = AutoSpeculator.from_pretrained(folder, target=target(), depth=3).drafter
        assert drafter.options == EagleOptions(depth=3)
        assert drafter.spec.dialect == layout.removesuffix("-narrow").removesuffix("-parallel")
        assert not any(p.requires_grad for p in drafter.head.parameters())

    def test_switches_come_from_tensors_and_config(self, head):
        spec = EagleDrafter.from_folder(head("speculators"), target()).spec
        assert (spec.num_layers, spec.num_features, spec.qk_norm, spec.windows) == (2, 4, True, (None, 6))
        assert spec.norm_before_residual
        assert spec.feed_back_normed
        assert spec.norm_before_fc
        spec = EagleDrafter.from_folder(head("specforge"), target()).spec
        assert (spec.norm_logits, spec.feed_back_normed, spec.fc_norm) == (False, False, True)
        assert spec.rope["rope_theta"] == 1e6
        assert EagleDrafter.from_folder(head("safeailab"), target()).entry_layers == (2, 3, 4)
        assert EagleDrafter.from_folder(head("deepspec"), target()).entry_layers == (1, 2, 4, 5, 6)
        assert EagleDrafter.from_folder(head("eagle1"), target()).entry_layers == (DEPTH,)

    @pytest.mark.parametrize("layout", ["specforge", "vllm"])
    def test_eagle4_drafts_with_its_whole_output_matrix(self, head, layout, logged):
        """It is read as the EAGLE-3.1 head that it extends; both matrices of low rank are accounted for."""

        def change(config, tensors):
            config["architectures"] = ["LlamaForCausalLMEagle4"]
            config.pop("parallel_drafting", None)
            config["efficient_lm_head_config"] = {"type": "svd", "rank": 4, "num_candidates": 8}
            tensors |= {"efficient_lm_head.weight": torch.randn(48, 4)}
            tensors |= {"efficient_lm_head_down_proj.weight": torch.randn(4, HIDDEN)}
            prefix = "model." if layout == "vllm" else ""
            tensors[f"{prefix}fc.linear.weight"] = tensors.pop(f"{prefix}fc.weight")

        plain = EagleDrafter.from_folder(head(layout), target())
        drafter = AutoSpeculator.from_pretrained(head(layout, change), target=target()).drafter
        named = {"efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"}
        assert drafter.report.ignored.keys() - plain.report.ignored.keys() == named
        ours, theirs = drafter.head.state_dict(), plain.head.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
        assert bool(logged()) == (layout == "vllm"), "whose meaning norm_output has is open there"
        request = {"input_ids": torch.tensor([[5, 9, 11, 3]]), **PLAIN}
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
            texts = []
            for speculator in (None, Speculator(drafter)):
                torch.manual_seed(3)
                texts.append(target().generate(**request, **sampling, speculator=speculator))
            assert torch.equal(*texts)

    def test_vllms_names_without_speculators_conventions(self, head):
        """NeMo Automodel's: `norm_output` is the state that is fed back, and the target's windows are not theirs."""
        spec = EagleDrafter.from_folder(head("vllm"), target()).spec
        assert (spec.norm_before_residual, spec.norm_logits, spec.feed_back_normed) == (False, True, True)
        assert (spec.windows, spec.rope["rope_theta"]) == ((None,), 5e5)
        folder = head("vllm", change=lambda config, _: config.update(norm_output=False))
        spec = EagleDrafter.from_folder(folder, target()).spec
        assert (spec.norm_logits, spec.feed_back_normed) == (True, False)

    @pytest.mark.parametrize("last", [True, False])
    def test_modelopts_files_under_vllms_names(self, head, last):
        def change(config, tensors):
            flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": last, "next_layer_regular": True}
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], **flags}
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            for name in list(tensors):
                tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
            del tensors["t2d"]
            if not last:
                del tensors["norm.weight"]

        drafter = EagleDrafter.from_folder(head(change=change), target())
        assert (drafter.spec.dialect, drafter.entry_layers) == ("modelopt", (1, 3, 5))
        assert (drafter.spec.norm_before_residual, drafter.spec.norm_logits) == (False, last)

    def test_what_files_leave_open_is_logged_with_the_option_that_decides(self, head, logged):
        def borrowed(config, tensors):
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            del config["parallel_drafting"]

        folder = head("vllm", change=borrowed)
        assert not EagleDrafter.from_folder(folder, target()).spec.feed_back_normed
        assert [line for line in logged() if folder in line and "give feed_back_normed yourself" in line]
        assert len(logged()) == 1
        assert EagleDrafter.from_folder(folder, target(), feed_back_normed=True).spec.feed_back_normed
        folder = head("speculators", change=lambda config, _: config.pop("norm_before_residual"))
        EagleDrafter.from_folder(folder, target(), norm_before_residual=False)
        assert len(logged()) == 1
        assert not EagleDrafter.from_folder(folder, target()).spec.norm_before_residual
        assert "give norm_before_residual yourself" in logged()[1]

    @pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
    def test_nothing_is_logged_of_whole_files(self, head, logged, layout):
        EagleDrafter.from_folder(head(layout), target())
        assert not logged()

    @pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.module.model."])
    def test_wrapper_prefixes_do_not_matter(self, head, prefix):
        def wrap(config, tensors):
            for name in list(tensors):
                tensors[prefix + name] = tensors.pop(name)

        plain, wrapped = (
            EagleDrafter.from_folder(folder, target()).head.state_dict() for folder in (head(), head(change=wrap))
        )
        assert plain.keys() == wrapped.keys()
        assert all(torch.equal(plain[name], wrapped[name]) for name in plain)

    def test_from_folder_reads_sharded_files(self, head, tmp_path):
        folder = head("speculators")
        tensors = load_file(f"{folder}/model.safetensors")
        names = sorted(tensors)
        shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
        for shard, members in shards.items():
            save_file({name: tensors[name] for name in members}, f"{folder}/{shard}")
        weight_map = {name: shard for shard, members in shards.items() for name in members}
        expected = EagleDrafter.from_folder(folder, target()).head.state_dict()
        os.remove(f"{folder}/model.safetensors")
        with open(f"{folder}/model.safetensors.index.json", "w") as file:
            json.dump({"weight_map": weight_map}, file)
        found = EagleDrafter.from_folder(folder, target()).head.state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        os.remove(f"{folder}/model-00002-of-00002.safetensors")
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
            EagleDrafter.from_folder(folder, target())

    def test_embeddings_of_the_target_are_shared_not_copied(self, head):
        drafter = EagleDrafter.from_folder(head("eagle1"), target())
        assert drafter.head.shared["embed_tokens"] is target().get_input_embeddings()
        assert drafter.head.shared["lm_head"] is target().get_output_embeddings()
        assert not any("embed" in name or "lm_head" in name for name in drafter.head.state_dict())
        assert drafter.report.shared["embed_tokens.weight"] == "equal to the target's"

    def test_trained_embeddings_are_used_and_random_ones_are_not(self, head):
        assert EagleDrafter.from_folder(head("speculators"), target()).head.shared["embed_tokens"] is None

        folder = head("speculators", change=lambda config, _: config.update(embed_requires_grad=False))
        drafter = EagleDrafter.from_folder(folder, target())
        assert drafter.head.shared["embed_tokens"] is not None
        assert "random" in drafter.report.shared["embed_tokens.weight"]
        assert EagleDrafter.from_folder(folder, target(), embeddings="own").head.shared["embed_tokens"] is None

    def test_conventions_can_be_overridden(self, head):
        drafter = EagleDrafter.from_folder(
            head(), target(), feature_layers=[1, 3, DEPTH], rope_theta=5e5, feed_back_normed=True
        )
        assert drafter.entry_layers == (1, 3, RAW_LAST)
        assert drafter.spec.rope["rope_theta"] == 5e5
        assert drafter.spec.feed_back_normed
        with pytest.raises(TargetMismatchError, match="3 target layers, but 2"):
            EagleDrafter.from_folder(head(), target(), feature_layers=[1, 3])

    @pytest.mark.parametrize(
        ("rope", "expected"),
        [
            ({}, {"rope_type": "default", "rope_theta": 10000.0}),
            ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
            ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 10000.0}),
            (
                {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0}},
                {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
            ),
            ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 1, 2]}}, {"rope_type": "default"}),
        ],
    )
    def test_rope_is_found_wherever_configs_put_it(self, rope, expected):
        found = _rope(ConfigValues("head", rope), "safeailab")
        assert expected.items() <= found.items()

    def test_t2d_alone_gives_the_vocabulary(self, head):
        expected = EagleDrafter.from_folder(head(), target()).target_ids
        drafter = EagleDrafter.from_folder(head(change=lambda _, tensors: tensors.pop("d2t")), target())
        assert torch.equal(drafter.target_ids, expected)


def test_the_bundled_head_under_vllms_names_drafts_the_same(tmp_path):
    """As llama.cpp and others rename SpecForge's files: no word of speculators, and SpecForge's `norm_output`."""
    model = AutoModelForCausalLM.from_pretrained(PYCODER, dtype=torch.float32)
    ids = torch.tensor([[44, 300, 71, 9, 200, 31, 15, 400, 77, 12]])
    convert_checkpoint(f"{PYCODER}-eagle3", tmp_path / "midlayer", "specforge", PYCODER)
    tensors = load_file(tmp_path / "midlayer" / "model.safetensors")
    (tmp_path / "layers").mkdir()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "layers" / "model.safetensors")
    shutil.copy(tmp_path / "midlayer" / "config.json", tmp_path / "layers")
    assert json.loads((tmp_path / "layers" / "config.json").read_text())["norm_output"]
    found = []
    for name in ("midlayer", "layers"):
        speculator = AutoSpeculator.from_pretrained(str(tmp_path / name), target=model, adaptive=False)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, speculator=speculator
        )
        found.append(speculator.stats.mean_acceptance_length)
    assert found[0] == found[1] > 3
    convert_checkpoint(tmp_path / "layers", tmp_path / "again", "speculators", PYCODER)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["norm_before_residual"], config["norm_output"]) == (False, False)


class TestMasksOfParallelHeads:
    @pytest.mark.parametrize("key", ["mask_token_id", "ptd_token_id", "pard_token"])
    def test_mask_token_is_read_under_every_name(self, head, key):
        def change(config, tensors):
            config[key] = config.pop("mask_token_id")
            tensors["mask_hidden"] = tensors["mask_hidden"][0]  # NeMo writes two dimensions

        drafter = EagleDrafter.from_folder(head("speculators-parallel", change=change), target())
        assert (drafter.spec.parallel, drafter.spec.mask_token_id) == (True, VOCAB - 1)
        assert (drafter.spec.algorithm, drafter.spec.kind) == ("peagle", "P-EAGLE")

    def test_mask_token_that_no_key_names_must_be_passed(self, head, tmp_path):
        folder = head("speculators-parallel", change=lambda config, _: config.pop("mask_token_id"))
        with pytest.raises(CheckpointError, match=r"does not name its mask token .* pass mask_token_id="):
            EagleDrafter.from_folder(folder, target())
        assert EagleDrafter.from_folder(folder, target(), mask_token_id=3).spec.mask_token_id == 3
        with pytest.raises(CheckpointError, match="a mask token without a known id"):
            EagleDrafter.convert(folder, tmp_path / "saved", "speculators")
        assert not (tmp_path / "saved").exists()

    @pytest.mark.parametrize("value", [-1, 1.5, "<mask>", True])
    def test_mask_token_of_another_type_is_refused(self, head, value):
        folder = head("speculators-parallel", change=lambda config, _: config.update(mask_token_id=value))
        with pytest.raises(CheckpointError, match=r"mask_token_id .* a token id"):
            EagleDrafter.from_folder(folder, target())

    def test_mask_token_outside_the_vocabulary_is_refused(self, head):
        for token in (VOCAB, -1):
            with pytest.raises(TargetMismatchError, match=f"is {token}, but it knows {VOCAB} tokens"):
                EagleDrafter.from_folder(head("speculators-parallel"), target(), mask_token_id=token)

    def test_mask_token_is_refused_for_heads_without_masks(self, head):
        with pytest.raises(ValueError, match=r"mask_token_id is for P-EAGLE heads; the head in .* is EAGLE-3"):
            EagleDrafter.from_folder(head(), target(), mask_token_id=3)

    def test_embeddings_are_the_heads_own(self, head):
        """P-EAGLE trains them: those that are unlike the target's are not taken for rubbish."""
        drafter = EagleDrafter.from_folder(head("speculators-parallel"), target())
        assert "embed_tokens.weight" in drafter.report.used
        saved = EagleDrafter.describe(head("speculators-parallel"))
        assert (saved.algorithm, saved.layout) == ("peagle", "speculators")


class TestSaving:
    """What is written in a layout is read back as the same head."""

    @pytest.mark.parametrize(
        ("source", "layout"),
        [
            ("eagle1", "safeailab"),
            ("safeailab", "safeailab"),
            ("safeailab", "specforge"),
            ("safeailab", "speculators"),
            ("safeailab-narrow", "specforge"),
            ("safeailab-narrow", "speculators"),
            ("specforge", "specforge"),
            ("speculators", "speculators"),
            ("deepspec", "speculators"),
            ("speculators-parallel", "speculators"),
        ],
    )
    def test_save_pretrained_is_read_as_the_same_head(self, head, tmp_path, source, layout):
        overrides = {"rope_theta": 3e5} if source != "specforge" else {}
        first = EagleDrafter.from_folder(head(source), target(), **overrides)
        first.save_pretrained(tmp_path / "saved", layout=layout)
        second = EagleDrafter.from_folder(str(tmp_path / "saved"), target())
        assert second.spec.dialect == (layout if source != "eagle1" else "eagle1")
        same = {"dialect": "safeailab", "feature_layers": None}
        assert replace(first.spec, **same) == replace(second.spec, **same)
        assert first.entry_layers == second.entry_layers
        assert (first.target_ids is None) == (second.target_ids is None)
        assert first.target_ids is None or torch.equal(first.target_ids, second.target_ids)
        before, after = first.head.state_dict(), second.head.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert first.head.shared == second.head.shared

    def test_save_pretrained_refuses_layouts_that_cannot_express_the_head(self, head, tmp_path):
        drafter = EagleDrafter.from_folder(head("speculators"), target())
        with pytest.raises(CheckpointError, match=r"specforge layout cannot .* more than one layer, norms of queries"):
            drafter.save_pretrained(tmp_path / "saved", layout="specforge")
        with pytest.raises(CheckpointError, match=r"specforge layout cannot .* the mask of P-EAGLE"):
            EagleDrafter.from_folder(head("speculators-parallel"), target()).check_layout("specforge")
        drafter = EagleDrafter.from_folder(head("specforge"), target())
        for layout in ("safeailab", "speculators"):
            with pytest.raises(CheckpointError, match="logits without a norm"):
                drafter.save_pretrained(tmp_path / "saved", layout=layout)
        with pytest.raises(CheckpointError, match=r"other layers than \[2, 3, 4\]"):
            EagleDrafter.from_folder(head(), target(), feature_layers=[1, 3, 4]).save_pretrained(
                tmp_path / "saved", layout="safeailab"
            )
        with pytest.raises(CheckpointError, match="a head size other than"):
            EagleDrafter.from_folder(head("safeailab-narrow"), target()).save_pretrained(
                tmp_path / "saved", layout="safeailab"
            )
        with pytest.raises(ValueError, match="unknown layout"):
            drafter.save_pretrained(tmp_path / "saved", layout="onnx")
        assert not (tmp_path / "saved").exists()


class TestBadInput:
    def refused(self, folder, match, error=CheckpointError, model=None):
        with pytest.raises(error, match=match):
            AutoSpeculator.from_pretrained(folder, target=model or target())

    @pytest.mark.parametrize("layout", ["safeailab", "specforge"])
    def test_from_folder_refuses_a_truncated_file(self, head, layout):
        folder = head(layout)
        path = next(f"{folder}/{name}" for name in os.listdir(folder) if not name.endswith("json"))
        content = Path(path).read_bytes()
        for size in (len(content) - 50, len(content) // 2, 4, 0):
            Path(path).write_bytes(content[:size])
            self.refused(folder, "cannot read|refused")

    def test_pickle_with_code_is_not_run(self, head, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "pwned"),)

        folder = head()
        for save in (torch.save, lambda content, path: Path(path).write_bytes(pickle.dumps(content))):
            save({"fc.weight": Evil()}, f"{folder}/pytorch_model.bin")
            self.refused(folder, "refused to load")
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda _, t: t.update({"x": t.pop("midlayer.mlp.up_proj.weight")}),
                "missing: .*up_proj.weight; unknown: x",
            ),
            (lambda _, t: t["norm.weight"].fill_(torch.inf), r"NaN.*norm\.weight"),
            (
                lambda _, t: t.update({"norm.weight": torch.ones(31)}),
                r"norm\.weight has shape \(31,\), expected \(32,\)",
            ),
            (lambda c, _: c.update(draft_vocab_size=1000), "draft_vocab_size in .* is 1000, that of the weights 48"),
        ],
    )
    def test_from_folder_refuses_tensors_of_another_head(self, head, change, message):
        self.refused(head(change=change), message)

    @pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
    def test_from_folder_refuses_a_missing_tensor(self, head, layout):
        """Each alone: no head is quietly another one. Left out may be what the target has, and one of two maps."""
        _, tensors = make_tensors(layout, lambda *shape: torch.zeros(*shape))
        optional = {"d2t", "t2d", "model.d2t", "model.t2d"}
        optional |= {"eagle1": {"embed_tokens.weight", "fc.bias"}, "specforge": {"norm.weight"}}.get(layout, set())
        for name in sorted(tensors.keys() - optional):
            with pytest.raises(CheckpointError):
                EagleDrafter.from_folder(head(layout, change=lambda _, found, name=name: found.pop(name)), target())

    def test_from_folder_takes_the_targets_output_matrix_only_if_the_config_says_so(self, head):
        def without(**changes):
            def change(config, tensors):
                tensors.pop("lm_head.weight"), tensors.pop("d2t"), tensors.pop("t2d")
                config.pop("draft_vocab_size")
                config.update(changes)

            return head("specforge", change=change)

        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            EagleDrafter.from_folder(without(), target())
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            EagleDrafter.convert(without(), "nowhere", "specforge")
        for change in (
            {"own_output": False},
            {"draft_vocab_size": None},
            {"eagle_config": {"use_last_layernorm": True}},
        ):
            drafter = EagleDrafter.from_folder(without(**change), target())
            assert drafter.head.shared["lm_head"] is target().get_output_embeddings()

    def test_from_folder_refuses_missing_trained_embeddings(self, head):
        folder = head("speculators", change=lambda _, tensors: tensors.pop("embed_tokens.weight"))
        self.refused(folder, r"embed_tokens\.weight is missing")
        assert EagleDrafter.from_folder(folder, target(), embeddings="target").head.shared["embed_tokens"] is not None

    def test_from_folder_refuses_another_target(self, head):
        wide = LlamaForCausalLM(replace_config(hidden_size=64, num_attention_heads=4)).eval()
        self.refused(head(), "hidden size 32, .* has 64", TargetMismatchError, wide)
        other = LlamaForCausalLM(replace_config(vocab_size=64)).eval()
        self.refused(head(), "vocabulary 96, .* has 64", TargetMismatchError, other)
        shallow = target(depth=3)
        self.refused(head("specforge"), r"\[1, 4, 7\].* 3 layers", TargetMismatchError, shallow)
        drafter = EagleDrafter.from_folder(head(), target())
        with pytest.raises(TargetMismatchError, match="has 64"):
            wide.generate(torch.tensor([[5, 6]]), speculator=Speculator(drafter), **PLAIN)

    @pytest.mark.parametrize("layout", ["specforge", "speculators", "eagle1"])
    @pytest.mark.parametrize(("key", "found"), [("hidden_size", 32), ("intermediate_size", 48), ("vocab_size", 96)])
    def test_from_folder_refuses_a_config_that_contradicts_the_weights(self, head, layout, key, found):
        def change(config, tensors):
            tensors.setdefault("embed_tokens.weight", torch.zeros(96, 32))
            config.get("transformer_layer_config", config)[key] = 1000

        message = f"{key} in config.json is 1000, that of the weights {found}"
        self.refused(head(layout, change=change), message)

    def test_from_folder_warns_of_an_empty_vocabulary_map(self, head, logged):
        def change(config, tensors):
            tensors["d2t"].zero_()
            del tensors["t2d"]
            tensors["embed_tokens.weight"] = target().model.embed_tokens.weight.clone()

        folder = head(change=change)
        EagleDrafter.from_folder(folder, target())
        (line,) = logged()
        assert f"{folder}: d2t is zero everywhere" in line

    def test_from_folder_refuses_contradicting_vocabulary_maps(self, head):
        def absolute(config, tensors):
            tensors["d2t"] = tensors["d2t"] + torch.arange(48)

        self.refused(head(change=absolute), "contradict each other")

        def outside(config, tensors):
            tensors["d2t"] = tensors["d2t"] + 90
            del tensors["t2d"]

        self.refused(head(change=outside), "the vocabulary has 96")

        def none(config, tensors):
            del tensors["d2t"], tensors["t2d"]
            tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)

        self.refused(head(change=none), "neither d2t nor t2d")

    def test_from_folder_refuses_an_absent_broken_or_wrong_config(self, head):
        folder = head()
        os.remove(f"{folder}/config.json")
        self.refused(folder, "num_attention_heads")
        Path(f"{folder}/config.json").write_text("{")
        self.refused(folder, r"cannot read .*config\.json")
        self.refused(head(change=lambda config, _: config.update(num_attention_heads=5)), "5 heads")
        folder = head(change=lambda config, _: config.pop("model_type"))
        EagleDrafter.from_folder(folder, target())

    def test_from_folder_refuses_a_folder_without_weights(self, tmp_path):
        self.refused(str(tmp_path), "no installed drafter")
        with pytest.raises(CheckpointError, match="no weights"):
            EagleDrafter.from_folder(str(tmp_path), target())


def replace_config(**changes) -> LlamaConfig:
    config = target().config.to_dict()
    config.pop("head_dim")
    return LlamaConfig(**{**config, **changes})
