"""The outputs of earlier requests, shared by the requests of a speculator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeGuard

from hf_speculate.errors import CheckpointError, OptionError
from hf_speculate.files import Writer, check_kinds, json_writer, read_json, replace_files, user_path

from .contexts import ContextCounts, RecycledRows


if TYPE_CHECKING:
    from typing_extensions import Self


_FORMAT = "hf_speculate.suffix_store.1"
# 100 million tokens and more. A larger store is not saved, since it would not be read.
_MAX_BYTES = 1 << 30
_KINDS: dict[str, Any] = {"format": str, "vocab_size": int, "max_tokens": int, "requests": list}


@dataclass
class _StoredRequest:
    """One request's output, and the cursor of its counts."""

    adapters: str
    tokens: list[int] = field(default_factory=list)
    cursor: list[int] = field(default_factory=list)


class SuffixStore:
    """Outputs of earlier requests, counted apart for each set of the target's adapters, and what the target found
    probable after each token (`RecycledRows`; neither saved nor taken back with a request). May be shared by threads.

    A store never changes a text. But it changes the speed of requests, so by timing them, a user can find out what the
    requests of others have written. Do not share a store between people who may not read each other's texts.

    Args:
        max_tokens: most tokens of all outputs; above it the oldest request's go.
    Attributes:
        lock: lock to hold while counts are read.
    Raises:
        OptionError: a limit below 1.
    """

    def __init__(self, max_tokens: int = 200_000):
        if max_tokens < 1:
            raise OptionError(f"SuffixStore: max_tokens must be at least 1, got {max_tokens}.")
        self.max_tokens = max_tokens
        self.lock = RLock()
        self.num_tokens = 0
        self._vocab_size: int | None = None
        self._requests: dict[int, _StoredRequest] = {}  # oldest first
        self._counts: dict[str, ContextCounts] = {}
        self._recycled: dict[str, RecycledRows] = {}
        self._num_begun = 0

    def __repr__(self) -> str:
        return f"SuffixStore({len(self)} requests, {self.num_tokens} of {self.max_tokens} tokens)"

    def __len__(self) -> int:
        """Requests whose outputs are held."""
        return len(self._requests)

    def attach(self, vocab_size: int) -> None:
        """Notes the size of the vocabulary; raises `CheckpointError` if the store is of another one."""
        with self.lock:
            if self._vocab_size not in (None, vocab_size):
                raise CheckpointError(
                    f"the store holds tokens of a vocabulary of {self._vocab_size}, the target's has {vocab_size}: "
                    "token ids of another tokenizer mean nothing here. Use a store of this target's."
                )
            self._vocab_size = vocab_size

    def counts(self, adapters: str) -> ContextCounts:
        """Counts of the outputs with these adapters, which are read with `lock` held."""
        with self.lock:
            return self._counts.setdefault(adapters, ContextCounts())

    def recycled(self, adapters: str) -> RecycledRows:
        """The rows that requests with these adapters share, which are used with `lock` held."""
        with self.lock:
            return self._recycled.setdefault(adapters, RecycledRows())

    def begin(self, adapters: str) -> int:
        """Opens a request; returns its number, for `extend`."""
        with self.lock:
            self._num_begun += 1
            self._requests[self._num_begun] = _StoredRequest(adapters)
            return self._num_begun

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Appends to a request's output. One that has left the store stays out."""
        with self.lock:
            request = self._requests.get(number)
            if request is None:
                return
            request.tokens += tokens
            self.num_tokens += len(tokens)
            self.counts(request.adapters).extend(request.cursor, tokens)
            while self.num_tokens > self.max_tokens:
                self.forget(next(iter(self._requests)))

    def forget(self, number: int) -> None:
        """Drops one request's output: counts are then as if it had never been there."""
        with self.lock:
            request = self._requests.pop(number, None)
            if request is not None:
                self.num_tokens -= len(request.tokens)
                self.counts(request.adapters).remove(request.tokens)

    def clear(self) -> None:
        """Drops everything. Outputs of requests that are still running are not stored."""
        with self.lock:
            self._recycled.clear()
            for number in list(self._requests):
                self.forget(number)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the outputs to a JSON file, whole or not at all.

        Raises:
            CheckpointError: it could not be written, or is larger than `load` reads (1 GB, more than 100 million
                tokens); what was there is still there.
        """
        with self.lock:
            requests = [
                {"adapters": request.adapters, "tokens": [*request.tokens]} for request in self._requests.values()
            ]
            content = {
                "format": _FORMAT,
                "vocab_size": self._vocab_size,
                "max_tokens": self.max_tokens,
                "requests": requests,
            }
        path = Path(user_path(path))
        replace_files(path.parent, {path.name: _bounded(json_writer(content, indent=None))})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A store from a file that `save` wrote.

        Raises:
            CheckpointError: it cannot be read, or is something else.
        """
        path = user_path(path)
        content = read_json(path, _MAX_BYTES)
        check_kinds(path, content, _KINDS)
        _check(path, content.get("format") == _FORMAT, f'"format" is {content.get("format")!r}, expected {_FORMAT!r}')
        vocab_size, requests = content.get("vocab_size"), content.get("requests", [])
        _check(path, requests is not None, '"requests" is null')
        _check(path, vocab_size is None or vocab_size >= 0, f'"vocab_size" is {vocab_size!r}')
        max_tokens = content.get("max_tokens") or 0
        _check(path, max_tokens > 0, f'"max_tokens" is {max_tokens!r}')
        for request in requests:
            _check(path, _is_request(request, vocab_size), f"a request is not tokens below {vocab_size} with adapters")
        num_tokens = sum(len(request["tokens"]) for request in requests)
        _check(path, num_tokens <= max_tokens, f"{num_tokens} tokens are above its own limit")
        store = cls(max_tokens)
        store._vocab_size = vocab_size
        for request in requests:
            store.extend(store.begin(request["adapters"]), request["tokens"])
        return store


def _bounded(write: Writer) -> Writer:
    """Writes what `load` will read, or raises."""

    def write_bounded(path: str) -> None:
        write(path)
        if os.path.getsize(path) > _MAX_BYTES:
            raise ValueError(f"the store has more than the {_MAX_BYTES >> 20} MB that are read; lower max_tokens")

    return write_bounded


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_request(value: Any, vocab_size: int | None) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("adapters"), str)):
        return False
    tokens = value.get("tokens")
    return isinstance(tokens, list) and all(_is_count(token) and token < (vocab_size or 0) for token in tokens)


def _check(path: str | os.PathLike[str], is_right: bool, problem: str) -> None:
    if not is_right:
        raise CheckpointError(f"{os.fspath(path)} is not a store that can be read: {problem}. Nothing was loaded.")
