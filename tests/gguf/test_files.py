"""Broken and unfit files are refused with a clear message before their weights are read."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import hf_speculate
from hf_speculate.errors import CheckpointError
from hf_speculate_gguf import load_model
from hf_speculate_gguf.reading import read_header

from ..support.random_gguf import FileShape


def test_header_is_what_was_written(write):
    file = read_header(write())
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.attention.head_count_kv"] == 2
    entry = file.tensors["blk.1.ffn_down.weight"]
    assert (entry.shape, entry.type, entry.row_bytes, entry.num_bytes) == ((32, 64), "Q4_0", 36, 32 * 36)
    assert max(e.offset + e.num_bytes for e in file.tensors.values()) <= file.num_bytes


def test_read_header_refuses_files_cut_anywhere(write, tmp_path):
    """Every cut within the header, and cuts within the weights."""
    whole = write().read_bytes()
    file, cut = read_header(tmp_path / "model.gguf"), tmp_path / "cut.gguf"
    last = max(entry.offset + entry.num_bytes for entry in file.tensors.values())
    start = min(entry.offset for entry in file.tensors.values())
    for length in [*range(0, start, 7), start, (start + last) // 2, last - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(cut)
    cut.write_bytes(whole[:last])
    assert read_header(cut).tensors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"GGML" + bytes(60), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40), "announced"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**50), "array of"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 13), "value type 13"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xff" + bytes(8), "not UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_read_header_refuses_other_files(content, message, tmp_path):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_load_gguf_refuses_the_malformed_files_of_others(shared_root):
    for path in sorted((shared_root / "data" / "gguf" / "malformed").glob("*.gguf")):
        with pytest.raises(CheckpointError, match=path.name):
            hf_speculate.load_gguf(path)


def test_load_model_names_unknown_tensor_types(write, no_weights, tmp_path):
    path = write(recipe="F32")
    data = path.read_bytes()
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 16  # behind the number of dimensions and two of them
    assert struct.unpack_from("<I", data, at) == (0,)
    for number, message in ((999, "ggml type 999"), (9, r"is of type Q8_1; supported here: F32.* llama-quantize")):
        path.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])
        with pytest.raises(CheckpointError, match=message):
            load_model(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({".block_count": None}, "no 'llama.block_count'"),
        ({".context_length": "long"}, "is 'long', not of type int"),
        ({".attention.head_count": 0}, "'llama.attention.head_count' is 0"),
        ({".block_count": 2**31}, "2147483648 layers are announced, but 21 tensors"),
        ({".block_count": 3}, r"9 tensors of a llama model are missing: blk.2"),
        ({".block_count": 1}, r"9 tensors of a llama model are not known: blk.1"),
        ({".feed_forward_length": 96}, r"'blk.0.ffn_gate.weight' is \[64, 32\]; the metadata give \[96, 32\]"),
        ({".expert_count": 8}, "mixture of experts"),
        ({".rope.dimension_count": 4}, "rotating or keeping a part of a head"),
        ({".rope.scaling.type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "not a list of str only"),
        ({"tokenizer.ggml.tokens": ["a"] * 40, "tokenizer.ggml.token_type": [1]}, "has 1 entries"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "'tokenizer.ggml.bos_token_id' is 'x', not of type int"),
        ({".rope.freq_base": float("nan")}, "freq_base' is nan, expected a number above 0"),
        ({".rope.scaling.attn_factor": 1.5}, "RoPE with 'llama.rope.scaling.attn_factor' of its own is not supported"),
        ({".rope.scaling.type": "yarn"}, "no 'llama.rope.scaling.factor'"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(write, no_weights, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(write(metadata=metadata))


def test_other_architectures_are_refused(write, no_weights):
    with pytest.raises(CheckpointError, match="architecture 'mamba'; supported: llama, qwen2, qwen3, gemma3"):
        load_model(write(FileShape("mamba", 40, 32, 64, 2, 4, 2)))


def test_load_gguf_refuses_a_file_without_tokenizer(write, no_weights):
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        hf_speculate.load_gguf(write())


def test_absent_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="is no file"):
        hf_speculate.load_gguf(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="is a folder without a GGUF file"):
        hf_speculate.load_gguf(tmp_path)
    for name in ("a.gguf", "b.gguf", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"is a folder: name the file .*, one of a\.gguf, b\.gguf\.$"):
        hf_speculate.load_gguf(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be had"):
        hf_speculate.load_gguf(tmp_path, gguf_file="absent.gguf")


def test_weights_that_are_not_numbers_are_refused(write):
    norm = np.full(32, np.nan, np.float32)
    with pytest.raises(CheckpointError, match=r"'output_norm.weight' holds values that are not finite"):
        load_model(write(extra_tensors={"output_norm.weight": norm}))
