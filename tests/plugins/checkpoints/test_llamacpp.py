"""Heads in llama.cpp's files: what is written, read again, kept packed, and refused."""

from __future__ import annotations

import dataclasses
import random
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, DrafterNotFoundError, SpeculateError
from hf_speculate.speculator import local_folder, repositories
from hf_speculate_gguf import TensorRows, read_header, read_values, write_gguf
from hf_speculate_gguf.native import PackedLinear, has_kernel
from hf_speculate_gguf.rope import WRITTEN_ROPE
from hf_speculate_plugins.block import BlockFiles
from hf_speculate_plugins.checkpoints import GGUF_ROPE, TargetFiles, read_checkpoint, tensor_shapes
from hf_speculate_plugins.eagle import EagleDrafter, EagleFiles

from ...support.block_heads import KINDS, random_block
from ...support.block_heads import spec_of as block_spec
from ...support.golden import GOLDEN, target_of
from ...support.heads import HIDDEN, PLAIN, VOCAB, target, write_head
from ...support.llamacpp import Wordless
from ...support.native_heads import SPEC
from ...support.paths import REPOSITORY
from ...support.tiers import quick


EXAMPLES = REPOSITORY / "examples"
PYCODER = EXAMPLES / "pycoder"
# Golden heads that llama.cpp's files can hold.
GOLDEN_HEADS = {
    "eagle3-safeai-base": EagleFiles,
    "eagle3-safeai-targethidden": EagleFiles,
    "eagle3-speculators-llama-nbr-true": EagleFiles,
    "dspark-deepspec-vanilla": BlockFiles,
    "dspark-speculators-reducedvocab": BlockFiles,
    "dflash-zlab-base": BlockFiles,
}


@cache
def pycoder():
    return AutoModelForCausalLM.from_pretrained(PYCODER, dtype=torch.float32).eval()


def written(files, folder, destination, out_type="f32", model=None) -> str:
    """The path of a head as a llama.cpp file."""
    given = TargetFiles(PYCODER) if model is None else Wordless(model, "numbers")
    files.convert(str(folder), destination, "llama.cpp", given, out_type)
    return str(Path(destination, "draft.gguf"))


def plain_eagle3(config, tensors):
    """What llama.cpp can run of the random heads."""
    config.pop("fc_norm", None)
    config["norm_output"] = True
    for name in [name for name in tensors if name.startswith("fc_norm")]:
        del tensors[name]


def values(path: str, name: str) -> torch.Tensor:
    file = read_header(path)
    return read_values(TensorRows(file, file.tensors[name]))


def drafts(head, model, **options):
    """A text, and how much of every draft of it was accepted."""
    speculator = AutoSpeculator.from_pretrained(head, target=model, adaptive=False, **options)
    prompt = torch.tensor([[4, 8, 15, 16, 23, 42]])
    text = model.generate(prompt, speculator=speculator, do_sample=False, **PLAIN)
    return text.tolist(), speculator.stats.accepted_histogram, speculator.stats.drafted_tokens


@pytest.mark.parametrize(("head", "files"), [("pycoder-eagle3", EagleFiles), ("pycoder-dspark", BlockFiles)])
def test_a_bundled_head_comes_back_as_it_was(head, files, tmp_path):
    """In f32 bit for bit, and its drafts are the same."""
    path = written(files, EXAMPLES / head, tmp_path / "out")
    before, after = files.open(str(EXAMPLES / head)), files.open(path)
    for name, tensor in after.checkpoint.tensors.items():
        assert torch.equal(tensor, before.checkpoint.tensors[name].float()), name
    differences = {
        field.name
        for field in dataclasses.fields(before.spec)
        if getattr(before.spec, field.name) != getattr(after.spec, field.name)
    }
    # Numbers are float32 in a file; windows, of which there are none, are counted in another way.
    assert differences <= {"dialect", "rms_norm_eps", "window_from_anchor"}
    chain = {"depth": 4, "top_k": 1, "max_nodes": 4}
    found = drafts(path, pycoder(), **chain)
    assert found == drafts(EXAMPLES / head, pycoder(), **chain)
    assert found[1].total() > found[1][0]  # something was accepted
    assert files.saved(path).layout == "llama.cpp"


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden heads are not on this machine (../shared/golden)")
@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_golden_heads_keep_facts_and_tensors_in_gguf(name, tmp_path):
    """Every fact that the two layouts share is kept, and so are tensors; a draft vocabulary is made of either."""
    files, folder, model = GOLDEN_HEADS[name], str(GOLDEN / name / "head"), target_of(name)
    path = written(files, folder, tmp_path / "out", model=model)
    before, after = files.load(folder, model), files.load(path, model)
    for (name, ours), theirs in zip(before.head.state_dict().items(), after.head.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    layers = before.spec.resolved_layers(model.config.num_hidden_layers)
    assert after.spec.resolved_layers(model.config.num_hidden_layers) == layers
    for field in ("norm_before_residual", "norm_before_fc", "block_size", "mask_token_id", "first_slot", "causal"):
        assert getattr(before.spec, field, None) == getattr(after.spec, field, None), field
    assert torch.equal(before.head.output.weight, after.head.output.weight)
    ids = (torch.arange(4) if each.target_ids is None else each.target_ids for each in (before, after))
    assert torch.equal(*ids)
    positions = torch.arange(40)[None]
    states = torch.zeros(1, 40, before.spec.hidden_size)
    for ours, theirs in zip(before.head.rotary(states, positions), after.head.rotary(states, positions), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_eagle3_file_has_llamacpps_names_and_keys(tmp_path):
    """Names, keys and order are those that llama.cpp's loader asks for."""
    folder = write_head(tmp_path / "head", "specforge", plain_eagle3)
    path = written(EagleFiles, folder, tmp_path / "out", model=target())
    file, source = read_header(path), read_checkpoint(folder).tensors
    stated = {
        "general.architecture": "eagle3",
        "eagle3.block_count": 1,
        "eagle3.target_layers": [1, 4, 7],  # of `hidden_states`; the head's config has [0, 3, 6], outputs
        "eagle3.target_hidden_size": HIDDEN,
        "eagle3.norm_before_residual": False,
        "eagle3.attention.head_count": 4,
        "eagle3.attention.head_count_kv": 2,
        "eagle3.rope.freq_base": 1e6,
    }
    assert {key: file.metadata[key] for key in stated} == stated
    assert len(file.metadata["tokenizer.ggml.tokens"]) == VOCAB
    assert file.tensors["d2t"].type == "I64"
    assert torch.equal(values(path, "d2t"), source["d2t"] + torch.arange(48))
    assert "t2d" not in file.tensors
    query, stored = source["midlayer.self_attn.q_proj.weight"], values(path, "blk.0.attn_q.weight")
    half = 8 // 2  # of a head's rows: row j of the first half lies at 2 j, of the second at 2 j + 1
    for head in range(4):
        for row in range(half):
            assert torch.equal(stored[8 * head + 2 * row], query[8 * head + row])
            assert torch.equal(stored[8 * head + 2 * row + 1], query[8 * head + half + row])
    for theirs, ours in {
        "attn_norm": "input_layernorm",
        "attn_norm_2": "hidden_norm",
        "ffn_norm": "post_attention_layernorm",
        "attn_v": "self_attn.v_proj",
    }.items():
        assert torch.equal(values(path, f"blk.0.{theirs}.weight"), source[f"midlayer.{ours}.weight"])


def test_a_compact_head_gets_the_targets_rows(tmp_path):
    """llama.cpp ends with an assertion where a file has a draft vocabulary and no matrix for it."""

    def compact(config, tensors):
        plain_eagle3(config, tensors)
        config["own_output"] = False
        del tensors["lm_head.weight"]

    folder = write_head(tmp_path / "head", "specforge", compact)
    path = written(EagleFiles, folder, tmp_path / "out", model=target())
    assert torch.equal(values(path, "output.weight"), target().lm_head.weight[values(path, "d2t")])
    assert drafts(path, target(), depth=3) == drafts(folder, target(), depth=3)


_NO = {
    "more than one layer": {"num_layers": 2, "windows": (None, None)},
    "norms of queries and keys": {"qk_norm": True},
    "a normed state fed back": {"feed_back_normed": True},
    "sliding windows": {"windows": (6,)},
    "other than three features": {"num_features": 4, "feature_layers": (1, 2, 3, 4)},
    "the mask of P-EAGLE": {"parallel": True},
    "EAGLE-1": {"version": 1, "num_features": 1, "norm_logits": False},
    "fc_norm": {"fc_norm": True},
    "logits without a norm": {"norm_logits": False},
    "an activation other than SiLU": {"hidden_act": "gelu"},
    "RoPE other than default": {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    "biases in EAGLE-3": {"qkv_bias": True},
    "biases of output projections": {"o_bias": True},
}


@pytest.mark.parametrize("reason", _NO)
def test_check_layout_refuses_eagle_heads_that_llamacpp_cannot_run(reason):
    with pytest.raises(CheckpointError, match=f"llama.cpp layout cannot express this head.*{reason}"):
        EagleFiles.check_layout("llama.cpp", dataclasses.replace(SPEC, **_NO[reason]))


def test_check_layout_takes_eagle_heads_that_llamacpp_can_run():
    for changes in ({}, {"norm_before_residual": True, "norm_before_fc": True}, {"target_hidden_size": 32}):
        assert EagleFiles.check_layout("llama.cpp", dataclasses.replace(SPEC, **changes)) == "llama.cpp"


_NO_BLOCK = {
    "windows": ("windows", {}),
    "a Markov head that is not vanilla": ("gated", {}),
    "convolutions and a selector": ("dflash2", {}),
    "LiLiCorr's lattice": ("lilicorr", {}),
    "some are causal": ("dflash", {"causal": (True, False)}),
    "an anchor's slot": ("dflash", {"first_slot": 0}),
    "another width": ("dflash", {"adapts_features": True}),
    "a Markov head on changed logits": ("dspark", {"output_multiplier": 0.5}),
    "no Markov codes": ("dspark", {"confidence_with_markov": False}),
    "RoPE scaling": ("dflash", {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
}


def test_rope_is_allowed_if_it_is_written():
    assert GGUF_ROPE == WRITTEN_ROPE


@pytest.mark.parametrize("reason", _NO_BLOCK)
def test_check_layout_refuses_block_heads_that_llamacpp_cannot_run(reason):
    kind, changes = _NO_BLOCK[reason]
    with pytest.raises(CheckpointError, match=f"llama.cpp layout cannot express this head.*{reason}"):
        BlockFiles.check_layout("llama.cpp", dataclasses.replace(block_spec(kind), **changes))


@pytest.mark.parametrize("kind", quick(["reduced", "dflash", "jetspec", "dspark"]))
def test_block_heads_draft_the_same_from_gguf(kind, tmp_path):
    model = target()
    drafter = random_block(kind, model)
    layout = {"jetspec": "zlab", "dflash": "zlab", "dspark": "deepspec", "reduced": "speculators"}[kind]
    drafter.save_pretrained(tmp_path / "head", layout)
    path = written(BlockFiles, tmp_path / "head", tmp_path / "out", model=model)
    assert drafts(path, model, top_k=2) == drafts(tmp_path / "head", model, top_k=2)
    stated = read_header(path).metadata
    assert (stated["dflash.block_size"], stated["dflash.target_layers"]) == (5, [0, 2])
    assert stated["tokenizer.ggml.mask_token_id"] == KINDS[kind].get("mask_token_id", VOCAB - 1)
    assert stated["dflash.attention.causal"] == (kind == "jetspec")
    assert stated.get("dflash.sample_from_anchor") == (True if kind in ("dspark", "reduced") else None)


@pytest.mark.parametrize(("out_type", "atol"), [("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 1e-2), ("q4_0", 0.2)])
def test_out_type_sets_the_types_of_matrices(out_type, atol, tmp_path):
    folder = write_head(tmp_path / "head", "specforge", plain_eagle3)
    path = written(EagleFiles, folder, tmp_path / "out", out_type, target())
    source, found = read_checkpoint(folder).tensors, read_checkpoint(path)
    kinds = {entry.name: entry.type for entry in read_header(path).tensors.values()}
    assert kinds["fc.weight"] == out_type.upper()
    assert kinds["output_norm.weight"] == "F32"
    torch.testing.assert_close(found.tensors["fc.weight"].float(), source["fc.weight"], atol=atol, rtol=0)
    assert set(found.packed) == ({name for name in found.packed if "norm" not in name})
    assert bool(found.packed) == out_type.startswith("q")


@pytest.mark.skipif(not has_kernel(), reason="matrices stay packed for the kernel only, which needs a C++ compiler")
@pytest.mark.parametrize("out_type", quick(["q4_0", "q8_0"]))
def test_matrices_stay_packed(out_type, tmp_path):
    """They give what the same matrices give dequantised, to draft and to be saved; a trainer gets dense ones."""
    path = written(EagleFiles, EXAMPLES / "pycoder-eagle3", tmp_path / "out", out_type)
    packed, dense = (EagleFiles.load(path, pycoder(), packed=packed) for packed in (True, False))
    attention = packed.head.layers[0].self_attn
    assert all(type(each) is PackedLinear for each in (packed.head.fc, attention.q_proj, packed.head.lm_head))
    assert type(dense.head.fc) is torch.nn.Linear
    assert packed.head.dtype is torch.float32
    features = [torch.randn(1, 3, 192, generator=torch.Generator().manual_seed(layer)) for layer in range(3)]
    for weights in (attention.q_proj, packed.head.lm_head):
        assert weights.packed.nbytes < weights.in_features * weights.out_features * (1.2 if out_type == "q8_0" else 0.7)
    torch.testing.assert_close(packed.head.fuse(features), dense.head.fuse(features), atol=1e-4, rtol=1e-4)
    inputs = torch.randn(5, 384, generator=torch.Generator().manual_seed(7))
    ours, theirs = (each.head.layers[0].self_attn.k_proj(inputs) for each in (packed, dense))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # rows are in order, too
    drafter = EagleDrafter(packed, pycoder())
    assert drafter._native is not None
    assert drafter._native.current_ranking() is not None
    drafter.save_pretrained(tmp_path / "saved", "speculators")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, weight in dense.head.state_dict().items():
        torch.testing.assert_close(saved[name], weight, atol=1e-5, rtol=1e-4, msg=name)
    text, accepted, _ = drafts(path, pycoder(), depth=4, top_k=1)
    assert text == pycoder().generate(torch.tensor([[4, 8, 15, 16, 23, 42]]), do_sample=False, **PLAIN).tolist()
    assert accepted.total() > accepted[0]


def test_llama3_rope_survives_the_file(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192

    def scaled(config, tensors):
        plain_eagle3(config, tensors)
        config |= {"rope_parameters": scaling, "max_position_embeddings": 131072}

    folder = write_head(tmp_path / "head", "specforge", scaled)
    path = written(EagleFiles, folder, tmp_path / "out", model=target())
    assert values(path, "rope_freqs.weight").shape == (4,)
    assert EagleFiles.open(path).spec.rope == pytest.approx(scaling)


def changed(path: str, destination: Path, metadata=(), tensors=()) -> str:
    """A copy of a file with other metadata and tensors; None removes one."""
    file = read_header(path)
    stated = {**file.metadata, **dict(metadata)}
    architecture = stated.pop("general.architecture")
    stored = {name: values(path, name) for name in file.tensors} | dict(tensors)
    write_gguf(
        destination,
        architecture,
        {key: value for key, value in stated.items() if value is not None},
        {name: tensor for name, tensor in stored.items() if tensor is not None},
        "f32",
    )
    return str(destination)


def test_absent_metadata_have_llama_cpps_meaning(tmp_path):
    folder = write_head(tmp_path / "head", "safeailab")  # a RoPE base of 10000
    path = written(EagleFiles, folder, tmp_path / "out", model=target())
    keys = ("norm_before_residual", "norm_before_fc", "target_hidden_size", "rope.freq_base", "attention.key_length")
    spec = EagleFiles.open(changed(path, tmp_path / "less.gguf", {f"eagle3.{key}": None for key in keys})).spec
    assert spec == EagleFiles.open(path).spec


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({}, {"blk.0.attn_q.bias": torch.ones(32)}, "blk.0.attn_q.bias"),
        ({}, {"blk.0.attn_norm_3.weight": torch.ones(32)}, "unknown: blk.0.attn_norm_3.weight"),
        ({}, {"output_norm.weight": None}, "missing: norm.weight"),
        ({"eagle3.attention.scale": 0.5}, {}, "attention.scale"),
        ({"eagle3.attention.head_count": None}, {}, "head_count"),
        ({"eagle3.attention.layer_norm_rms_epsilon": None}, {}, "rms_epsilon"),
        ({"eagle3.attention.head_count_kv": 3}, {}, "3"),
        ({"eagle3.target_layers": [1, 4]}, {}, "target_hidden_size in the metadata is 32"),
        ({"eagle3.target_layers": None}, {}, r"lacks eagle3\.target_layers"),
        ({}, {"d2t": torch.zeros(48, dtype=torch.long)}, "48 draft ids to 1"),
        ({}, {"rope_freqs.weight": torch.tensor([1.0, 2.0, 7.0, 3.0])}, "not those of Llama 3"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, {}, "a target of vocabulary 2"),
    ],
)
def test_from_pretrained_refuses_contradicting_gguf_heads(metadata, tensors, message, tmp_path):
    folder = write_head(tmp_path / "head", "specforge", plain_eagle3)
    path = written(EagleFiles, folder, tmp_path / "out", model=target())
    path = changed(path, tmp_path / "changed.gguf", metadata, tensors)
    with pytest.raises(SpeculateError, match=message):
        AutoSpeculator.from_pretrained(path, target=target())


def test_no_damaged_file_is_a_raw_error(tmp_path):
    folder = write_head(tmp_path / "head", "specforge", plain_eagle3)
    path = Path(written(EagleFiles, folder, tmp_path / "out", "q4_0", target()))
    whole, choose = path.read_bytes(), random.Random(0)
    loaded = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(choose.randint(1, 4)):
            damaged[choose.randrange(4096)] = choose.randrange(256)  # metadata and the table of tensors
        path.write_bytes(damaged[: choose.choice([len(damaged), len(damaged), choose.randrange(len(damaged))])])
        with suppress(SpeculateError):
            AutoSpeculator.from_pretrained(path, target=target())
            loaded += 1
    assert 0 < loaded < 150


def test_from_pretrained_refuses_gguf_files_without_a_head(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", {"llama.block_count": 1}, {"token_embd.weight": torch.ones(4, 32)})
    assert tensor_shapes(str(path)) == {}
    with pytest.raises(CheckpointError, match=r"no installed drafter.*draft_model:model=FILE"):
        AutoSpeculator.from_pretrained(path, target=target())
    with pytest.raises(CheckpointError, match="architecture 'llama', not a draft head"):
        read_checkpoint(str(path))
    path.write_bytes(b"GGUF\x03")
    with pytest.raises(CheckpointError, match="cut off"):
        AutoSpeculator.from_pretrained(path, target=target())
    with pytest.raises(DrafterNotFoundError, match="a GGUF file"):
        AutoSpeculator.from_pretrained(tmp_path / "absent.gguf", target=target())


def test_local_folder_downloads_a_single_file(tmp_path, monkeypatch):
    """Downloaded alone: other quantisations may lie beside it. A folder here is no owner there."""
    asked = []

    def download(*names, **where):
        asked.append((names, where["revision"]))
        if names[1] == "absent.gguf":
            raise LocalEntryNotFoundError("no such entry")
        return str(tmp_path / "blob.gguf")

    monkeypatch.setattr(repositories, "hf_hub_download", download)
    found = local_folder("owner/name/q4/draft.gguf", revision="main")
    assert (found, asked) == (str(tmp_path / "blob.gguf"), [(("owner/name", "q4/draft.gguf"), "main")])
    with pytest.raises(DrafterNotFoundError, match=r"absent\.gguf"):
        local_folder("owner/name/absent.gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(DrafterNotFoundError, match="is not a folder"):
        local_folder("runs/one/draft.gguf")
    assert len(asked) == 2


def test_a_file_needs_the_targets_tokenizer(tmp_path):
    folder = write_head(tmp_path / "head", "specforge", plain_eagle3)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        EagleFiles.convert(folder, tmp_path / "out", "llama.cpp")
    drafter = EagleDrafter.from_folder(folder, target())
    with pytest.raises(CheckpointError, match="hf-speculate convert"):
        drafter.save_pretrained(tmp_path / "out", "llama.cpp")
    assert not (tmp_path / "out").exists()
