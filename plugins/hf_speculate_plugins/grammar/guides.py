"""Guides: cursors over the constraints of a request, which give a draft the tokens that can follow.

A guide is a second cursor over the same grammar, for one row. The processor's own state belongs to the emitted text,
and no guide touches it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from .words import Possible, Vocabulary


# A larger set of allowed tokens is free text, where nothing can be learnt.
_FEW_TOKENS = 64
_MAX_ROLLBACK = 64  # tokens; no draft is deeper


class Guide(ABC):
    """A cursor over the constraint of one row.

    Attributes:
        tells_places: whether `Possible.place` can be other than None.
    """

    tells_places: bool = True

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Moves on by a token. Returns False, and does not move, if the constraint forbids the token."""

    @abstractmethod
    def back(self) -> None:
        """Undoes the last `accept`."""

    @abstractmethod
    def possible(self) -> Possible:
        """The possible continuations here."""

    def text_of(self, token: int) -> bytes | None:
        """The bytes of a token; None if they are not known."""
        return None


def guides_of(
    processors: LogitsProcessorList, texts: Sequence[Sequence[int]], vocabulary: Vocabulary
) -> list[Guide] | None:
    """One guide a row, at the end of the prompt, for the first processor that is a constraint; None without one."""
    for processor in processors:
        for is_known, make in _SOURCES:
            if is_known(processor):
                return [make(processor, row, text, vocabulary) for row, text in enumerate(texts)]
    return None


def are_constrained(processors: LogitsProcessorList) -> bool:
    """Whether `guides_of` would find a constraint."""
    return any(is_known(processor) for processor in processors for is_known, _ in _SOURCES)


class _TextGuide(Guide):
    """A guide that calls a function of the user with the whole text. The function may be slow."""

    tells_places = False

    def __init__(self, text: Sequence[int]):
        self._text = list(text)

    def accept(self, token: int) -> bool:
        self._text.append(token)
        return True

    def back(self) -> None:
        self._text.pop()

    def _asked(self) -> torch.Tensor:
        return torch.tensor(self._text, dtype=torch.long, device="cpu")


class PrefixGuide(_TextGuide):
    """`prefix_allowed_tokens_fn`, where it allows a single token."""

    def __init__(self, processor: PrefixConstrainedLogitsProcessor, row: int, text: Sequence[int]):
        super().__init__(text)
        self._allowed: Callable[..., Sequence[int]] = processor._prefix_allowed_tokens_fn
        self._prompt = row // processor._num_beams

    def possible(self) -> Possible:
        allowed = list(self._allowed(self._prompt, self._asked()))
        return Possible(tokens=allowed, is_certain=True) if len(allowed) == 1 else Possible()


class DeclaredGuide(_TextGuide):
    """A processor with a method `forced_tokens(prefix)`."""

    def __init__(self, processor: Any, text: Sequence[int]):
        super().__init__(text)
        self._forced: Callable[[torch.Tensor], Sequence[int]] = processor.forced_tokens
        self._answer: tuple[int, Sequence[int]] = 0, ()  # length of the text when it was given, and the tokens

    def possible(self) -> Possible:
        start, answer = self._answer
        said = self._text[start:]
        if start > len(self._text) or len(said) >= len(answer) or list(answer[: len(said)]) != said:
            self._answer = len(self._text), list(self._forced(self._asked()))
            said, answer = [], self._answer[1]
        return Possible(tokens=answer[len(said) : len(said) + 1], is_certain=len(answer) > len(said))


class XGrammarGuide(Guide):
    """A grammar of xgrammar."""

    def __init__(self, compiled: Any, vocabulary: Vocabulary):
        from xgrammar import GrammarMatcher  # pyright: ignore[reportMissingImports]

        self._matcher = GrammarMatcher(compiled)
        self._words = vocabulary.of_xgrammar(compiled.tokenizer_info)

    def accept(self, token: int) -> bool:
        return not self._matcher.is_terminated() and self._matcher.accept_token(token)

    def back(self) -> None:
        self._matcher.rollback(1)

    def possible(self) -> Possible:
        if self._matcher.is_terminated():
            return Possible()
        if forced := self._matcher.find_jump_forward_string().encode():
            return self._words.spelling(forced)
        if self._matcher.is_completed():
            return Possible(b"", self._matcher.stop_token_ids[:1])
        return Possible(b"")

    def text_of(self, token: int) -> bytes | None:
        return self._words.text(token)


class LLGuidanceGuide(Guide):
    """A grammar of llguidance in a processor of outlines."""

    def __init__(self, processor: Any):
        from llguidance import LLMatcher  # pyright: ignore[reportMissingImports]

        self._tokenizer = processor.llg_tokenizer
        self._matcher = LLMatcher(self._tokenizer, processor.grammar)

    def accept(self, token: int) -> bool:
        return self._matcher.try_consume_tokens([token]) == 1

    def back(self) -> None:
        self._matcher.rollback(1)

    def possible(self) -> Possible:
        if self._matcher.is_stopped():
            return Possible()
        return Possible(self._matcher.compute_ff_bytes(), self._matcher.compute_ff_tokens()[:1])

    def text_of(self, token: int) -> bytes | None:
        return self._tokenizer.decode_bytes([token])


class OutlinesGuide(Guide):
    """An `outlines_core` index. It knows the allowed tokens, but not their bytes."""

    def __init__(self, processor: Any):
        from outlines_core import Guide as Automaton  # pyright: ignore[reportMissingImports]

        self._automaton = Automaton(processor.index, max_rollback=_MAX_ROLLBACK)

    def accept(self, token: int) -> bool:
        if self._automaton.is_finished() or not self._automaton.accepts_tokens([token]):
            return False
        self._automaton.advance(token_id=token, return_tokens=False)
        return True

    def back(self) -> None:
        self._automaton.rollback_state(1)

    def possible(self) -> Possible:
        allowed = self._automaton.get_tokens()
        place = tuple(sorted(allowed)) if len(allowed) <= _FEW_TOKENS else None
        is_certain = len(allowed) == 1
        return Possible(place, allowed if is_certain else (), is_certain)


def _is_a(name: str) -> Callable[[Any], bool]:
    """A test for processors of a class. The class is given by name, so its library need not be installed."""
    return lambda processor: name in (f"{kind.__module__}.{kind.__qualname__}" for kind in type(processor).__mro__)


def _of_xgrammar(processor: Any, row: int, text: Sequence[int], vocabulary: Vocabulary) -> Guide:
    grammars = processor.compiled_grammars
    return XGrammarGuide(grammars[row if len(grammars) > 1 else 0], vocabulary)


_SOURCES: tuple[tuple[Callable[[Any], bool], Callable[[Any, int, Sequence[int], Vocabulary], Guide]], ...] = (
    (
        lambda processor: callable(getattr(processor, "forced_tokens", None)),
        lambda processor, row, text, _: DeclaredGuide(processor, text),
    ),
    (
        lambda processor: type(processor) is PrefixConstrainedLogitsProcessor,
        lambda processor, row, text, _: PrefixGuide(processor, row, text),
    ),
    (_is_a("xgrammar.contrib.hf.LogitsProcessor"), _of_xgrammar),
    (
        _is_a("outlines.backends.xgrammar.XGrammarLogitsProcessor"),
        lambda processor, row, text, vocabulary: XGrammarGuide(processor.compiled_grammar, vocabulary),
    ),
    (
        _is_a("outlines.backends.llguidance.LLGuidanceLogitsProcessor"),
        lambda processor, row, text, _: LLGuidanceGuide(processor),
    ),
    (
        _is_a("outlines.backends.outlines_core.OutlinesCoreLogitsProcessor"),
        lambda processor, row, text, _: OutlinesGuide(processor),
    ),
)
