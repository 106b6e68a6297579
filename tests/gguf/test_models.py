"""Packed models compute what the dequantised ones do, and are targets like others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_speculate
from hf_speculate.errors import CheckpointError
from hf_speculate_gguf import load_gguf, load_model
from hf_speculate_gguf.native.formats import DENSE_TYPES, FORMATS
from hf_speculate_gguf.rope import plain_frequencies
from hf_speculate_gguf.shards import find_file, part_names

from ..support.inputs import character_tokenizer
from ..support.packed import available, dequantised, relative_error, shape_of
from ..support.packed import ids as token_ids
from ..support.random_gguf import FileShape, one_type, write_random_file
from ..support.tiers import quick_quarter


VOCAB = 96


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


@pytest.mark.parametrize(("backend", "shown"), [("dense", "Dequantising layers"), ("dequantize", "Packing layers")])
def test_the_progress_bar_names_what_is_done(write, monkeypatch, backend, shown):
    bars: list[str] = []

    def tqdm(layers, desc):
        bars.append(desc)
        return layers

    monkeypatch.setattr("hf_speculate_gguf.loading.logging.tqdm", tqdm)
    load_model(write(shape_of("llama"), "Q8_0"), backend=backend)
    assert bars == [shown]


def test_load_model_names_the_config_after_the_file(write):
    """Cards of heads name what they were made for by the config."""
    path = write(shape_of("llama"))
    model = load_model(path)
    assert model.name_or_path == model.config._name_or_path == str(path)


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


OF_YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
MORE_OF_YARN = {"scaling.yarn_attn_factor": 1.5, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_ext_factor": 1.0}
LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
YARN["original_max_position_embeddings"] = 64
# Keys below `rope` of a file's metadata, and the parameters of transformers that they stand for.
ROPES = [
    ("llama", {"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
    ("llama", {"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ("llama", {"scaling.factor": 4.0, "scale_linear": 2.0}, LINEAR),
    ("llama", {"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
    ("llama", OF_YARN | MORE_OF_YARN, YARN | {"attention_factor": 1.5, "beta_fast": 16.0}),
    ("qwen2", OF_YARN, YARN),
    ("qwen2", {"freq_base": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
]


@pytest.mark.parametrize(("architecture", "metadata", "parameters"), ROPES)
def test_rope_is_scaled_as_the_metadata_say(architecture, metadata, parameters, write):
    given = {f".rope.{name}": value for name, value in metadata.items()}
    path, ids = write(shape_of(architecture, hidden=64), "Q8_0", metadata=given), token_ids(1, 40)
    found = load_model(path, dtype=torch.float32)
    expected = with_rope(dequantised(path), {"rope_theta": 10000.0, **parameters})
    assert relative_error(found(ids).logits, expected(ids).logits) < 5e-6
    assert {k: found.config.rope_parameters[k] for k in parameters} == parameters


def test_rope_factors_of_llama_3_are_used_and_named(write):
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
def test_real_files_give_the_text_of_transformers(name, shared_root):
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


def test_tokenizer_chat_template_and_end_tokens_are_the_files(write):
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
    assert load_gguf(path.parent, gguf_file="model.gguf")[0].config.vocab_size == 98


@pytest.mark.rest  # a process of its own
def test_importing_the_package_does_not_need_gguf():
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "import hf_speculate\n"
        "assert not [m for m in sys.modules if m.startswith('hf_speculate_gguf')]\n"
        "try: hf_speculate.load_gguf(sys.argv[1])\n"
        "except hf_speculate.SpeculateError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True, timeout=120)
    assert "pip install 'hf-speculate[gguf]'" in done.stdout, done.stderr
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_speculate.no_such_name  # noqa: B018


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


def test_parts_that_do_not_belong_together_are_refused(parts):
    (first, second, third), _ = parts
    with pytest.raises(CheckpointError, match=r"is one of 3 parts of a model: load the first, '.*cut-00001-of-00003"):
        load_model(second)
    swapped = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match="is part 2 of 3 by its metadata, not 1 of 3"):
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
