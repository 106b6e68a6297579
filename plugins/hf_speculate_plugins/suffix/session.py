"""One request of `suffix`: the counts of each row, which grow with its text, and sources that requests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from hf_speculate.drafting import Choices, DraftRequest, DraftSession, DraftState, new_tokens
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow

from .answers import answers_by_row
from .automaton import Automaton, Mixture, Race, Source, TextDraft, draft_tree
from .contexts import ORDERS, ContextCounts, RecycledRows
from .guide import Guide
from .options import SuffixOptions
from .store import SuffixStore


# Tokens that the target found most probable, which are remembered of every node that it scored.
_NUM_RECYCLED = 32


class TextRow:
    """One row's text, and the drafts after its end.

    Args:
        answers: counts of the answers to this row's prompt, to which it adds its own; None if there are no others.
    """

    def __init__(
        self,
        options: SuffixOptions,
        shared: Mapping[str, Source],
        mixture: Mixture,
        prompt: Sequence[int],
        answers: ContextCounts | None = None,
        guide: Guide | None = None,
    ):
        self._options = options
        self._counts, self._tail = ContextCounts(), []
        self._answers, self._end_of_answer = answers, [*prompt[-ORDERS[-1] :]]
        own = {"local": self._counts} if answers is None else {"answers": answers, "local": self._counts}
        self._automaton = Automaton({**shared, **own}, ORDERS, mixture)
        self._counts.extend(self._tail, prompt)
        self._position = None if guide is None else guide.start(prompt)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens that the target has written."""
        for token in tokens:
            position = self._position
            self._automaton.learn(tuple(self._tail), token, () if position is None else position.guesses)
            self._counts.extend(self._tail, [token])
            if self._answers is not None:
                self._answers.extend(self._end_of_answer, [token])
            self._position = None if position is None else position.after(token)

    def draft(self, state: DraftState, number: int) -> TextDraft:
        """The draft of the request's row of this number."""
        return draft_tree(
            self._automaton,
            self._tail,
            max_nodes=self._options.max_nodes,
            max_depth=min(state.max_depth, self._options.depth),
            chain=state.chains_only,
            race=Race(state, number) if state.samples else None,
            position=self._position,
        )


class SuffixSession(DraftSession):
    """Drafts from the counts of each row's text, from answers to its prompt, and from sources that requests share.

    Args:
        store: store that gets the outputs; its lock is held while sources are read. None: there is none.
        keep: function that takes these weights at the end.
    """

    def __init__(
        self,
        options: SuffixOptions,
        request: DraftRequest,
        sources: Mapping[str, ContextCounts],
        recycled: RecycledRows,
        store: SuffixStore | None,
        mixture: Mixture,
        keep: Callable[[Mixture], None],
        guide: Guide | None = None,
    ):
        self.options = options
        # Nothing is drafted after the end of the output, but the store needs that end.
        self.carries_over = store is not None
        self._recycled, self._store, self._mixture, self._keep = recycled, store, mixture, keep
        self.num_choices = _NUM_RECYCLED
        self._lock = nullcontext() if store is None else store.lock
        shared = {"recycled": recycled, **sources}
        prompts = request.row_texts
        self._rows = [
            TextRow(options, shared, mixture, prompt, answers, guide)
            for prompt, answers in zip(prompts, answers_by_row(prompts, store, request.adapters), strict=True)
        ]
        self._outputs: list[list[int]] = [[] for _ in self._rows]
        self._numbers = [] if store is None else store.begin(request.adapters, prompts)
        self._has_seen_prompt = False

    def observe(self, tokens, features, lengths) -> None:
        with self._lock:
            for row, new in enumerate(new_tokens(tokens, lengths, not self._has_seen_prompt)):
                self._rows[row].append(new)
                self._outputs[row] += new
        self._has_seen_prompt = True

    def observe_choices(self, choices: Choices) -> None:
        with self._lock:
            self._recycled.learn(choices)

    def draft(self, state: DraftState) -> DraftTree:
        drafts = []
        with self._lock:
            for number, (row, is_active) in enumerate(zip(self._rows, state.active, strict=True)):
                drafts.append(row.draft(state, number) if is_active else TextDraft())
        if not any(draft.tokens for draft in drafts):
            return DraftTree.root_only(state.root_ids)
        return DraftTree.from_rows(
            [
                TreeRow(
                    [root, *draft.tokens],
                    [ROOT_PARENT, *(parent + 1 for parent in draft.parents)],
                    [0.0, *map(math.log, draft.probs)],
                )
                for root, draft in zip(state.root_ids.tolist(), drafts, strict=True)
            ]
        )

    def close(self) -> None:
        """Stores the outputs. Stored earlier, a text would count twice: in this request and in the store."""
        if self._store is not None:
            for number, output in zip(self._numbers, self._outputs, strict=True):
                self._store.extend(number, output)
        self._keep(self._mixture)
