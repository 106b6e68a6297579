"""GGUF files that we write: read again by us, and their tokenizers give the ids of those that they were made from."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_speculate.errors import CheckpointError
from hf_speculate_gguf import (
    OUT_TYPES,
    TensorRows,
    describe_rope,
    describe_vocabulary,
    half_split_order,
    interleaved,
    read_header,
    read_rope,
    read_tokenizer,
    read_values,
    write_gguf,
)

from ..support.paths import REPOSITORY, SHARED


TEXTS = (
    "import os\n\n\ndef f(x):\n    return x + 12345",
    "naïve  Ünïcode\t漢字 🚀",
    "It's <|endoftext|> HTTPServer\r\n",
)


def values_of(path) -> dict[str, torch.Tensor]:
    file = read_header(path)
    return {name: read_values(TensorRows(file, entry)) for name, entry in file.tensors.items()}


@pytest.mark.parametrize("out_type", OUT_TYPES)
def test_write_gguf_keeps_tensors_and_metadata(out_type, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(3, 64, generator=generator),
        "narrow": torch.randn(3, 10, generator=generator),
        "vector": torch.randn(5, generator=generator),
        "cube": torch.randn(2, 3, 4, generator=generator),
        "ids": torch.tensor([5, 1 << 40]),
    }
    path = tmp_path / "file.gguf"
    write_gguf(
        path, "any", {"any.size": 3, "any.names": ["a", "ü"], "any.half": 0.5, "any.yes": True}, tensors, out_type
    )
    file, found = read_header(path), values_of(path)
    assert file.metadata["general.architecture"] == "any"
    assert [file.metadata[f"any.{key}"] for key in ("size", "names", "half", "yes")] == [3, ["a", "ü"], 0.5, True]
    blocks = OUT_TYPES[out_type].startswith("Q")
    assert file.tensors["matrix"].type == OUT_TYPES[out_type]
    assert file.tensors["narrow"].type == ("F16" if blocks else OUT_TYPES[out_type])
    assert (file.tensors["vector"].type, file.tensors["cube"].type, file.tensors["ids"].type) == ("F32", "F32", "I64")
    for name in ("vector", "cube", "ids"):
        assert torch.equal(found[name], tensors[name])
    error = {"f32": 0.0, "f16": 1e-3, "bf16": 1e-2, "q8_0": 2e-2, "q4_0": 0.4}[out_type]
    torch.testing.assert_close(found["matrix"].float(), tensors["matrix"], atol=error, rtol=error)


def test_write_gguf_refuses_unknown_types_and_large_values(tmp_path):
    with pytest.raises(CheckpointError, match=r"'q9_0'.*possible: f32, f16"):
        write_gguf(tmp_path / "file.gguf", "any", {}, {}, "q9_0")
    with pytest.raises(CheckpointError, match="too large for F16"):
        write_gguf(tmp_path / "file.gguf", "any", {}, {"matrix": torch.full((1, 32), 1e6)}, "f16")
    with pytest.raises(CheckpointError, match=r"'yarn'.*default, linear, llama3"):
        describe_rope("any", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, 8)


def test_interleaved_rows_are_undone_by_half_split_order():
    """llama.cpp keeps rows that rotate together side by side, transformers in the halves of a head."""
    rows = torch.arange(16)[:, None]
    stored = interleaved(rows, num_heads=2)
    assert stored[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert torch.equal(stored[half_split_order(16, 2)], rows)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        },
    ],
)
def test_describe_rope_is_read_again(rope, tmp_path):
    metadata, factors = describe_rope("any", rope, 64)
    path = tmp_path / "file.gguf"
    tensors = {"ids": torch.tensor([1])} | ({} if factors is None else {"rope_freqs.weight": factors})
    write_gguf(path, "any", metadata, tensors)
    assert read_rope(read_header(path), "any", 64, 131072) == pytest.approx(rope)


@pytest.mark.parametrize(
    ("folder", "vocab_size"),
    [
        (REPOSITORY / "examples" / "pycoder", 4100),
        (SHARED / "models" / "qwen2-16m", 8192),
        (SHARED / "models" / "stories260k", 512),
    ],
)
def test_describe_vocabulary_is_read_as_the_same_tokenizer(folder, vocab_size, tmp_path):
    """The same ids and texts, by the reader that is tested against llama.cpp; pycoder's has four unused tokens here."""
    if not folder.is_dir():
        pytest.skip(f"{folder} is not on this machine")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    metadata = describe_vocabulary(tokenizer, vocab_size)
    assert len(metadata["tokenizer.ggml.tokens"]) == len(metadata["tokenizer.ggml.token_type"]) == vocab_size
    path = tmp_path / "file.gguf"
    write_gguf(path, "any", metadata, {"ids": torch.tensor([1])})
    again = read_tokenizer(read_header(path), vocab_size)
    for text in TEXTS:
        composed = tokenizer.backend_tokenizer.normalizer is None or text.isascii()
        if composed or "llama" in metadata["tokenizer.ggml.model"]:
            assert again(text).input_ids == tokenizer(text).input_ids, text
    assert (again.eos_token_id, again.bos_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)


def test_describe_vocabulary_refuses_tokenizers_that_do_not_fit():
    class Slow:
        backend_tokenizer = None

    with pytest.raises(CheckpointError, match="neither byte-level"):
        describe_vocabulary(Slow(), 10)
    pycoder: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(REPOSITORY / "examples" / "pycoder")
    with pytest.raises(CheckpointError, match="has token 4095, but the model only 10"):
        describe_vocabulary(pycoder, 10)
