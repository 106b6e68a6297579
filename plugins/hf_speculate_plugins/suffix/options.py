"""The options of the `suffix` drafter, and the tokens of its corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import OptionError, TargetMismatchError
from hf_speculate.speculator import check_sizes

from .store import SuffixStore


@dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """Options of `suffix`.

    Attributes:
        depth: greatest depth of a node.
        max_nodes: most draft nodes.
        store: whether to draft from the outputs of earlier requests, too: True for a store of this drafter's own, or a
            `SuffixStore`. Off by default: the speed of a request then shows that others have written the same (never
            their text).
        corpus: texts, or lists of token ids, to draft from as well: documents that will be quoted, code that will be
            edited.
        schemas: JSON schemas, tools as `apply_chat_template(tools=)` takes them, or functions with docstrings. Where
            the answer is such an object or call, its keys, punctuation and choices are drafted.
        tokenizer: the target's tokenizer; schemas and a corpus of texts need it.
    Raises:
        OptionError: an option without a meaning, or schemas without a tokenizer.
    """

    depth: int = 24
    max_nodes: int = 16
    store: bool | SuffixStore = False
    corpus: Sequence[str | Sequence[int]] = ()
    schemas: Sequence[Any] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        check_sizes("suffix", self, "depth", "max_nodes")
        if not isinstance(self.store, bool | SuffixStore):
            raise OptionError(f"suffix: store is True, False or a SuffixStore, got {type(self.store).__name__}.")
        if self.schemas and not isinstance(self.tokenizer, PreTrainedTokenizerBase):
            given = type(self.tokenizer).__name__
            raise OptionError(f"suffix: schemas need the target's tokenizer: give tokenizer=, got {given}.")

    def __repr__(self) -> str:
        """The options without what would fill the screen."""
        limits = f"depth={self.depth}, max_nodes={self.max_nodes}"
        given = f"corpus=<{len(self.corpus)} texts>, schemas=<{len(self.schemas)}>"
        return f"SuffixOptions({limits}, store={self.store!r}, {given})"


def read_corpus(corpus: Sequence[str | Sequence[int]], tokenizer: Any, vocab_size: int) -> Iterator[list[int]]:
    """Token ids of every text.

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
