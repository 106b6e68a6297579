"""Forecasts as tokens, and the position of a text among the continuations that its schemas allow."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from .contexts import RecycledRow
from .forecast import Forecaster
from .json_text import JsonText
from .schemas import Shape


_REPLACEMENT = "\ufffd"  # tokenizers write it for bytes that are not a whole character yet
# Prompt tokens that are read, for an answer whose beginning the caller has written.
_NUM_PROMPT_TOKENS = 64
# Largest number of tokens that stay unread while nothing depends on them, and of texts whose tokens are cached.
_MAX_UNREAD, _MAX_REMEMBERED = 64, 1 << 16

Component = tuple[str, int, int]
Guess = tuple[Component, RecycledRow]

# Weights to begin with, by kind of forecast: of its first token, and of later ones if the first was right.
_WEIGHTS = {"open": 0.8, "key": 0.9, "choice": 0.9, "more": 0.9, "number": 0.3, "text": 0.1}
_LATER = 0.9


def first_weights() -> dict[Component, float]:
    """Weights of the forecasts before anything was written."""
    return {_component(kind, later): (_LATER if later else _WEIGHTS[kind]) for kind in _WEIGHTS for later in (0, 1)}


def _component(kind: str, is_later: int) -> Component:
    return f"schemas, {kind}", is_later, 0


class Vocabulary:
    """Texts of tokens, and tokens of texts, which are cached.

    Attributes:
        stop: text of the token that ends an answer; "" if there is none.
        special_ids: tokens that end any object.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        # A copy: fast tokenizers fail where another thread changes their padding meanwhile.
        self._tokenizer, self._size = deepcopy(tokenizer), vocab_size
        self.stop: str = tokenizer.eos_token or ""
        self.special_ids = frozenset(tokenizer.all_special_ids)
        # Some tokenizers drop the space before the first word; after another token it stays.
        self._anchor = self._encode('"')[-1:]
        self._pieces: dict[int, str] = {}
        self._tokens: dict[tuple[int, str, str], tuple[int, ...]] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens after others."""
        if len(tokens) > 1:
            return self._after_anchor(tokens)
        piece = self._pieces.get(tokens[0])
        if piece is None:
            piece = self._pieces[tokens[0]] = self._after_anchor(tokens)
        return piece

    def tokens(self, last: int, text: str, probe: str) -> tuple[int, ...]:
        """The tokens of `text` after the token `last`, without those that would reach into the probe; empty if the
        tokenizer would not have ended a token at `last`."""
        key = (last, text, probe)
        tokens = self._tokens.get(key)
        if tokens is None:
            if len(self._tokens) >= _MAX_REMEMBERED:
                self._tokens.clear()
            tokens = self._tokens[key] = tuple(self._split(last, text, probe))
        return tokens

    def _split(self, last: int, text: str, probe: str) -> list[int]:
        ids = self._encode(self.text([last]) + text + probe)
        whole = self._decode(ids)
        if not whole.endswith(text + probe):
            return []
        tokens, num_wanted = [], len(text) + len(probe)
        for count, token in enumerate(ids):
            left = len(whole) - len(self._decode(ids[:count]))
            if left == num_wanted or tokens:
                if len(whole) - len(self._decode(ids[: count + 1])) < len(probe) or token >= self._size:
                    break
                tokens.append(token)
        return tokens

    def _after_anchor(self, tokens: Sequence[int]) -> str:
        return self._decode([*self._anchor, *tokens])[len(self._decode(self._anchor)) :]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)


class _Chain(NamedTuple):
    """A continuation, with the tokens of it that are passed already, and its probability among all."""

    tokens: tuple[int, ...]
    prob: float


class Guide:
    """The schemas of a drafter, for all its requests."""

    def __init__(self, shapes: Sequence[Shape], tokenizer: Any, vocab_size: int):
        self.vocabulary = Vocabulary(tokenizer, vocab_size)
        self.forecaster = Forecaster(shapes, self.vocabulary.stop)

    def start(self, prompt: Sequence[int]) -> Position:
        """The position after a prompt, of which only the beginning of the answer is read."""
        begun: list[int] = []
        for token in reversed(prompt[-_NUM_PROMPT_TOKENS:]):
            if token in self.vocabulary.special_ids:
                break
            begun.insert(0, token)
        text = JsonText()
        if begun:
            text.feed(self.vocabulary.text(begun))
        return Position(self, text, (), begun[-1] if begun else None)

    def chains(self, text: JsonText, last: int | None) -> tuple[str, tuple[_Chain, ...]]:
        """The kind of a forecast, and its ways as tokens after the token `last`."""
        forecast = None if last is None else self.forecaster(text)
        if forecast is None or last is None:
            return "", ()
        ways = ((self.vocabulary.tokens(last, way.text, way.probe), way.prob) for way in forecast.ways)
        return forecast.kind, tuple(_Chain(tokens, prob) for tokens, prob in ways if tokens)


class Position:
    """An immutable position in a text, or in a draft after it.

    Args:
        text: reader of the text up to the unread tokens.
        unread: last tokens, which `text` has not read yet.
        kind, chains: continuations that the unread tokens have followed so far; None if they must be found first.
    """

    __slots__ = ("_chains", "_guess", "_guide", "_kind", "_last", "_next", "_text", "_unread")

    def __init__(
        self,
        guide: Guide,
        text: JsonText,
        unread: tuple[int, ...],
        last: int | None,
        kind: str = "",
        chains: tuple[_Chain, ...] | None = None,
    ):
        self._guide, self._text, self._unread, self._last = guide, text, unread, last
        self._kind, self._chains = kind, chains
        self._guess: Guess | None = None
        self._next: dict[int, Position] = {}

    @property
    def guesses(self) -> Sequence[Guess]:
        """The tokens that may be next, as a last component of the automaton; empty if nothing is known."""
        if self._chains is None:
            self._kind, self._chains = self._guide.chains(self._text, self._last)
        if not self._chains:
            return ()
        if self._guess is None:
            probs: dict[int, float] = {}
            for chain in self._chains:
                token = chain.tokens[len(self._unread)]
                probs[token] = probs.get(token, 0.0) + chain.prob
            tokens = sorted(probs, key=lambda token: -probs[token])
            total = sum(probs.values())
            row = RecycledRow(tokens, [probs[token] / total for token in tokens])
            self._guess = (_component(self._kind, int(bool(self._unread))), row)
        return (self._guess,)

    def after(self, token: int) -> Position:
        """The position after one more token."""
        position = self._next.get(token)
        if position is None:
            position = self._next[token] = self._follow(token) or self._read(token)
        return position

    def _follow(self, token: int) -> Position | None:
        """The position in the continuations that have this token and others after it; None if there are none."""
        place = len(self._unread)
        chains = tuple(
            chain for chain in self._chains or () if len(chain.tokens) > place + 1 and chain.tokens[place] == token
        )
        if not chains:
            return None
        return Position(self._guide, self._text, (*self._unread, token), token, self._kind, chains)

    def _read(self, token: int) -> Position:
        """The position after reading what was not read."""
        vocabulary = self._guide.vocabulary
        if token in vocabulary.special_ids:
            return Position(self._guide, JsonText(), (), token)
        unread = (*self._unread, token)
        if len(unread) < _MAX_UNREAD:
            is_outside = self._text.level is None and "{" not in vocabulary.text((token,))
            if is_outside or vocabulary.text(unread).endswith(_REPLACEMENT):  # the rest of a character is to come
                return Position(self._guide, self._text, unread, token, chains=())
        text = self._text.copy()
        text.feed(vocabulary.text(unread))
        return Position(self._guide, text, (), token)
