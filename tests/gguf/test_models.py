"""Packed models compute what the dequantised ones do, and are targets like others."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_speculate
from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import cache_of
from hf_speculate.errors import CheckpointError, UnsupportedRequestError
from hf_speculate.gguf import load_gguf, load_model, packing_report
from hf_speculate.gguf.matrices import TensorRows
from hf_speculate.gguf.model import plain_frequencies, plan_model
from hf_speculate.gguf.reading import read_header
from hf_speculate.gguf.shards import find_file, part_names
from hf_speculate.native.binding import native_problem
from hf_speculate.native.formats import DENSE_TYPES, FORMATS
from hf_speculate.native.modules import PackedEmbedding, PackedLinear, Projection
from hf_speculate.testing import RandomDrafter, ScriptedDrafter, check_lossless
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions

from ..support.gguf import relative_error, token_ids
from ..support.inputs import character_tokenizer
from ..support.random_gguf import FileShape, one_type, q4_k_m, write_random_file
from ..support.tiers import quick, quick_quarter
from ..support.tiny_heads import write_eagle_head


VOCAB = 96


def shape_of(architecture: str, hidden: int = 256, tied: bool = False, layers: int = 2) -> FileShape:
    head_dim = 128 if architecture == "qwen3" else None
    return FileShape(
        architecture, VOCAB, hidden, 256, layers, 4, 2, 256, is_tied=tied, embedding_std=1.0, head_dim=head_dim
    )


@pytest.fixture
def write(tmp_path):
    """Writes a random model; returns its path."""

    def _write(shape: FileShape, recipe="Q4_0", **kwargs) -> str:
        path = tmp_path / "model.gguf"
        write_random_file(path, shape, one_type(recipe) if isinstance(recipe, str) else recipe, **kwargs)
        return str(path)

    return _write


def dequantised(path: str, dtype: torch.dtype = torch.float32):
    """What transformers makes of the file."""
    folder, name = os.path.split(path)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype).eval()


def available(*backends: str) -> list[str]:
    """Those that run here: "native" needs a C++ compiler."""
    return [name for name in backends if name != "native" or not native_problem()]


@pytest.mark.parametrize("kind", quick_quarter([*FORMATS, *DENSE_TYPES]))
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_dequantised_model(architecture, kind, write):
    """Tied and untied, with biases and norms of heads and without, q and k permuted and not; measured: fp32 1e-6, bf16
    1e-2."""
    path, ids = write(shape_of(architecture, tied=architecture == "qwen2"), kind), token_ids(2, 9)
    expected = dequantised(path)(ids).logits
    for backend in available("native", "dequantize", "dense"):
        for dtype, allowed in ((torch.float32, 5e-6), (torch.bfloat16, 2e-2)):
            model = load_model(path, dtype=dtype, backend=backend)
            assert relative_error(model(ids).logits, expected) < allowed, f"{kind}, {backend}, {dtype}"
            assert model.dtype == dtype


def test_models_know_their_file(write):
    """Cards of heads name what they were made for by the config."""
    path = write(shape_of("llama"))
    model = load_model(path)
    assert model.name_or_path == model.config._name_or_path == path


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_mixed_files_fuse_what_they_can(architecture, write):
    path, ids = write(shape_of(architecture, layers=4), q4_k_m(4)), token_ids(1, 7)
    model = load_model(path, dtype=torch.float32)
    assert relative_error(model(ids).logits, dequantised(path)(ids).logits) < 5e-6
    types = {entry.type for entry in read_header(path).tensors.values()}
    assert types == {"Q4_K", "Q6_K", "F32"}
    mixed = [layer.self_attn for layer in model.model.layers if isinstance(layer.self_attn.v_proj, PackedLinear)]
    whole = [layer.self_attn for layer in model.model.layers if isinstance(layer.self_attn.v_proj, Projection)]
    assert mixed, "layers whose values are finer than queries and keys: those two fused"
    assert whole, "layers of one type: all three fused"
    assert all(attention.q_proj.fused is attention.k_proj.fused for attention in mixed)
    assert all(layer.mlp.gate_proj.fused is layer.mlp.up_proj.fused for layer in model.model.layers)


def test_biases_of_llama_are_permuted_as_its_rows(write):
    biases = {
        f"blk.{layer}.{name}.bias": np.random.default_rng(layer).normal(size=size).astype(np.float32)
        for layer in range(2)
        for name, size in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64))
    }
    path, ids = write(shape_of("llama", hidden=64), "Q8_0", extra_tensors=biases), token_ids(1, 7)
    found = load_model(path, dtype=torch.float32)
    assert found.config.attention_bias
    q_bias = torch.from_numpy(biases["blk.1.attn_q.bias"]).view(4, 8, 2).transpose(1, 2).reshape(-1)
    assert torch.equal(found.model.layers[1].self_attn.q_proj.bias, q_bias)
    expected = dequantised(path)  # which leaves them out
    assert relative_error(found(ids).logits, expected(ids).logits) > 1e-3
    for layer, ours in zip(expected.model.layers, found.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).bias = torch.nn.Parameter(getattr(ours.self_attn, name).bias.clone())
    assert relative_error(found(ids).logits, expected(ids).logits) < 5e-6


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def with_rope(model, parameters):
    """The model with another RoPE."""
    model.config.rope_parameters = parameters
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


@pytest.mark.parametrize(
    ("architecture", "metadata", "parameters"),
    [
        (
            "llama",
            {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ("llama", {".rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ("llama", {".rope.scaling.factor": 4.0, ".rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        (
            "llama",
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 64,
                ".rope.scaling.yarn_attn_factor": 1.5,
                ".rope.scaling.yarn_beta_fast": 16.0,
                ".rope.scaling.yarn_ext_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.5,
                "beta_fast": 16.0,
            },
        ),
        (
            "qwen2",
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ("qwen2", {".rope.freq_base": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_rope_scaling_of_the_metadata(architecture, metadata, parameters, write):
    path, ids = write(shape_of(architecture, hidden=64), "Q8_0", metadata=metadata), token_ids(1, 40)
    found = load_model(path, dtype=torch.float32)
    expected = with_rope(dequantised(path), {"rope_theta": 10000.0, **parameters})
    assert relative_error(found(ids).logits, expected(ids).logits) < 5e-6
    assert {k: found.config.rope_parameters[k] for k in parameters} == parameters


def test_rope_factors_of_llama_3(write):
    """Used as they are; and named where they are those of the usual parameters."""
    shape, metadata = shape_of("llama", hidden=512), {".rope.freq_base": 500000.0}
    plain_path = write(shape, "Q8_0", metadata=metadata)
    expected = with_rope(dequantised(plain_path), LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](expected.config, torch.device("cpu"))
    factors = plain_frequencies(expected.config) / scaled
    assert factors.max() == 32
    path = write(shape, "Q8_0", metadata=metadata, extra_tensors={"rope_freqs.weight": factors.numpy()})
    found, ids = load_model(path, dtype=torch.float32), token_ids(1, 60)
    assert relative_error(found(ids).logits, expected(ids).logits) < 5e-6
    assert found.config.rope_parameters == LLAMA3
    factors[3] *= 1.5
    path = write(shape, "Q8_0", metadata=metadata, extra_tensors={"rope_freqs.weight": factors.numpy()})
    other = load_model(path, dtype=torch.float32)
    assert other.config.rope_parameters["rope_type"] == "default"
    torch.testing.assert_close(other.model.rotary_emb.inv_freq, plain_frequencies(other.config) / factors)


@pytest.mark.parametrize("name", ["llama2xs-Q4_0", "llama2xs-Q8_0", "stories260K-F16", "stories260K-F32"])
def test_real_files(name, shared_root):
    path = shared_root / "data" / "gguf" / f"{name}.gguf"
    expected = dequantised(str(path))
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model, tokenizer = load_gguf(path, dtype=torch.float32)
    text = "Once upon a time, there was a little girl named Lily."
    inputs = tokenizer(text, return_tensors="pt")
    assert inputs.input_ids.tolist() == [reference(text).input_ids]
    assert relative_error(model(**inputs).logits, expected(**inputs).logits) < 5e-6
    request = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**inputs, **request), expected.generate(**inputs, **request, eos_token_id=2))
    assert model.generation_config.eos_token_id == [2]
    assert tokenizer.decode(inputs.input_ids[0], skip_special_tokens=True).strip() == text


def test_tokenizer_chat_template_and_end_tokens_of_the_file(write):
    """A byte-level vocabulary whose end of turn is named by its text only."""
    characters = character_tokenizer().convert_ids_to_tokens(list(range(VOCAB - 1)))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*characters, "ab", "<|endoftext|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1] * VOCAB + [3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 97,
        "tokenizer.ggml.bos_token_id": 96,
        "tokenizer.chat_template": "{% for m in messages %}<{{ m['content'] }}>{% endfor %}",
    }
    path = write(FileShape("qwen2", 98, 64, 64, 1, 4, 2, 128), metadata=metadata)
    model, tokenizer = load_gguf(path)
    assert tokenizer("ab c<|im_end|>").input_ids == [95, *character_tokenizer()(" c").input_ids, 97]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert model.generation_config.eos_token_id == [97, 96]
    assert model.generation_config.bos_token_id == 96
    given = character_tokenizer()
    assert load_gguf(path, tokenizer=given)[1] is given
    assert load_gguf(os.path.dirname(path), gguf_file="model.gguf")[0].config.vocab_size == 98


def test_tied_matrices_are_in_memory_once_where_one_layout_serves_both(write):
    """A kernel's own layout has no rows to look up: beside it the file's rows are kept."""
    path = write(shape_of("qwen2", tied=True))
    model = load_model(path)
    assert model.config.tie_word_embeddings
    report = packing_report(model)
    assert report.in_memory["Q4_0", "rows"] == report.in_file["Q4_0", "rows"] == model.model.embed_tokens.weight.nbytes
    rows = load_model(path, backend="dequantize")
    assert rows.model.embed_tokens.packed is rows.lm_head.packed
    assert torch.equal(rows.model.embed_tokens(token_ids(1, 4)), model.model.embed_tokens(token_ids(1, 4)))
    model.tie_weights()
    assert isinstance(model.lm_head, PackedLinear)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    dense = load_model(path, backend="dense")
    assert dense.lm_head.weight is dense.model.embed_tokens.weight


def test_reports_say_what_lies_where(write):
    path = write(shape_of("llama", layers=4), q4_k_m(4))
    file, model = read_header(path), load_model(path, backend="dequantize")
    report = packing_report(model)
    for kind in ("Q4_K", "Q6_K"):
        stored = sum(entry.num_bytes for entry in file.tensors.values() if entry.type == kind)
        assert sum(size for (found, _), size in report.in_file.items() if found == kind) == stored
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert report.resident == sum(tensors.values())
    assert report.backends == ("dequantize", "rows")
    assert "Q6_K (dequantize)" in str(report)
    assert sum(report.in_memory.values()) == sum(report.in_file.values())


def test_native_weights_are_as_wide_as_in_the_file(write):
    """256 rows: no tile is padded with more than 63 bytes."""
    if not available("native"):
        pytest.skip(f"native: {native_problem()}")
    factors = {}
    for kind in FORMATS:
        report = packing_report(load_model(write(shape_of("llama"), kind), backend="native"))
        factors[kind] = report.in_memory[kind, "native"] / report.in_file[kind, "native"]
    exact = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K"}
    assert all(abs(factors[kind] - 1) < 0.01 for kind in exact), factors
    # 4-bit and 6-bit factors take a byte.
    assert max(factors.values()) < 1.23, factors


_MEASURE = """
import os, sys, torch
from transformers import LlamaForCausalLM
from hf_speculate.gguf import load_model
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))
torch.set_num_threads(1)
load_model(sys.argv[2])  # what is imported and allocated once
start = status("VmRSS")
model = load_model(sys.argv[1])
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, eos_token_id=None)
print(status("VmRSS") - start, status("VmHWM") - start, os.path.getsize(sys.argv[1]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="resident memory is read from /proc")
@pytest.mark.rest
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M"])
def test_resident_memory(kind, tmp_path):
    """At most 1.25 x the file, and 24 MB that the allocator may keep; while loading, 48 MB for what is being packed."""
    recipe = q4_k_m(16) if kind == "Q4_K_M" else one_type(kind)
    large = FileShape("llama", 8192, 1024, 2816, 16, 8, 2, 512, is_tied=False)
    write_random_file(tmp_path / "large.gguf", large, recipe)
    write_random_file(tmp_path / "small.gguf", shape_of("llama"), recipe)
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "large.gguf"), str(tmp_path / "small.gguf")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    resident, peak, file = map(int, printed.split())
    assert file > 100e6
    for what, found, spare in (("resident", resident, 24e6), ("at most while loading", peak, 48e6)):
        assert found < 1.25 * file + spare, f"{what}: {found / file:.2f} x the file"


def test_models_copy_cast_and_refuse_to_be_saved(write, tmp_path):
    model, ids = load_model(write(shape_of("llama")), dtype=torch.bfloat16), token_ids(1, 6)
    expected = model(ids).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, expected)
    assert relative_error(twin.float()(ids).logits, expected.float()) < 2e-2
    assert twin(ids).logits.dtype == torch.float32
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(UnsupportedRequestError, match="packed for the CPU"):
        model.lm_head(torch.empty(1, 256, device="meta"))


def test_importing_the_package_does_not_need_gguf():
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "import hf_speculate\n"
        "assert not [m for m in sys.modules if m.startswith('hf_speculate.gguf')]\n"
        "try: hf_speculate.load_gguf(sys.argv[1])\n"
        "except hf_speculate.SpeculateError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True, timeout=120)
    assert "pip install 'hf-speculate[gguf]'" in done.stdout, done.stderr
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_speculate.no_such_name  # noqa: B018


@pytest.fixture(params=quick(["native", "dequantize"], "native"))
def target(request, write):
    if request.param not in available(request.param):
        pytest.skip(f"native: {native_problem()}")
    path = write(FileShape("llama", VOCAB, 64, 96, 3, 4, 2, 256, is_tied=False, embedding_std=1.0), "Q8_0")
    return load_model(path, dtype=torch.float32, backend=request.param)


def drafters(target, prompt, tmp_path) -> dict[str, Speculator]:
    script = target.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    scripted = ScriptedDrafter(script[:, prompt.shape[1] :], (3, 2, 1, 1), accuracy=0.7, vocab_size=VOCAB)
    heads = MedusaHeads(torch.randn(3, 1, 64, 64) * 0.1, None, None)
    return {
        "scripted": Speculator(scripted),
        "random": Speculator(RandomDrafter(vocab_size=VOCAB)),
        "prompt lookup": AutoSpeculator.from_name("prompt_lookup", target=target),
        "draft model": Speculator(DraftModelDrafter(target, DraftModelOptions(depth=3, top_k=2))),
        "eagle": AutoSpeculator.from_pretrained(write_eagle_head(tmp_path / "eagle", 64, VOCAB), target=target),
        "medusa": Speculator(MedusaDrafter.for_target(target, heads=heads)),
    }


def test_every_method_drafts_for_packed_targets(target, prompt, tmp_path):
    """Greedy and sampled text is the target's own, to fp32's tolerance; a head's missing matrices are the target's."""
    prompts = [prompt(12, seed=i) for i in range(2)]
    found = drafters(target, prompts[0], tmp_path)
    for name, speculator in found.items():
        request = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0}
        report = check_lossless(target, speculator, prompts, do_sample=False, **request)
        sampled = check_lossless(target, speculator, prompts[:1], seeds=(3,), do_sample=True, **request)
        assert report.num_cases == 2, name
        assert not report.ties + sampled.ties, f"{name}: {report.ties + sampled.ties}"
        assert speculator.stats.rounds, name
    eagle = found["eagle"].drafter
    assert eagle.head.shared == {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}
    assert isinstance(eagle.head.shared["embed_tokens"], PackedEmbedding)
    assert found["draft model"].stats.mean_acceptance_length > 3, "a target drafts perfectly for itself"


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.rest
def test_packed_targets_compile_as_one_graph(target, prompt):
    """Fused projections hand each other their products while they are traced."""
    drafter = RandomDrafter(vocab_size=target.config.vocab_size, max_nodes=6)
    speculator = Speculator(drafter, compile="eager")
    request = {"max_new_tokens": 12, "do_sample": False}
    found = target.generate(prompt(9), speculator=speculator, **request)
    assert torch.equal(found, target.generate(prompt(9), **request))
    assert not speculator.stats.fallbacks


@pytest.mark.parametrize("backend", quick(["native", "native-int8"]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_native_layers_give_the_very_text_of_plain(dtype, backend, write, prompt):
    """Scores and cache have plain's bits: trees and chains, greedy and sampled, one row and a padded batch."""
    if problem := native_problem():
        pytest.skip(f"native: {problem}")
    shape = dataclasses.replace(shape_of("qwen2", tied=True), embedding_std=0.05)  # flat: ties would be seen
    target = load_model(write(shape, q4_k_m(2)), dtype=dtype, backend=backend)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    request = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0, "output_scores": True}
    request |= {"return_dict_in_generate": True}
    for drafter in (
        RandomDrafter(vocab_size=VOCAB, max_nodes=9),
        PromptLookupDrafter(PromptLookupOptions(min_ngram=1)),
    ):
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}):
            for inputs in (
                {"input_ids": prompt(12)},
                {"input_ids": torch.cat([prompt(12, seed=i) for i in range(2)]), "attention_mask": mask},
            ):
                outputs = []
                for options in ({}, {"speculator": Speculator(drafter, adaptive=False)}):
                    torch.manual_seed(0)
                    outputs.append(target.generate(**inputs, **request, **sampling, **options))
                plain, found = outputs
                assert torch.equal(plain.sequences, found.sequences)
                assert all(map(torch.equal, plain.scores, found.scores))
                if len(inputs["input_ids"]) == 1:
                    kept = [(layer.keys, layer.values) for layer in cache_of(plain).layers]
                    for (keys, values), layer in zip(kept, cache_of(found).layers, strict=True):
                        assert torch.equal(keys, layer.keys)
                        assert torch.equal(values, layer.values)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A model in parts as `gguf` writes them; returns their paths and the model in one file."""
    import gguf

    whole, shape = tmp_path / "whole.gguf", shape_of("llama")
    write_random_file(whole, shape, one_type("Q4_0"))
    monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, split_max_tensors=8))
    write_random_file(tmp_path / "cut.gguf", shape, one_type("Q4_0"))
    return sorted(tmp_path.glob("cut-*.gguf")), whole


def test_a_model_in_parts_is_the_whole(parts):
    paths, whole = parts
    assert [path.name for path in paths] == part_names(paths[1].name)
    assert len(paths) == 3
    ids = token_ids(1, 9)
    assert torch.equal(
        load_model(paths[0], backend="dequantize")(ids).logits, load_model(whole, backend="dequantize")(ids).logits
    )
    found = find_file(paths[0].parent, paths[0].name, {"local_files_only": True})
    assert os.path.samefile(found, paths[0])


def test_parts_that_do_not_belong_together(parts):
    (first, second, third), _ = parts
    with pytest.raises(CheckpointError, match=r"is one of 3 parts of a model: load the first, '.*cut-00001-of-00003"):
        load_model(second)
    swapped = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match="says that it is part 2 of 3, not 1 of 3"):
        load_model(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"cut-00002-of-00003.gguf' is missing: .* has 3 parts"):
        load_model(first)
    with pytest.raises(CheckpointError, match=r"cut-00002-of-00003.gguf' of .* cannot be had"):
        find_file(first.parent, first.name, {"local_files_only": True})
    second.write_bytes(swapped)
    renamed = first.rename(first.with_name("other.gguf"))
    with pytest.raises(CheckpointError, match=r"the first of 3 parts: .* it is called otherwise"):
        load_model(renamed)


def test_plans_are_made_without_weights(write, monkeypatch):
    path = write(shape_of("qwen2"))
    monkeypatch.setattr(TensorRows, "read", lambda *_: pytest.fail("weights were read"))
    plan = plan_model(read_header(path))
    assert plan.config.num_hidden_layers == 2
    assert plan.config.model_type == "qwen2"
    assert not plan.is_tied


def test_a_gguf_file_is_a_draft_model(write):
    path = write(shape_of("llama"))
    target = load_model(path, dtype=torch.float32, backend="dense")
    speculator = AutoSpeculator.from_name("draft_model", target=target, model=path, depth=3, adaptive=False)
    assert speculator.drafter.model.get_memory_footprint() < target.get_memory_footprint(), "its weights stay packed"
    assert speculator.drafter.model.dtype == torch.float32
    request = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = token_ids(1, 8)
    assert torch.equal(target.generate(ids, speculator=speculator, **request), target.generate(ids, **request))
    assert speculator.stats.mean_acceptance_length > 3, "the same weights"
