"""The bytes of a tokenizer's tokens, and the tokens of any bytes.

Two vocabularies agree in nothing but the bytes that their tokens stand for. So a text goes from one to the other as
bytes, also where a token ends in the middle of a character. Byte-level BPE and SentencePiece-like vocabularies are
read; both know every byte. Unicode normalization is left out: it would change bytes that are already written.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from tokenizers import Tokenizer
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_speculate.errors import OptionError


_BLANK = "\u2581"  # the space of SentencePiece
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Characters that stand for bytes which are not UTF-8 (`surrogateescape`).
_ESCAPED, _ALL_ESCAPED = re.compile("[\udc80-\udcff]"), re.compile("([\udc80-\udcff]+)")
# What changes a text before it is split, except the spaces of SentencePiece.
_KEPT_NORMALIZERS = ("Replace",)
_PREFIX_OPTIONS = {"ByteLevel": ("add_prefix_space", False), "Metaspace": ("prepend_scheme", "never")}


class Piece(NamedTuple):
    """A token of a text, and the index of the first byte after it."""

    token: int
    end: int


def num_incomplete(text: bytes) -> int:
    """Number of bytes at the end of a text that are the beginning of a character."""
    for count in range(1, min(len(text), 3) + 1):
        byte = text[-count]
        if byte >= 0xC0:
            size = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return count if count < size else 0
        if byte < 0x80:
            break
    return 0


class Vocabulary:
    """The tokens of a tokenizer as bytes. Nothing of it changes after it was made, so threads may share it.

    Args:
        tokenizer: a tokenizer of transformers with a fast backend.
        num_tokens: number of token ids that the model knows; others are not used.
        whose: noun for its owner in messages, such as "the target's".

    Attributes:
        texts: bytes of each token by id; None for unused ids. A special token has those of its name.
        special: ids of special tokens by name.
        prefix: tokens that the tokenizer puts before every text.

    Raises:
        OptionError: the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: Any, num_tokens: int, whose: str):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise OptionError(
                f"draft_model: {whose} tokenizer is a {type(tokenizer).__name__}, which has no fast backend "
                "(tokenizer.json): the bytes of its tokens are unknown. Give a draft model of the target's vocabulary."
            )
        self._is_byte_level = _has_kind(_state(backend.decoder), "ByteLevel") or _has_kind(
            _state(backend.pre_tokenizer), "ByteLevel"
        )
        if not (self._is_byte_level or _BLANK in json.dumps(_state(backend.decoder), ensure_ascii=False)):
            raise OptionError(
                f"draft_model: {whose} tokenizer is neither byte-level nor SentencePiece's, so the bytes of its tokens "
                "are unknown. Give a draft model of the target's vocabulary."
            )
        self._encoder = _plain(backend)
        added = {index: token for index, token in backend.get_added_tokens_decoder().items() if index < num_tokens}
        self.special = {token.content: index for index, token in added.items() if token.special}
        self.texts: list[bytes | None] = [None] * num_tokens
        for name, index in backend.get_vocab(with_added_tokens=True).items():
            if index < num_tokens:
                self.texts[index] = added[index].content.encode() if index in added else self._bytes(name)
        self._special_ids = frozenset(self.special.values())
        self._ids = self._ids_of_texts()
        self._longest = max(map(len, self._ids), default=0)
        whole = [token.content for token in added.values() if not token.special and token.content]
        self._whole = re.compile("|".join(map(re.escape, sorted(whole, key=len, reverse=True)))) if whole else None
        self.prefix = [token for token in _prefix(tokenizer) if token < num_tokens]
        self.begins_with_space = _adds_space(backend)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def text(self, token: int) -> bytes:
        """The bytes of a token; empty for an unused id."""
        return self.texts[token] or b"" if 0 <= token < len(self.texts) else b""

    def token(self, text: bytes) -> int | None:
        """The token of exactly these bytes, if there is one. Special tokens have no text."""
        return self._ids.get(text)

    def encode(self, text: bytes) -> list[Piece]:
        """The tokens of a text as the tokenizer would choose them, without special ones.

        Bytes that the vocabulary lacks are left out; only vocabularies without bytes lack any."""
        pieces: list[Piece] = []
        start = 0
        for part, is_text in self._parts(text):
            tokens = self._split(part, is_text)
            end = start
            for token in tokens:
                end += len(self.text(token))
                pieces.append(Piece(token, end))
            if end != start + len(part):
                del pieces[len(pieces) - len(tokens) :]
                pieces += self._longest_matches(part, start)
            start += len(part)
        return pieces

    def last_word(self, text: bytes) -> int:
        """Index of the first byte whose tokens may still change if the text continues: the tokenizer chooses the tokens
        of a word together, and the last word may not be whole."""
        incomplete = num_incomplete(text)
        whole = _ESCAPED.sub("?", text[: len(text) - incomplete].decode("utf-8", "surrogateescape"))
        if self._encoder.pre_tokenizer is not None:
            words = self._encoder.pre_tokenizer.pre_tokenize_str(whole) if whole else []
            size = len(self._bytes(words[-1][0])) if words else 0
        else:
            words = re.findall(r"\s*\S+|\s+", whole)
            size = len(words[-1].encode()) if words else 0
        return max(len(text) - size - incomplete, 0)

    def longer(self, text: bytes) -> slice:
        """Indices into `sorted_ids` of the tokens that begin with `text` and are longer."""
        after = _next(text)
        return slice(
            bisect_right(self._sorted, text), len(self._sorted) if after is None else bisect_left(self._sorted, after)
        )

    @cached_property
    def sorted_ids(self) -> Int[Tensor, " T"]:
        """Ids of all tokens that are not special, ordered by their bytes."""
        return torch.tensor([self._ids[text] for text in self._sorted], dtype=torch.long, device="cpu")

    def first_of(self, text: bytes) -> int | None:
        """The longest token with which `text` begins."""
        sizes = range(min(len(text), self._longest), 0, -1)
        return next((token for size in sizes if (token := self._ids.get(text[:size])) is not None), None)

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self._ids)

    def _bytes(self, name: str) -> bytes:
        """The bytes of a token, or of a part of a text that is written like one."""
        if self._is_byte_level:
            known = [_BYTES.get(char) for char in name]
            return name.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        return name.replace(_BLANK, " ").encode("utf-8", "surrogatepass")

    def _ids_of_texts(self) -> dict[bytes, int]:
        """Token by bytes. Of several the first one counts, and byte tokens of SentencePiece come last."""
        ids: dict[bytes, int] = {}
        names = {} if self._is_byte_level else {self._encoder.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        for late in (False, True):
            for index, text in enumerate(self.texts):
                if text and index not in self._special_ids and (index in names) == late:
                    ids.setdefault(text, index)
        return ids

    def _parts(self, text: bytes) -> Iterator[tuple[bytes, bool]]:
        """Parts of a text in their order, and whether each is UTF-8."""
        for index, part in enumerate(_ALL_ESCAPED.split(text.decode("utf-8", "surrogateescape"))):
            if part:
                yield part.encode("utf-8", "surrogateescape"), not index % 2

    def _split(self, part: bytes, is_text: bool) -> list[int]:
        if not is_text:
            if not self._is_byte_level:
                return [token for byte in part if (token := self._ids.get(bytes([byte]))) is not None]
            return [token.id for token in self._encoder.model.tokenize("".join(_CHARACTERS[byte] for byte in part))]
        text = part.decode()
        if self._whole is None:
            return self._encoder.encode(text, add_special_tokens=False).ids
        tokens, start = [], 0
        for match in self._whole.finditer(text):
            tokens += self._encoder.encode(text[start : match.start()], add_special_tokens=False).ids
            tokens.append(self._ids[match[0].encode()])
            start = match.end()
        return tokens + self._encoder.encode(text[start:], add_special_tokens=False).ids

    def _longest_matches(self, part: bytes, start: int) -> list[Piece]:
        pieces, at = [], 0
        while at < len(part):
            token = self.first_of(part[at : at + self._longest])
            at += 1 if token is None else len(self.text(token))
            if token is not None:
                pieces.append(Piece(token, start + at))
        return pieces


def _plain(backend: Tokenizer) -> Tokenizer:
    """A tokenizer that splits texts as `backend` does, but finds no special tokens, adds nothing, and keeps the text's
    bytes. The two share the large model."""
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": _kept(_state(backend.normalizer)),
        "pre_tokenizer": _without_prefix(_state(backend.pre_tokenizer)),
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    plain = Tokenizer.from_str(json.dumps(parts))
    plain.model = backend.model
    return plain


def _state(part: Any) -> Any:
    """A part of a tokenizer as `tokenizer.json` has it; None without one."""
    return None if part is None else json.loads(part.__getstate__())


def _kept(normalizer: Any) -> Any:
    if normalizer is None:
        return None
    inner = [part for part in normalizer.get("normalizers", [normalizer]) if part["type"] in _KEPT_NORMALIZERS]
    return {"type": "Sequence", "normalizers": inner} if inner else None


def _without_prefix(splitter: Any) -> Any:
    if splitter is None:
        return None
    if "pretokenizers" in splitter:
        return splitter | {"pretokenizers": [_without_prefix(part) for part in splitter["pretokenizers"]]}
    option = _PREFIX_OPTIONS.get(splitter["type"])
    return splitter if option is None else splitter | dict([option])


def _has_kind(part: Any, kind: str) -> bool:
    return f'"type": "{kind}"' in json.dumps(part)


def _adds_space(backend: Tokenizer) -> bool:
    """Whether the tokenizer puts a space before a text."""
    parts = json.dumps([_state(backend.normalizer), _state(backend.pre_tokenizer)])
    return any(mark in parts for mark in ('"type": "Prepend"', '"add_prefix_space": true')) or (
        '"type": "Metaspace"' in parts and '"prepend_scheme": "never"' not in parts
    )


def _prefix(tokenizer: Any) -> Sequence[int]:
    plain, whole = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
    starts = (start for start in range(len(whole) - len(plain) + 1) if whole[start : start + len(plain)] == plain)
    return list(whole[: next(starts, 0)])


def _next(text: bytes) -> bytes | None:
    """The least text after all that begin with `text`; None if there is none."""
    shorter = text.rstrip(b"\xff")
    return shorter[:-1] + bytes([shorter[-1] + 1]) if shorter else None


_CHARACTERS = bytes_to_unicode()  # by which byte-level vocabularies write each byte
_BYTES = {char: byte for byte, char in _CHARACTERS.items()}
