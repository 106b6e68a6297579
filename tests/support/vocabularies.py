"""Vocabularies for GGUF files, text that is hard on them, and SentencePiece's rule in its plainest form."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from hf_speculate.gguf import read_model_file, read_tokenizer

from .random_gguf import FileShape, one_type, write_random_file


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


def numbered_list(seed: int) -> str:
    choose = random.Random(seed)
    gap = choose.choice(("\n", "\n\n"))
    items = [
        f"{number}. " + " ".join(odd_strings(1, seed * 100 + number, ("apples", " and", " 12", ":\n", " 3.5")))
        for number in range(1, 13)
    ]
    return f"Here is the list:{gap}{gap.join(items)}"


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
