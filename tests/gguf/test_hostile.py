"""Any header: a clear error before weights are read, or a model that runs; files that change below a loaded model."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

import hf_speculate
from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate_gguf import load_model
from hf_speculate_gguf.reading import read_header

from ..support.random_gguf import FileShape, one_type, write_random_file


KEYS = (
    *(".context_length", ".embedding_length", ".block_count", ".feed_forward_length", ".expert_count"),
    *(".attention.head_count", ".attention.head_count_kv", ".attention.key_length", ".attention.value_length"),
    *(".attention.layer_norm_rms_epsilon", ".rope.dimension_count", ".rope.freq_base", ".rope.scale_linear"),
    *(".rope.scaling.type", ".rope.scaling.factor", ".rope.scaling.original_context_length"),
    *(".rope.scaling.yarn_beta_fast", ".rope.scaling.yarn_beta_slow", ".rope.scaling.attn_factor"),
    *(".rope.scaling.yarn_attn_factor", ".rope.scaling.yarn_ext_factor", ".rope.scaling.other"),
    *("general.alignment", "general.architecture", "tokenizer.chat_template", "tokenizer.ggml.model"),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "padding", "eot", "unknown")),
    *(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges", "pre")),
    *(f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")),
)
VALUES = (
    *(0, 1, 2, 3, 5, 7, 31, 63, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0.0, 1.0, -1.0, float("nan"), float("inf")),
    *(1e-30, 3e38, "", "x", "none", "linear", "yarn", "llama3", "longrope", "gpt2", "llama", [1, 2], ["a"], [1.5]),
    *(True, None),
)
TOKENS = [*(chr(code) for code in range(33, 72)), '!"']
WORDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 39 + [3],
    "tokenizer.ggml.merges": ['! "'],
    "tokenizer.ggml.eos_token_id": 39,
}


def shape(choose: random.Random) -> FileShape:
    return FileShape(
        choose.choice(("llama", "qwen2")), 40, 32, 32, 1, choose.choice((2, 4)), 2, 64, choose.random() < 0.5
    )


def change_metadata(path, choose):
    model = shape(choose)
    changes = {choose.choice(KEYS): choose.choice(VALUES) for _ in range(choose.choice((1, 1, 2)))}
    known = WORDS if choose.random() < 0.5 else {}
    write_random_file(path, model, one_type(choose.choice(("Q4_0", "Q8_0"))), metadata=known | changes)


def change_shape(path, choose):
    heads, kv_heads = choose.choice((1, 2, 3, 4, 5, 8, 16, 32)), choose.choice((1, 2, 3, 4, 5, 8))
    hidden, inner = choose.choice((32, 64, 96, 160)), choose.choice((32, 64))
    model = FileShape(choose.choice(("llama", "qwen2")), choose.choice((1, 17)), hidden, inner, 1, heads, kv_heads, 64)
    write_random_file(path, model, one_type("Q4_0"))


def change_bytes(path, choose):
    write_random_file(path, shape(choose), one_type("Q4_0"), metadata=WORDS if choose.random() < 0.5 else {})
    end = min(entry.offset for entry in read_header(path).tensors.values())
    data = bytearray(path.read_bytes())
    for _ in range(choose.choice((1, 1, 4))):
        data[choose.randrange(end)] = choose.choice((0, 1, 0x7F, 0xFF, choose.randrange(256)))
    path.write_bytes(data if choose.random() < 0.9 else data[: choose.randrange(len(data))])


def loads(path) -> bool:
    """Whether a file is read, then also run; anything else than a clear error is raised."""
    try:
        if "tokenizer.ggml.model" in read_header(path).metadata:
            model, tokenizer = hf_speculate.load_gguf(path, dtype=torch.float32, backend="dequantize")
            tokenizer('!"')
        else:
            model = load_model(path, dtype=torch.float32, backend="dequantize")
    except SpeculateError:
        return False
    model.generate(torch.tensor([[0, 0, 0]]), max_new_tokens=2, do_sample=False)
    return True


def test_mutated_headers_give_clear_errors_or_models_that_run(tmp_path):
    path, num_loaded, num_cases = tmp_path / "model.gguf", 0, 0
    for seed in range(250):
        choose = random.Random(seed)
        try:
            choose.choice((change_metadata, change_metadata, change_shape, change_bytes))(path, choose)
        except Exception:  # what the writer refuses is no file, and no case
            continue
        num_loaded += loads(path)
        num_cases += 1
    assert num_cases >= 200
    assert 0.1 < num_loaded / num_cases < 0.6


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FileShape("llama", 40, 64, 64, 1, 4, 3), "4 attention heads of 16 values, 3 of keys"),
        (FileShape("qwen2", 40, 96, 64, 1, 32, 4), "heads of 3 values"),
    ],
)
def test_heads_that_do_not_fit_each_other_are_refused(model, message, write, no_weights):
    with pytest.raises(CheckpointError, match=message):
        load_model(write(model))


def test_special_tokens_that_the_model_does_not_have_are_none(write):
    ids = {f"tokenizer.ggml.{name}_token_id": 2**32 - 1 for name in ("bos", "eos", "padding")}
    config = load_model(write(metadata=ids)).generation_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(write, no_weights):
    words = WORDS | {"tokenizer.ggml.tokens": [*TOKENS, "more"], "tokenizer.ggml.token_type": [1] * 41}
    with pytest.raises(CheckpointError, match="a tokenizer of 41 tokens, but embeddings of 40"):
        hf_speculate.load_gguf(write(metadata=words))


def test_a_tokenizer_whose_parts_do_not_belong_together_is_refused(write, no_weights):
    with pytest.raises(CheckpointError, match=r"tokenizer in .* cannot be read"):
        hf_speculate.load_gguf(write(metadata=WORDS | {"tokenizer.ggml.merges": ["nothing"]}))


def test_tensors_that_share_bytes_are_refused(write, no_weights):
    """A small file could show the same bytes as many gigabytes of matrices."""
    path = write()
    names = [b"blk.0.ffn_gate.weight", b"blk.0.ffn_up.weight"]  # of one type and shape
    data = bytearray(path.read_bytes())
    places = [data.index(name) + len(name) + 4 + 16 + 4 for name in names]
    data[places[1] : places[1] + 8] = data[places[0] : places[0] + 8]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"ffn_gate.weight' and 'blk.0.ffn_up.weight' overlap"):
        load_model(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_model(tmp_path / "pipe.gguf")


def cut(path):
    os.truncate(path, 4096)


def overwrite(path):
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(bytes(reversed(data)))


def replace(path):
    (path.parent / "other").write_bytes(bytes(path.stat().st_size))
    os.replace(path.parent / "other", path)


CHANGES = (overwrite, replace, os.remove, cut)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_does_not_depend_on_its_file(change, tied, write):
    path = write(FileShape("qwen2", 4000, 64, 64, 1, 4, 2, 128, is_tied=tied), "Q8_0")
    model = load_model(path, dtype=torch.float32, backend="dequantize")
    kernel = load_model(path, dtype=torch.float32, backend="auto")
    prompt = torch.tensor([[3900, 6, 2500]])
    before = [loaded(prompt).logits for loaded in (model, kernel)]
    change(path)
    assert all(
        torch.equal(loaded(prompt).logits, logits) for loaded, logits in zip((model, kernel), before, strict=True)
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "token_embd.weight", "output_norm.weight"])
def test_a_file_that_changes_while_it_is_read_is_refused(change, name, write, monkeypatch):
    from hf_speculate_gguf.reading import GgufFile

    read, path = GgufFile.read, write()

    def changed_before(self, entry, *rows):
        if entry.name == name and path.exists():
            change(path)
        return read(self, entry, *rows)

    monkeypatch.setattr(GgufFile, "read", changed_before)
    with pytest.raises(CheckpointError, match=r"load it again|cannot read"):
        load_model(path, backend="dequantize")


def test_a_file_that_changes_after_its_last_read_is_refused(write, monkeypatch):
    """It may have changed in the middle of that read."""
    from hf_speculate_gguf import loading

    path, place = write(), loading._Builder._place_rotary

    def place_and_change(self, decoder):
        place(self, decoder)
        overwrite(path)

    monkeypatch.setattr(loading._Builder, "_place_rotary", place_and_change)
    with pytest.raises(CheckpointError, match="load it again"):
        load_model(path, backend="dequantize")


def test_rows_of_permuted_matrices_are_those_of_one_read(write):
    """They are read in chunks, each of which reads around what it takes."""
    from hf_speculate_gguf.matrices import TensorRows, half_split_order

    file = read_header(write())
    entry = file.tensors["blk.0.attn_q.weight"]
    order = half_split_order(entry.num_rows, 4)
    rows, whole = TensorRows(file, entry, order), file.read(entry)
    assert np.array_equal(torch.cat([rows.read(i, i + 5) for i in range(0, 30, 5)]), whole[order[:30]])
