"""The bytes of tokens, and the tokens that can begin a forced text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Possible:
    """Possible continuations of a text.

    Attributes:
        place: key that is equal where the same continuations are possible; None where nothing can be learnt.
        tokens: tokens that begin the only possible text, longest first; empty if the text can branch.
        is_certain: whether the first of `tokens` is the only possible token.
    """

    place: Hashable | None = None
    tokens: Sequence[int] = ()
    is_certain: bool = False


class Words:
    """The bytes of all tokens, and an index to find the tokens that begin a text.

    Args:
        names: token ids that never stand in a text, such as special tokens.
    """

    def __init__(self, texts: Sequence[bytes], names: Sequence[int]):
        self._texts, left_out = texts, set(names)
        self._ids = {text: token for token, text in enumerate(texts) if text and token not in left_out}
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def text(self, token: int) -> bytes | None:
        """The bytes of a token; None for one that the grammar's tokenizer does not have."""
        return self._texts[token] if token < len(self._texts) else None

    def spelling(self, forced: bytes) -> Possible:
        """The possible continuations where the next bytes are `forced`."""
        sizes = range(min(len(forced), self._longest), 0, -1)
        tokens = [token for size in sizes if (token := self._ids.get(forced[:size])) is not None]
        after = bisect_right(self._sorted, forced)
        goes_beyond = after < len(self._sorted) and self._sorted[after].startswith(forced)
        return Possible(forced, tokens, is_certain=len(tokens) == 1 and not goes_beyond)


class Vocabulary:
    """The bytes of one target's tokens. They are read once: that takes a few tenths of a second."""

    def __init__(self) -> None:
        self._words: dict[str, Words] = {}

    def of_xgrammar(self, tokenizer_info: Any) -> Words:
        kind = tokenizer_info.dump_metadata()
        if kind not in self._words:
            self._words[kind] = Words(tokenizer_info.decoded_vocab, tokenizer_info.special_token_ids)
        return self._words[kind]
