"""One round of the loop as a value: the tree, what was accepted and emitted, and how long it took.

Statistics, records, the policy and the drafter receive every round. `hf_speculate.rounds` yields them to users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .draft_tree import DraftTree


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RoundSeconds:
    """Wall-clock seconds of a round.

    Attributes:
        drafting: time to choose the budget and draft. On a GPU the device's time counts if it is longer.
        total: time of the whole round, without the time that consumers take between rounds.
        reading: time in which the drafter read the prompt. It is not part of the total.
    """

    drafting: float = 0.0
    total: float = 0.0
    reading: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one round. Sequences have one item for each row of the batch.

    Attributes:
        tree: scored tree of the rows that took part (`DraftTree.slot` maps rows). The prompt's round has only the root,
            the prompt's last token.
        paths: indices of the accepted nodes, root first; `tokens[r][j]` was chosen after node `paths[r][j]`. The path
            of a finished row may continue with padding.
        tokens: emitted token ids: those of the accepted nodes below the root, then the target's own token.
        num_accepted: number of emitted tokens that were draft nodes.
        lengths: committed cache entries of each row before the round.
        context: number of cache entries before the tree, in the longest row.
        depth: levels that the drafter made, before the tree was cut to the budget.
        seconds: time that the round took.
        is_prefill: whether this is the prompt's round.
        is_warm_up: whether something was compiled in the round, so that its time is not typical.
        is_ahead: whether the draft was made while the previous round was verified.
    """

    tree: DraftTree
    paths: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    num_accepted: Sequence[int]
    lengths: Sequence[int]
    context: int
    depth: int = 0
    seconds: RoundSeconds = RoundSeconds()
    is_prefill: bool = False
    is_warm_up: bool = False
    is_ahead: bool = False

    @property
    def num_nodes(self) -> int:
        """Number of scored draft nodes in each row."""
        return self.tree.num_nodes - 1

    def draw(self, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        """A text picture of the tree, one for each row that emitted something.

        `●` marks accepted nodes, `○` other nodes, and `★` the token that the target chose itself.

        Args:
            tokenizer: decodes tokens to text; None shows token ids.
        """
        return "\n\n".join(self._drawn(row, tokenizer) for row, tokens in enumerate(self.tokens) if tokens)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.draw())}</pre>"

    def _drawn(self, row: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
        slot, emitted = self.tree.slot(row), self.tokens[row]
        tokens, parents = self.tree.host.token_ids[slot], self.tree.host.parents[slot]
        accepted = self.num_accepted[row]
        path = list(self.paths[row][: len(emitted)])
        picture = _Picture(tokens, parents, set(path), tokenizer)
        if accepted < len(emitted):
            picture.add_own(path[-1], emitted[-1])
        heading = f"row {row}: {accepted} of {picture.num_drafted} drafted tokens accepted, {len(emitted)} emitted"
        return "\n".join([heading, picture.text(tokens[0]), *picture.lines(0, "")])


class _Picture:
    def __init__(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        accepted: set[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ):
        self._tokenizer = tokenizer
        self._children: dict[int, list[tuple[int, str]]] = {}
        self.num_drafted = 0
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent >= 0:
                self.num_drafted += 1
                mark = "●" if node in accepted else "○"
                self._children.setdefault(parent, []).append((node, f"{mark} {self.text(token)}"))

    def add_own(self, parent: int, token: int) -> None:
        """Adds the token that the target chose itself."""
        self._children.setdefault(parent, []).append((-1, f"★ {self.text(token)}"))

    def text(self, token: int) -> str:
        return str(token) if self._tokenizer is None else repr(self._tokenizer.decode([token]))

    def lines(self, node: int, indent: str) -> Iterator[str]:
        """The lines for everything below a node."""
        children = self._children.get(node, [])
        for index, (child, text) in enumerate(children):
            is_last = index == len(children) - 1
            yield f"{indent}{'└─' if is_last else '├─'}{text}"
            if child >= 0:
                yield from self.lines(child, indent + ("  " if is_last else "│ "))
