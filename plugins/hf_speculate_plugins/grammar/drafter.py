"""The `grammar` drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList

from hf_speculate.drafting import Drafter, DraftRequest, DraftSession, DraftState, new_tokens
from hf_speculate.messages import get_logger
from hf_speculate.speculator import check_sizes, read_options
from hf_speculate.stats import Advice
from hf_speculate.target import GenerativeModel
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow

from .growth import Growth
from .guides import Guide, are_constrained, guides_of
from .style import Style, longer
from .words import Vocabulary


if TYPE_CHECKING:
    from typing_extensions import Self


logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarOptions:
    """Options of `grammar`.

    Attributes:
        depth: greatest depth of a node.
        max_nodes: most draft nodes.
    """

    depth: int = 16
    max_nodes: int = 24

    def __post_init__(self) -> None:
        check_sizes("grammar", self, "depth", "max_nodes")


def _warn(error: Exception) -> None:
    """Logs once why a constraint is not used for drafts."""
    logger.warning_once(
        f"grammar: {type(error).__name__}: {error}. The request continues without drafts from its constraint."
    )


class GuidedRow:
    """One row: a guide at the end of its text, and the last tokens of the text."""

    def __init__(self, guide: Guide):
        self.guide, self._last = guide, list[int]()

    def is_text(self, token: int) -> bool:
        """Whether a token has letters or digits; True if that is not known."""
        text = self.guide.text_of(token)
        return text is None or any(chr(byte).isalnum() or byte > 127 for byte in text)

    def append(self, token: int, style: Style) -> bool:
        """Moves on by a token of the text. Returns False if the guide cannot follow."""
        if self.guide.tells_places:
            style.learn(self.guide.possible(), self._last, token, self.is_text)
        self._last = longer(self._last, token)
        return self.guide.accept(token)

    def grown(self, row: TreeRow, style: Style, max_depth: int, most: int) -> TreeRow:
        return Growth(self.guide, style, self.is_text, max_depth, most).grown(row, self._last)


class GrammarSession(DraftSession):
    """Drafts along the guides of a request's rows."""

    def __init__(self, options: GrammarOptions, guides: Sequence[Guide] | None, style: Style, drafter: GrammarDrafter):
        self._options, self._style, self._drafter = options, style, drafter
        self._rows: list[GuidedRow | None] = [GuidedRow(guide) for guide in guides or ()]
        self._has_seen_prompt = False

    def observe(self, tokens, features, lengths) -> None:
        for number, new in enumerate(new_tokens(tokens, lengths, not self._has_seen_prompt)):
            if number < len(self._rows) and not self._follow(number, new):
                self._rows[number] = None
        self._has_seen_prompt = True

    def _follow(self, number: int, tokens: Sequence[int]) -> bool:
        """Moves a row's guide on by emitted tokens. Returns False if it cannot follow."""
        row = self._rows[number]
        try:
            return row is not None and all(row.append(token, self._style) for token in tokens)
        except Exception as error:  # of a user's function or another library; the text does not depend on it
            _warn(error)
            return False

    def draft(self, state: DraftState) -> DraftTree:
        roots = [TreeRow([root], [ROOT_PARENT], [0.0]) for root in state.root_ids.tolist()]
        return DraftTree.from_rows(self.complete(roots, state, self._options.max_nodes))

    def complete(self, rows: Sequence[TreeRow], state: DraftState, max_nodes: int) -> list[TreeRow]:
        return [self._completed(number, row, state, max_nodes) for number, row in enumerate(rows)]

    def _completed(self, number: int, tree: TreeRow, state: DraftState, max_nodes: int) -> TreeRow:
        row = self._rows[number] if number < len(self._rows) else None
        if row is None or not state.active[number]:
            return tree
        try:
            grown = row.grown(tree, self._style, min(state.max_depth, self._options.depth), max_nodes)
        except Exception as error:
            self._rows[number] = None
            _warn(error)
            return tree
        return grown.best(max_nodes)

    def close(self) -> None:
        row = next((row for row in self._rows if row is not None), None)
        try:
            if row is not None:
                self._drafter.style = self._style.without_text(row.is_text)
        except Exception as error:
            _warn(error)


class GrammarDrafter(Drafter):
    """Drafts the tokens that a constraint of the request forces; fits every target.

    Constraints are: a processor with a method `forced_tokens(prefix)`, which takes the text of a row (int64 [T]) and
    returns the token ids that must follow; `prefix_allowed_tokens_fn`, where it allows a single token; a processor of
    xgrammar, or of outlines with any of its backends. Of several, the first is used.

    Attributes:
        style: counts of tokens from earlier requests, without any content.
    """

    name = "grammar"
    is_free = True
    options_classes = (GrammarOptions,)

    def __init__(self, options: GrammarOptions | None = None):
        self.options = options or GrammarOptions()
        self.style = Style()
        self._vocabulary = Vocabulary()

    @property
    def advice(self) -> Advice:
        return Advice(
            good="the constraint forces enough of the text",
            poor="The constraint forces little of the text. A head or `suffix` would draft more.",
        )

    def __repr__(self) -> str:
        return f"GrammarDrafter({self.options})"

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        return cls(read_options(GrammarOptions, options, cls.name))

    @classmethod
    def joins(cls, processors: LogitsProcessorList) -> bool:
        return are_constrained(processors)

    def start(self, request: DraftRequest) -> GrammarSession:
        try:
            guides = guides_of(request.processors, request.input_ids.tolist(), self._vocabulary)
        except Exception as error:  # a library of another version
            guides = None
            _warn(error)
        return GrammarSession(self.options, guides, self.style.copy(), self)
