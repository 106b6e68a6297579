"""A round as a value: what was drafted, what of it was accepted, what was emitted, and what it took by `RoundClock`.

Statistics, records, the policy and the drafter are told of every round; `hf_speculate.rounds` gives them to users.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .draft_tree import DraftTree


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RoundSeconds:
    """Wall clock of the host.

    Attributes:
        drafting: choosing the budget and drafting.
        total: the whole round, without the time of its consumers.
    """

    drafting: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one turn of the loop. Sequences are over the rows of the batch.

    Attributes:
        tree: that was scored; of the rows that took part (`DraftTree.slot` says where a row is). The prompt's round has
            the root alone: its last token.
        paths: accepted nodes, root first; `tokens[r][j]` was chosen after node `paths[r][j]`. Of rows that have ended
            they may go on with padding.
        tokens: emitted token ids: those of the accepted nodes below the root, and the target's own token behind them.
        num_accepted: how many of the tokens were draft nodes.
        lengths: committed cache entries of each row before the round.
        context: cache entries in front of the tree, those of the longest row.
        depth: levels that were drafted, before the tree was cut to what the round was allowed to score.
        seconds: what it took.
        is_prefill: whether it is the prompt's.
        is_warm_up: something was compiled in it: its time says nothing about others.
        is_ahead: its draft was made while the round before it was verified.
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
        """Draft nodes that were scored, a row."""
        return self.tree.num_nodes - 1

    def draw(self, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        """A picture of the tree in text, one for each row that emitted something.

        Accepted nodes are marked with `●`, others with `○`; `★` is the token that the target chose itself.

        Args:
            tokenizer: to show tokens as text; without one their ids are shown.
        """
        return "\n\n".join(self._drawn(row, tokenizer) for row, tokens in enumerate(self.tokens) if tokens)

    def _drawn(self, row: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
        slot, emitted = self.tree.slot(row), self.tokens[row]
        tokens, parents = self.tree.host.token_ids[slot], self.tree.host.parents[slot]
        accepted = self.num_accepted[row]
        path = list(self.paths[row][: len(emitted)])
        nodes = _Nodes(tokens, parents, set(path), tokenizer)
        if accepted < len(emitted):
            nodes.add_own(path[-1], emitted[-1])
        heading = f"row {row}: {accepted} of {nodes.num_drafted} drafted tokens accepted, {len(emitted)} emitted"
        return "\n".join([heading, nodes.text(tokens[0]), *nodes.lines(0, "")])


class _Nodes:
    """A row's tree, to be drawn."""

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
        """The token that the target chose where nothing that it chose was drafted."""
        self._children.setdefault(parent, []).append((-1, f"★ {self.text(token)}"))

    def text(self, token: int) -> str:
        return str(token) if self._tokenizer is None else repr(self._tokenizer.decode([token]))

    def lines(self, node: int, indent: str) -> Iterator[str]:
        """Lines for everything below a node."""
        children = self._children.get(node, [])
        for index, (child, text) in enumerate(children):
            is_last = index == len(children) - 1
            yield f"{indent}{'└─' if is_last else '├─'}{text}"
            if child >= 0:
                yield from self.lines(child, indent + ("  " if is_last else "│ "))


class RoundClock:
    """Times one round after the other. The time of a round's consumers is not in it; what telling of a round took
    counts for the next one."""

    def __init__(self) -> None:
        self._start = self._published = 0.0
        self._drafting = self._carried = self._put_off = 0.0

    def start(self) -> None:
        self._start = time.perf_counter() - self._carried

    def drafted(self) -> None:
        """The tree is there."""
        self._drafting = time.perf_counter() - self._start

    def leave_out(self, seconds: float) -> None:
        """Takes time of others, within the round, out of it."""
        self._start += seconds

    def put_off(self, seconds: float) -> None:
        """Counts time of this round to the next one's draft."""
        self.leave_out(seconds)
        self._put_off += seconds

    def stop(self) -> RoundSeconds:
        """The round is over, and is told of from here on."""
        self._published = time.perf_counter()
        return RoundSeconds(drafting=self._drafting, total=self._published - self._start)

    def told(self) -> None:
        """Everybody has been told."""
        self._carried = time.perf_counter() - self._published + self._put_off
        self._put_off = 0.0
