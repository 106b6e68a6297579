"""The outputs of earlier requests, shared by the requests of a speculator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from hf_speculate.errors import CheckpointError
from hf_speculate.files import Writer, check_kinds, json_writer, read_json, replace_files

from .contexts import ContextCounts, RecycledRows
from .windows import WindowCounts


if TYPE_CHECKING:
    from typing_extensions import Self


Index = ContextCounts | WindowCounts


class IndexKind(NamedTuple):
    """The kind of counts that are kept of every text.

    Attributes:
        orders: of contexts, with smoothing; None without.
        depth: of windows, without smoothing; None with it.
    """

    orders: tuple[int, ...] | None
    depth: int | None

    def make(self) -> Index:
        if self.orders is not None:
            return ContextCounts(self.orders)
        assert self.depth is not None
        return WindowCounts(self.depth)


_FORMAT = "hf_speculate.suffix_store.1"
# 100 million tokens and more. A larger store is not saved, since it would not be read.
_MAX_BYTES = 1 << 30
_KINDS: dict[str, Any] = {"format": str, "vocab_size": int, "max_tokens": int, "max_requests": int, "requests": list}


@dataclass
class _Request:
    """One request's output, and where its index has read to."""

    adapters: str
    tokens: list[int] = field(default_factory=list)
    cursor: list[Any] = field(default_factory=list)


class SuffixStore:
    """Outputs of earlier requests, counted apart for each set of the target's adapters, and what the target found
    probable after each token (`RecycledRows`; neither saved nor taken back with a request). May be shared by threads.

    Whoever may send requests can find out by their timing what others' requests have written here; texts are never
    changed by it. One store for people who may not read each other's texts is a leak.

    Args:
        max_tokens: of all outputs; above it the oldest request's goes.
        max_requests: the same by their number; None: no limit.
    Attributes:
        lock: to be held while counts are read.
    Raises:
        ValueError: a limit below 1.
    """

    def __init__(self, max_tokens: int = 200_000, max_requests: int | None = None):
        for name, limit in (("max_tokens", max_tokens), ("max_requests", max_requests)):
            if limit is not None and limit < 1:
                raise ValueError(f"SuffixStore: {name} must be at least 1, got {limit}.")
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self.lock = RLock()
        self.num_tokens = 0
        self._kind: IndexKind | None = None
        self._vocab_size: int | None = None
        self._requests: dict[int, _Request] = {}  # oldest first
        self._indices: dict[str, Index] = {}
        self._recycled: dict[tuple[str, int], RecycledRows] = {}
        self._num_begun = 0

    def __repr__(self) -> str:
        return f"SuffixStore({len(self)} requests, {self.num_tokens} of {self.max_tokens} tokens)"

    def __len__(self) -> int:
        """Requests whose outputs are held."""
        return len(self._requests)

    def attach(self, kind: IndexKind, vocab_size: int) -> None:
        """Says what to count, and for which vocabulary; what was loaded is counted now.

        Raises:
            CheckpointError: the store is of another vocabulary.
            ValueError: another drafter counts something else in it. Nothing is changed then.
        """
        with self.lock:
            if self._vocab_size not in (None, vocab_size):
                raise CheckpointError(
                    f"the store holds tokens of a vocabulary of {self._vocab_size}, the target's has {vocab_size}: "
                    "token ids of another tokenizer mean nothing here. Use a store of this target's."
                )
            if self._kind not in (None, kind):
                raise ValueError(
                    f"the store counts for another drafter ({self._kind}), asked for {kind}: drafters share one if "
                    "smoothing, orders and depth are the same."
                )
            is_new = self._kind is None
            self._kind, self._vocab_size = kind, vocab_size
            for request in self._requests.values() if is_new else ():
                self.index(request.adapters).extend(request.cursor, request.tokens)

    def index(self, adapters: str) -> Index:
        """The counts of the outputs with these adapters; to be read with `lock` held."""
        assert self._kind is not None, "attach() comes first"
        with self.lock:
            if adapters not in self._indices:
                self._indices[adapters] = self._kind.make()
            return self._indices[adapters]

    def recycled(self, adapters: str, num_choices: int) -> RecycledRows:
        """The rows that requests with these adapters share; to be used with `lock` held."""
        assert self._vocab_size is not None, "attach() comes first"
        with self.lock:
            key = adapters, num_choices
            if key not in self._recycled:
                self._recycled[key] = RecycledRows()
            return self._recycled[key]

    def begin(self, adapters: str) -> int:
        """Opens a request; returns its number, for `extend`."""
        with self.lock:
            while self.max_requests is not None and len(self._requests) >= self.max_requests:
                self.forget(next(iter(self._requests)))
            self._num_begun += 1
            self._requests[self._num_begun] = _Request(adapters)
            return self._num_begun

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Appends to a request's output. One that has left the store stays out."""
        with self.lock:
            request = self._requests.get(number)
            if request is None:
                return
            request.tokens += tokens
            self.num_tokens += len(tokens)
            self.index(request.adapters).extend(request.cursor, tokens)
            while self.num_tokens > self.max_tokens:
                self.forget(next(iter(self._requests)))

    def forget(self, number: int) -> None:
        """Drops one request's output: counts are then as if it had never been there."""
        with self.lock:
            request = self._requests.pop(number, None)
            if request is not None:
                self.num_tokens -= len(request.tokens)
                if request.tokens and self._kind is not None:
                    self.index(request.adapters).remove(request.tokens)

    def clear(self) -> None:
        """Drops everything; requests that run on are not recorded."""
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
            requests = [{"adapters": each.adapters, "tokens": [*each.tokens]} for each in self._requests.values()]
            content = {
                "format": _FORMAT,
                "vocab_size": self._vocab_size,
                "max_tokens": self.max_tokens,
                "max_requests": self.max_requests,
                "requests": requests,
            }
        path = Path(path)
        replace_files(path.parent, {path.name: _bounded(json_writer(content, indent=None))})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A store from a file that `save` wrote.

        Raises:
            CheckpointError: it cannot be read, or is something else.
        """
        content = read_json(path, _MAX_BYTES)
        check_kinds(path, content, _KINDS)
        _check(path, content.get("format") == _FORMAT, f'"format" is {content.get("format")!r}, expected {_FORMAT!r}')
        vocab_size, requests = content.get("vocab_size"), content.get("requests", [])
        _check(path, requests is not None, '"requests" is null')
        _check(path, vocab_size is None or vocab_size >= 0, f'"vocab_size" is {vocab_size!r}')
        max_tokens, max_requests = content.get("max_tokens") or 0, content.get("max_requests")
        _check(path, max_tokens > 0, f'"max_tokens" is {max_tokens!r}')
        _check(path, max_requests is None or max_requests > 0, f'"max_requests" is {max_requests!r}')
        store = cls(max_tokens, max_requests)
        store._vocab_size = vocab_size
        for each in requests:
            _check(path, _is_request(each, vocab_size), f"a request is not tokens below {vocab_size} with adapters")
            store._requests[store.begin(each["adapters"])].tokens = each["tokens"]
            store.num_tokens += len(each["tokens"])
        _check(path, store.num_tokens <= store.max_tokens, f"{store.num_tokens} tokens are above its own limit")
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


def _check(path: str | os.PathLike[str], is_right: bool, found: str) -> None:
    if not is_right:
        raise _unreadable(path, found)


def _unreadable(path: str | os.PathLike[str], found: str) -> CheckpointError:
    return CheckpointError(f"{os.fspath(path)} is not a store that can be read: {found}. Nothing was loaded.")
