"""The outputs of earlier requests, shared by the requests of a speculator."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
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
_KINDS: dict[str, Any] = {"format": str, "vocab_size": int, "max_tokens": int, "max_kept": int, "requests": list}
# 80 MB.
_MAX_KEPT = 20_000_000
# Fewest answers to a prompt that are kept. If one request answers it more often, answers of two such requests are.
_MIN_ANSWERS = 16


@dataclass
class _StoredRequest:
    """One request's output, and the cursor of its counts."""

    adapters: str
    prompt: str
    tokens: array[int] = field(default_factory=lambda: array("i"))
    cursor: list[int] = field(default_factory=list)


@dataclass
class _Answers:
    """Numbers of the requests with one prompt, oldest first, and how many of them are kept at most."""

    most: int
    numbers: list[int] = field(default_factory=list)


class SuffixStore:
    """Outputs of earlier requests, counted apart for each set of the target's adapters, and what the target found
    probable after each token (`RecycledRows`; neither saved nor taken back with a request). May be shared by threads.

    The newest outputs are counted, and every request can draft from them. Older ones are kept as answers to their
    prompt: only a request with the same prompt drafts from them. Of each prompt the newest 16 answers are kept, or
    twice as many as one request asked for. So answers of older weights, as in reinforcement learning, go first.

    A store never changes a text. But it changes the speed of requests, so by timing them, a user can find out what the
    requests of others have written. Do not share a store between people who may not read each other's texts.

    Args:
        max_tokens: most tokens that are counted, at about 1 KB each.
        max_kept: most tokens of all outputs, at 4 bytes each; above it the oldest request's go.
    Attributes:
        lock: lock to hold while counts are read.
        num_tokens: tokens of all outputs.
        num_counted: tokens that are counted.
    Raises:
        OptionError: a limit below 1.
    """

    def __init__(self, max_tokens: int = 200_000, max_kept: int = _MAX_KEPT):
        for name, limit in (("max_tokens", max_tokens), ("max_kept", max_kept)):
            if limit < 1:
                raise OptionError(f"SuffixStore: {name} must be at least 1, got {limit}.")
        self.max_tokens, self.max_kept = max_tokens, max_kept
        self.lock = RLock()
        self.num_tokens = self.num_counted = 0
        self._vocab_size: int | None = None
        self._requests: dict[int, _StoredRequest] = {}  # oldest first
        self._counted: dict[int, None] = {}  # numbers of those that are counted, oldest first
        self._answers: dict[tuple[str, str], _Answers] = {}  # by adapters and prompt
        self._counts: dict[str, ContextCounts] = {}
        self._recycled: dict[str, RecycledRows] = {}
        self._num_begun = 0

    def __repr__(self) -> str:
        counted = f"{self.num_counted} of at most {self.max_tokens} counted"
        return f"SuffixStore({len(self)} requests, {self.num_tokens} tokens, {counted})"

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

    def answers(self, adapters: str, prompt: Sequence[int]) -> list[Sequence[int]]:
        """Copies of the outputs of earlier requests with this prompt and these adapters, newest first."""
        with self.lock:
            kept = self._answers.get((adapters, _digest(prompt)))
            numbers = () if kept is None else reversed(kept.numbers)
            return [tokens[:] for number in numbers if (tokens := self._requests[number].tokens)]

    def begin(self, adapters: str, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Opens requests that are made together; returns their numbers, for `extend`.

        Args:
            prompts: token ids of each request's prompt, of which the store keeps a hash. An output without a prompt
                (no tokens) leaves the store with its counts.
        """
        hashes = [_digest(prompt) for prompt in prompts]
        num_answers = Counter(hashes)
        with self.lock:
            return [self._open(adapters, prompt, 2 * num_answers[prompt]) for prompt in hashes]

    def _open(self, adapters: str, prompt: str, most: int) -> int:
        self._num_begun += 1
        self._requests[self._num_begun] = _StoredRequest(adapters, prompt)
        self._counted[self._num_begun] = None
        if prompt:
            kept = self._answers.setdefault((adapters, prompt), _Answers(_MIN_ANSWERS))
            kept.most = max(kept.most, most)
            kept.numbers.append(self._num_begun)
        return self._num_begun

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Appends to a request's output. One that has left the store stays out."""
        with self.lock:
            request = self._requests.get(number)
            if request is None:
                return
            request.tokens.extend(tokens)
            self.num_tokens += len(tokens)
            if number in self._counted:
                self.num_counted += len(tokens)
                self.counts(request.adapters).extend(request.cursor, tokens)
            self._shrink(self._answers.get((request.adapters, request.prompt)))

    def _shrink(self, answers: _Answers | None) -> None:
        """Keeps all limits, after a request with these answers has grown."""
        while answers is not None and len(answers.numbers) > answers.most:
            self.forget(answers.numbers[0])
        while self.num_tokens > self.max_kept:
            self.forget(next(iter(self._requests)))
        while self.num_counted > self.max_tokens:
            oldest = next(iter(self._counted))
            drop = self._uncount if self._requests[oldest].prompt else self.forget
            drop(oldest)

    def _uncount(self, number: int) -> None:
        """Takes a request's output out of the counts, if it is there."""
        if number in self._counted:
            del self._counted[number]
            request = self._requests[number]
            self.num_counted -= len(request.tokens)
            self.counts(request.adapters).remove(request.tokens)

    def forget(self, number: int) -> None:
        """Drops one request's output: counts are then as if it had never been there."""
        with self.lock:
            if number not in self._requests:
                return
            self._uncount(number)
            request = self._requests.pop(number)
            self.num_tokens -= len(request.tokens)
            key = request.adapters, request.prompt
            if key in self._answers:
                self._answers[key].numbers.remove(number)
                if not self._answers[key].numbers:
                    del self._answers[key]

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
                {"adapters": request.adapters, "prompt": request.prompt, "tokens": [*request.tokens]}
                for request in self._requests.values()
            ]
            content = {
                "format": _FORMAT,
                "vocab_size": self._vocab_size,
                "max_tokens": self.max_tokens,
                "max_kept": self.max_kept,
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
        limits = {"max_tokens": content.get("max_tokens") or 0, "max_kept": content.get("max_kept", _MAX_KEPT) or 0}
        for name, limit in limits.items():
            _check(path, limit > 0, f'"{name}" is {limit!r}')
        for request in requests:
            _check(path, _is_request(request, vocab_size), f"a request is not tokens below {vocab_size} with adapters")
        num_tokens = sum(len(request["tokens"]) for request in requests)
        _check(path, num_tokens <= limits["max_kept"], f"{num_tokens} tokens are above its own limit")
        store = cls(**limits)
        store._vocab_size = vocab_size
        num_answers = Counter((request["adapters"], request.get("prompt")) for request in requests)
        for request in requests:
            adapters, prompt = request["adapters"], request.get("prompt", "")
            number = store._open(adapters, prompt, num_answers[adapters, prompt])
            store.extend(number, request["tokens"])
        return store


def _digest(prompt: Sequence[int]) -> str:
    """A hash of a prompt; "" if it has no tokens."""
    return blake2b(array("q", prompt).tobytes(), digest_size=16).hexdigest() if len(prompt) else ""


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
    if not isinstance(value.get("prompt", ""), str):
        return False
    tokens = value.get("tokens")
    return isinstance(tokens, list) and all(_is_count(token) and token < (vocab_size or 0) for token in tokens)


def _check(path: str | os.PathLike[str], is_right: bool, problem: str) -> None:
    if not is_right:
        raise CheckpointError(f"{os.fspath(path)} is not a store that can be read: {problem}. Nothing was loaded.")
