"""The options of the `suffix` drafter: what it counts, and how much of it is drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import OptionError, TargetMismatchError

from .store import SuffixStore


_OF_SMOOTHING = ("orders", "children", "floor", "recycled")
_OF_COUNTS = ("max_spec_factor", "max_spec_offset", "min_token_prob", "tree")


@dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """Options of `suffix`.

    Attributes:
        smoothing: interpolate over context lengths, with weights learnt on line. False: draft after the match that
            SuffixDecoding (arctic-inference) would choose, by its counts.
        depth: of a node at most; without smoothing, of match and draft together.
        max_nodes: draft nodes altogether.
        orders: lengths of the contexts that are counted, rising.
        children: of a node.
        floor: smallest probability of a path.
        recycled: how many of the tokens that the target found probable are remembered of every node that it scored,
            right or wrong, as what follows that node's token; 0: none. Between requests they stay in the `store`.
        max_spec_factor, max_spec_offset: without smoothing, a match of m tokens is worth `m * factor + offset` nodes.
        min_token_prob: without smoothing, smallest probability of a path.
        tree: without smoothing, whether several continuations are drafted side by side.
        store: what earlier requests wrote is drafted from, too: True for a store of this drafter's own, or a
            `SuffixStore`. Off by default: how fast a request runs then tells what others have written (never its text).
        corpus: texts, or lists of token ids, that are drafted from as well: documents that will be quoted, code that
            will be edited.
        tokenizer: of the target; for a corpus of texts.
    Raises:
        ValueError: an option without a meaning, or one of the other mode.
    """

    smoothing: bool = True
    depth: int = 24
    max_nodes: int = 16
    orders: Sequence[int] = (1, 2, 4, 8)
    children: int = 8
    floor: float = 0.01
    recycled: int = 32
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    tree: bool = True
    store: bool | SuffixStore = False
    corpus: Sequence[str | Sequence[int]] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "max_nodes", "children"):
            if getattr(self, name) < 1:
                raise ValueError(f"suffix: {name} must be at least 1, got {getattr(self, name)}.")
        if self.recycled < 0:
            raise ValueError(f"suffix: recycled must be at least 0, got {self.recycled}.")
        for name in ("floor", "min_token_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"suffix: {name} is a probability, from 0 to 1, got {getattr(self, name)}.")
        orders = tuple(self.orders) if isinstance(self.orders, Sequence) else (self.orders,)
        if not orders or any(not isinstance(order, int) or order < 1 for order in orders):
            raise ValueError(f"suffix: orders are context lengths of at least 1, got {self.orders!r}.")
        object.__setattr__(self, "orders", tuple(sorted(set(orders))))
        if not isinstance(self.store, bool | SuffixStore):
            raise ValueError(f"suffix: store is True, False or a SuffixStore, got {type(self.store).__name__}.")
        self._check_mode()

    def _check_mode(self) -> None:
        unused = _OF_COUNTS if self.smoothing else _OF_SMOOTHING
        for each in fields(self):
            if each.name in unused and getattr(self, each.name) != each.default:
                raise ValueError(
                    f"suffix: {each.name} has no effect with smoothing={self.smoothing}; "
                    f"the options of that are {', '.join(_OF_SMOOTHING if self.smoothing else _OF_COUNTS)}."
                )

    def __repr__(self) -> str:
        """Without what would fill the screen."""
        shown = [each for each in fields(self) if each.name not in ("corpus", "tokenizer", "store")]
        values = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in shown)
        return f"SuffixOptions({values}, store={self.store!r}, corpus=<{len(self.corpus)} texts>)"


def read_corpus(corpus: Sequence[str | Sequence[int]], tokenizer: Any, vocab_size: int) -> Iterator[list[int]]:
    """Token ids of every text.

    Args:
        tokenizer: of the target; texts need it, token ids do not.
        vocab_size: of the target.
    Raises:
        OptionError: no list of texts or of lists of token ids, a text without a tokenizer, one that it cannot read.
        TargetMismatchError: a token that the target does not have.
    """
    if isinstance(corpus, str | bytes):
        raise OptionError(f"suffix: corpus is a list of texts or of lists of token ids, got one {_kind(corpus)}.")
    for number, text in enumerate(corpus):
        tokens = _encode(text, tokenizer, number)
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise TargetMismatchError(
                    f"suffix: corpus text {number} has token {token}, the target has 0 to {vocab_size - 1}. Was it "
                    "encoded with the target's tokenizer?"
                )
        yield tokens


def _encode(text: str | Sequence[int], tokenizer: Any, number: int) -> list[int]:
    if not isinstance(text, str):
        tokens = list(text) if isinstance(text, Sequence) and not isinstance(text, bytes) else None
        if tokens is None or not all(isinstance(token, int) for token in tokens):
            raise OptionError(
                f"suffix: corpus text {number} is a {_kind(text)}, neither a text nor a list of token ids."
            )
        return tokens
    if tokenizer is None:
        raise OptionError(f"suffix: corpus text {number} is a text: give tokenizer=, or lists of token ids.")
    try:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # what tokenizers raise differs between them
        raise OptionError(f"suffix: the tokenizer cannot read corpus text {number}: {error}") from error


def _kind(value: Any) -> str:
    return type(value).__name__
