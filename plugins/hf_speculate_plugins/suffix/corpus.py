"""Texts that are drafted from, whatever is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_speculate.errors import OptionError, TargetMismatchError


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
