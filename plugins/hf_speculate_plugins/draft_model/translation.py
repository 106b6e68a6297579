"""The text of a target in a draft model's vocabulary, and drafts in the target's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from .vocabulary import Piece, Vocabulary, num_incomplete


# Longest end of a text, in bytes, that is kept open because a word may continue: languages without spaces have long
# words. Shorter than the entries that sliding windows keep to move back.
_LONGEST_WORD = 32


class Names(NamedTuple):
    """The special tokens of a vocabulary that have a meaning of their own.

    Attributes:
        begin: token that begins a text; None without one.
        ends: tokens that end a text, that of the tokenizer first.
        unwritten: tokens without any text, such as padding.
    """

    begin: int | None
    ends: Sequence[int]
    unwritten: Sequence[int]


class Translation:
    """Translates between the vocabularies of a target and a draft model, by the bytes of tokens.

    Special tokens of the same name are the same, as are those that begin or end a text. Any other special token of the
    target is read by the draft model as its name.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, target_names: Names, draft_names: Names):
        self.target, self.draft = target, draft
        self.filler = next((token for token in (draft_names.begin, *draft_names.ends) if token is not None), 0)
        self._to_draft: dict[int, Sequence[int]] = {}
        self._to_target: dict[int, int] = {}
        for name, token in target.special.items():
            self._to_draft[token] = self._read_special(name, token, target_names, draft_names)
        for name, token in draft.special.items():
            if name in target.special:
                self._to_target[token] = target.special[name]
            elif token in draft_names.ends and target_names.ends:
                self._to_target[token] = target_names.ends[0]

    def _read_special(self, name: str, token: int, target_names: Names, draft_names: Names) -> Sequence[int]:
        if name in self.draft.special:
            return [self.draft.special[name]]
        if token in target_names.ends and draft_names.ends:
            return [draft_names.ends[0]]
        if token == target_names.begin:
            return [] if draft_names.begin is None else [draft_names.begin]
        if token in target_names.unwritten:
            return []
        return [piece.token for piece in self.draft.encode(name.encode())]

    def special_to_draft(self, token: int) -> Sequence[int]:
        """The draft model's tokens for a special token of the target."""
        return self._to_draft.get(token, ())

    def special_to_target(self, token: int) -> int | None:
        """The target's token for a special token of the draft model, if it has one."""
        return self._to_target.get(token)

    def to_target(self, before: bytes, drafted: bytes) -> list[Piece]:
        """The target's tokens for a drafted text, with their ends in it.

        The target writes words as its tokenizer does, unless it has split this one already. Tokens of a character that
        is not whole are left out: others would stand for it.

        Args:
            before: the text before the draft, from the beginning of a word on.
        """
        word, pieces = self._with_word(before, drafted)
        if word and all(piece.end != len(word) for piece in pieces):
            word, pieces = b"", self.target.encode(drafted)
        end = len(word)
        most = end + len(drafted) - num_incomplete(before + drafted)
        tokens = []
        for token, piece_end in pieces:
            if piece_end <= len(word):
                continue
            if piece_end > most or piece_end - len(self.target.text(token)) != end:
                break
            end = piece_end
            tokens.append(Piece(token, end - len(word)))
        return tokens

    def may_follow(self, before: bytes, drafted: bytes) -> bool:
        """Whether the target's tokenizer ends a token at the end of `before`, if `drafted` follows. Else the target
        would have written another token there. Arguments: see `to_target`."""
        word, pieces = self._with_word(before, drafted)
        return not word or any(piece.end == len(word) for piece in pieces)

    def _with_word(self, before: bytes, drafted: bytes) -> tuple[bytes, list[Piece]]:
        """The last word before a draft, and the target's tokens for it and the draft."""
        word = before[self.target.last_word(before) :] if before else b""
        return word, self.target.encode(word + drafted)

    @cached_property
    def first_tokens(self) -> Int[Tensor, " W"]:
        """The target's token with which the text of each of the draft model's tokens begins; -1 without one."""
        first = []
        for token, text in enumerate(self.draft.texts):
            known = self._to_target.get(token) if self.draft.is_special(token) else self.target.first_of(text or b"")
            first.append(-1 if known is None else known)
        return torch.tensor(first, dtype=torch.long, device="cpu")


class ReadText:
    """The text of one row as the draft model reads it.

    Attributes:
        ids: the draft model's tokens for the whole text.
        num_fixed: number of `ids`, at least 2 once a text was read, that no further text can change.
        tail: bytes of the text after these.
    """

    def __init__(self, translation: Translation, tokens: Sequence[int]):
        self._translation = translation
        self.ids: list[int] = []
        self.num_fixed, self.tail = 0, b""
        self._is_at_start = True
        self.append(tokens)
        self._begin()

    def append(self, tokens: Sequence[int]) -> None:
        """Reads further tokens of the target."""
        target = self._translation.target
        text = bytearray(self.tail)
        for token in tokens:
            if not target.is_special(token):
                text += self._text(token)
                continue
            self._fix(bytes(text), len(text))
            text.clear()
            self.ids += self._translation.special_to_draft(token)
            self.num_fixed = len(self.ids)
        self._fix(bytes(text), self._translation.draft.last_word(bytes(text)) if text else 0)

    def state(self) -> tuple[list[int], int, bytes, bool]:
        """The state that `restore` takes, to undo `append`."""
        return self.ids[self.num_fixed :], self.num_fixed, self.tail, self._is_at_start

    def restore(self, state: tuple[list[int], int, bytes, bool]) -> None:
        tail, self.num_fixed, self.tail, self._is_at_start = state
        self.ids[self.num_fixed :] = tail

    def _text(self, token: int) -> bytes:
        """The bytes of a token of the target. The space with which a tokenizer begins every text is none of the
        text."""
        target, draft, text = self._translation.target, self._translation.draft, self._translation.target.text(token)
        if self._is_at_start and text:
            self._is_at_start = False
            if target.begins_with_space and not draft.begins_with_space:
                return text.removeprefix(b" ")
            if draft.begins_with_space and not target.begins_with_space:
                return b" " + text
        return text

    def _fix(self, text: bytes, count: int) -> None:
        """Fixes the tokens of the first `count` bytes of the text after the fixed tokens.

        They are chosen together with the bytes after them: a tokenizer may split spaces before a word as it does not
        split them at the end of a text.
        """
        pieces = self._translation.draft.encode(text)
        if len(text) - count > _LONGEST_WORD:
            count = len(text) - _LONGEST_WORD // 2
        fixed = [piece for piece in pieces if piece.end <= count]
        self.ids[self.num_fixed :] = [piece.token for piece in pieces]
        self.num_fixed += len(fixed)
        self.tail = text[fixed[-1].end if fixed else 0 :]

    def _begin(self) -> None:
        """Puts the draft model's first token before the text, and fixes as many tokens as a cache begins with."""
        draft = self._translation.draft
        prefix = draft.prefix if self.ids[: len(draft.prefix)] != list(draft.prefix) else ()
        fillers = [self._translation.filler] * max(2 - len(prefix) - len(self.ids), 0)
        self.ids[:0] = [*fillers, *prefix]
        self.num_fixed += len(fillers) + len(prefix)
        while self.num_fixed < 2:
            self.tail = self.tail[len(draft.text(self.ids[self.num_fixed])) :]
            self.num_fixed += 1
