"""Packed models as targets: memory, copies, and the text of plain `generate` with every method."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import cache_of
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.testing import RandomDrafter, ScriptedDrafter, check_lossless
from hf_speculate_gguf import load_model, packing_report
from hf_speculate_gguf.native.binding import native_problem
from hf_speculate_gguf.native.formats import FORMATS
from hf_speculate_gguf.native.modules import PackedEmbedding, PackedLinear, Projection
from hf_speculate_gguf.reading import read_header
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions

from ..support.packed import available, dequantised, relative_error, shape_of
from ..support.packed import ids as token_ids
from ..support.random_gguf import FileShape, one_type, q4_k_m, write_random_file
from ..support.tiers import quick
from ..support.tiny_heads import write_eagle_head


VOCAB = 96


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_files_of_mixed_types_fuse_projections_of_one_type(architecture, write):
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


def test_tied_matrices_are_stored_once_if_one_layout_fits_both(write):
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


def test_packing_report_counts_bytes_by_type_and_backend(write):
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


def test_native_weights_take_as_many_bytes_as_in_the_file(write):
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
from hf_speculate_gguf import load_model
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
def test_resident_memory_stays_near_the_size_of_the_file(kind, tmp_path):
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


def test_packed_models_can_be_copied_and_cast_but_not_saved(write, tmp_path):
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
def test_packed_targets_give_the_bits_of_plain_generate(dtype, backend, write, prompt):
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


def test_gguf_file_can_be_a_draft_model(write):
    path = write(shape_of("llama"))
    target = load_model(path, dtype=torch.float32, backend="dense")
    speculator = AutoSpeculator.from_name("draft_model", target=target, model=str(path), depth=3, adaptive=False)
    assert speculator.drafter.model.get_memory_footprint() < target.get_memory_footprint(), "its weights stay packed"
    assert speculator.drafter.model.dtype == torch.float32
    request = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = token_ids(1, 8)
    assert torch.equal(target.generate(ids, speculator=speculator, **request), target.generate(ids, **request))
    assert speculator.stats.mean_acceptance_length > 3, "the same weights"
