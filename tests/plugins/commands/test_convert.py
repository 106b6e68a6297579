"""Heads from one published layout to another: exact, nothing asked for that is not needed, nothing half-written."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, DrafterNotFoundError, TargetMismatchError
from hf_speculate_plugins.checkpoints import TargetNeededError, read_checkpoint
from hf_speculate_plugins.eagle import EagleDrafter, load_head
from hf_speculate_plugins.eagle.loading import canonical_name
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads
from hf_speculate_plugins.medusa.loading import read_heads
from hf_speculate_plugins.medusa.saving import write_heads
from hf_speculate_tools import cli
from hf_speculate_tools.heads.convert import convert_checkpoint

from ...support.llamacpp import write_target
from ...support.paths import REPOSITORY, SHARED


GOLDEN = SHARED / "golden"
EAGLE_LAYOUTS = ("safeailab", "specforge", "speculators")
# What each golden head can be written as, by what its layouts can say; the others are refused.
EAGLE = {
    "eagle1-llama3-nobias": "safeailab",
    "eagle1-qwen2-qkvbias": "safeailab",
    "eagle1-vicuna-fcbias": "safeailab",
    "eagle3-safeai-base": "safeailab specforge speculators",
    "eagle3-safeai-fullvocab": "safeailab specforge speculators",
    "eagle3-safeai-targethidden": "safeailab specforge speculators",
    "eagle3-safeai-theta1e6-safetensors": "safeailab specforge speculators",
    "eagle3-specforge-31-fcnorm": "specforge speculators",
    "eagle3-specforge-base": "safeailab specforge speculators",
    "eagle3-specforge-fullvocab-normoutput-false": "specforge",
    "eagle3-specforge-llama3rope-auxids": "specforge speculators",
    "eagle3-specforge-targethidden-headdim": "specforge speculators",
    "eagle3-specforge-yarn": "specforge speculators",
    "eagle3-speculators-2layer-fcnorm-llama3rope-4aux": "speculators",
    "eagle3-speculators-llama-nbr-false-fullvocab": "safeailab specforge speculators",
    "eagle3-speculators-llama-nbr-true": "speculators",
    "eagle3-speculators-qwen3-31": "speculators",
    "eagle3-speculators-qwen3-defaults": "speculators",
}
MEDUSA = ("medusa1-base", "medusa1-2layers", "medusa2-full", "medusa-v2-sharedhead")


def target_folder(name: str) -> Path:
    if name == "medusa2-full":  # heads and the backbone they were trained with are one checkpoint
        return GOLDEN / name / "head"
    return GOLDEN / json.loads((GOLDEN / name / "meta.json").read_text())["target"]


@cache
def target_of(name: str, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(target_folder(name), dtype=dtype).eval()


def assert_same_head(first, second):
    """Two loaded EAGLE heads compute the same, bit for bit."""
    same = {"dialect": "safeailab", "feature_layers": None}
    assert replace(first.spec, **same) == replace(second.spec, **same)
    depth = 8
    assert first.spec.resolved_layers(depth) == second.spec.resolved_layers(depth)
    assert (first.target_ids is None) == (second.target_ids is None)
    assert first.target_ids is None or torch.equal(first.target_ids, second.target_ids)
    before, after = first.head.state_dict(), second.head.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert first.head.shared == second.head.shared


@pytest.mark.parametrize("name", EAGLE)
def test_golden_eagle_heads_in_every_layout_that_can_say_them(golden_root, tmp_path, name):
    source, target = GOLDEN / name / "head", target_of(name)
    original = load_head(str(source), target)
    for layout in EAGLE_LAYOUTS:
        if layout not in EAGLE[name].split():
            with pytest.raises(CheckpointError, match="layout cannot express this head"):
                convert_checkpoint(source, tmp_path / layout, layout, target_folder(name))
            assert not (tmp_path / layout).exists()
            continue
        saved, report = convert_checkpoint(source, tmp_path / layout, layout, target_folder(name))
        assert saved.algorithm == ("eagle" if name.startswith("eagle1") else "eagle3")
        files = read_checkpoint(str(source))
        assert len(report.used) + len(report.shared) + len(report.ignored) >= len(files.tensors)
        assert_same_head(original, load_head(str(tmp_path / layout), target))
        dtypes = {canonical_name(key): tensor.dtype for key, tensor in files.tensors.items()}
        for key, tensor in read_checkpoint(str(tmp_path / layout)).tensors.items():
            assert tensor.dtype == dtypes.get(canonical_name(key), tensor.dtype), key


def test_golden_conversions_that_need_no_target(golden_root, tmp_path):
    for name, layout in (
        ("eagle3-safeai-base", "specforge"),
        ("eagle3-specforge-base", "safeailab"),
        ("eagle3-specforge-31-fcnorm", "speculators"),
        ("eagle3-speculators-qwen3-31", "speculators"),
        ("eagle1-qwen2-qkvbias", "safeailab"),
    ):
        convert_checkpoint(GOLDEN / name / "head", tmp_path / name, layout)
        first, second = (
            load_head(str(folder), target_of(name)) for folder in (GOLDEN / name / "head", tmp_path / name)
        )
        assert_same_head(first, second)


@pytest.mark.parametrize(
    ("name", "layout", "missing"),
    [
        ("eagle3-safeai-base", "speculators", "embed_tokens.weight"),
        ("medusa-v2-sharedhead", "vllm", "output matrix"),
    ],
)
def test_golden_a_target_that_is_needed_is_asked_for(golden_root, tmp_path, name, layout, missing):
    with pytest.raises(CheckpointError, match=rf"{missing}.*\(--target\)"):
        convert_checkpoint(GOLDEN / name / "head", tmp_path / "head", layout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MEDUSA)
def test_golden_medusa_heads_in_every_layout(golden_root, tmp_path, name):
    source, folder = GOLDEN / name / "head", target_folder(name)
    original = read_heads(str(source)).heads
    features = torch.randn(5, original.hidden_size)
    lm_head = target_of(name).lm_head
    for layout in ("fasterdecoding", "vllm"):
        _, report = convert_checkpoint(source, tmp_path / layout, layout, folder)
        heads = read_heads(str(tmp_path / layout)).heads
        assert torch.equal(heads.block_weight, original.block_weight)
        assert torch.equal(heads.block_bias, original.block_bias)
        if original.output_weight is not None:
            assert torch.equal(heads.output_weight, original.output_weight)
        expected, found = original.float()(features, lm_head), heads.float()(features, lm_head)
        torch.testing.assert_close(found, expected)
        assert ("backbone" in report.missing) == (name == "medusa2-full")


# --- heads made here -------------------------------------------------------------------------------------------------

HIDDEN, VOCAB = 32, 96


def save_target(folder, tied=False, shard_size="5GB", **changes) -> Path:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 7, "num_attention_heads": 4} | changes
    config = LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=tied)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def save_head(folder, *, full_vocabulary=False, **config) -> Path:
    """A SafeAILab EAGLE-3 head in bf16, embeddings left out."""
    torch.manual_seed(2)
    size = VOCAB if full_vocabulary else 40
    shapes = {"self_attn.q_proj": (32, 64), "self_attn.k_proj": (16, 64), "self_attn.v_proj": (16, 64)}
    shapes |= {"self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32)}
    shapes |= {"mlp.down_proj": (32, 48), "hidden_norm": (32,), "input_layernorm": (32,)}
    shapes |= {"post_attention_layernorm": (32,)}
    shapes = {f"midlayer.{name}": shape for name, shape in shapes.items()} | {"fc": (32, 96), "norm": (32,)}
    tensors = {f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if not full_vocabulary:
        tensors["lm_head.weight"] = torch.randn(size, HIDDEN, dtype=torch.bfloat16)
        ids = torch.randperm(VOCAB)[:size].sort().values
        tensors |= {"d2t": ids - torch.arange(size), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        tensors["t2d"][ids] = True
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_tensors_of_the_target_are_read_from_its_files(tmp_path, tied, shard_size):
    target = save_target(tmp_path / "target", tied, shard_size)
    assert (target / "model.safetensors").exists() == (shard_size == "5GB")
    source = save_head(tmp_path / "source", full_vocabulary=True)
    stated = json.loads((source / "config.json").read_text()) | {"own_output": False}
    (source / "config.json").write_text(json.dumps(stated))  # the target's matrix, on purpose
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight.*--target"):
        convert_checkpoint(source, tmp_path / "head", "speculators")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*--target"):
        convert_checkpoint(source, tmp_path / "head", "specforge")
    convert_checkpoint(source, tmp_path / "head", "speculators", target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["embed_tokens.weight"].dtype == torch.float32  # as the target's files, not as the head
    assert torch.equal(tensors["embed_tokens.weight"].bfloat16(), model.get_input_embeddings().weight)
    assert torch.equal(tensors["lm_head.weight"].bfloat16(), model.get_output_embeddings().weight)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["embed_requires_grad"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    loaded = EagleDrafter.from_folder(str(tmp_path / "head"), model)
    assert loaded.head.shared["embed_tokens"] is model.get_input_embeddings()
    assert loaded.head.shared["lm_head"] is model.get_output_embeddings()


def test_medusa_heads_that_share_the_output_matrix_get_the_targets_for_vllm(tmp_path):
    target = save_target(tmp_path / "target", num_hidden_layers=1)
    heads = MedusaHeads(torch.randn(2, 1, HIDDEN, HIDDEN), torch.randn(2, 1, HIDDEN))
    write_heads(tmp_path / "v2", heads, "fasterdecoding", vocab_size=VOCAB)
    convert_checkpoint(tmp_path / "v2", tmp_path / "vllm", "vllm", target)
    model = AutoModelForCausalLM.from_pretrained(target)
    read = read_heads(str(tmp_path / "vllm")).heads
    assert torch.equal(read.output_weight, model.lm_head.weight[None])
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["original_lm_head"] is True
    assert MedusaDrafter.from_folder(str(tmp_path / "vllm"), model).heads.output_weight is None


def test_the_size_of_the_vocabulary_of_truncated_heads_must_come_from_somewhere(tmp_path):
    ids = torch.arange(0, 60, 3)
    heads = MedusaHeads(torch.randn(2, 1, HIDDEN, HIDDEN), None, torch.randn(2, 20, HIDDEN), ids)
    write_heads(tmp_path / "source", heads, "vllm", vocab_size=VOCAB)
    convert_checkpoint(tmp_path / "source", tmp_path / "copy", "vllm")
    (tmp_path / "source" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="size of the target's vocabulary"):
        convert_checkpoint(tmp_path / "source", tmp_path / "again", "vllm")
    convert_checkpoint(tmp_path / "source", tmp_path / "again", "vllm", save_target(tmp_path / "target"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("copy", "again")]
    assert [config["vocab_size"] for config in configs] == [VOCAB, VOCAB]


def test_saving_a_loaded_speculator_writes_a_card_and_loads_again(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(save_target(tmp_path / "target"), dtype=torch.bfloat16)
    speculator = AutoSpeculator.from_pretrained(
        save_head(tmp_path / "source"), target=target, acceptance="typical", posterior_threshold=0.2
    )
    assert not speculator.lossless
    for layout in (*EAGLE_LAYOUTS, None):
        speculator.save_pretrained(tmp_path / str(layout), layout=layout, metrics={"rounds": 3})
        card = ModelCard.load(tmp_path / str(layout) / "README.md")
        assert card.data.tags == ["speculative-decoding", "eagle3"]
        assert f"`{layout or 'speculators'}` layout" in card.text
        again = AutoSpeculator.from_pretrained(tmp_path / str(layout), target=target).drafter
        assert again.entry_layers == speculator.drafter.entry_layers
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors.*instead of the pytorch_model\.bin"):
        speculator.save_pretrained(tmp_path / "specforge", layout="safeailab")
    speculator.save_pretrained(tmp_path / "specforge", layout="specforge")  # the same file: replaced


def test_layers_that_a_layout_cannot_name_need_the_targets_depth(tmp_path):
    """safeailab has no list of layers: whether these are its default depends on how many the target has."""
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    source, target = save_head(tmp_path / "source", **nested), save_target(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"the number of the target's layers.*--target"):
        convert_checkpoint(source, tmp_path / "a", "safeailab")
    convert_checkpoint(source, tmp_path / "a", "safeailab", target)
    other = save_target(tmp_path / "deeper", num_hidden_layers=9)
    with pytest.raises(CheckpointError, match=r"other layers than \[2, 4, 6\]"):
        convert_checkpoint(source, tmp_path / "b", "safeailab", other)
    convert_checkpoint(source, tmp_path / "b", "specforge")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


class TestRefusals:
    def test_convert_refuses_a_destination_that_is_not_empty(self, tmp_path):
        source = save_head(tmp_path / "source")
        (tmp_path / "empty").mkdir()
        convert_checkpoint(source, tmp_path / "empty", "specforge")
        for taken in (tmp_path / "empty", source, source / "config.json"):
            with pytest.raises(CheckpointError, match="not an empty folder"):
                convert_checkpoint(source, taken, "specforge")

    def test_convert_leaves_nothing_after_an_unknown_layout(self, tmp_path):
        source = save_head(tmp_path / "source", eagle_aux=1)
        with pytest.raises(CheckpointError, match="unknown layout 'onnx'; known are 'safeailab'"):
            convert_checkpoint(source, tmp_path / "head", "onnx")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def test_convert_refuses_another_or_missing_target(self, tmp_path):
        source = save_head(tmp_path / "source")
        with pytest.raises(TargetMismatchError, match=r"vocabulary 96, but .*target has 64"):
            convert_checkpoint(source, tmp_path / "head", "specforge", save_target(tmp_path / "target", vocab_size=64))
        with pytest.raises(DrafterNotFoundError, match="is not a folder here"):
            convert_checkpoint(source, tmp_path / "head", "specforge", tmp_path / "absent")
        with pytest.raises(DrafterNotFoundError, match="cannot read target"):
            convert_checkpoint(source, tmp_path / "head", "specforge", tmp_path)

    def test_convert_refuses_quantised_and_incomplete_targets(self, tmp_path):
        source, target = save_head(tmp_path / "source"), save_target(tmp_path / "target")
        tensors = load_file(target / "model.safetensors")
        packed = tensors | {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.uint8)}
        save_file(packed, target / "model.safetensors")
        with pytest.raises(CheckpointError, match="quantised"):
            convert_checkpoint(source, tmp_path / "head", "speculators", target)
        del packed["model.embed_tokens.weight"]
        save_file(packed, target / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"does not hold model\.embed_tokens\.weight"):
            convert_checkpoint(source, tmp_path / "head", "speculators", target)
        (target / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="holds none of"):
            convert_checkpoint(source, tmp_path / "head", "speculators", target)

    def test_convert_refuses_draft_models(self, tmp_path):
        with pytest.raises(CheckpointError, match="'draft_model', which has no other layouts"):
            convert_checkpoint(save_target(tmp_path / "model"), tmp_path / "head", "speculators")


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(cli.app, ["convert", *map(str, arguments)])

    def test_convert_prints_a_report(self, tmp_path):
        source = save_head(tmp_path / "source")
        result = self.run(source, tmp_path / "a", "--layout", "specforge")
        assert result.exit_code == 0, result.output
        assert "15 tensors used" in result.stdout
        assert "shared: embed_tokens.weight (not in the file)" in result.stdout
        result = self.run(source, tmp_path / "b", "--layout", "specforge", "--json")
        found = json.loads(result.stdout)
        assert (found["layout"], found["algorithm"], len(found["keys"]["used"])) == ("specforge", "eagle3", 15)
        assert (tmp_path / "b" / "README.md").exists()


EXAMPLES = REPOSITORY / "examples"


class TestForEngines:
    @pytest.mark.parametrize(
        ("engine", "head", "layout", "flags"),
        [
            ("vllm", "pycoder-eagle3", "speculators", {}),
            (
                "sglang",
                "pycoder-eagle3",
                "specforge",
                {"--speculative-algorithm": "EAGLE3", "--speculative-eagle-topk": "4", "--speculative-num-steps": "5"},
            ),
            ("llama.cpp", "pycoder-dspark", "llama.cpp", {"--spec-type": "draft-dspark", "--spec-draft-n-max": "5"}),
        ],
    )
    def test_convert_for_an_engine_writes_its_layout_and_command(self, tmp_path, engine, head, layout, flags):
        folder, target = tmp_path / "it's a folder", EXAMPLES / "pycoder"
        if engine == "llama.cpp":
            model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
            write_target(tmp_path / "target.gguf", model, AutoTokenizer.from_pretrained(target), "q8_0")
            target = tmp_path / "target.gguf"
        arguments = ["convert", str(EXAMPLES / head), str(folder), "--for", engine, "--target", str(target), "--json"]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        words = shlex.split(found["command"])
        assert (found["layout"], str(target) in words) == (layout, True)
        assert flags.items() <= dict(pairwise(words)).items()
        heads = {"vllm": "--speculative-config", "sglang": "--speculative-draft-model-path", "llama.cpp": "-md"}
        named = words[words.index(heads[engine]) + 1]
        assert (json.loads(named)["model"] if engine == "vllm" else named).startswith(str(folder))

    @pytest.mark.parametrize(
        ("head", "engine", "options", "said"),
        [
            ("pycoder-medusa", "sglang", (), "serves heads of eagle3, eagle, not of medusa; none of the other engines"),
            ("pycoder-dspark", "vllm", (), "not of dspark; possible: --for llama.cpp"),
            ("pycoder-eagle3", "llama.cpp", (), "no states of 'qwen2' models"),
            ("pycoder-eagle3", "llama.cpp", ("--target", str(EXAMPLES / "pycoder")), "no states of 'qwen2' models"),
            ("pycoder-eagle3", "vllm", ("--outtype", "q8_0"), "'speculators' keeps the head's"),
            ("pycoder-eagle3", "vllm", ("--layout", "compact"), "pass one of --layout and --for"),
        ],
    )
    def test_convert_refuses_heads_that_the_engine_cannot_serve(self, tmp_path, head, engine, options, said):
        arguments = ["convert", str(EXAMPLES / head), str(tmp_path / "out"), "--for", engine, *options]
        result = CliRunner().invoke(cli.app, arguments)
        assert (result.exit_code, said in result.stderr) == (1, True), result.stderr
        assert not (tmp_path / "out").exists()


class TestNamedTargets:
    """Without --target, the target that the head names is taken, if it is needed and here."""

    def test_convert_finds_the_target_in_the_provenance(self, tmp_path, monkeypatch):
        target = save_target(tmp_path / "target")
        source = save_head(tmp_path / "source", eagle_aux=1)
        with pytest.raises(TargetNeededError, match=r"give the target \(--target\)\.$"):
            convert_checkpoint(source, tmp_path / "head", "speculators")
        monkeypatch.chdir(tmp_path)
        (source / "provenance.json").write_text('{"target": {"name": "target"}}')
        given, _ = convert_checkpoint(source, tmp_path / "given", "speculators", target)
        found, _ = convert_checkpoint(source, tmp_path / "found", "speculators")
        assert found.layout == given.layout == "speculators"
        files = [load_file(tmp_path / name / "model.safetensors") for name in ("given", "found")]
        assert files[0].keys() == files[1].keys()
        monkeypatch.chdir("/")
        with pytest.raises(TargetNeededError, match="The head names 'target', which is not on this machine"):
            convert_checkpoint(source, tmp_path / "head", "speculators")
        assert not (tmp_path / "head").exists()


class TestOrigins:
    """A head takes its origin along into another layout."""

    def test_convert_keeps_figures_and_provenance(self, tmp_path):
        source = REPOSITORY / "examples" / "pycoder-eagle3"
        convert_checkpoint(source, tmp_path / "head", "sglang")
        found, before = (json.loads((f / "provenance.json").read_text()) for f in (tmp_path / "head", source))
        assert found["converted"] == {"to": "specforge", "from": "speculators"}
        assert (found["target"], found["metrics"]) == (before["target"], before["metrics"])
        files = {path.name: path for path in (tmp_path / "head").iterdir()}
        card, kept = ModelCard.load(files["README.md"]), ModelCard.load(source / "README.md")
        assert card.data.eval_results == kept.data.eval_results
        assert card.text.partition("## Measured")[2] == kept.text.partition("## Measured")[2]
        assert "`specforge` layout), made for `pycoder`" in card.text

    def test_a_layout_is_also_called_by_who_reads_it(self, tmp_path):
        source = REPOSITORY / "examples" / "pycoder-eagle3"
        saved, _ = convert_checkpoint(source, tmp_path / "head", "vllm", REPOSITORY / "examples" / "pycoder")
        assert saved.layout == EagleDrafter.describe(str(tmp_path / "head")).layout == "speculators"
