"""Prompt lookup: what followed the same n-gram earlier in prompt or output is drafted again.

Method: Saxena, "Prompt Lookup Decoding" (2023). Unlike stock `prompt_lookup_num_tokens`, the longest suffix wins, the
index grows with the text (no rescan per round), and several continuations become branches of one tree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_speculate.drafting import Drafter, DraftRequest, DraftSession, DraftState, new_tokens
from hf_speculate.errors import OptionError
from hf_speculate.speculator import check_sizes, read_options
from hf_speculate.stats import Advice
from hf_speculate.target import GenerativeModel
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow


if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupOptions:
    """Options of prompt lookup.

    Attributes:
        max_ngram: longest suffix that is looked up.
        min_ngram: shortest suffix that is looked up. After a match of one token the copy is often wrong.
        depth: tokens of a continuation that are drafted.
        max_nodes: draft nodes altogether.
    """

    max_ngram: int = 5
    min_ngram: int = 1
    depth: int = 8
    max_nodes: int = 12

    def __post_init__(self) -> None:
        check_sizes("prompt_lookup", self, "max_ngram", "min_ngram", "depth", "max_nodes")
        if self.min_ngram > self.max_ngram:
            raise OptionError(f"prompt_lookup: min_ngram ({self.min_ngram}) is above max_ngram ({self.max_ngram}).")


_MAX_OCCURRENCES = 32
# Different continuations that are drafted side by side, the latest occurrence first.
_NUM_BRANCHES = 2


class SuffixIndex:
    """The ends of every n-gram of a growing text, for n from `min_ngram` to `max_ngram`.

    An appended token costs one dictionary entry per n; nothing is rescanned.
    """

    def __init__(self, min_ngram: int, max_ngram: int):
        self.tokens: list[int] = []
        self._sizes = range(min_ngram, max_ngram + 1)
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: list[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self.tokens[end - size : end])].append(end)

    def continuations(self, count: int) -> list[tuple[int, int]]:
        """Up to `count` continuations of the text's end, as (size of the match, start). Their first tokens differ.

        Those after the longest matching suffix come first, later occurrences before earlier ones.
        """
        matches: list[tuple[int, int]] = []
        first_tokens: set[int] = set()
        length = len(self.tokens)
        for size in reversed(self._sizes):
            if size > length or len(matches) >= count:
                continue
            # Only the latest occurrences: in repetitive text a common n-gram occurs almost everywhere.
            latest = self._ends.get(tuple(self.tokens[-size:]), [])[-_MAX_OCCURRENCES:]
            for end in reversed(latest):
                if end < length and self.tokens[end] not in first_tokens:
                    matches.append((size, end))
                    first_tokens.add(self.tokens[end])
                    if len(matches) >= count:
                        break
        return matches


class PromptLookupSession(DraftSession):
    """One index per row."""

    def __init__(self, options: PromptLookupOptions, request: DraftRequest):
        self.options = options
        self._indices = []
        for text in request.row_texts:
            index = SuffixIndex(options.min_ngram, options.max_ngram)
            index.extend(text)
            self._indices.append(index)
        self._has_seen_prompt = False

    def observe(self, tokens, features, lengths) -> None:
        for index, new in zip(self._indices, new_tokens(tokens, lengths, not self._has_seen_prompt), strict=True):
            index.extend(new)
        self._has_seen_prompt = True

    def draft(self, state: DraftState) -> DraftTree:
        rows = []
        for index, root, is_active in zip(self._indices, state.root_ids.tolist(), state.active, strict=True):
            rows.append(self._draft_row(index, root, state) if is_active else TreeRow([root], [ROOT_PARENT], [0.0]))
        return DraftTree.from_rows(rows)

    def _draft_row(self, index: SuffixIndex, root: int, state: DraftState) -> TreeRow:
        options = self.options
        depth = min(options.depth, state.max_depth)
        tokens, parents, probs = [root], [ROOT_PARENT], [1.0]
        branches, rest = 1 if state.chains_only else _NUM_BRANCHES, 1.0
        for match_size, start in index.continuations(branches):
            node = 0
            for copied, token in enumerate(index.tokens[start : start + depth]):
                child = _find_child(tokens, parents, node, token)
                if child is None:
                    if len(tokens) > options.max_nodes:
                        break
                    child = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    probs.append((probs[node] if node else rest) * _prob_right(match_size + copied))
                node = child
            rest *= 1 - _prob_right(match_size)  # at most one child of the root is right
        return TreeRow(tokens, parents, [math.log(prob) for prob in probs])


def _prob_right(match_size: int) -> float:
    """Assumed probability that the token after a match of this size follows again. Only the order of these values
    matters."""
    return match_size / (match_size + 1)


def _find_child(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    return next((i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token), None)


class PromptLookupDrafter(Drafter):
    """Drafts from the text itself; fits every target."""

    name = "prompt_lookup"
    is_free = True
    options_classes = (PromptLookupOptions,)

    def __init__(self, options: PromptLookupOptions | None = None):
        self.options = options or PromptLookupOptions()

    @property
    def advice(self) -> Advice:
        return Advice(
            good="the text repeats itself or its prompt often enough",
            poor="The text repeats little of itself or of its prompt; a head or a draft model would draft more.",
        )

    def __repr__(self) -> str:
        return f"PromptLookupDrafter({self.options})"

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        return cls(read_options(PromptLookupOptions, options, cls.name))

    def start(self, request: DraftRequest) -> PromptLookupSession:
        return PromptLookupSession(self.options, request)
