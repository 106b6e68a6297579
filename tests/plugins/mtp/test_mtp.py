"""Draft layers that targets bring along, on tiny random targets in the layouts of all families."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import save_file

import hf_speculate
from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.testing import check_drafter
from hf_speculate_plugins.mtp import MtpDrafter, layout_of
from hf_speculate_plugins.mtp.saving import WEIGHTS
from hf_speculate_plugins.mtp.source import SHARD

from ...support.inputs import padded_batch
from ...support.models import build_tiny_model
from ...support.mtp import (
    DEPTH,
    FAMILIES,
    build,
    draft_tensors,
    load_target,
    skip_where_not_drafted,
    write_target,
)
from ...support.replays import stand_in
from ...support.requests import assert_same, run
from ...support.tiers import quick, quick_quarter


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return cache(lambda family: write_target(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def target_of(folder_of):
    return cache(lambda family: load_target(folder_of(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_is_found_and_accounted_for(target_of, folder_of, family):
    drafter = MtpDrafter.for_target(target_of(family))
    assert drafter.spec.dialect == FAMILIES[family][1]
    tensors = draft_tensors(family)
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(
        tensor.numel() for tensor in drafter.head.state_dict().values()
    )
    assert MtpDrafter.for_target(build(family), head=folder_of(family)).spec == drafter.spec


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("do_sample", quick([False, True]))
def test_texts_of_padded_batches_are_those_of_plain_generate(target_of, prompt, family, do_sample):
    skip_where_not_drafted(family)
    target, inputs = target_of(family), padded_batch(prompt, (11, 4, 9))
    request = {**inputs, "max_new_tokens": 14, "do_sample": do_sample, **({"top_k": 20} if do_sample else {})}
    speculator = AutoSpeculator.from_name("mtp", target, adaptive=False)
    assert_same(run(target, speculator, **request), run(target, **request))
    assert speculator.stats.drafted_tokens


@pytest.mark.parametrize("family", quick(["glm4_moe", "qwen3_5_text"]))
def test_the_drafter_keeps_the_contract(target_of, prompt, family):
    skip_where_not_drafted(family)
    target = target_of(family)
    drafter = AutoSpeculator.from_name("mtp", target).drafter
    check_drafter(drafter, target, [prompt(10)[0], prompt(4, seed=1)[0]], max_new_tokens=6)


@pytest.mark.parametrize("family", quick_quarter(["glm4_moe", "deepseek_v3", "qwen2", "llama"]))
def test_captured_drafts_are_those_of_the_modules(target_of, prompt, monkeypatch, family):
    target, inputs = target_of(family), padded_batch(prompt, (8, 5))
    texts, counts = [], []
    for compile in (False, None):
        with monkeypatch.context() as patch:
            replays = stand_in(patch)
            speculator = AutoSpeculator.from_name("mtp", target, adaptive=False, compile=compile)
            texts.append(target.generate(**inputs, max_new_tokens=16, speculator=speculator))
        counts.append((speculator.stats.accepted_tokens, speculator.stats.rounds))
    assert "eagle_draft" in replays.names
    assert torch.equal(*texts)
    assert counts[0] == counts[1]


def test_the_first_of_several_layers_drafts(tmp_path):
    tensors = draft_tensors("glm4_moe") | draft_tensors("glm4_moe", seed=8, layer=1)
    target = load_target(write_target(tmp_path, "glm4_moe", tensors))
    drafter = MtpDrafter.for_target(target)
    assert drafter.spec.num_stored == 2
    assert drafter.report.ignored[f"model.layers.{DEPTH + 1}.eh_proj.weight"] == (
        "the first draft layer drafts every token"
    )
    assert torch.equal(drafter.head.fc.weight, tensors[f"model.layers.{DEPTH}.eh_proj.weight"])


def test_copies_of_the_targets_matrices_are_left_out(tmp_path):
    tensors = draft_tensors("glm4_moe")
    copies = {
        f"model.layers.{DEPTH}.{name}.weight": torch.zeros(96, 32) for name in ("embed_tokens", "shared_head.head")
    }
    drafter = MtpDrafter.for_target(load_target(write_target(tmp_path, "glm4_moe", tensors | copies)))
    assert set(drafter.report.ignored) == set(copies)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_part_of_the_vocabulary_is_drafted_with_the_targets_own_rows(target_of, prompt, do_sample):
    target, ids = target_of("qwen2"), prompt(9)
    speculator = AutoSpeculator.from_name("mtp", target, draft_vocab=40, adaptive=False)
    output = speculator.drafter.head.output
    assert output.weight.shape == (40, 32)
    assert output.weight.data_ptr() == target.lm_head.weight.data_ptr()
    torch.manual_seed(1)
    plain = target.generate(ids, max_new_tokens=20, do_sample=do_sample)
    torch.manual_seed(1)
    rounds = list(hf_speculate.rounds(target, ids, max_new_tokens=20, do_sample=do_sample, speculator=speculator))
    assert [token for each in rounds for token in each.tokens[0]] == plain[0, 9:].tolist()
    drafted = [token for each in rounds for token in each.tree.host.token_ids[0][1:]]
    assert drafted
    assert max(drafted) < 40


class TestProblems:
    def test_mtp_refuses_a_target_without_draft_layers(self, tmp_path):
        model = build("llama")
        model.save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=r"no draft layers \(MTP\) among its .*mtp\.fc\.weight \(Qwen\)"):
            AutoSpeculator.from_name("mtp", load_target(tmp_path))

    def test_a_config_that_counts_layers_which_are_not_there(self, tmp_path):
        build("glm4_moe").save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            CheckpointError, match="states num_nextn_predict_layers=1: they were lost when it was saved"
        ):
            AutoSpeculator.from_name("mtp", load_target(tmp_path))

    def test_mtp_refuses_a_target_made_in_memory(self):
        with pytest.raises(CheckpointError, match="does not know where it was loaded from"):
            AutoSpeculator.from_name("mtp", build("llama"))

    @pytest.mark.parametrize("kind", ["missing", "wrong", "unknown", "expert", "other class"])
    def test_tensors_that_do_not_fit(self, tmp_path, kind):
        family = "deepseek_v3" if kind == "expert" else "qwen2"
        tensors = draft_tensors(family)
        if kind == "missing":
            del tensors["model.mtp_layers.0.token_layernorm.weight"]
        elif kind == "wrong":
            tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(32, 60)
        elif kind == "unknown":
            tensors["model.mtp_layers.0.adapter.weight"] = torch.zeros(3)
        elif kind == "expert":
            del tensors[f"model.layers.{DEPTH}.mlp.experts.2.up_proj.weight"]
        else:
            family, tensors = "llama", draft_tensors("qwen2")  # with biases
        target = load_target(write_target(tmp_path, family, tensors))
        wanted = {
            "missing": "missing: enorm.weight",
            "wrong": r"fc.weight has shape \(32, 60\), expected \(32, 64\)",
            "expert": "experts lacks 2.up_proj",
        }
        with pytest.raises(CheckpointError, match=wanted.get(kind, "no layer of .*Model has the tensors")):
            AutoSpeculator.from_name("mtp", target)

    def test_layers_of_another_width(self, tmp_path, folder_of):
        wide = build_tiny_model("qwen2", hidden_size=64, num_layers=DEPTH)
        with pytest.raises(TargetMismatchError, match=r"belong to a model of hidden size 32; this .* has 64"):
            AutoSpeculator.from_name("mtp", wide, head=str(folder_of("qwen2")))

    def test_mtp_refuses_a_truncated_file(self, tmp_path):
        target = load_target(write_target(tmp_path, "qwen2"))
        (tmp_path / SHARD).write_bytes((tmp_path / SHARD).read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="may be truncated"):
            AutoSpeculator.from_name("mtp", target)

    def test_mtp_refuses_weights_that_are_not_finite(self, tmp_path):
        tensors = draft_tensors("qwen2")
        tensors["model.mtp_layers.0.input_proj.weight"][0, 0] = torch.nan
        with pytest.raises(CheckpointError, match="NaN or infinite weights"):
            AutoSpeculator.from_name("mtp", load_target(write_target(tmp_path, "qwen2", tensors)))

    def test_a_speculator_for_another_target(self, target_of, prompt):
        speculator, other = AutoSpeculator.from_name("mtp", target_of("qwen2")), build_tiny_model("qwen2")
        with pytest.raises(TargetMismatchError, match=r"belong to a model .*\(32, 96, 4\); .* has \(32, 96, 2\)"):
            other.generate(prompt(5), max_new_tokens=3, speculator=speculator)

    def test_the_targets_folder_is_no_draft_model(self, target_of, folder_of):
        with pytest.raises(TargetMismatchError, match=r"holds the target itself.*speculator='mtp'"):
            AutoSpeculator.from_pretrained(folder_of("glm4_moe"), target_of("glm4_moe"))

    def test_unknown_options(self, target_of):
        with pytest.raises((TypeError, ValueError), match="depht"):
            AutoSpeculator.from_name("mtp", target_of("qwen2"), depht=3)


def test_a_folder_of_draft_layers_alone_is_recognised_and_one_of_a_model_is_not(tmp_path, folder_of):
    save_file(draft_tensors("llama"), tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text('{"speculators_model_type": "mtp"}')
    assert MtpDrafter.recognizes(str(tmp_path))
    assert not MtpDrafter.recognizes(str(folder_of("qwen2")))
    speculator = AutoSpeculator.from_pretrained(tmp_path, build("llama"))
    assert speculator.drafter.name == "mtp"


def test_layers_of_the_target_itself_are_not_draft_layers():
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(4)]
    assert layout_of(names, 4) is None
    assert layout_of([*names, "model.layers.4.eh_proj.weight"], 4) is not None
